package trajectory

import (
	"crypto/sha256"
	"encoding/binary"
	"hash"
	"io"
	"os"
	"sync"
	"time"

	"github.com/klauspost/compress/zstd"
)

// An object is written in blocks, each a zstd frame, by a goroutine of its own that runs
// while there are any: who writes waits only where it is far behind. What is streamed to an
// action may come as fast as a disk takes it: not more than a tenth of the time that it
// takes, and what a MiB does, is spent on compressing it, and other blocks are kept as they
// are, which costs next to nothing. What an action writes is always compressed: it may be
// without end. Last is a skippable frame that holds the length of the content, by which an
// object is known that lost power before it was whole.
const (
	blockLen  = 128 << 10 // zstd has none longer
	maxQueue  = 8         // blocks
	frameLen  = 12        // what is before the data of a block that is kept as it is
	rawBlocks = 7         // so many are kept as they are, after one that did not become smaller
	freeSpent = 5 * time.Millisecond
)

// object is one being written.
type object struct {
	f     *os.File
	hash  hash.Hash // nil: whoever writes it has its digest
	n     int64     // bytes written
	block []byte    // next one, behind room for its frame; nil: none yet

	mu      sync.Mutex
	changed sync.Cond
	queue   [][]byte
	running bool // drain is
	err     error

	// Of store:
	raw   int // blocks to keep as they are
	began time.Time
	spent time.Duration // on compressing
}

var blocks = sync.Pool{New: func() any { b := make([]byte, frameLen, frameLen+blockLen); return &b }}

// Encoders are large, and outputs that need one few.
var encoders = sync.Pool{New: func() any {
	enc, err := zstd.NewWriter(nil, zstd.WithEncoderLevel(zstd.SpeedFastest), zstd.WithEncoderConcurrency(1), zstd.WithWindowSize(512<<10), zstd.WithLowerEncoderMem(true),
		zstd.WithEncoderCRC(false)) // there is a digest
	if err != nil {
		panic(err) // the options are constants
	}
	return enc
}}

// compress appends a zstd frame.
func compress(dst, b []byte) []byte {
	enc := encoders.Get().(*zstd.Encoder)
	defer encoders.Put(enc)
	return enc.EncodeAll(b, dst)
}

// create begins an object. Its digest is that of all that is written to it, where it is
// not known otherwise.
func (o *outputs) create(digest bool) (*object, error) {
	f, err := os.CreateTemp(o.path("new"), "")
	if err != nil {
		return nil, err
	}
	w := &object{f: f, began: time.Now()}
	w.changed.L = &w.mu
	if digest {
		w.hash = sha256.New()
	}
	return w, nil
}

// Write implements io.Writer. It may tell of what went wrong with what was written before.
func (w *object) Write(p []byte) (int, error) {
	for rest := p; len(rest) > 0; {
		if w.block == nil {
			w.block = *blocks.Get().(*[]byte)
		}
		n := min(len(rest), frameLen+blockLen-len(w.block))
		w.block, rest = append(w.block, rest[:n]...), rest[n:]
		if len(w.block) == frameLen+blockLen {
			if err := w.put(); err != nil {
				return 0, err
			}
		}
	}
	w.n += int64(len(p))
	return len(p), nil
}

// put hands the block over.
func (w *object) put() error {
	w.mu.Lock()
	defer w.mu.Unlock()
	for len(w.queue) == maxQueue && w.err == nil {
		w.changed.Wait()
	}
	if w.err != nil {
		return w.err
	}
	w.queue, w.block = append(w.queue, w.block), nil
	if !w.running {
		w.running = true
		go w.drain()
	}
	return nil
}

// drain writes blocks until there are none.
func (w *object) drain() {
	w.mu.Lock()
	defer w.mu.Unlock()
	for len(w.queue) > 0 && w.err == nil {
		block := w.queue[0]
		w.queue = w.queue[1:]
		w.mu.Unlock()
		err := w.store(block)
		w.mu.Lock()
		w.err = err
		w.changed.Broadcast()
	}
	w.running = false
	w.changed.Broadcast()
}

// wait waits until all that was handed over is written.
func (w *object) wait() error {
	w.mu.Lock()
	defer w.mu.Unlock()
	for w.running {
		w.changed.Wait()
	}
	return w.err
}

// store writes one block.
func (w *object) store(block []byte) error {
	defer func() {
		block = block[:frameLen]
		blocks.Put(&block)
	}()
	data := block[frameLen:]
	if w.hash != nil {
		w.hash.Write(data)
	}
	now := time.Now()
	switch {
	case w.raw > 0:
		w.raw--
	case w.hash == nil && w.spent > freeSpent+now.Sub(w.began)/10:
	default:
		spare := *blocks.Get().(*[]byte)
		defer blocks.Put(&spare)
		out := compress(spare[:0], data)
		w.spent += time.Since(now)
		if len(out) < len(data)-len(data)/16 {
			_, err := w.f.Write(out)
			return err
		}
		w.raw = rawBlocks
	}
	// A frame of one segment that tells its length in four bytes, with one block, which is
	// the last and raw.
	le := binary.LittleEndian
	le.PutUint32(block, 0xFD2FB528)
	block[4] = 2<<6 | 1<<5
	le.PutUint32(block[5:], uint32(len(data)))
	head := uint32(len(data))<<3 | 1
	block[9], block[10], block[11] = byte(head), byte(head>>8), byte(head>>16)
	_, err := w.f.Write(block)
	return err
}

// endFrame is the end of an object of n bytes.
func endFrame(n int64) []byte {
	b := binary.LittleEndian.AppendUint32(nil, 0x184D2A50)
	b = binary.LittleEndian.AppendUint32(b, 8)
	return binary.LittleEndian.AppendUint64(b, uint64(n))
}

// finish ends an object and returns its digest, where it has one of its own.
func (w *object) finish() ([]byte, error) {
	if w.block != nil {
		if err := w.put(); err != nil {
			return nil, err
		}
	}
	if err := w.wait(); err != nil {
		return nil, err
	}
	if _, err := w.f.Write(endFrame(w.n)); err != nil || w.hash == nil {
		return nil, err
	}
	return w.hash.Sum(nil), nil
}

// abandon leaves nothing of an object, or of its first name where it has others.
// One that is nil or kept has nothing to leave.
func (w *object) abandon() {
	if w == nil || w.f == nil {
		return
	}
	_ = w.wait()
	_ = os.Remove(w.f.Name())
	_ = w.f.Close()
	w.f = nil
}

// wholeObject reports whether there is an object of n bytes to its end, as far as its end tells.
func wholeObject(path string, n int64) bool {
	f, err := os.Open(path)
	if err != nil {
		return false
	}
	defer f.Close()
	want := endFrame(n)
	got := make([]byte, len(want))
	if _, err := f.Seek(-int64(len(got)), io.SeekEnd); err != nil {
		return false
	}
	_, err = io.ReadFull(f, got)
	return err == nil && string(got) == string(want)
}

// decompressed reads an object as it was before it was compressed.
func decompressed(r io.Reader) (io.ReadCloser, error) {
	d, err := zstd.NewReader(r, zstd.WithDecoderConcurrency(1), zstd.WithDecoderLowmem(true), zstd.WithDecoderMaxWindow(8<<20))
	if err != nil {
		return nil, err
	}
	return d.IOReadCloser(), nil
}
