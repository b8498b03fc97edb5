package convert

import (
	"bytes"
	"cmp"
	"encoding/binary"
	"errors"
	"fmt"
	"math"

	"golang.org/x/sys/unix"
)

// The parts of EROFS's format that patching needs; all little-endian. See
// https://docs.kernel.org/filesystems/erofs.html.
const (
	blockSize   = 4096
	superOffset = 1024
	superSize   = 128
	superRoot   = 14 // u16
	superInodes = 16 // u64
	superBlocks = 36 // u32
	superMeta   = 40 // u32
	superUUID   = 48 // 16 bytes

	inodeSlot   = 32
	inodeStart  = 16 // u32 of an inode: its first block
	direntSize  = 12
	flatPlain   = 0
	flatInline  = 2
	layoutShift = 1
)

var errFormat = errors.New("the image is not as go-erofs is known to write it")

// patcher does three things. It leads inodes of regular files to where their content
// is. It joins the names of inodes that have several: go-erofs gives each name an
// inode of its own, so the other names' entries are made to lead to the first one's;
// the empty inodes they led to are left, unreachable. And it moves the blocks of
// directories and of symbolic links, if they are among the data of files, to the
// image's end, behind the inodes: a node has the end of an image at hand, and not its
// data.
type patcher struct {
	f     *windows
	size  int64
	out   *erofsOut
	meta  int64
	nid   map[*inode]uint64 // of first names
	later []laterName
}

// laterName is an entry to be redirected.
type laterName struct {
	off int64 // of the entry in the image
	n   *inode
}

// patchImage returns the image's new size.
func patchImage(f File, size int64, out *erofsOut, t *tree, id [16]byte) (int64, error) {
	super := make([]byte, superSize)
	if _, err := f.ReadAt(super, superOffset); err != nil {
		return 0, err
	}
	p := &patcher{
		f: &windows{f: f}, size: size, out: out, nid: map[*inode]uint64{},
		meta: out.at(int64(binary.LittleEndian.Uint32(super[superMeta:])) * blockSize),
	}
	if err := p.dir(t.root, uint64(binary.LittleEndian.Uint16(super[superRoot:]))); err != nil {
		return 0, err
	}
	var nid [8]byte
	for _, l := range p.later {
		n, ok := p.nid[l.n]
		if !ok {
			return 0, errFormat
		}
		binary.LittleEndian.PutUint64(nid[:], n)
		if err := p.f.WriteAt(nid[:], l.off); err != nil {
			return 0, err
		}
	}
	if err := p.f.flush(); err != nil {
		return 0, err
	}
	inodes := binary.LittleEndian.Uint64(super[superInodes:])
	binary.LittleEndian.PutUint64(super[superInodes:], inodes-uint64(len(p.later)))
	binary.LittleEndian.PutUint32(super[superBlocks:], uint32(p.size/blockSize))
	binary.LittleEndian.PutUint32(super[superMeta:], uint32(p.meta/blockSize))
	copy(super[superUUID:], id[:])
	_, err := f.WriteAt(super, superOffset)
	return p.size, err
}

// dir patches one directory of the image and those below.
func (p *patcher) dir(dir *inode, nid uint64) error {
	off, size, err := p.indexed(nid, unix.S_IFDIR)
	if err != nil {
		return err
	}
	seen := 0
	for start := int64(0); start < size; start += blockSize {
		block := make([]byte, min(blockSize, size-start))
		if err := p.f.ReadAt(block, off+start); err != nil {
			return fmt.Errorf("read directory: %w", err)
		}
		n, err := p.block(dir, block, off+start)
		if err != nil {
			return err
		}
		seen += n
	}
	if seen != len(dir.names) {
		return errFormat
	}
	return nil
}

// block looks at the entries of one block and counts those that are names of
// the tree.
func (p *patcher) block(dir *inode, block []byte, off int64) (seen int, err error) {
	if len(block) < direntSize {
		return 0, errFormat
	}
	count := int(binary.LittleEndian.Uint16(block[8:])) / direntSize
	if count == 0 || count*direntSize > len(block) {
		return 0, errFormat
	}
	for i := range count {
		entry := block[i*direntSize:]
		from, to := int(binary.LittleEndian.Uint16(entry[8:])), len(block)
		if i+1 < count {
			to = int(binary.LittleEndian.Uint16(entry[direntSize+8:]))
		}
		if from >= to || to > len(block) {
			return 0, errFormat
		}
		name := string(bytes.TrimRight(block[from:to], "\x00"))
		if name == "." || name == ".." {
			continue
		}
		n := dir.children[name].n
		if n == nil {
			return 0, errFormat
		}
		seen++
		nid := binary.LittleEndian.Uint64(entry)
		switch {
		case n.isDir():
			if err := p.dir(n, nid); err != nil {
				return 0, err
			}
		case n.firstDir == dir && n.firstName == name:
			var err error
			switch n.mode & unix.S_IFMT {
			case unix.S_IFLNK:
				_, _, err = p.indexed(nid, unix.S_IFLNK)
			case unix.S_IFREG:
				err = p.regular(n, nid)
			}
			if err != nil {
				return 0, err
			}
			if n.nlink > 1 {
				p.nid[n] = nid
			}
		default:
			p.later = append(p.later, laterName{off + int64(i*direntSize), n})
		}
	}
	return seen, nil
}

// regular leads the inode of a regular file to its content.
func (p *patcher) regular(n *inode, nid uint64) error {
	off, size, plain, err := p.content(nid, unix.S_IFREG)
	if err != nil || size != n.size || n.image != nil && !plain {
		return cmp.Or(err, errFormat)
	}
	if !plain || size == 0 {
		return nil
	}
	if n.image != nil {
		off = n.off
	}
	return p.lead(nid, off)
}

// lead has the content of an inode begin at off.
func (p *patcher) lead(nid uint64, off int64) error {
	if off%blockSize != 0 || off/blockSize > math.MaxUint32 {
		return errFormat
	}
	var start [4]byte
	binary.LittleEndian.PutUint32(start[:], uint32(off/blockSize))
	return p.f.WriteAt(start[:], p.meta+int64(nid)*inodeSlot+inodeStart)
}

// indexed finds the content of a directory or symbolic link, which it moves to
// behind the inodes if it is before them.
func (p *patcher) indexed(nid uint64, kind uint16) (off, size int64, err error) {
	off, size, plain, err := p.content(nid, kind)
	if err == nil && plain && size > 0 {
		off, err = p.move(nid, off, size)
	}
	return off, size, err
}

// move moves the blocks of an inode to the end of the image.
func (p *patcher) move(nid uint64, off, size int64) (to int64, err error) {
	blocks := make([]byte, (size+blockSize-1)/blockSize*blockSize)
	if err := p.f.ReadAt(blocks, off); err != nil {
		return 0, fmt.Errorf("read blocks: %w", err)
	}
	to = p.size
	if to%blockSize != 0 || to/blockSize+int64(len(blocks))/blockSize > math.MaxUint32 {
		return 0, errFormat
	}
	if err := p.f.WriteAt(blocks, to); err != nil {
		return 0, err
	}
	p.size += int64(len(blocks))
	if err := p.lead(nid, to); err != nil {
		return 0, err
	}
	clear(blocks)
	return to, p.f.WriteAt(blocks, off)
}

// content finds where the content of an inode of this kind is in the image: in blocks
// of its own, or right behind the inode.
func (p *patcher) content(nid uint64, kind uint16) (off, size int64, plain bool, err error) {
	pos := p.meta + int64(nid)*inodeSlot
	var inode [64]byte
	if pos < 0 || pos+inodeSlot > p.size {
		return 0, 0, false, errFormat
	}
	if err := p.f.ReadAt(inode[:min(64, p.size-pos)], pos); err != nil {
		return 0, 0, false, err
	}
	format := binary.LittleEndian.Uint16(inode[0:])
	if binary.LittleEndian.Uint16(inode[4:])&unix.S_IFMT != kind {
		return 0, 0, false, errFormat
	}
	core := int64(32)
	if format&1 != 0 {
		core, size = 64, int64(binary.LittleEndian.Uint64(inode[8:]))
	} else {
		size = int64(binary.LittleEndian.Uint32(inode[8:]))
	}
	var xattrs int64
	if n := binary.LittleEndian.Uint16(inode[2:]); n > 0 {
		xattrs = 12 + 4*int64(n-1)
	}
	switch format >> layoutShift & 7 {
	case flatPlain:
		return p.out.at(int64(binary.LittleEndian.Uint32(inode[inodeStart:])) * blockSize), size, true, nil
	case flatInline:
		off = pos + core + xattrs
		if size < 0 || off+size > p.size {
			return 0, 0, false, errFormat
		}
		return off, size, false, nil
	}
	return 0, 0, false, errFormat
}
