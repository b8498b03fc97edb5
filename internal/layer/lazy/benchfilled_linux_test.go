package lazy

import (
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"testing"
	"testing/fstest"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec/internal/testutil"
)

// loopOf is a read-only loop device of a file, with direct I/O, as layers are mounted.
func loopOf(b *testing.B, f *os.File) *os.File {
	b.Helper()
	control, err := os.OpenFile("/dev/loop-control", os.O_RDWR, 0)
	if err != nil {
		b.Skip(err)
	}
	defer control.Close()
	n, err := unix.IoctlRetInt(int(control.Fd()), unix.LOOP_CTL_GET_FREE)
	if err != nil {
		b.Fatal(err)
	}
	path := fmt.Sprintf("/dev/loop%d", n)
	_ = unix.Mknod(path, unix.S_IFBLK|0o600, int(unix.Mkdev(7, uint32(n))))
	loop, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		b.Fatal(err)
	}
	config := unix.LoopConfig{Fd: uint32(f.Fd())}
	config.Info.Flags = unix.LO_FLAGS_READ_ONLY | unix.LO_FLAGS_AUTOCLEAR | unix.LO_FLAGS_DIRECT_IO
	if err := unix.IoctlLoopConfigure(int(loop.Fd()), &config); err != nil {
		b.Fatal(err)
	}
	_ = unix.IoctlSetInt(int(loop.Fd()), unix.BLKRASET, 1024)
	return loop
}

// BenchmarkFilled is what the front ends cost once all of an image is here: a file of
// a mounted image is read whole, or in places, from where the page cache has none of
// it, and from the page cache. "file" is the file of the cache without a front end.
func BenchmarkFilled(b *testing.B) {
	testutil.Require(b, testutil.Root, testutil.EROFS, testutil.Kernel(6, 14))
	const size = 128 << 20
	for _, front := range []string{"fanotify", "fuse", "file"} {
		b.Run(front, func(b *testing.B) {
			f := newFixture(b, MinChunk, MinChunk)
			content := make([]byte, size)
			_, _ = rand.NewChaCha8([32]byte{1}).Read(content)
			meta, data := erofsImage(b, f.dir, fstest.MapFS{"f": &fstest.MapFile{Data: content, Mode: 0o644}})
			image := f.addBytes(b, "erofs", data, 128<<10)
			kind := FUSE
			if front == "fanotify" {
				kind = Fanotify
			}
			k := &bench{f: f, c: connect(b, f.config(b, kind)), im: image}
			if err := k.c.Prefetch(b.Context(), image, nil, nil); err != nil {
				b.Fatal(err)
			}
			local, err := os.Open(filepath.Join(f.dir, "cache", name(image.Key)+".data"))
			if err != nil {
				b.Fatal(err)
			}
			defer local.Close()
			var device *os.File
			switch front {
			case "fanotify":
				device = openImageFile(b, k.c, image)
			case "fuse":
				device = loopOf(b, openImageFile(b, k.c, image))
			case "file":
				device = loopOf(b, local)
			}
			if front != "fanotify" {
				first, err := os.Open(meta)
				if err != nil {
					b.Fatal(err)
				}
				defer first.Close()
				loop := loopOf(b, first) // all devices of an image are of one kind
				defer loop.Close()
				meta = fmt.Sprintf("/proc/self/fd/%d", loop.Fd())
			}
			mnt := mountEROFS(b, meta, device)
			defer mnt.Close()
			_ = device.Close()
			in := openBelow(b, mnt, "f")
			defer in.Close()
			drop := func() {
				for _, f := range []*os.File{in, local} {
					_ = unix.Fadvise(int(f.Fd()), 0, 0, unix.FADV_DONTNEED)
				}
			}
			_ = local.Sync()
			p := make([]byte, 128<<10)
			all := func(b *testing.B) {
				if _, err := io.CopyBuffer(struct{ io.Writer }{io.Discard}, io.NewSectionReader(in, 0, size), p); err != nil {
					b.Fatal(err)
				}
			}
			b.Run("whole", func(b *testing.B) {
				b.SetBytes(size)
				k.measure(b, func(int) { b.StopTimer(); drop(); b.StartTimer(); all(b) })
			})
			b.Run("4K", func(b *testing.B) {
				k.measure(b, func(i int) {
					if i%256 == 0 {
						b.StopTimer()
						drop()
						b.StartTimer()
					}
					if _, err := in.ReadAt(p[:4096], rand.Int64N(size/4096)*4096); err != nil {
						b.Fatal(err)
					}
				})
			})
			b.Run("whole-cached", func(b *testing.B) {
				all(b)
				b.SetBytes(size)
				k.measure(b, func(int) { all(b) })
			})
		})
	}
}
