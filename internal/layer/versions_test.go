package layer

import (
	"bytes"
	"crypto/sha256"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/layer/convert"
)

// A store has the layers that versions before wrote, in one file each, and gives
// them for as long as they are there.
func TestLayersOfVersionsBefore(t *testing.T) {
	for name, doc := range map[string]string{
		"1": `{"version":1,"digest":%q,"size":%d,"files":1,"kind":"rootfs","source_digest":"sha256:ab","source_size":5,"created":"2026-11-01T00:00:00Z","config":{"env":["A=b"]},"index_offset":%d,"index_digest":%q}`,
		"2": `{"version":2,"digest":%q,"size":%d,"files":1,"kind":"base","source":"rootfs","source_digest":"sha256:ab","source_size":5,"created":"2026-11-01T00:00:00Z","config":{"env":["A=b"]},"index_offset":%d,"index_digest":%q}`,
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			s := openStoreIn(t, dir, Options{})
			_ = s.Close()
			var image, scratch memFile
			res, err := convert.Convert(bytes.NewReader(archive(t, "old")), &image, &scratch, convert.Options{Limits: Limits{}.WithDefaults()})
			if err != nil {
				t.Fatal(err)
			}
			start, err := indexStart(image.b, res.Size)
			if err != nil {
				t.Fatal(err)
			}
			index, _, err := digestIndex(&image, res.Size)
			if err != nil {
				t.Fatal(err)
			}
			digest := fmt.Sprintf("sha256:%x", sha256.Sum256(image.b))
			base := filepath.Join(dir, "sha256", strings.TrimPrefix(digest, "sha256:"))
			if err := errors.Join(
				os.WriteFile(base+imageExt, image.b, 0o400),
				os.WriteFile(base+metaExt, fmt.Appendf(nil, doc, digest, res.Size, start, index), 0o600),
			); err != nil {
				t.Fatal(err)
			}
			s = openStoreIn(t, dir, Options{})
			meta, err := s.Get(t.Context(), digest)
			if err != nil || meta.Kind != dsec.LayerBase || meta.Source != SourceRootFS || !slices.Equal(meta.Config.Env, []string{"A=b"}) {
				t.Fatalf("%+v, %v", meta, err)
			}
			release, err := s.Hold(t.Context(), digest)
			if err != nil {
				t.Fatal(err)
			}
			if devices, _, err := s.Open(t.Context(), digest); err != nil || len(devices) != 1 {
				t.Errorf("%v, %v", devices, err)
			}
			if err := s.Check(t.Context(), digest, true); err != nil {
				t.Error(err)
			}
			wantCode(t, s.Remove(t.Context(), digest), dsec.CodeConflict)
			release()
			if err := s.Remove(t.Context(), digest); err != nil {
				t.Error(err)
			}
			wantFiles(t, s)

			// One that is damaged is not used.
			image.b[1100] ^= 1
			if err := errors.Join(
				os.WriteFile(base+imageExt, image.b, 0o400),
				os.WriteFile(base+metaExt, fmt.Appendf(nil, doc, digest, res.Size, start, index), 0o600),
				s.Close(),
			); err != nil {
				t.Fatal(err)
			}
			s = openStoreIn(t, dir, Options{})
			_, err = s.Hold(t.Context(), digest)
			wantCode(t, err, dsec.CodeInternal)
			wantCode(t, s.Check(t.Context(), digest, false), dsec.CodeInternal)
		})
	}
}

// memFile is a convert.File in memory.
type memFile struct{ b []byte }

func (m *memFile) ReadAt(p []byte, off int64) (int, error) {
	return bytes.NewReader(m.b).ReadAt(p, off)
}

func (m *memFile) WriteAt(p []byte, off int64) (int, error) {
	if need := off + int64(len(p)) - int64(len(m.b)); need > 0 {
		m.b = append(m.b, make([]byte, need)...)
	}
	return copy(m.b[off:], p), nil
}

func (m *memFile) Truncate(size int64) error {
	if size <= int64(len(m.b)) {
		m.b = m.b[:size]
		return nil
	}
	_, err := m.WriteAt(nil, size)
	return err
}
