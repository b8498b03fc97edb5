package upper

import (
	"archive/tar"
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/layer/convert"
	"github.com/opendsec/dsec/internal/testutil"
)

// stream is what is written of a directory.
func stream(t *testing.T, dir string, opt Options) (map[string]*tar.Header, Report, error) {
	t.Helper()
	d, err := os.Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	defer d.Close()
	var b bytes.Buffer
	report, err := Write(t.Context(), &b, d, opt)
	all := map[string]*tar.Header{}
	if err != nil {
		return nil, report, err
	}
	for r := tar.NewReader(&b); ; {
		hdr, err := r.Next()
		if err == io.EOF {
			return all, report, nil
		}
		if err != nil {
			t.Fatal(err)
		}
		all[hdr.Name] = hdr
	}
}

// TestIDs: those of the sandbox are as it sees them, and so are others.
func TestIDs(t *testing.T) {
	testutil.Require(t, testutil.Root)
	dir := t.TempDir()
	for name, id := range map[string]int{"first": 1 << 20, "last": 1<<20 + 65535, "below": 1<<20 - 1, "above": 1<<20 + 65536, "host": 0} {
		name = filepath.Join(dir, name)
		if err := errors.Join(os.WriteFile(name, nil, 0o644), os.Lchown(name, id, id)); err != nil {
			t.Fatal(err)
		}
	}
	all, _, err := stream(t, dir, Options{Owner: 1 << 20})
	if err != nil {
		t.Fatal(err)
	}
	for name, want := range map[string]int{"first": 0, "last": 65535, "below": 65534, "above": 65534, "host": 65534} {
		if hdr := all["./"+name]; hdr.Uid != want || hdr.Gid != want {
			t.Errorf("%s: %d:%d, want %d", name, hdr.Uid, hdr.Gid, want)
		}
	}
}

// TestTooMuch: what no layer holds is refused by what it is, before it is written.
func TestTooMuch(t *testing.T) {
	deep, long, many, big := t.TempDir(), t.TempDir(), t.TempDir(), t.TempDir()
	must := func(errs ...error) {
		t.Helper()
		if err := errors.Join(errs...); err != nil {
			t.Fatal(err)
		}
	}
	must(os.MkdirAll(filepath.Join(deep, strings.Repeat("d/", 20)), 0o755))
	at, err := os.OpenRoot(long)
	must(err)
	for range 17 {
		name := strings.Repeat("n", 250)
		must(at.Mkdir(name, 0o755))
		below, err := at.OpenRoot(name)
		must(err, at.Close())
		at = below
	}
	must(at.Close())
	for i := range 30 {
		must(os.WriteFile(filepath.Join(many, fmt.Sprint(i)), nil, 0o644))
	}
	must(os.WriteFile(filepath.Join(big, "holes"), nil, 0o644), os.Truncate(filepath.Join(big, "holes"), 1<<40))
	limits := convert.Limits{Depth: 20, Entries: 25, ContentBytes: 1 << 30}
	for want, dir := range map[string]string{"20 directories": deep, "4095 bytes": long, "more than 25 files": many, `"/holes"`: big} {
		_, _, err := stream(t, dir, Options{Owner: uint32(os.Getuid()), Limits: limits})
		if e, ok := errors.AsType[*dsec.Error](err); !ok || e.Code != dsec.CodeUnsupported || !strings.Contains(e.Message, want) {
			t.Errorf("%s: %v", want, err)
		}
	}
}

// TestNothingIsFollowed: neither links nor what blocks a reader.
func TestNothingIsFollowed(t *testing.T) {
	dir, secret := t.TempDir(), filepath.Join(t.TempDir(), "secret")
	for _, err := range []error{
		os.WriteFile(secret, []byte("of the host"), 0o600), os.Symlink(secret, filepath.Join(dir, "link")), os.Symlink("/", filepath.Join(dir, "root")),
		unix.Mkfifo(filepath.Join(dir, "pipe"), 0o600), os.WriteFile(filepath.Join(dir, ".wh.x"), []byte("plain"), 0o600),
		os.Link(filepath.Join(dir, ".wh.x"), filepath.Join(dir, "again")), os.Mkdir(filepath.Join(dir, "bad\xff\n"), 0o700),
	} {
		if err != nil {
			t.Fatal(err)
		}
	}
	all, report, err := stream(t, dir, Options{Owner: uint32(os.Getuid())})
	if err != nil || len(report.Removed) > 0 {
		t.Fatal(err, report)
	}
	kinds := ""
	for _, name := range []string{"./", "./link", "./root", "./pipe", "./bad\xff\n/"} {
		kinds += string(all[name].Typeflag)
	}
	if links := string(all["./.wh.x"].Typeflag) + string(all["./again"].Typeflag); kinds != "52265" || links != "01" && links != "10" || len(all) != 7 {
		t.Errorf("types %s and %s of %d", kinds, links, len(all))
	}
}
