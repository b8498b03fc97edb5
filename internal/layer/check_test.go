package layer

import (
	"os"
	"strings"
	"testing"

	"github.com/opendsec/dsec"
)

// Whatever of a layer is gone, cut or other in the store is found, of the data what has
// their size only by reading them; importing the same again makes the layer whole.
func TestCheck(t *testing.T) {
	eachPlace(t, func(t *testing.T, p place) {
		s := p.node(t)
		content := strings.Repeat("some content of a file", 20_000)
		meta := build(t, s, content)
		for _, part := range []string{partManifest, partChunks, partPacked, partData} {
			key := blobKey(meta.Digest, part)
			for what, spoil := range map[string]func() error{
				"gone":  func() error { return os.Remove(p.file(key)) },
				"cut":   func() error { return os.Truncate(p.file(key), 100) },
				"other": func() error { p.spoil(t, key); return nil },
			} {
				for _, data := range []bool{false, true} {
					if err := s.Check(t.Context(), meta.Digest, data); err != nil {
						t.Fatalf("whole: %v", err)
					}
				}
				if err := spoil(); err != nil {
					t.Fatal(err)
				}
				if err := s.Check(t.Context(), meta.Digest, false); part == partData && what == "other" {
					if err != nil {
						t.Errorf("data were read: %v", err)
					}
				} else if err == nil || dsec.CodeOf(err) != dsec.CodeInternal || !strings.Contains(err.Error(), meta.Digest) {
					t.Errorf("%s is %s: %v", part, what, err)
				}
				wantCode(t, s.Check(t.Context(), meta.Digest, true), dsec.CodeInternal)
				build(t, s, content)
			}
		}
		if err := s.Remove(t.Context(), meta.Digest); err != nil {
			t.Fatal(err)
		}
		wantCode(t, s.Check(t.Context(), meta.Digest, false), dsec.CodeInternal)
		wantCode(t, s.Check(t.Context(), "none", false), dsec.CodeInvalid)
	})
}

// What the scrub found is damage until an import has mended it.
func TestCheckKnowsWhatTheScrubFound(t *testing.T) {
	dir := t.TempDir()
	s := openStoreIn(t, dir, Options{})
	m := build(t, s, noise(1, 1<<20))
	release := hold(t, s, m)
	flip(t, dir+"/blobs", m, 5000)
	sc := startScrub(t, s, nil)
	<-sc.idle
	wantCode(t, s.Check(t.Context(), m.Digest, false), dsec.CodeInternal)
	sc.stop()
	build(t, s, noise(1, 1<<20))
	if err := s.Check(t.Context(), m.Digest, false); err != nil {
		t.Errorf("mended: %v", err)
	}
	release()
}
