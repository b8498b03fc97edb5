package layer

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"testing"

	"github.com/opendsec/dsec/internal/layer/blob"
	"github.com/opendsec/dsec/internal/layer/blob/dirblob"
	"github.com/opendsec/dsec/internal/layer/blob/s3blob"
	"github.com/opendsec/dsec/internal/testutil/s3server"
)

// place is where the blobs of a store are, which several nodes may open.
type place struct {
	open func(t testing.TB) blob.Store
	file func(key string) string // the file that a blob is in
}

// eachPlace runs a test on a directory and on a bucket.
func eachPlace(t *testing.T, test func(t *testing.T, p place)) {
	opened := func(t testing.TB, s blob.Store, err error) blob.Store {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = s.(io.Closer).Close() })
		return blob.Wrap(s, blob.Options{})
	}
	t.Run("dir", func(t *testing.T) {
		dir := t.TempDir()
		test(t, place{
			open: func(t testing.TB) blob.Store { s, err := dirblob.Open(dir); return opened(t, s, err) },
			file: func(key string) string { return filepath.Join(dir, key) },
		})
	})
	t.Run("s3", func(t *testing.T) {
		srv, err := s3server.Start(t.Context(), t.TempDir(), s3server.Options{})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = srv.Close() })
		keys := blob.Credentials{Env: func(name string) (string, bool) {
			v, ok := map[string]string{"AWS_ACCESS_KEY_ID": srv.ID, "AWS_SECRET_ACCESS_KEY": srv.Secret}[name]
			return v, ok
		}}
		test(t, place{
			open: func(t testing.TB) blob.Store {
				s, err := s3blob.Open(context.WithoutCancel(t.Context()), s3blob.Config{Bucket: srv.Bucket, Prefix: "p", Endpoint: srv.Endpoint(srv.Addr), PathStyle: true, Credentials: keys})
				return opened(t, s, err)
			},
			file: func(key string) string { return srv.Object("p/" + key) },
		})
	})
}

// node is a store of its own over a place.
func (p place) node(t testing.TB) *Store {
	t.Helper()
	return openStore(t, Options{Blobs: p.open(t)})
}

// spoil changes a blob behind the store's back, and keeps its size.
func (p place) spoil(t testing.TB, key string) {
	t.Helper()
	b, err := os.ReadFile(p.file(key))
	if err != nil {
		t.Fatal(err)
	}
	for i := range b {
		b[i] ^= 0x55
	}
	if err := os.WriteFile(p.file(key), b, 0o600); err != nil {
		t.Fatal(err)
	}
}

// bytesOf are those of a blob as the store gives them.
func bytesOf(t testing.TB, s blob.Store, key string) []byte {
	t.Helper()
	info, err := s.Stat(t.Context(), key)
	if err != nil {
		t.Fatal(err)
	}
	var b bytes.Buffer
	if n, err := io.Copy(&b, io.NewSectionReader(readerOf{t.Context(), s, key}, 0, info.Size)); err != nil || n != info.Size {
		t.Fatal(fmt.Errorf("%s: %d bytes: %w", key, n, err))
	}
	return b.Bytes()
}

// readerOf is a blob as an io.ReaderAt.
type readerOf struct {
	ctx context.Context
	s   blob.Store
	key string
}

func (r readerOf) ReadAt(p []byte, off int64) (int, error) { return r.s.ReadAt(r.ctx, r.key, p, off) }
