package s3blob

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strconv"
	"strings"
	"time"

	"github.com/aws/aws-sdk-go-v2/aws"
	"github.com/aws/aws-sdk-go-v2/service/s3"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/layer/blob"
)

// errAnswer is of an answer that is well-formed and wrong.
func errAnswer(format string, args ...any) error {
	return &dsec.Error{
		Code: dsec.CodeInternal, Message: "blob store: it answers what it must not", Err: fmt.Errorf(format, args...),
	}
}

// Stat implements blob.Store.
func (s *Store) Stat(ctx context.Context, key string) (blob.Info, error) {
	if err := blob.CheckKey(key); err != nil {
		return blob.Info{}, err
	}
	if err := ctx.Err(); err != nil {
		return blob.Info{}, err
	}
	out, err := s.client.HeadObject(ctx, &s3.HeadObjectInput{Bucket: &s.cfg.Bucket, Key: s.object(key)})
	if status, _ := statusOf(err); status == http.StatusNotFound && hasPage(err) {
		err = s.reason(ctx, key, err)
	}
	if err != nil {
		return blob.Info{}, s.storeError(ctx, reading, err)
	}
	if out.ContentLength == nil || *out.ContentLength < 0 || out.LastModified == nil || aws.ToString(out.ETag) == "" || isPage(aws.ToString(out.ContentType)) {
		return blob.Info{}, errAnswer("the head of no object: %d bytes, type %.40q", aws.ToInt64(out.ContentLength), aws.ToString(out.ContentType))
	}
	return blob.Info{Key: key, Size: *out.ContentLength, Created: out.LastModified.UTC()}, nil
}

// reason asks for a byte of what a head did not find, for an answer with a body.
func (s *Store) reason(ctx context.Context, key string, head error) error {
	resp, err := s.getter.get(ctx, *s.object(key), 0, 1)
	if err != nil {
		return err
	}
	_ = resp.Body.Close()
	return head // it came between
}

// isPage is of what a proxy says in place of the server.
func isPage(contentType string) bool { return strings.HasPrefix(contentType, "text/html") }

// ReadAt implements blob.Store.
func (s *Store) ReadAt(ctx context.Context, key string, p []byte, off int64) (int, error) {
	if err := blob.CheckKey(key); err != nil {
		return 0, err
	}
	if off < 0 {
		return 0, dsec.Invalid("off", "a blob's bytes from %d", off)
	}
	if err := ctx.Err(); err != nil || len(p) == 0 {
		return 0, err
	}
	resp, err := s.getter.get(ctx, *s.object(key), off, int64(len(p)))
	if status, ok := statusOf(err); ok && status == http.StatusRequestedRangeNotSatisfiable && ctx.Err() == nil {
		return 0, s.behind(ctx, key, off)
	}
	if err != nil {
		return 0, s.storeError(ctx, reading, err)
	}
	defer resp.Body.Close()
	n, err := lengthOf(resp.Header, resp.ContentLength, off, int64(len(p)))
	if err != nil {
		return 0, err
	}
	got, err := io.ReadFull(resp.Body, p[:n])
	if err != nil {
		return got, s.storeError(ctx, reading, err)
	}
	if err := atEnd(resp.Body); errors.Is(err, errMore) {
		return 0, errAnswer("more than the %d bytes that it told of", n)
	} else if err != nil {
		return 0, s.storeError(ctx, reading, err)
	}
	if n < len(p) {
		return n, io.EOF
	}
	return n, nil
}

// behind is io.EOF where a blob has nothing from off on.
func (s *Store) behind(ctx context.Context, key string, off int64) error {
	info, err := s.Stat(ctx, key)
	if err != nil {
		return err
	}
	if off < info.Size {
		return errAnswer("no byte %d in an object of %d", off, info.Size)
	}
	return io.EOF
}

var errMore = errors.New("more bytes")

// atEnd also lets the connection be used again.
func atEnd(r io.Reader) error {
	switch n, err := io.ReadFull(r, make([]byte, 1)); {
	case n > 0:
		return errMore
	case err != io.EOF:
		return err
	}
	return nil
}

// lengthOf is how many bytes of the want from off an answer holds, which tells of
// length bytes or, with -1, of none. It is fewer only where the object ends there.
func lengthOf(h http.Header, length, off, want int64) (int, error) {
	if enc := h.Get("Content-Encoding"); enc != "" && enc != "identity" && enc != "aws-chunked" {
		return 0, errAnswer("bytes encoded as %.40q", enc)
	}
	if isPage(h.Get("Content-Type")) || h.Get("ETag") == "" {
		return 0, errAnswer("no object: type %.40q", h.Get("Content-Type"))
	}
	first, last, total, ok := parseRange(h.Get("Content-Range"))
	if !ok {
		// A server that knows no ranges answers with all, which may be what was asked for.
		if h.Get("Content-Range") == "" && off == 0 && 0 <= length && length <= want {
			return int(length), nil
		}
		return 0, errAnswer("no range but %.80q, of %d bytes", h.Get("Content-Range"), length)
	}
	n := last - first + 1
	if first != off || last != min(off+want, total)-1 || length >= 0 && length != n {
		return 0, errAnswer("%d bytes of range %d-%d/%d, want %d from %d", length, first, last, total, want, off)
	}
	return int(n), nil
}

// parseRange reads bytes 0-9/100.
func parseRange(text string) (first, last, total int64, ok bool) {
	text, ok = strings.CutPrefix(text, "bytes ")
	span, size, ok2 := strings.Cut(text, "/")
	from, to, ok3 := strings.Cut(span, "-")
	if !ok || !ok2 || !ok3 {
		return 0, 0, 0, false
	}
	for _, v := range []struct {
		text string
		to   *int64
	}{{from, &first}, {to, &last}, {size, &total}} {
		n, err := strconv.ParseUint(v.text, 10, 63)
		if err != nil {
			return 0, 0, 0, false
		}
		*v.to = int64(n)
	}
	return first, last, total, first <= last && last < total
}

// List implements blob.Store.
func (s *Store) List(ctx context.Context, prefix string, f func(blob.Info) error) error {
	if err := blob.CheckPrefix(prefix); err != nil {
		return err
	}
	if err := ctx.Err(); err != nil {
		return err
	}
	in := &s3.ListObjectsV2Input{Bucket: &s.cfg.Bucket, Prefix: s.object(prefix)}
	if s.cfg.PageSize > 0 {
		in.MaxKeys = &s.cfg.PageSize
	}
	for last := ""; ; {
		out, err := s.client.ListObjectsV2(ctx, in)
		if err != nil {
			return s.storeError(ctx, reading, err)
		}
		if out.Name == nil || *out.Name != s.cfg.Bucket {
			return errAnswer("a list of bucket %.80q", aws.ToString(out.Name))
		}
		for _, o := range out.Contents {
			key, err := s.keyOf(aws.ToString(o.Key), *in.Prefix, last)
			if err != nil {
				return err
			}
			last = key
			if blob.CheckKey(key) != nil { // not a Put's
				continue
			}
			if err := f(blob.Info{Key: key, Size: aws.ToInt64(o.Size), Created: aws.ToTime(o.LastModified).UTC()}); err != nil {
				return err
			}
		}
		if !aws.ToBool(out.IsTruncated) {
			return nil
		}
		if len(out.Contents) == 0 || aws.ToString(out.NextContinuationToken) == "" {
			return errAnswer("a list that goes on nowhere")
		}
		in.ContinuationToken = out.NextContinuationToken
	}
}

// keyOf checks an object's place in a list.
func (s *Store) keyOf(object, prefix, last string) (string, error) {
	own := ""
	if s.cfg.Prefix != "" {
		own = s.cfg.Prefix + "/"
	}
	key := strings.TrimPrefix(object, own)
	if !strings.HasPrefix(object, prefix) || !strings.HasPrefix(object, own) || key <= last && last != "" {
		return "", errAnswer("%.80q listed for prefix %.80q after %.80q", object, prefix, last)
	}
	return key, nil
}

// Delete implements blob.Store.
func (s *Store) Delete(ctx context.Context, key string) error {
	if err := blob.CheckKey(key); err != nil {
		return err
	}
	if err := ctx.Err(); err != nil {
		return err
	}
	_, err := s.client.DeleteObject(ctx, &s3.DeleteObjectInput{Bucket: &s.cfg.Bucket, Key: s.object(key)})
	err = s.storeError(ctx, writing, err)
	if err != nil && ctx.Err() == nil && dsec.CodeOf(err) == dsec.CodeNotFound {
		return nil
	}
	return err
}

// staleAfter is the age at which nobody goes on with a multipart upload: it bears
// the time of its beginning only.
const staleAfter = 7 * 24 * time.Hour

// Sweep implements blob.Sweeper: it ends the multipart uploads of dead writers.
func (s *Store) Sweep(ctx context.Context) error { return s.sweep(ctx, staleAfter) }

func (s *Store) sweep(ctx context.Context, older time.Duration) error {
	in := &s3.ListMultipartUploadsInput{Bucket: &s.cfg.Bucket, Prefix: s.object("")}
	for {
		out, err := s.client.ListMultipartUploads(ctx, in)
		if err != nil {
			return s.storeError(ctx, reading, err)
		}
		for _, u := range out.Uploads {
			if u.Initiated == nil || time.Since(*u.Initiated) < older {
				continue
			}
			_, err := s.client.AbortMultipartUpload(ctx, &s3.AbortMultipartUploadInput{Bucket: &s.cfg.Bucket, Key: u.Key, UploadId: u.UploadId})
			if err != nil && apiCodeOf(err) != noSuchUpload {
				return s.storeError(ctx, writing, err)
			}
		}
		if !aws.ToBool(out.IsTruncated) {
			return nil
		}
		if len(out.Uploads) == 0 || aws.ToString(out.NextKeyMarker) == "" {
			return errAnswer("a list that goes on nowhere")
		}
		in.KeyMarker, in.UploadIdMarker = out.NextKeyMarker, out.NextUploadIdMarker
	}
}
