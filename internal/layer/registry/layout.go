package registry

import (
	"archive/tar"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"sync/atomic"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/types"

	"github.com/opendsec/dsec/internal/layer/ahead"
)

// Layout is an image on its way: the tar stream of an OCI layout that holds it
// alone. It is read by one goroutine.
type Layout struct {
	io.Reader
	img    *Image
	pipe   *io.PipeReader
	cancel context.CancelFunc
	done   chan struct{}
	sent   atomic.Int64
}

// Open starts to fetch. The stream ends with a *dsec.Error of the field ref where
// the registry fails or sends something else than the manifest says.
func (img *Image) Open(ctx context.Context) *Layout {
	ctx, cancel := context.WithCancel(ctx)
	r, w := io.Pipe()
	l := &Layout{Reader: r, img: img, pipe: r, cancel: cancel, done: make(chan struct{})}
	go func() {
		defer close(l.done)
		_ = w.CloseWithError(l.write(ctx, w))
	}()
	return l
}

// Close gives up what was not read, and returns when nothing is fetched any more.
func (l *Layout) Close() error {
	l.cancel()
	_ = l.pipe.Close()
	<-l.done
	return nil
}

// Progress tells how many of the image's bytes have gone by, of how many.
func (l *Layout) Progress() (sent, size int64) { return l.sent.Load(), l.img.Size }

func (l *Layout) write(ctx context.Context, out io.Writer) error {
	img, w := l.img, tar.NewWriter(out)
	digest, err := v1.NewHash(img.Digest)
	if err != nil {
		return err
	}
	kind, err := kindOf(img.manifest, types.OCIManifestSchema1)
	if err != nil {
		return err
	}
	index, err := json.Marshal(v1.IndexManifest{
		SchemaVersion: 2, MediaType: types.OCIImageIndex,
		Manifests: []v1.Descriptor{{MediaType: kind, Digest: digest, Size: int64(len(img.manifest))}},
	})
	if err != nil {
		return err
	}
	for _, f := range []struct {
		name string
		doc  []byte
	}{
		{"oci-layout", []byte(`{"imageLayoutVersion":"1.0.0"}`)}, {"index.json", index}, {blobName(digest), img.manifest},
	} {
		if err := writeHeader(w, f.name, int64(len(f.doc))); err != nil {
			return err
		}
		if _, err := w.Write(f.doc); err != nil {
			return err
		}
	}
	l.sent.Add(int64(len(img.manifest)))
	if err := l.blobs(ctx, w); err != nil {
		return err
	}
	return w.Close()
}

const (
	fetches    = 3 // blobs at once
	pieceBytes = 256 << 10
	aheadBytes = 8 << 20 // of each, that nobody has asked for yet
)

// blobs are sent one after another. While one is, those that follow are fetched.
func (l *Layout) blobs(ctx context.Context, w *tar.Writer) error {
	var next []*fetch
	defer func() {
		for _, f := range next {
			f.close()
		}
	}()
	for i, d := range l.img.blobs {
		for len(next) < fetches && i+len(next) < len(l.img.blobs) {
			next = append(next, l.img.fetch(ctx, l.img.blobs[i+len(next)]))
		}
		if err := writeHeader(w, blobName(d.Digest), d.Size); err != nil {
			return err
		}
		if _, err := next[0].WriteTo(&sending{w, &l.sent}); err != nil {
			return err
		}
		next[0].close()
		next = next[1:]
	}
	return nil
}

// fetch is a blob that is fetched before its turn.
type fetch struct {
	*ahead.Reader
	b      *blob
	cancel context.CancelFunc
}

func (img *Image) fetch(ctx context.Context, d v1.Descriptor) *fetch {
	ctx, cancel := context.WithCancel(ctx)
	b := img.open(ctx, d)
	return &fetch{ahead.Stream(ctx, ahead.Options{Piece: pieceBytes, Pieces: aheadBytes / pieceBytes}, b), b, cancel}
}

// close returns when nothing of the blob is fetched any more.
func (f *fetch) close() {
	f.cancel() // a read that waits for the registry ends
	_ = f.Close()
	f.b.Close()
}

// sending counts what goes by.
type sending struct {
	w io.Writer
	n *atomic.Int64
}

// Write implements io.Writer.
func (s *sending) Write(p []byte) (int, error) {
	n, err := s.w.Write(p)
	s.n.Add(int64(n))
	return n, err
}

func blobName(h v1.Hash) string { return fmt.Sprintf("blobs/%s/%s", h.Algorithm, h.Hex) }

func writeHeader(w *tar.Writer, name string, size int64) error {
	return w.WriteHeader(&tar.Header{Name: name, Typeflag: tar.TypeReg, Mode: 0o644, Size: size})
}
