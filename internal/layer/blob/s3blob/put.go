package s3blob

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"time"

	"github.com/aws/aws-sdk-go-v2/aws"
	"github.com/aws/aws-sdk-go-v2/service/s3"
	"github.com/aws/aws-sdk-go-v2/service/s3/types"
	"golang.org/x/sync/errgroup"

	"github.com/opendsec/dsec"
)

const (
	partsAtOnce = 4
	maxParts    = 10_000 // of one upload, by the protocol
	blobType    = "application/octet-stream"
	abortWait   = 30 * time.Second
)

// Put implements blob.Store. It holds up to four parts in memory.
func (s *Store) Put(ctx context.Context, key string, r io.Reader, size int64) error {
	if size < 0 {
		return dsec.Invalid("size", "a blob of %d bytes", size)
	}
	err := s.cfg.Backoff.Do(ctx, func() error { return s.confirm(ctx, key, size) })
	if err == nil || ctx.Err() != nil || dsec.CodeOf(err) != dsec.CodeNotFound {
		return err
	}
	if size > s.cfg.PartSize {
		return s.putParts(ctx, key, r, size)
	}
	b := make([]byte, size)
	if err := readFull(r, b, 0, size); err != nil {
		return err
	}
	return s.publish(ctx, key, size, func(ifNoneMatch *string) error {
		out, err := s.client.PutObject(ctx, &s3.PutObjectInput{
			Bucket: &s.cfg.Bucket, Key: s.object(key), Body: bytes.NewReader(b), ContentLength: &size,
			ContentType: aws.String(blobType), IfNoneMatch: ifNoneMatch,
		})
		if err == nil && aws.ToString(out.ETag) == "" {
			err = errAnswer("a put without a tag")
		}
		return err
	})
}

// confirm is nil where the blob is there.
func (s *Store) confirm(ctx context.Context, key string, size int64) error {
	info, err := s.Stat(ctx, key)
	if err == nil && info.Size != size {
		err = dsec.Errorf(dsec.CodeConflict, "blob store: the blob of this key has %d bytes, not %d", info.Size, size)
	}
	return err
}

// readFull reads the bytes from off of a source of size.
func readFull(r io.Reader, b []byte, off, size int64) error {
	n, err := io.ReadFull(r, b)
	if err == io.EOF || err == io.ErrUnexpectedEOF {
		return dsec.Invalid("size", "the blob's source ended after %d bytes, want %d", off+int64(n), size)
	}
	if err != nil {
		return fmt.Errorf("read the blob's source: %w", err)
	}
	return nil
}

// publish does the request that makes a blob visible, and repeats it. That the blob
// is there already is success: the request did its work before its answer was lost,
// or another writer's did, upon which some servers cut the connection.
func (s *Store) publish(ctx context.Context, key string, size int64, request func(ifNoneMatch *string) error) error {
	again := false
	return s.cfg.Backoff.Do(ctx, func() error {
		if again {
			err := s.confirm(ctx, key, size)
			if err == nil || ctx.Err() != nil || dsec.CodeOf(err) != dsec.CodeNotFound {
				return err
			}
		}
		again = true
		err := s.ifNoneMatch(request)
		if _, own := errors.AsType[*dsec.Error](err); own && ctx.Err() == nil {
			return err
		}
		if status, _ := statusOf(err); status == http.StatusPreconditionFailed || apiCodeOf(err) == noSuchUpload {
			if there := s.confirm(ctx, key, size); there == nil || ctx.Err() != nil || dsec.CodeOf(there) != dsec.CodeNotFound {
				return there
			}
			// Deleted since, or of an upload that was ended: the next attempt tells.
			return &dsec.Error{Code: dsec.CodeUnavailable, Message: "blob store: another writer was in the way", Err: err}
		}
		return s.storeError(ctx, writing, err)
	})
}

// ifNoneMatch does a request with the condition that no object is there, unless the
// server does not know it.
func (s *Store) ifNoneMatch(request func(condition *string) error) error {
	if s.unconditional.Load() {
		return request(nil)
	}
	err := request(aws.String("*"))
	if status, _ := statusOf(err); status == http.StatusNotImplemented {
		s.unconditional.Store(true)
		err = request(nil)
	}
	return err
}

// partSize is such that the blob has not too many parts.
func (s *Store) partSize(size int64) int64 {
	const unit = 1 << 20
	least := (size/(maxParts-1) + unit - 1) / unit * unit
	return max(s.cfg.PartSize, least)
}

// putParts uploads a blob in parts, each of which is repeated by itself.
func (s *Store) putParts(ctx context.Context, key string, r io.Reader, size int64) error {
	var upload *string
	err := s.cfg.Backoff.Do(ctx, func() error {
		out, err := s.client.CreateMultipartUpload(ctx, &s3.CreateMultipartUploadInput{
			Bucket: &s.cfg.Bucket, Key: s.object(key), ContentType: aws.String(blobType),
		})
		if err != nil {
			return s.storeError(ctx, writing, err)
		}
		if upload = out.UploadId; aws.ToString(upload) == "" {
			return errAnswer("an upload without a name")
		}
		return nil
	})
	if err != nil {
		return err
	}
	completed := false
	defer func() {
		if !completed { // also where another writer was first
			s.abort(ctx, key, upload)
		}
	}()
	parts, err := s.uploadParts(ctx, key, upload, r, size)
	if err != nil {
		return err
	}
	return s.publish(ctx, key, size, func(ifNoneMatch *string) error {
		out, err := s.client.CompleteMultipartUpload(ctx, &s3.CompleteMultipartUploadInput{
			Bucket: &s.cfg.Bucket, Key: s.object(key), UploadId: upload, IfNoneMatch: ifNoneMatch,
			MultipartUpload: &types.CompletedMultipartUpload{Parts: parts},
		})
		if err == nil && aws.ToString(out.ETag) == "" {
			err = errAnswer("an upload that ended without a tag")
		}
		completed = err == nil
		return err
	})
}

// abort frees what an upload holds. What stays where the server cannot be reached
// is the sweep's.
func (s *Store) abort(ctx context.Context, key string, upload *string) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), abortWait)
	in := &s3.AbortMultipartUploadInput{Bucket: &s.cfg.Bucket, Key: s.object(key), UploadId: upload}
	s.aborts.Go(func() {
		defer cancel()
		_, _ = s.client.AbortMultipartUpload(ctx, in)
	})
}

// uploadParts reads r in order, and uploads a few parts at once.
func (s *Store) uploadParts(ctx context.Context, key string, upload *string, r io.Reader, size int64) ([]types.CompletedPart, error) {
	partSize := s.partSize(size)
	parts := make([]types.CompletedPart, (size+partSize-1)/partSize)
	free := make(chan []byte, partsAtOnce)
	for range partsAtOnce {
		free <- nil
	}
	g, gctx := errgroup.WithContext(ctx)
	var source error
	for i := range parts {
		off := int64(i) * partSize
		var buf []byte
		select {
		case buf = <-free:
		case <-gctx.Done():
		}
		if gctx.Err() != nil {
			break
		}
		if buf == nil {
			buf = make([]byte, partSize)
		}
		b := buf[:min(partSize, size-off)]
		if source = readFull(r, b, off, size); source != nil {
			break
		}
		g.Go(func() error {
			part, err := s.uploadPart(gctx, key, upload, int32(i+1), b)
			parts[i] = part
			free <- buf
			return err
		})
	}
	err := g.Wait()
	if ctx.Err() != nil {
		return nil, ctx.Err()
	}
	if source != nil {
		return nil, source
	}
	return parts, err
}

func (s *Store) uploadPart(ctx context.Context, key string, upload *string, number int32, b []byte) (types.CompletedPart, error) {
	var part types.CompletedPart
	err := s.cfg.Backoff.Do(ctx, func() error {
		out, err := s.client.UploadPart(ctx, &s3.UploadPartInput{
			Bucket: &s.cfg.Bucket, Key: s.object(key), UploadId: upload, PartNumber: &number,
			Body: bytes.NewReader(b), ContentLength: aws.Int64(int64(len(b))),
		})
		if err != nil {
			return s.storeError(ctx, writing, err)
		}
		if aws.ToString(out.ETag) == "" {
			return errAnswer("a part without a tag")
		}
		part = types.CompletedPart{ETag: out.ETag, PartNumber: &number}
		return nil
	})
	return part, err
}
