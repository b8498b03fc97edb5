package container

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec/internal/backend"
	"github.com/opendsec/dsec/internal/testutil"
)

// Kernels before 6.12 mount images through a loop device, which goes with the mount.
func TestImageOnLoopDevice(t *testing.T) {
	testutil.Require(t, testutil.Root, testutil.EROFS)
	img := image(t, nil)
	testutil.Ledger(t, imagePath(img))
	f, err := os.Open(imagePath(img))
	check(t, err)
	defer f.Close()
	loop, path, err := attachLoop(int(f.Fd()))
	check(t, err)
	m, err := newMount("erofs", attrReadOnly, option{Key: "source", Value: path}, option{Key: "ro"})
	check(t, unix.Close(loop))
	check(t, err)
	defer unix.Close(m)
	var st unix.Stat_t
	check(t, unix.Fstatat(m, "etc/shared", &st, 0))
	if st.Size != int64(len("the layer's bytes\n")*1000) {
		t.Errorf("the file has %d bytes", st.Size)
	}
}

// The end of a mount may wait for a store that does not answer. Whoever wants it
// unmounted need not, and the layer is released when it has ended.
func TestLayerIsReleasedLate(t *testing.T) {
	testutil.Require(t, testutil.Root, testutil.EROFS)
	dir := t.TempDir()
	img := image(t, nil)
	pin := filepath.Join(dir, "layers")
	ns, err := openLayerNS(pin, testutil.Logger(t))
	check(t, err)
	defer func() {
		ns.close()
		check(t, unix.Unmount(pin, unix.MNT_DETACH))
	}()
	ls := newLayers(ns, dir, dir)
	answers, released := make(chan struct{}), make(chan struct{})
	late := img
	late.Release = func() { <-answers; close(released) }
	_, err = ls.hold(t.Context(), []backend.Layer{late})
	check(t, err)
	ls.release([]backend.Layer{late})
	given, giveUp := context.WithCancel(t.Context())
	giveUp()
	if err := ls.drop(given, img.Digest); !errors.Is(err, context.Canceled) {
		t.Fatalf("a drop that was given up: %v", err)
	}
	close(answers)
	<-released
	img.Release = nil
	l, err := ls.hold(t.Context(), []backend.Layer{img})
	check(t, err)
	var st unix.Stat_t
	check(t, unix.Fstatat(l.fds[0], "etc/shared", &st, 0))
	ls.release([]backend.Layer{img})
	check(t, ls.drop(t.Context(), img.Digest))
}

// A node that mounts layers from files, because it has no loop devices, says so once.
func TestWithoutLoopDevices(t *testing.T) {
	testutil.Require(t, testutil.Root)
	var files []*os.File
	for _, name := range []string{"index", "data"} {
		path := filepath.Join(t.TempDir(), name)
		check(t, os.WriteFile(path, make([]byte, 8192), 0o600))
		fd, err := unix.Open(path, unix.O_PATH|unix.O_CLOEXEC, 0) // which no loop device takes
		check(t, err)
		f := os.NewFile(uintptr(fd), path)
		defer f.Close()
		files = append(files, f)
	}
	var said bytes.Buffer
	l := &layerNS{log: slog.New(slog.NewTextHandler(&said, nil))}
	for range 2 {
		_, err := l.mountImage(func() (backend.Devices, error) {
			var d backend.Devices
			for _, f := range files {
				fd, err := unix.FcntlInt(f.Fd(), unix.F_DUPFD_CLOEXEC, 0)
				check(t, err)
				d.Files = append(d.Files, os.NewFile(uintptr(fd), f.Name()))
			}
			return d, nil
		})
		if err == nil {
			t.Fatal("mounted what is no image")
		}
	}
	if n := strings.Count(said.String(), "loop devices"); n != 1 || !strings.Contains(said.String(), "bad file descriptor") {
		t.Errorf("said %d times: %s", n, said.String())
	}
}
