package layer

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"hash"
	"io"
	"math"
	"os"
	"runtime"

	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"
)

// An image is made of three parts: its first block, with the superblock; the
// data of files; and, at the end, what look-ups read (inodes, names, attributes).
// A layer keeps the data apart, as the image's second device, and calls the rest
// its index: the index is on every node that uses the layer, data are read from
// where they are. In the index file the data's place is a hole, so that no
// address in the image changes; in a store the index is without that hole.
// See https://docs.kernel.org/filesystems/erofs.html.
const (
	firstBlock  = 4096
	superOffset = 1024
	superMeta   = superOffset + 40 // u32: the block where the inodes begin
	superFlags  = superOffset + 80 // u32: features that a kernel must know
	superSlots  = superOffset + 86 // u16: devices beside the first
	superTable  = superOffset + 88 // u16: where they are described, in units of slotSize
	superMagic  = 0xe0f5e1e2

	slotSize    = 128
	slotOffset  = superOffset + slotSize // right after the superblock
	slotBlocks  = slotOffset + 64        // u32
	slotAddress = slotOffset + 68        // u32: of its first block in the image
	flagDevices = 8
)

// indexStart reads from the first block where the index goes on.
func indexStart(first []byte, size int64) (int64, error) {
	off := int64(binary.LittleEndian.Uint32(first[superMeta:])) * firstBlock
	if binary.LittleEndian.Uint32(first[superOffset:]) != superMagic || off < firstBlock || off > size {
		return 0, errors.New("the image has no sound superblock")
	}
	return off, nil
}

// addDevice has the first block say that all between it and start is on another
// device. There is none where nothing is between them.
func addDevice(first []byte, start int64) error {
	if binary.LittleEndian.Uint16(first[superSlots:]) != 0 || len(bytes.Trim(first[slotOffset:slotOffset+slotSize], "\x00")) > 0 {
		return errors.New("the image has a device table")
	}
	blocks := start/firstBlock - 1
	if blocks == 0 {
		return nil
	}
	le := binary.LittleEndian
	le.PutUint32(first[superFlags:], le.Uint32(first[superFlags:])|flagDevices)
	le.PutUint16(first[superSlots:], 1)
	le.PutUint16(first[superTable:], slotOffset/slotSize)
	le.PutUint32(first[slotBlocks:], uint32(blocks))
	le.PutUint32(first[slotAddress:], 1)
	return nil
}

// splitFile is the image as the import helper writes it: data, index without its
// first block, first block. Cut off after the data, it is the second device.
type splitFile struct {
	f     *os.File
	first [firstBlock]byte
}

// ReadAt implements io.ReaderAt.
func (s *splitFile) ReadAt(p []byte, off int64) (n int, err error) {
	if off < firstBlock {
		if n = copy(p, s.first[off:]); n == len(p) {
			return n, nil
		}
	}
	m, err := s.f.ReadAt(p[n:], off+int64(n)-firstBlock)
	return n + m, err
}

// WriteAt implements io.WriterAt.
func (s *splitFile) WriteAt(p []byte, off int64) (n int, err error) {
	if off < firstBlock {
		if n = copy(s.first[off:], p); n == len(p) {
			return n, nil
		}
	}
	m, err := s.f.WriteAt(p[n:], off+int64(n)-firstBlock)
	return n + m, err
}

// Truncate sets the image's size.
func (s *splitFile) Truncate(size int64) error { return s.f.Truncate(size - firstBlock) }

// finish writes the first block of an image of size bytes.
func (s *splitFile) finish(size int64) error {
	_, err := s.f.WriteAt(s.first[:], size-firstBlock)
	return err
}

// takeIndex makes the index file of what the helper wrote to image, and cuts
// image down to the data.
func takeIndex(index, image *os.File, size int64) (dataSize int64, err error) {
	first := make([]byte, firstBlock)
	if _, err := image.ReadAt(first, size-firstBlock); err != nil {
		return 0, fmt.Errorf("read superblock: %w", err)
	}
	start, err := indexStart(first, size)
	if err != nil {
		return 0, err
	}
	if err := addDevice(first, start); err != nil {
		return 0, err
	}
	rest := io.NewSectionReader(image, start-firstBlock, size-start)
	if err := writeIndex(index, io.MultiReader(bytes.NewReader(first), rest), size); err != nil {
		return 0, err
	}
	return start - firstBlock, image.Truncate(start - firstBlock)
}

// writeIndex writes an index without its hole to f, with it. The image is of size bytes.
func writeIndex(f *os.File, index io.Reader, size int64) error {
	first := make([]byte, firstBlock)
	if _, err := io.ReadFull(index, first); err != nil {
		return fmt.Errorf("read index: %w", err)
	}
	start, err := indexStart(first, size)
	if err != nil {
		return err
	}
	if _, err := f.WriteAt(first, 0); err != nil {
		return err
	}
	w := io.NewOffsetWriter(f, start)
	n, err := io.CopyBuffer(onlyWriter{w}, onlyReader{index}, make([]byte, 256<<10))
	if err == nil && start+n != size {
		err = fmt.Errorf("the index has %d bytes, want %d", firstBlock+n, firstBlock+size-start)
	}
	if err == nil {
		err = f.Truncate(size)
	}
	return err
}

// readIndex reads the index file of an image of size bytes without its hole.
func readIndex(f io.ReaderAt, size int64) (r io.Reader, n int64, err error) {
	first := make([]byte, firstBlock)
	if _, err := f.ReadAt(first, 0); err != nil {
		return nil, 0, fmt.Errorf("read superblock: %w", err)
	}
	start, err := indexStart(first, size)
	if err != nil {
		return nil, 0, err
	}
	return io.MultiReader(bytes.NewReader(first), io.NewSectionReader(f, start, size-start)), firstBlock + size - start, nil
}

// digestIndex is the digest and the size of an index file without its hole.
func digestIndex(f io.ReaderAt, size int64) (digest string, n int64, err error) {
	r, n, err := readIndex(f, size)
	if err != nil {
		return "", 0, err
	}
	h := sha256.New()
	if err := copyWhole(h, r, n); err != nil {
		return "", 0, fmt.Errorf("hash index: %w", err)
	}
	return sumOf(h), n, nil
}

// chunkSize of what is fetched and checked at once: at 128 KiB the first command
// in an environment moves 7 % of it, at 512 KiB 8 %, at 32 KiB 6.4 % in twice the time.
const chunkSize = 128 << 10

// zeroChunk is the SHA-256 of a chunk of zeros.
var zeroChunk = sha256.Sum256(make([]byte, chunkSize))

// hashChunks gives the SHA-256 of each chunk of size bytes of data, one after another.
// nextData tells where, at or behind off, data has bytes that may be other than zeros:
// an archive of 2 KiB can be a file of 32 GiB, of which nothing needs to be read.
func hashChunks(ctx context.Context, data io.ReaderAt, nextData func(off int64) int64, size int64) ([]byte, error) {
	chunks := (size + chunkSize - 1) / chunkSize
	hashes := make([]byte, chunks*sha256.Size)
	var g errgroup.Group
	workers := int64(runtime.GOMAXPROCS(0))
	each := (chunks + workers - 1) / workers
	for from := int64(0); from < chunks; from += each {
		g.Go(func() error {
			buf := make([]byte, chunkSize)
			next := int64(-1) // no hole is known
			for c := from; c < min(from+each, chunks); c++ {
				if ctx.Err() != nil {
					return canceled(ctx)
				}
				off, end := c*chunkSize, (c+1)*chunkSize
				if next < off {
					next = nextData(off)
				}
				sum := zeroChunk
				if next < end || end > size {
					b := buf[:min(chunkSize, size-off)]
					if _, err := data.ReadAt(b, off); err != nil {
						return fmt.Errorf("hash data: %w", err)
					}
					sum = sha256.Sum256(b)
				}
				copy(hashes[c*sha256.Size:], sum[:])
			}
			return nil
		})
	}
	return hashes, g.Wait()
}

// nextData is hashChunks' of a file: where its file system has no hole.
func nextData(f *os.File) func(off int64) int64 {
	return func(off int64) int64 {
		next, err := unix.Seek(int(f.Fd()), off, unix.SEEK_DATA)
		switch {
		case err == unix.ENXIO: // nothing but a hole up to the end
			return math.MaxInt64
		case err != nil: // not of this file system
			return off
		}
		return next
	}
}

type onlyWriter struct{ io.Writer }
type onlyReader struct{ io.Reader }

// copyWhole copies n bytes, which must be there.
func copyWhole(w io.Writer, r io.Reader, n int64) error {
	m, err := io.CopyBuffer(onlyWriter{w}, onlyReader{r}, make([]byte, 256<<10))
	if err == nil && m != n {
		err = io.ErrUnexpectedEOF
	}
	return err
}

func sumOf(h hash.Hash) string { return fmt.Sprintf("sha256:%x", h.Sum(nil)) }
