package lazy

import (
	"bytes"
	"crypto/sha256"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec"
)

// image is one Image of the cache.
type image struct {
	Image
	name string
	dir  directory
	// Both are nil while it rests: it has no chunk then, and nobody uses it.
	data *os.File // read and write, opened before anything was marked: its own accesses raise no events
	maps *os.File // the map; written by chunk

	// hole is held for reading from the look at a chunk's state to the end of the
	// read of its bytes, while a chunk is written or verified again, and for writing
	// while chunks go.
	hole sync.RWMutex

	ops sync.Mutex // held while it is opened or released

	mu      sync.Mutex
	states  []chunkState
	touched []bool        // read since the last look for what can go
	count   int64         // of states that are present or doubtful
	total   *atomic.Int64 // bytes of chunks of all images
	missing int64         // of states that are not present
	flights map[int64]*flight
	failed  int64 // chunk that could not be fetched last
	probed  bool  // something looks whether it can again
	ahead   readAhead
	stats   Stats
	trace   []int64 // chunks in order of their first read; nil where it is not recorded
	traced  []bool
	used    time.Time // when it was opened, read ahead of its opening, or released last
	inUse   bool      // opened and not released
	// armed: since it was last seen that nobody has data open, it was handed out by
	// fanotify. No chunk may go: the kernel reads it some time after it was allowed to.
	armed bool
	// left: it was released while somebody had it open, by FUSE. It is served on.
	left   bool
	marked bool // the group has a mark on data
	lost   bool // was served, incomplete, by a layerd whose descriptors are gone
}

// openImage opens the files of want, or makes them. With data, a descriptor that
// an earlier process opened before its mark, it is used. With quiet, the data file
// may have a mark, so that it is not touched.
func openImage(dir directory, want *Image, boot string, data *os.File, quiet bool) (*image, error) {
	im := &image{Image: *want, name: name(want.Key), dir: dir, flights: map[int64]*flight{}, used: time.Now()}
	old, err := loadMeta(dir, im.name)
	switch {
	case err == nil && !sameImage(old, want):
		return nil, &dsec.Error{Code: dsec.CodeConflict, Field: "key",
			Message: fmt.Sprintf("%q is known with another size, chunk size or other hashes", want.Key)}
	case err != nil && !errors.Is(err, fs.ErrNotExist) && !errors.Is(err, errBroken):
		return nil, err
	case err != nil: // nothing can be said of the other files
		if err := errors.Join(dir.remove(im.name+".map"), dir.remove(im.name+".data")); err != nil {
			return nil, err
		}
		if err := dir.write(im.name+".meta", marshalMeta(want)); err != nil {
			return nil, err
		}
	}
	if im.data = data; data == nil {
		if im.data, err = dir.open(im.name+".data", unix.O_CREAT|unix.O_RDWR); err != nil {
			return nil, err
		}
	}
	if err := errors.Join(im.loadMap(dir, boot), im.prepareData(quiet)); err != nil {
		im.close()
		return nil, err
	}
	return im, nil
}

func loadMeta(dir directory, name string) (*Image, error) {
	b, err := dir.read(name+".meta", maxMeta)
	if err != nil {
		return nil, err
	}
	return parseMeta(b)
}

func sameImage(a, b *Image) bool {
	return a.Key == b.Key && a.Size == b.Size && a.ChunkSize == b.ChunkSize && bytes.Equal(a.Hashes, b.Hashes)
}

// loadMap reads the map, and writes it anew if it is not of this run of the kernel.
func (im *image) loadMap(dir directory, boot string) error {
	b, err := dir.read(im.name+".map", mapHeader+im.chunks())
	if err != nil && !errors.Is(err, fs.ErrNotExist) && !errors.Is(err, errBroken) {
		return err
	}
	if im.states, err = parseMap(b, &im.Image, boot); err != nil {
		im.states = make([]chunkState, im.chunks())
	}
	im.touched = make([]bool, im.chunks())
	im.missing = im.chunks()
	for _, s := range im.states {
		if s != absent {
			im.count++
		}
		if s == present {
			im.missing--
		}
	}
	if now := marshalMap(&im.Image, boot, im.states); !bytes.Equal(b, now) {
		if err := dir.write(im.name+".map", now); err != nil {
			return err
		}
	}
	im.maps, err = dir.open(im.name+".map", unix.O_WRONLY)
	return err
}

// prepareData gives the data file its length, and frees what a process that was
// killed left in it without a word in the map.
func (im *image) prepareData(quiet bool) error {
	var st unix.Stat_t
	if err := unix.Fstat(int(im.data.Fd()), &st); err != nil {
		return err
	}
	if quiet && st.Size == im.Size {
		return nil
	}
	if st.Size != im.Size {
		if err := im.data.Truncate(im.Size); err != nil {
			return err
		}
	}
	if st.Blocks*512 <= im.count*im.ChunkSize { // a little more is metadata of the file system
		return nil
	}
	for i, s := range im.states {
		if s == absent {
			if err := im.punch(int64(i)); err != nil {
				return err
			}
		}
	}
	return nil
}

// reopen replaces the descriptor of the data file, which has no mark, by one that
// raises no events when it has one.
func (im *image) reopen() error {
	f, err := im.dir.open(im.name+".data", unix.O_RDWR)
	if err != nil {
		return err
	}
	im.hole.Lock()
	defer im.hole.Unlock()
	_ = im.data.Close()
	im.data = f
	return nil
}

func (im *image) close() {
	for _, f := range []*os.File{im.data, im.maps} {
		if f != nil {
			_ = f.Close()
		}
	}
}

// rest closes the files of an image that has no chunk, and that nobody opened or
// reads: a node may have known many. Nobody opens, releases or evicts it meanwhile.
func (im *image) rest() {
	im.hole.Lock()
	defer im.hole.Unlock()
	im.mu.Lock()
	defer im.mu.Unlock()
	if im.count > 0 || len(im.flights) > 0 || im.inUse || im.armed || im.lost {
		return
	}
	im.close()
	im.data, im.maps = nil, nil
}

// wake opens the files of an image that rests, which has no mark then. im.mu is held.
func (im *image) wake() error {
	if im.data != nil {
		return nil
	}
	data, err := im.dir.open(im.name+".data", unix.O_RDWR)
	if err != nil {
		return err
	}
	maps, err := im.dir.open(im.name+".map", unix.O_WRONLY)
	if err != nil {
		_ = data.Close()
		return err
	}
	im.data, im.maps = data, maps
	return nil
}

// verified reports whether b is what chunk i must be.
func (im *image) verified(i int64, b []byte) bool {
	sum := sha256.Sum256(b)
	return bytes.Equal(sum[:], im.Hashes[i*sha256.Size:(i+1)*sha256.Size])
}

// setState writes a chunk's state to the map, then to memory. Its chunk is in
// the data file if it is to be present.
func (im *image) setState(i int64, s chunkState) error {
	if _, err := im.maps.WriteAt([]byte{byte(s)}, mapHeader+i); err != nil {
		return err
	}
	im.mu.Lock()
	defer im.mu.Unlock()
	old := im.states[i]
	im.states[i] = s
	if (old == absent) != (s == absent) {
		if s == absent {
			im.count--
			im.total.Add(-im.ChunkSize)
		} else {
			im.count++
			im.total.Add(im.ChunkSize)
		}
	}
	if (old == present) != (s == present) {
		if s == present {
			im.missing--
		} else {
			im.missing++
		}
	}
	return nil
}

// punch frees the bytes of a chunk, of which the map says that it is absent.
func (im *image) punch(i int64) error {
	r := im.chunk(i)
	return unix.Fallocate(int(im.data.Fd()), unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, r.Offset, r.Length)
}

// ready reports whether all chunks from first to end are present, and notes that
// they are wanted.
func (im *image) ready(first, end int64) bool {
	im.mu.Lock()
	defer im.mu.Unlock()
	ok := true
	for i := first; i < end; i++ {
		im.touched[i] = true
		if im.traced != nil && !im.traced[i] {
			im.traced[i] = true
			im.trace = append(im.trace, i)
		}
		ok = ok && im.states[i] == present
	}
	return ok
}

func (im *image) snapshot() Stats {
	im.mu.Lock()
	defer im.mu.Unlock()
	s := im.stats
	s.Key, s.Size, s.Chunks, s.Present = im.Key, im.Size, im.chunks(), im.chunks()-im.missing
	s.InUse, s.Open = im.inUse, im.armed || im.left
	return s
}

// complete reports whether the whole image is on local disk and verified.
func (im *image) complete() bool {
	im.mu.Lock()
	defer im.mu.Unlock()
	return im.missing == 0
}

// exclusive calls f while nobody else has the data file open, nor can open it:
// the kernel grants a write lease only then, and lets an open wait until it is
// given back. It reports whether it did.
func (im *image) exclusive(f func()) bool {
	fd := im.data.Fd()
	if _, err := unix.FcntlInt(fd, unix.F_SETLEASE, unix.F_WRLCK); err != nil {
		return false
	}
	defer func() { _, _ = unix.FcntlInt(fd, unix.F_SETLEASE, unix.F_UNLCK) }()
	f()
	return true
}
