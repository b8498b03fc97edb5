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
	buf := make([]byte, 256<<10)
	for _, d := range img.blobs {
		if err := l.blob(ctx, w, d, buf); err != nil {
			return err
		}
	}
	return w.Close()
}

func (l *Layout) blob(ctx context.Context, w *tar.Writer, d v1.Descriptor, buf []byte) error {
	if err := writeHeader(w, blobName(d.Digest), d.Size); err != nil {
		return err
	}
	b := l.img.open(ctx, d)
	defer b.Close()
	_, err := io.CopyBuffer(struct{ io.Writer }{w}, counted{b, &l.sent}, buf)
	return err
}

// counted counts what goes by.
type counted struct {
	io.Reader
	n *atomic.Int64
}

func (c counted) Read(p []byte) (int, error) {
	n, err := c.Reader.Read(p)
	c.n.Add(int64(n))
	return n, err
}

func blobName(h v1.Hash) string { return fmt.Sprintf("blobs/%s/%s", h.Algorithm, h.Hex) }

func writeHeader(w *tar.Writer, name string, size int64) error {
	return w.WriteHeader(&tar.Header{Name: name, Typeflag: tar.TypeReg, Mode: 0o644, Size: size})
}
