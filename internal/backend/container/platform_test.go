package container

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/backend"
	"github.com/opendsec/dsec/internal/testutil"
)

// upper lists what lies in the upper directory of a sandbox.
func (s *sandbox) upper() (names []string) {
	s.Helper()
	fd, err := s.i.(*instance).volume.Open()
	check(s, err)
	dir := os.NewFile(uintptr(fd), "volume")
	defer dir.Close()
	root := procPath(fd) + "/upper"
	check(s, filepath.WalkDir(root, func(path string, _ os.DirEntry, err error) error {
		if path != root {
			names = append(names, strings.TrimPrefix(path, root))
		}
		return err
	}))
	return names
}

// What is in the upper directory is what the sandbox has written.
func TestUpperStartsEmpty(t *testing.T) {
	h := newHost(t, nil)
	bare := image(t, func(root string) {
		for _, name := range []string{"proc", "sys", "dev", "tmp", "etc"} {
			check(t, os.RemoveAll(filepath.Join(root, name)))
		}
	})
	for name, tc := range map[string]struct {
		layer backend.Layer
		tmp   string
	}{"with all": {h.image, "0:0:755"}, "with none": {bare, "0:0:1777"}} {
		s := h.create(tc.layer)
		if have := s.upper(); len(have) != 0 {
			t.Errorf("%s: the upper directory has %v", name, have)
		}
		o := s.sh("cat /etc/hostname; stat -c %u:%g:%a /proc /sys /dev /tmp /etc /etc/hosts /etc/hostname /etc/resolv.conf; echo x > /tmp/x; rm /etc/resolv.conf; ls /etc/resolv.conf")
		if !strings.HasPrefix(o.out, "sandbox\n") || o.Code == 0 {
			t.Errorf("%s: %q, %+v", name, o.out, o.Outcome)
		}
		if have := s.upper(); !slices.Contains(have, "/tmp/x") {
			t.Errorf("%s: control: the upper directory has %v", name, have)
		}
		for line, want := range map[int]string{4: tc.tmp, 5: "0:0:755", 6: "0:0:644", 7: "0:0:644", 8: "0:0:644"} {
			if lines := strings.Split(o.out, "\n"); lines[line] != want {
				t.Errorf("%s: line %d of %q is not %q", name, line, o.out, want)
			}
		}
	}
}

// /etc is the image's as to mode, owner and time, and what the image has there.
func TestEtcLooksAsInTheImage(t *testing.T) {
	h := newHost(t, nil)
	at := time.Date(2011, 2, 3, 4, 5, 6, 0, time.UTC)
	img := image(t, func(root string) {
		check(t, errors.Join(
			os.Chown(root+"/etc", 12, 34),
			os.Chmod(root+"/etc", 0o750|os.ModeSetgid),
			os.WriteFile(root+"/etc/hosts", []byte("the image's\n"), 0o600),
			os.Chtimes(root+"/etc", at, at),
		))
	})
	// A layer above that has an /etc decides.
	top := image(t, func(root string) {
		check(t, errors.Join(os.RemoveAll(root+"/bin"), os.Chmod(root+"/etc", 0o711), os.Chtimes(root+"/etc", at, at)))
	})
	for _, tc := range []struct {
		layers []backend.Layer
		want   string
	}{
		{[]backend.Layer{img}, "12:34:2750"},
		{[]backend.Layer{img, top}, "0:0:711"},
	} {
		s := h.create(tc.layers...)
		o := s.sh("stat -c %u:%g:%a:%Y /etc; stat -c %u:%g:%a /etc/hosts; grep -c localhost /etc/hosts; cat /etc/passwd")
		want := fmt.Sprintf("%s:%d\n0:0:644\n2\nroot:", tc.want, at.Unix())
		if !strings.HasPrefix(o.out, want) {
			t.Errorf("%q, want %q", o.out, want)
		}
	}
	// IDs that no sandbox has are refused, naming the directory.
	foreign := image(t, func(root string) { check(t, os.Chown(root+"/etc", idsPerSlot, 0)) })
	_, err := h.b.Create(t.Context(), h.request(foreign))
	if dsec.CodeOf(err) != dsec.CodeInvalid || !strings.Contains(err.Error(), "/etc") {
		t.Errorf("%v, want invalid that names /etc", err)
	}
}

// The platform's files are each sandbox's own to change.
func TestPlatformFilesAreWritable(t *testing.T) {
	h := newHost(t, nil)
	a, b := h.create(), h.create()
	o := a.sh("echo 10.0.0.9 mine >> /etc/hosts && chmod 600 /etc/hosts && chown 7 /etc/hosts && rm /etc/hostname && mv /etc/resolv.conf /etc/r && mkdir /etc/hostname; stat -c %u:%a /etc/hosts; cat /etc/hosts /etc/r; ls -d /etc/hostname/")
	if !strings.HasPrefix(o.out, "7:600\n127.0.0.1") || !strings.Contains(o.out, "10.0.0.9 mine\n# This") || !o.OK() {
		t.Errorf("%q, %+v", o.out, o.Outcome)
	}
	for _, s := range []*sandbox{b, h.create()} {
		o := s.sh("stat -c %u:%a /etc/hosts; grep -c mine /etc/hosts; cat /etc/hostname /etc/resolv.conf")
		if o.out != "0:644\n0\nsandbox\n# This sandbox has no network.\n" {
			t.Errorf("another sees %q", o.out)
		}
	}
}

// A sandbox of no layers has the platform's alone. Nothing can run in it.
func TestSandboxWithoutLayers(t *testing.T) {
	h := newHost(t, nil)
	req := h.request()
	req.Layers = nil
	i, err := h.b.Create(t.Context(), req)
	check(t, err)
	s := &sandbox{host: h, id: req.ID, i: i}
	if have := s.upper(); len(have) != 0 {
		t.Errorf("the upper directory has %v", have)
	}
	root := fmt.Sprintf("/proc/%d/root/etc/", i.(*instance).sh.proc.pid)
	data, err := os.ReadFile(root + "hostname")
	check(t, err)
	if string(data) != hostname+"\n" {
		t.Errorf("/etc/hostname has %q", data)
	}
	st, err := os.Stat(root + "hosts")
	check(t, err)
	if base := i.(*instance).sh.slot.base(); st.Sys().(*syscall.Stat_t).Uid != base {
		t.Errorf("/etc/hosts belongs to %d, want %d", st.Sys().(*syscall.Stat_t).Uid, base)
	}
	check(t, i.Destroy(t.Context()))
}

// Images that look alike share one layer of the platform's, which is mounted
// once, is dropped as other layers are, and is made again after a restart.
func TestPlatformLayerIsShared(t *testing.T) {
	h := newHost(t, nil)
	at := time.Unix(1e9, 0)
	alike := func(word string) backend.Layer {
		return image(t, func(root string) {
			check(t, errors.Join(os.WriteFile(root+"/etc/word", []byte(word), 0o644), os.Chtimes(root+"/etc", at, at)))
		})
	}
	first, second := alike("a"), alike("b")
	if first.Digest == second.Digest {
		t.Fatal("control: the images are the same")
	}
	running := []*sandbox{h.create(first), h.create(second)}
	mounted := func() (names []string) {
		check(t, h.b.ns.do(func() error {
			list, err := os.ReadDir("/layers")
			for _, e := range list {
				names = append(names, "sha256:"+e.Name())
			}
			return err
		}))
		return names
	}
	if have := mounted(); len(have) != 3 {
		t.Errorf("mounted: %v, want two images and one of the platform's", have)
	}
	check(t, h.b.Close())
	h.open()
	for _, s := range running {
		i, err := h.b.Recover(t.Context(), s.id, s.i.Handle())
		check(t, err)
		_ = s.client.Close()
		s.use(i)
	}
	s := h.create(first)
	if o := s.sh("cat /etc/word /etc/hostname"); o.out != "asandbox\n" {
		t.Errorf("have %q", o.out)
	}
	if have := mounted(); len(have) != 3 {
		t.Errorf("mounted after a restart: %v, want the same three", have)
	}
}

// An image of the platform's is the same each time, also from a file system
// that has no files without names; and it mounts from a loop device.
func TestPlatformImage(t *testing.T) {
	testutil.Require(t, testutil.Root, testutil.EROFS)
	dir := t.TempDir()
	testutil.Ledger(t, dir)
	in := platforms{temp: t.TempDir(), dir: dir}
	p, err := in.plan(nil)
	check(t, err)
	q, err := platforms{temp: in.temp, dir: "/proc"}.plan(nil)
	check(t, err)
	if p.digest != q.digest {
		t.Errorf("the digests are %s and %s", p.digest, q.digest)
	}
	for _, dir := range []string{in.temp, in.dir} {
		left, err := os.ReadDir(dir)
		check(t, err)
		if len(left) != 0 {
			t.Errorf("left in %s: %v", dir, left)
		}
	}
	for name, p := range map[string]*platform{"disk": p, "memory": q} {
		image, err := p.open()
		check(t, err)
		m, err := (&layerNS{log: testutil.Logger(t)}).mountImage(func() (backend.Devices, error) { return backend.Devices{Files: []*os.File{image}}, nil })
		check(t, err)
		var st unix.Stat_t
		check(t, unix.Fstatat(m, "tmp", &st, 0))
		if st.Mode != unix.S_IFDIR|0o1777 || time.Unix(st.Mtim.Unix()) != platformTime.Local() {
			t.Errorf("%s: /tmp has mode %o, time %d", name, st.Mode, st.Mtim.Sec)
		}
		check(t, unix.Close(m))
	}
}
