package lazy

import (
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"io/fs"
	"os"

	"golang.org/x/sys/unix"
)

// Three files are kept for an image, in one directory:
//
//	NAME.meta  the Image, written whole before anything else
//	NAME.map   a header, then one byte for each chunk: its state
//	NAME.data  as long as the image, with holes
//
// A chunk's byte is written after the chunk: what the process did before it was
// killed is in the page cache in the same order. Nothing is synced. A map that
// another run of the kernel wrote proves nothing, for the disk may have got the
// byte and not the chunk: its chunks are verified again before they are used.
const (
	metaMagic = "dsec-layer-meta1"
	mapMagic  = "dsec-layer-map-1"
	magicLen  = 16
	bootLen   = 36 // a UUID
	mapHeader = magicLen + 8 + 8 + bootLen + 4
)

// chunkState is a byte of the map. What is none of these counts as absent.
type chunkState byte

const (
	absent   chunkState = 0
	present  chunkState = 1
	doubtful chunkState = 2 // written in an earlier run of the kernel, not verified since
)

var errBroken = errors.New("not as it was written")

// marshalMeta is the content of a meta file.
func marshalMeta(im *Image) []byte {
	b := make([]byte, 0, magicLen+8+8+2+len(im.Key)+len(im.Hashes)+4)
	b = append(b, metaMagic...)
	b = binary.LittleEndian.AppendUint64(b, uint64(im.Size))
	b = binary.LittleEndian.AppendUint64(b, uint64(im.ChunkSize))
	b = binary.LittleEndian.AppendUint16(b, uint16(len(im.Key)))
	b = append(b, im.Key...)
	b = append(b, im.Hashes...)
	return binary.LittleEndian.AppendUint32(b, crc32.ChecksumIEEE(b))
}

// parseMeta is the reverse of marshalMeta, for any bytes.
func parseMeta(b []byte) (*Image, error) {
	const fixed = magicLen + 8 + 8 + 2
	if len(b) < fixed+4 || string(b[:magicLen]) != metaMagic {
		return nil, errBroken
	}
	body, sum := b[:len(b)-4], binary.LittleEndian.Uint32(b[len(b)-4:])
	if crc32.ChecksumIEEE(body) != sum {
		return nil, errBroken
	}
	keyLen := int(binary.LittleEndian.Uint16(body[magicLen+16:]))
	if len(body) < fixed+keyLen {
		return nil, errBroken
	}
	im := &Image{
		Key:       string(body[fixed : fixed+keyLen]),
		Size:      int64(binary.LittleEndian.Uint64(body[magicLen:])),
		ChunkSize: int64(binary.LittleEndian.Uint64(body[magicLen+8:])),
		Hashes:    bytes.Clone(body[fixed+keyLen:]),
	}
	if err := im.Validate(); err != nil {
		return nil, fmt.Errorf("%w: %w", errBroken, err)
	}
	return im, nil
}

// marshalMap is the content of a map file.
func marshalMap(im *Image, boot string, states []chunkState) []byte {
	b := make([]byte, 0, mapHeader+len(states))
	b = append(b, mapMagic...)
	b = binary.LittleEndian.AppendUint64(b, uint64(im.Size))
	b = binary.LittleEndian.AppendUint64(b, uint64(im.ChunkSize))
	b = append(b, fmt.Sprintf("%-*.*s", bootLen, bootLen, boot)...)
	b = binary.LittleEndian.AppendUint32(b, crc32.ChecksumIEEE(b))
	for _, s := range states {
		b = append(b, byte(s))
	}
	return b
}

// parseMap reads a map of im for any bytes. In another run of the kernel than
// the map was written in, present becomes doubtful.
func parseMap(b []byte, im *Image, boot string) ([]chunkState, error) {
	want := marshalMap(im, boot, nil)
	const sized = magicLen + 16
	switch {
	case int64(len(b)) != mapHeader+im.chunks(),
		!bytes.Equal(b[:sized], want[:sized]),
		crc32.ChecksumIEEE(b[:mapHeader-4]) != binary.LittleEndian.Uint32(b[mapHeader-4:]):
		return nil, errBroken
	}
	known := bytes.Equal(b[:mapHeader], want)
	states := make([]chunkState, im.chunks())
	for i, c := range b[mapHeader:] {
		switch s := chunkState(c); {
		case s == present && known:
			states[i] = present
		case s == present || s == doubtful:
			states[i] = doubtful
		}
	}
	return states, nil
}

// directory is a directory that is reached by its descriptor alone.
type directory struct{ f *os.File }

func (d directory) open(name string, flags int) (*os.File, error) {
	fd, err := unix.Openat(int(d.f.Fd()), name, flags|unix.O_CLOEXEC|unix.O_NOFOLLOW, 0o600)
	if err != nil {
		return nil, &fs.PathError{Op: "open", Path: name, Err: err}
	}
	return os.NewFile(uintptr(fd), name), nil
}

func (d directory) remove(name string) error {
	if err := unix.Unlinkat(int(d.f.Fd()), name, 0); err != nil && err != unix.ENOENT {
		return &fs.PathError{Op: "remove", Path: name, Err: err}
	}
	return nil
}

// read returns a file's content, of at most limit bytes.
func (d directory) read(name string, limit int64) ([]byte, error) {
	f, err := d.open(name, unix.O_RDONLY)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	b, err := io.ReadAll(io.LimitReader(f, limit+1))
	if err == nil && int64(len(b)) > limit {
		err = fmt.Errorf("%s: more than %d bytes: %w", name, limit, errBroken)
	}
	return b, err
}

// write puts b in the place of name whole: a process that is killed leaves the
// old content or the new one.
func (d directory) write(name string, b []byte) error {
	temp := name + ".new"
	f, err := d.open(temp, unix.O_CREAT|unix.O_TRUNC|unix.O_WRONLY)
	if err != nil {
		return err
	}
	_, err = f.Write(b)
	if err = errors.Join(err, f.Close()); err == nil {
		err = unix.Renameat(int(d.f.Fd()), temp, int(d.f.Fd()), name)
	}
	if err != nil {
		return errors.Join(fmt.Errorf("write %s: %w", name, err), d.remove(temp))
	}
	return nil
}

// list returns the names in d.
func (d directory) list() ([]string, error) {
	f, err := d.open(".", unix.O_RDONLY|unix.O_DIRECTORY) // an offset of its own
	if err != nil {
		return nil, err
	}
	defer f.Close()
	return f.Readdirnames(-1)
}

// maxMeta is the most bytes of a meta file.
const maxMeta = magicLen + 18 + maxKey + maxImage/MinChunk*sha256.Size + 4
