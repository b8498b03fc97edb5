package registry

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"hash"
	"io"
	"net/http"
	"os"
	"strconv"
	"strings"
	"time"

	v1 "github.com/google/go-containerregistry/pkg/v1"

	"github.com/opendsec/dsec"
)

// blob reads one blob, checked: its last byte comes only where all had the right
// digest. Where a body breaks off, it goes on from there, at the next source too.
type blob struct {
	ctx   context.Context
	img   *Image
	d     v1.Descriptor
	off   int64
	h     hash.Hash
	body  io.ReadCloser
	bad   int   // bodies in a row that brought nothing
	ended int64 // where the last body ended that was no longer; -1: none did
	whole bool  // the registry gives no parts
	at    int   // source
	keep  *kept
}

// open opens a blob: the cache's, or the registry's.
func (img *Image) open(ctx context.Context, d v1.Descriptor) *blob {
	b := &blob{ctx: ctx, img: img, d: d, h: sha256.New(), ended: -1}
	if c := img.c.cache; c != nil {
		if f := c.open(img.cacheKey(d), d.Size); f != nil {
			b.body = f
		} else {
			b.keep = c.start(img.cacheKey(d), d.Size)
		}
	}
	return b
}

// cacheKey is of the project and the repository: who may read a blob here need not
// be who may read it there.
func (img *Image) cacheKey(d v1.Descriptor) string {
	h := sha256.New()
	for _, s := range []string{img.req.Scope, img.Ref.Host, img.Ref.Repository, d.Digest.String()} {
		fmt.Fprintf(h, "%d:%s", len(s), s)
	}
	return hex.EncodeToString(h.Sum(nil))
}

// Close lets go of what a read that did not get to its end holds.
func (b *blob) Close() {
	if b.body != nil {
		_ = b.body.Close()
	}
	b.keep.drop()
}

// Read implements io.Reader.
func (b *blob) Read(p []byte) (int, error) {
	for b.off < b.d.Size {
		if b.body == nil {
			if err := b.reopen(); err != nil {
				return 0, err
			}
		}
		stop := b.img.c.watch(b.body)
		n, err := b.body.Read(p[:min(int64(len(p)), b.d.Size-b.off)])
		if !stop() && err != nil {
			err = errStalled
		}
		b.h.Write(p[:n])
		b.off += int64(n)
		if n > 0 {
			b.bad = 0
			b.keep.write(p[:n])
		}
		if b.off == b.d.Size {
			err = b.finish()
		} else if err != nil {
			err = b.broken(err)
		}
		if n > 0 || err != nil {
			return n, err
		}
	}
	if b.d.Size == 0 && b.at == 0 && b.body == nil { // nothing to fetch, something to check
		b.at++
		if err := b.check(); err != nil {
			return 0, err
		}
	}
	return 0, io.EOF
}

// broken drops a body that ended early, for another.
func (b *blob) broken(err error) error {
	_, cached := b.body.(*os.File)
	_ = b.body.Close()
	b.body = nil
	if cached {
		return fmt.Errorf("read cached blob: %w", err)
	}
	if err == io.EOF { // the whole of what the registry has to send
		if b.ended == b.off {
			return b.short(b.off)
		}
		b.ended, err = b.off, io.ErrUnexpectedEOF
	}
	if b.bad++; b.bad >= attempts {
		return typed(b.img.sources[b.at].host, b.what(), bare(err))
	}
	b.img.c.log.Info("blob broke off", "digest", b.d.Digest.String(), "at", b.off, "err", bare(err))
	if !sleep(b.ctx, b.img.c.cfg.times.backoff<<(b.bad-1)) {
		return typed(b.img.sources[b.at].host, b.what(), context.Cause(b.ctx))
	}
	return nil
}

// short leaves a source that has only so many bytes of the blob: asking again brings
// no more. What another source has goes on behind them.
func (b *blob) short(size int64) error {
	if b.at == len(b.img.sources)-1 {
		return b.mismatch("has %d bytes, its manifest says %d", size, b.d.Size)
	}
	b.img.c.log.Info("mirror has not the whole blob", "mirror", b.img.sources[b.at].host, "digest", b.d.Digest.String(), "bytes", size)
	b.next()
	return nil
}

// next goes on to the next source, of which nothing is known yet.
func (b *blob) next() {
	b.at++
	b.bad, b.ended, b.whole = 0, -1, false
}

func (b *blob) what() string { return "blob " + b.d.Digest.String() }

// finish checks the whole, and that there is no more.
func (b *blob) finish() error {
	stop := b.img.c.watch(b.body)
	n, _ := io.ReadFull(b.body, make([]byte, 1))
	stop()
	_ = b.body.Close()
	b.body = nil
	if n > 0 {
		return b.mismatch("has more than %d bytes", b.d.Size)
	}
	if err := b.check(); err != nil {
		return err
	}
	b.keep.finish()
	return nil
}

func (b *blob) check() error {
	if got := hex.EncodeToString(b.h.Sum(nil)); got != b.d.Digest.Hex {
		return b.mismatch("has digest sha256:%s", got)
	}
	return nil
}

// mismatch is the error of a blob that is another than its manifest says.
func (b *blob) mismatch(format string, args ...any) error {
	b.keep.drop()
	if b.img.c.cache != nil {
		b.img.c.cache.remove(b.img.cacheKey(b.d))
	}
	return dsec.Invalid("ref", "the registry's blob %s "+format, append([]any{b.d.Digest}, args...)...)
}

// reopen asks for what is missing. A source that has not the blob is followed by
// the next.
func (b *blob) reopen() error {
	for {
		s := b.img.sources[b.at]
		err := b.img.c.again(b.ctx, func() error { return b.get(s) })
		if err == nil {
			return nil
		}
		if b.at == len(b.img.sources)-1 || b.ctx.Err() != nil {
			return typed(s.host, b.what(), err)
		}
		b.img.c.log.Info("mirror has not the blob", "mirror", s.host, "digest", b.d.Digest.String(), "err", err)
		b.next()
	}
}

// get opens the body from the byte that is wanted next.
func (b *blob) get(s *source) error {
	if err := b.img.c.login(b.ctx, b.img, s); err != nil {
		return err
	}
	// A layer that says where else it is to be had is asked of the registry all
	// the same: its URLs are a stranger's.
	req, err := http.NewRequestWithContext(b.ctx, http.MethodGet, s.base+"/blobs/"+b.d.Digest.String(), nil)
	if err != nil {
		return err
	}
	ask := b.off > 0 && !b.whole
	if ask {
		req.Header.Set("Range", fmt.Sprintf("bytes=%d-%d", b.off, b.d.Size-1))
	}
	res, err := s.client.Do(req)
	if err != nil {
		return err
	}
	skip := int64(0)
	total := totalOf(res)
	switch {
	case ask && total >= 0 && total != b.d.Size: // of a part that it gives, or of one that it has not
		_ = res.Body.Close()
		return b.mismatch("has %d bytes, its manifest says %d", total, b.d.Size)
	case res.StatusCode == http.StatusRequestedRangeNotSatisfiable && ask:
		_ = res.Body.Close()
		b.whole = true
		return b.get(s)
	case res.StatusCode == http.StatusPartialContent && ask:
		var from int64
		if _, err := fmt.Sscanf(res.Header.Get("Content-Range"), "bytes %d-", &from); err != nil || from != b.off {
			_ = res.Body.Close()
			return &statusError{status: http.StatusBadGateway} // another part than was asked for
		}
	case res.StatusCode == http.StatusOK:
		skip = b.off // it does not know ranges
	default:
		_ = res.Body.Close()
		return status(res)
	}
	if want := b.d.Size - b.off + skip; res.ContentLength >= 0 && res.ContentLength != want {
		_ = res.Body.Close()
		return b.mismatch("has %d bytes, its manifest says %d", res.ContentLength-skip+b.off, b.d.Size)
	}
	b.body = res.Body
	if skip > 0 {
		stop := b.img.c.watch(res.Body)
		var n int64
		n, err = io.CopyN(io.Discard, res.Body, skip)
		if stop(); err != nil {
			_ = res.Body.Close()
			b.body = nil
		}
		if err == io.EOF {
			if b.ended == n {
				return b.mismatch("has %d bytes, its manifest says %d", n, b.d.Size)
			}
			b.ended, err = n, io.ErrUnexpectedEOF
		}
	}
	return err
}

// totalOf is how large the whole is of which an answer gives a part, or none; -1 where
// it does not say that.
func totalOf(res *http.Response) int64 {
	if res.StatusCode != http.StatusPartialContent && res.StatusCode != http.StatusRequestedRangeNotSatisfiable {
		return -1
	}
	_, after, _ := strings.Cut(res.Header.Get("Content-Range"), "/")
	total, err := strconv.ParseInt(after, 10, 64)
	if err != nil {
		return -1
	}
	return total
}

var errStalled = errors.New("no byte came for too long")

// watch closes a body from which nothing comes, until stop is called, which reports
// whether that was in time.
func (c *Client) watch(body io.Closer) (stop func() bool) {
	if _, ok := body.(*os.File); ok {
		return func() bool { return true }
	}
	return time.AfterFunc(c.cfg.times.stall, func() { _ = body.Close() }).Stop
}
