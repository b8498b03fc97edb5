package convert

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"io"
	"slices"
	"sort"
	"sync"
)

// imageFile is the image as it is written, in order: the first block is left out
// until all else is there; the content of large files follows as it comes out of
// the archive, each beginning a block; and behind it what go-erofs writes. Long runs
// of zeros are left as holes of the file.
//
// A goroutine of its own waits for the disk. A failed write is told by the next
// one or by sync.
type imageFile struct {
	f   File
	buf []byte
	off int64 // of buf's start in the file

	free    chan []byte
	full    chan piece // nil: no goroutine yet
	pending sync.WaitGroup

	mu  sync.Mutex // of f and err
	err error

	closed bool // nothing more is placed in it
}

// piece is a buffer on its way to the file.
type piece struct {
	b   []byte
	off int64
}

const (
	imageBuffer = 1 << 20
	imageBehind = 3        // buffers that are filled or wait for the disk
	holeSize    = 64 << 10 // runs of zeros shorter than that are written
)

var zeros [holeSize]byte

// newImageFile makes one, which must be stopped.
func newImageFile(f File) *imageFile {
	return &imageFile{f: f, off: blockSize}
}

// stop ends the goroutine. The image is of no use after it, unless it was synced.
func (w *imageFile) stop() {
	if w.full != nil {
		close(w.full)
		w.pending.Wait()
	}
}

// pos is where in the file the next byte goes.
func (w *imageFile) pos() int64 { return w.off + int64(len(w.buf)) }

// Write implements io.Writer.
func (w *imageFile) Write(p []byte) (int, error) {
	total := len(p)
	for len(p) > 0 {
		room, err := w.room(1)
		if err != nil {
			return total - len(p), err
		}
		n := copy(room, p)
		w.buf = w.buf[:len(w.buf)+n]
		p = p[n:]
	}
	return total, nil
}

// room is where at least n bytes more can be put. They count once buf is made
// longer by them.
func (w *imageFile) room(n int) ([]byte, error) {
	if cap(w.buf)-len(w.buf) < n {
		if err := w.flush(); err != nil {
			return nil, err
		}
		if w.full == nil {
			w.start()
		}
		w.buf = <-w.free
	}
	return w.buf[len(w.buf):cap(w.buf)], nil
}

func (w *imageFile) start() {
	w.free, w.full = make(chan []byte, imageBehind), make(chan piece, imageBehind)
	for range imageBehind {
		w.free <- make([]byte, 0, imageBuffer)
	}
	go func() {
		for p := range w.full {
			w.write(p)
			w.free <- p.b[:0]
			w.pending.Done()
		}
	}()
}

// flush hands over what is buffered.
func (w *imageFile) flush() error {
	if len(w.buf) > 0 {
		w.pending.Add(1)
		w.full <- piece{w.buf, w.off}
		w.off += int64(len(w.buf))
		w.buf = nil
	} else if w.buf != nil {
		w.free <- w.buf
		w.buf = nil
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.err
}

// sync returns once all is written to the file.
func (w *imageFile) sync() error {
	if err := w.flush(); err != nil {
		return err
	}
	w.pending.Wait()
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.err
}

func (w *imageFile) write(p piece) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for b, off := p.b, p.off; len(b) > 0 && w.err == nil; {
		run := 0 // bytes to write before the next hole
		for run < len(b) && !isHole(b[run:]) {
			run = min(run+holeSize, len(b))
		}
		if run > 0 {
			_, err := w.f.WriteAt(b[:run], off)
			w.err = diskError(err)
		}
		for run < len(b) && isHole(b[run:]) {
			run += holeSize
		}
		b, off = b[run:], off+int64(run)
	}
}

func isHole(b []byte) bool { return len(b) >= holeSize && bytes.Equal(b[:holeSize], zeros[:]) }

// writeAt is for the first block, which is no part of what is written in order.
func (w *imageFile) writeAt(p []byte, off int64) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	_, err := w.f.WriteAt(p, off)
	return diskError(err)
}

// ReadAt implements io.ReaderAt for what was synced, the only thing that may be
// read. Holes at the file's end are not in the file yet.
func (w *imageFile) ReadAt(p []byte, off int64) (int, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	n, err := w.f.ReadAt(p, off)
	if err == io.EOF {
		clear(p[n:])
		n, err = len(p), nil
	}
	return n, err
}

// place takes size bytes of r as the content of a file, and returns where it
// begins. look is shown the start of it.
func (w *imageFile) place(r io.Reader, size int64, look func(head []byte)) (at int64, err error) {
	room, err := w.room(int(min(size, LintBytes)))
	at = w.pos()
	for left := size; left > 0 && err == nil; {
		var n int
		n, err = io.ReadFull(r, room[:min(int64(len(room)), left)])
		if err == io.EOF {
			err = io.ErrUnexpectedEOF
		}
		if left == size && err == nil {
			look(room[:n])
		}
		w.buf, left = w.buf[:len(w.buf)+n], left-int64(n)
		if left > 0 && err == nil {
			room, err = w.room(1)
		}
	}
	if err == nil {
		_, err = w.Write(zeros[:padding(w.pos())])
	}
	return at, err
}

// padding is how many bytes are missing to a whole block.
func padding(n int64) int64 { return -n & (blockSize - 1) }

// compact moves the contents of these inodes together, so that nothing else is
// between them: what entries of the archive had put there and later ones hid.
func (w *imageFile) compact(live []*inode) error {
	if err := w.sync(); err != nil {
		return err
	}
	slices.SortFunc(live, func(a, b *inode) int { return cmp.Compare(a.off, b.off) })
	end := int64(blockSize)
	buf := make([]byte, imageBuffer)
	for _, n := range live {
		to, size := end, n.size+padding(n.size)
		end += size
		if n.off == to {
			continue
		}
		for moved := int64(0); moved < size; moved += imageBuffer {
			b := buf[:min(imageBuffer, size-moved)]
			if _, err := w.ReadAt(b, n.off+moved); err != nil {
				return fmt.Errorf("move content: %w", err)
			}
			if _, err := w.f.WriteAt(b, to+moved); err != nil {
				return diskError(err)
			}
		}
		n.off = to
	}
	if end == w.off {
		return nil
	}
	// What is behind it must read as zeros: holes are not written.
	w.off = end
	return diskError(w.f.Truncate(end))
}

// close writes what is buffered and sets the file's size, which it returns.
func (w *imageFile) close() (size int64, err error) {
	if err := w.sync(); err != nil {
		return 0, err
	}
	w.closed = true
	return w.off, diskError(w.f.Truncate(w.off))
}

// erofsOut is the image as go-erofs wants it. It writes the content of all files;
// that of files which are placed already is not asked for, so what go-erofs writes
// in its stead is dropped, and addresses behind it are larger than they come to be.
type erofsOut struct {
	w     *imageFile
	base  int64 // where in the image what go-erofs writes behind the first block is
	pos   int64 // of go-erofs
	drop  int64 // bytes that follow and are dropped
	drops []dropped
	super bool // what follows is the first block
}

// dropped is a run of what go-erofs wrote and what is not in the image.
type dropped struct {
	from, to int64
	before   int64 // bytes that were dropped before from
}

// skip has the next n bytes dropped, and, if they are the last of a file, what pads
// it to whole blocks.
func (o *erofsOut) skip(n int64, last bool) {
	o.drop += n
	if last {
		o.drop += padding(o.pos + o.drop)
	}
}

// Write implements io.Writer.
func (o *erofsOut) Write(p []byte) (int, error) {
	if o.super {
		err := o.w.writeAt(p, o.pos)
		o.pos += int64(len(p))
		return len(p), err
	}
	total := len(p)
	if o.pos < blockSize { // the place of the first block
		n := min(int64(len(p)), blockSize-o.pos)
		o.pos, p = o.pos+n, p[n:]
	}
	if n := min(o.drop, int64(len(p))); n > 0 {
		o.dropped(n)
		p = p[n:]
	}
	n, err := o.w.Write(p)
	o.pos += int64(n)
	return total - len(p) + n, err
}

func (o *erofsOut) dropped(n int64) {
	before := int64(0)
	if k := len(o.drops) - 1; k >= 0 {
		d := &o.drops[k]
		if d.to == o.pos {
			d.to += n
			o.drop, o.pos = o.drop-n, o.pos+n
			return
		}
		before = d.before + d.to - d.from
	}
	o.drops = append(o.drops, dropped{o.pos, o.pos + n, before})
	o.drop, o.pos = o.drop-n, o.pos+n
}

// at is where in the image that came to be which go-erofs has at off.
func (o *erofsOut) at(off int64) int64 {
	i := sort.Search(len(o.drops), func(i int) bool { return o.drops[i].from > off })
	if i > 0 {
		d := o.drops[i-1]
		off -= d.before + d.to - d.from
	}
	return off - blockSize + o.base
}

// Seek is called once, to write the first block when all else is written.
func (o *erofsOut) Seek(off int64, whence int) (int64, error) {
	if off != 0 || whence != io.SeekStart {
		return 0, errors.New("erofsOut: only to the start")
	}
	o.super, o.pos = true, 0
	return 0, nil
}
