package convert

import (
	"bufio"
	"bytes"
	"context"
	"io"
	"sync/atomic"

	"github.com/klauspost/compress/gzip"
	"github.com/klauspost/compress/zstd"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/layer/ahead"
)

// magics of what is sent in place of an archive. Those are never handed to a
// kernel or a VMM: whoever made them chose every byte.
var magics = []struct {
	off   int
	magic string
	what  string
}{
	{1024, "\xe2\xe1\xf5\xe0", "an EROFS image"},
	{1080, "\x53\xef", "an ext2, ext3 or ext4 image"},
	{0, "hsqs", "a squashfs image"},
	{0, "XFSB", "an XFS image"},
	{65600, "_BHRfS_M", "a btrfs image"},
	{32769, "CD001", "an ISO 9660 image"},
	{0, "QFI\xfb", "a QCOW2 image"},
	{0, "KDMV", "a VMDK image"},
	{0, "vhdxfile", "a VHDX image"},
	{0, "conectix", "a VHD image"},
	{0, "<<< ", "a VDI image"},
	{510, "\x55\xaa", "a partitioned disk image"},
	{0, "\x7fELF", "a program"},
	{0, "PK\x03\x04", "a zip archive"},
	{0, "\xfd7zXZ\x00", "an xz stream"},
	{0, "BZh", "a bzip2 stream"},
	{0, "\x1f\x9d", "a compress stream"},
	{0, "\x04\x22\x4d\x18", "an lz4 stream"},
	{0, "070701", "a cpio archive"},
	{0, "!<arch>", "an ar archive"},
	{0, "\x1f\x8b", "a gzip stream in a compressed stream"},
	{0, "\x28\xb5\x2f\xfd", "a zstd stream in a compressed stream"},
}

// headSize is how much of a stream is looked at.
const headSize = 65608

var (
	gzipMagic = []byte("\x1f\x8b")
	zstdMagic = []byte("\x28\xb5\x2f\xfd")
)

// isTar reports whether the block is a tar header: ustar, or a v7 header with
// a right checksum.
func isTar(head []byte) bool {
	if len(head) < 512 {
		return false
	}
	head = head[:512]
	if bytes.Equal(head[257:262], []byte("ustar")) {
		return true
	}
	var want int64
	for _, b := range bytes.Trim(head[148:156], " \x00") {
		if b < '0' || b > '7' {
			return false
		}
		want = want<<3 | int64(b-'0')
	}
	sum := int64(8 * ' ')
	for i, b := range head {
		if i < 148 || i >= 156 {
			sum += int64(b)
		}
	}
	return sum == want
}

// open tells what the stream holds and gives the tar stream in it. The closer
// frees the decompressor, and returns when r is not read any more.
func (c *converter) open(r io.Reader) (tar io.Reader, done func(), err error) {
	counted := &counter{r: r}
	br := bufio.NewReaderSize(counted, 1<<20)
	head, err := br.Peek(headSize)
	if err != nil && err != io.EOF {
		return nil, nil, err
	}
	done = func() {}
	packed := &inflated{c: c, in: counted}
	switch {
	case len(head) == 0:
		return nil, nil, dsec.Invalid("data", "empty, want a tar archive")
	case bytes.HasPrefix(head, gzipMagic):
		zr, err := gzip.NewReader(br)
		if err != nil {
			return nil, nil, packed.damaged(err)
		}
		packed.r = zr
		next := ahead.Stream(context.Background(), ahead.Options{Piece: pieceSize, Pieces: pieceBehind - 1}, packed)
		tar, done = next, func() { _ = next.Close() }
	case bytes.HasPrefix(head, zstdMagic):
		still := &gate{r: br}
		zr, err := zstd.NewReader(still, zstd.WithDecoderMaxWindow(c.limits.WindowBytes), zstd.WithDecoderConcurrency(2))
		if err != nil {
			return nil, nil, packed.damaged(err)
		}
		packed.r = zr // which reads ahead by itself
		tar, done = packed, func() { still.shut(); zr.Close() }
	default:
		return br, done, checkTar(head)
	}
	br = bufio.NewReaderSize(tar, pieceSize)
	head, err = br.Peek(headSize)
	if err == nil || err == io.EOF {
		err = checkTar(head)
	}
	if err != nil {
		done()
		return nil, nil, err
	}
	return unpacked{br}, done, nil
}

// unpacked is a tar stream that was compressed.
type unpacked struct{ io.Reader }

// checkTar refuses what is not a tar stream, by name where it is known.
func checkTar(head []byte) error {
	if isTar(head) {
		return nil
	}
	for _, m := range magics {
		if len(head) > m.off && bytes.HasPrefix(head[m.off:], []byte(m.magic)) {
			return dsec.Invalid("data", "%s, want a tar archive (plain, gzip or zstd)", m.what)
		}
	}
	if len(head) >= 1024 && bytes.Equal(head[:1024], zeros[:1024]) {
		return nil // an archive without entries
	}
	return dsec.Invalid("data", "not a tar archive (plain, gzip or zstd)")
}

// counter counts what a decompressor took.
type counter struct {
	r   io.Reader
	n   atomic.Int64 // zstd reads ahead on its own goroutine
	err atomic.Pointer[error]
}

func (c *counter) Read(p []byte) (int, error) {
	n, err := c.r.Read(p)
	c.n.Add(int64(n))
	if err != nil && err != io.EOF {
		c.err.Store(&err)
	}
	return n, err
}

// inflated stops a stream that grows out of proportion, and names a damaged
// one as such.
type inflated struct {
	c   *converter
	r   io.Reader
	in  *counter
	out int64
}

func (z *inflated) Read(p []byte) (int, error) {
	n, err := z.r.Read(p)
	z.out += int64(n)
	if z.out > ratioFloor && z.out/z.c.limits.Ratio > z.in.n.Load() {
		return 0, dsec.Invalid("data", "a compressed stream of %d bytes grows more than %d times", z.in.n.Load(), z.c.limits.Ratio)
	}
	if err == nil || err == io.EOF {
		return n, err
	}
	return n, z.damaged(err)
}

// damaged is the error of a decompressor, unless it had no chance.
func (z *inflated) damaged(err error) error {
	if cause := z.in.err.Load(); cause != nil {
		return *cause // the stream broke off: not the archive's fault
	}
	return dsec.Invalid("data", "damaged compressed stream: %v", err)
}
