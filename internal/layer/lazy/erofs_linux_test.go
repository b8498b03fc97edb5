package lazy

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"testing/fstest"
	"time"

	"github.com/erofs/go-erofs"
	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/testutil"
)

// erofsImage makes an EROFS image of two devices: what is to be mounted, and the
// data that lie apart.
func erofsImage(t testing.TB, dir string, files fs.FS) (meta string, data []byte) {
	t.Helper()
	const block = 4096
	whole, err := os.Create(filepath.Join(dir, "whole"))
	if err != nil {
		t.Fatal(err)
	}
	defer whole.Close()
	w := erofs.Create(whole, erofs.WithBlockSize(block))
	if err := errors.Join(w.CopyFrom(files), w.Close()); err != nil {
		t.Fatal(err)
	}
	b, err := os.ReadFile(whole.Name())
	if err != nil {
		t.Fatal(err)
	}
	le := binary.LittleEndian
	sb := b[1024:]
	metaBlock := le.Uint32(sb[40:])
	data = slices.Clone(b[block : int(metaBlock)*block])
	le.PutUint32(sb[8:], le.Uint32(sb[8:])&^1) // no checksum
	le.PutUint32(sb[80:], le.Uint32(sb[80:])|8)
	le.PutUint16(sb[86:], 1)
	le.PutUint16(sb[88:], 9)
	slot := b[1152:]
	le.PutUint32(slot[64:], metaBlock-1)
	le.PutUint32(slot[68:], 1)
	clear(b[block : int(metaBlock)*block])
	meta = filepath.Join(dir, "meta")
	if err := os.WriteFile(meta, b, 0o600); err != nil {
		t.Fatal(err)
	}
	return meta, data
}

// mountEROFS returns a detached mount.
func mountEROFS(t testing.TB, meta string, data *os.File) *os.File {
	t.Helper()
	ctx, err := unix.Fsopen("erofs", unix.FSOPEN_CLOEXEC)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(ctx)
	err = errors.Join(unix.FsconfigSetString(ctx, "source", meta),
		unix.FsconfigSetString(ctx, "device", fmt.Sprintf("/proc/self/fd/%d", data.Fd())),
		unix.FsconfigSetFlag(ctx, "ro"), unix.FsconfigCreate(ctx))
	if err != nil {
		t.Fatal(err)
	}
	fd, err := unix.Fsmount(ctx, unix.FSMOUNT_CLOEXEC, unix.MOUNT_ATTR_RDONLY)
	if err != nil {
		t.Fatal(err)
	}
	return os.NewFile(uintptr(fd), "erofs")
}

func openBelow(t testing.TB, mnt *os.File, path string) *os.File {
	t.Helper()
	fd, err := unix.Openat(int(mnt.Fd()), path, unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		t.Fatalf("open %s: %v", path, err)
	}
	return os.NewFile(uintptr(fd), path)
}

func TestEROFSIsMountedFromIt(t *testing.T) {
	testutil.Require(t, testutil.Root, testutil.EROFS, testutil.Kernel(6, 14))
	for _, front := range bothFrontEnds {
		t.Run(string(front), func(t *testing.T) {
			f := newFixture(t, MinChunk, MinChunk)
			tree := fstest.MapFS{}
			r := rand.NewChaCha8([32]byte{1})
			for i := range 40 {
				b := make([]byte, 50_000*(i%7+1)+i)
				_, _ = r.Read(b)
				tree[fmt.Sprintf("d%d/f%d", i%3, i)] = &fstest.MapFile{Data: b, Mode: 0o644}
			}
			meta, data := erofsImage(t, f.dir, tree)
			image := f.addBytes(t, "erofs", data, 128<<10)
			f.store.set(t, faults{Delay: time.Millisecond})
			c := connect(t, f.config(t, front))
			file := openImageFile(t, c, image)
			mnt := mountEROFS(t, meta, file)
			_ = file.Close()
			if s := statsOf(t, c, image.Key); s.Present != 0 {
				t.Errorf("the mount alone brought %d chunks", s.Present)
			}
			for path, want := range tree {
				in := openBelow(t, mnt, path)
				got, err := io.ReadAll(in)
				if err != nil || !bytes.Equal(got, want.Data) {
					t.Errorf("%s: %d bytes, want %d, %v", path, len(got), len(want.Data), err)
				}
				_ = in.Close()
			}
			if s := statsOf(t, c, image.Key); s.Errors != 0 || s.Present == 0 {
				t.Errorf("%+v", s)
			}
			// A mount that is left keeps the chunks of a released image.
			if err := c.Release(t.Context(), image.Key); err != nil {
				t.Fatal(err)
			}
			if front == Fanotify {
				if err := c.Stop(t.Context()); dsec.CodeOf(err) != dsec.CodeConflict {
					t.Errorf("stopped under a mount: %v", err)
				}
			}
			_ = mnt.Close()
			testutil.WaitFor(t, 10*time.Second, "stop", func() error { return c.Stop(t.Context()) })
		})
	}
}
