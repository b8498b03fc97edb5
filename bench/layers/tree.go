package main

import (
	"archive/tar"
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"

	"github.com/opendsec/dsec/bench/internal/measure"
)

// tree is the tar of a root file system: Go on busybox.
type tree struct {
	path  string
	size  int64 // bytes of the tar
	files int
}

// where Go is in it, and its first useful output.
const goRoot = "usr/local/go"

var (
	goVersion = []string{"/" + goRoot + "/bin/go", "version"}
	goEnv     = map[string]string{"HOME": "/root", "GOROOT": "/" + goRoot, "GOTOOLCHAIN": "local", "GOPROXY": "off", "CGO_ENABLED": "0", "PATH": "/bin"}
)

// pairs are the variables as a process has them.
func pairs(env map[string]string) []string {
	var all []string
	for _, name := range slices.Sorted(maps.Keys(env)) {
		all = append(all, name+"="+env[name])
	}
	return all
}

// goTree writes the tree of Go that this machine has. A small one has only what
// runs, without what it is built from.
func goTree(ctx context.Context, path string, small bool) (tree, error) {
	out, err := exec.CommandContext(ctx, "go", "env", "GOROOT").Output()
	if err != nil {
		return tree{}, fmt.Errorf("find Go's tree: %w", err)
	}
	root := strings.TrimSpace(string(out))
	f, err := os.Create(path)
	if err != nil {
		return tree{}, err
	}
	defer func() { _ = f.Close() }()
	t := tree{path: path}
	w := tar.NewWriter(f)
	if err := measure.AddBusybox(w); err != nil {
		return tree{}, err
	}
	for _, dir := range []string{"usr/", "usr/local/", "build/"} {
		_ = w.WriteHeader(&tar.Header{Typeflag: tar.TypeDir, Name: dir, Mode: 0o755}) // the next write reports it
	}
	err = filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		rel, err := filepath.Rel(root, path)
		if err != nil {
			return err
		}
		if small && d.IsDir() && (rel == "src" || rel == "test" || rel == "api") {
			return fs.SkipDir
		}
		t.files++
		return addFile(w, path, filepath.Join(goRoot, rel), d)
	})
	if err := errors.Join(err, w.Close(), f.Sync()); err != nil {
		return tree{}, err
	}
	fi, err := f.Stat()
	t.size = fi.Size()
	return t, err
}

func addFile(w *tar.Writer, path, name string, d fs.DirEntry) error {
	fi, err := d.Info()
	if err != nil {
		return err
	}
	target := ""
	if fi.Mode()&fs.ModeSymlink != 0 {
		if target, err = os.Readlink(path); err != nil {
			return err
		}
	}
	h, err := tar.FileInfoHeader(fi, target)
	if err != nil {
		return err
	}
	h.Name, h.Uid, h.Gid, h.Uname, h.Gname = name, 0, 0, "", ""
	if d.IsDir() {
		h.Name += "/"
	}
	if err := w.WriteHeader(h); err != nil || !fi.Mode().IsRegular() {
		return err
	}
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	defer func() { _ = f.Close() }()
	_, err = io.Copy(w, f)
	return err
}

// variant is the tar with one file more, which makes it an image of its own.
func (t tree) variant(n int) (io.ReadCloser, error) {
	head, err := variantHead(n)
	if err != nil {
		return nil, err
	}
	f, err := os.Open(t.path)
	if err != nil {
		return nil, err
	}
	return struct {
		io.Reader
		io.Closer
	}{io.MultiReader(bytes.NewReader(head), f), f}, nil
}

func variantHead(n int) ([]byte, error) {
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	content := fmt.Appendf(nil, "%d\n", n)
	err := w.WriteHeader(&tar.Header{Typeflag: tar.TypeReg, Name: "variant", Mode: 0o644, Size: int64(len(content))})
	if err == nil {
		_, err = w.Write(content)
	}
	err = errors.Join(err, w.Flush()) // no end mark: the rest follows
	return b.Bytes(), err
}

// writeVariant writes a variant to a file, for rivals.
func (t tree) writeVariant(path string, n int) error {
	r, err := t.variant(n)
	if err != nil {
		return err
	}
	defer func() { _ = r.Close() }()
	f, err := os.Create(path)
	if err != nil {
		return err
	}
	_, err = io.Copy(f, r)
	return errors.Join(err, f.Sync(), f.Close(), forgetFile(path))
}

// writeLayout writes an OCI layout, as a tar, of an image whose one layer is the
// tree, and whose configuration has n in it.
func (t tree) writeLayout(path string, n int) error {
	layer, err := os.Open(t.path)
	if err != nil {
		return err
	}
	defer func() { _ = layer.Close() }()
	h := sha256.New()
	if _, err := io.Copy(h, layer); err != nil {
		return err
	}
	diff := fmt.Sprintf("%x", h.Sum(nil))
	type object = map[string]any
	config := blob(object{
		"architecture": "amd64", "os": "linux", "config": object{"Env": []string{fmt.Sprintf("VARIANT=%d", n)}},
		"rootfs": object{"type": "layers", "diff_ids": []string{"sha256:" + diff}},
	})
	described := func(media, digest string, size int64) object {
		return object{"mediaType": "application/vnd.oci.image." + media, "digest": "sha256:" + digest, "size": size}
	}
	manifest := blob(object{
		"schemaVersion": 2, "mediaType": "application/vnd.oci.image.manifest.v1+json",
		"config": described("config.v1+json", digest(config), int64(len(config))),
		"layers": []object{described("layer.v1.tar", diff, t.size)},
	})
	index := blob(object{"schemaVersion": 2, "manifests": []object{described("manifest.v1+json", digest(manifest), int64(len(manifest)))}})
	f, err := os.Create(path)
	if err != nil {
		return err
	}
	defer func() { _ = f.Close() }()
	w := tar.NewWriter(f)
	add := func(name string, size int64, r io.Reader) {
		if err == nil {
			err = w.WriteHeader(&tar.Header{Typeflag: tar.TypeReg, Name: name, Mode: 0o644, Size: size})
		}
		if err == nil {
			_, err = io.Copy(w, r)
		}
	}
	small := func(name string, b []byte) { add(name, int64(len(b)), bytes.NewReader(b)) }
	small("oci-layout", blob(object{"imageLayoutVersion": "1.0.0"}))
	small("index.json", index)
	small("blobs/sha256/"+digest(manifest), manifest)
	small("blobs/sha256/"+digest(config), config)
	if err == nil {
		_, err = layer.Seek(0, io.SeekStart)
	}
	add("blobs/sha256/"+diff, t.size, layer)
	return errors.Join(err, w.Close(), f.Sync())
}

// blob is the JSON of what always has one.
func blob(v any) []byte {
	b, err := json.Marshal(v)
	if err != nil {
		panic(err) // maps of strings and numbers
	}
	return b
}

func digest(b []byte) string { return fmt.Sprintf("%x", sha256.Sum256(b)) }
