package lazy

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sync/semaphore"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/hostos"
	"github.com/opendsec/dsec/internal/layer/blob"
)

// Limits bounds what layerd does. A zero field has the default.
type Limits struct {
	CacheBytes int64         // most bytes of chunks on local disk; what is in use may exceed it; default 10 GiB
	RetryFor   time.Duration // a fetch is repeated for so long before readers get an error; default 30 s
	CallFor    time.Duration // one call to the store may take so long; default 10 s
	ReadAhead  int64         // most bytes fetched ahead of a sequential reader; default 4 MiB
	Trace      bool          // record in which order chunks are first read
}

func (l Limits) withDefaults() Limits {
	or := func(v *int64, d int64) {
		if *v <= 0 {
			*v = d
		}
	}
	or(&l.CacheBytes, 10<<30)
	or((*int64)(&l.RetryFor), int64(30*time.Second))
	or((*int64)(&l.CallFor), int64(10*time.Second))
	or(&l.ReadAhead, 4<<20)
	return l
}

// The bounds of what layerd fetches at once, in bytes: what a hung store can make
// it hold.
const (
	fetchBytes = 64 << 20 // for readers
	aheadBytes = 32 << 20 // ahead of them
	fetchRun   = 4 << 20  // in one call to the store; MaxChunk at least
)

// cache is the local copy of images, and what fills it.
type cache struct {
	dir    directory
	boot   string
	log    *slog.Logger
	crash  func(step string)
	notify func(Event)

	demand, background *semaphore.Weighted // bytes being fetched
	filling            sync.WaitGroup      // goroutines of fetches
	probing            sync.WaitGroup      // of what looks after images that cannot be read
	probeEvery         time.Duration
	life               context.Context //nolint:containedctx // of the goroutines, which outlive the calls that start them
	end                context.CancelFunc

	mu     sync.Mutex
	store  blob.Store
	limits Limits
	images map[string]*image // by name; closed only by close
	nodes  map[uint64]*image // by number in the FUSE file system

	memory  sync.Mutex
	through [8]through // chunks that the disk had no room for
	passed  int        // of them, in all

	evict  sync.Mutex   // held by the one that evicts
	bytes  atomic.Int64 // of the chunks on disk
	coming atomic.Int64 // of those that are being written
}

func newCache(dir *os.File, log *slog.Logger, crash func(string), notify func(Event)) (*cache, error) {
	boot, err := hostos.BootID()
	if err != nil {
		return nil, err
	}
	c := &cache{
		dir: directory{dir}, boot: boot, log: log, crash: crash, notify: notify,
		demand: semaphore.NewWeighted(fetchBytes), background: semaphore.NewWeighted(aheadBytes),
		images: map[string]*image{}, nodes: map[uint64]*image{}, limits: Limits{}.withDefaults(), probeEvery: probeEvery,
	}
	c.life, c.end = context.WithCancel(context.Background())
	return c, nil
}

// load opens all images that are on disk. held has the descriptors of data files
// that were opened before their marks, by name; they belong to the cache then.
// quiet has the names of images that may have marks without that.
func (c *cache) load(held map[string]*os.File, quiet map[string]bool) error {
	names, err := c.dir.list()
	if err != nil {
		return err
	}
	for _, file := range names {
		n, kind, _ := strings.Cut(file, ".")
		if kind != "meta" {
			continue
		}
		m, err := loadMeta(c.dir, n)
		if errors.Is(err, errBroken) || err == nil && name(m.Key) != n {
			c.log.Warn("cached image dropped: its description is broken", "file", file)
			err = errors.Join(c.dir.remove(n+".meta"), c.dir.remove(n+".map"), c.dir.remove(n+".data"))
			if err != nil {
				return err
			}
			continue
		}
		if err != nil {
			return err
		}
		im, err := openImage(c.dir, m, c.boot, held[n], quiet[n])
		if err != nil {
			return fmt.Errorf("cached image %s: %w", n, err)
		}
		c.adopt(im)
	}
	return nil
}

// open returns the image that want describes.
func (c *cache) open(want *Image) (*image, error) {
	if err := want.Validate(); err != nil {
		return nil, err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if im := c.images[name(want.Key)]; im != nil {
		if !sameImage(&im.Image, want) {
			return nil, &dsec.Error{Code: dsec.CodeConflict, Field: "key",
				Message: fmt.Sprintf("%q is known with another size, chunk size or other hashes", want.Key)}
		}
		return im, nil
	}
	im, err := openImage(c.dir, want, c.boot, nil, false)
	if err != nil {
		return nil, err
	}
	if c.limits.Trace {
		im.traced = make([]bool, im.chunks())
	}
	c.adopt(im)
	return im, nil
}

func (c *cache) adopt(im *image) {
	im.total = &c.bytes
	c.bytes.Add(im.count * im.ChunkSize)
	c.images[im.name] = im
	c.nodes[nodeOf(im)] = im
}

// byKey returns an image that was opened before.
func (c *cache) byKey(key string) (*image, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if im := c.images[name(key)]; im != nil {
		return im, nil
	}
	return nil, &dsec.Error{Code: dsec.CodeNotFound, Field: "key", Message: fmt.Sprintf("%q was never opened here", key)}
}

// all returns the images, those first that were not used for longest.
func (c *cache) all() []*image {
	c.mu.Lock()
	defer c.mu.Unlock()
	list := make([]*image, 0, len(c.images))
	used := map[*image]time.Time{}
	for _, im := range c.images {
		im.mu.Lock()
		used[im] = im.used
		im.mu.Unlock()
		list = append(list, im)
	}
	slices.SortFunc(list, func(a, b *image) int { return used[a].Compare(used[b]) })
	return list
}

func (c *cache) configure(store blob.Store, limits Limits) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if store != nil {
		if old, ok := c.store.(io.Closer); ok {
			_ = old.Close() // what it has under way is repeated with the new one
		}
		c.store = store
	}
	c.limits = limits.withDefaults()
	for _, im := range c.images {
		im.mu.Lock()
		if c.limits.Trace && im.traced == nil {
			im.traced = make([]bool, im.chunks())
		}
		im.mu.Unlock()
	}
}

func (c *cache) settings() (blob.Store, Limits) {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.store, c.limits
}

// close ends all fetches and closes the files.
func (c *cache) close() {
	c.end()
	c.filling.Wait()
	c.probing.Wait() // each is begun by a fetch
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, im := range c.images {
		im.close()
	}
}

// through is a chunk that the disk had no room for.
type through struct {
	im *image
	i  int64
	fl *flight
}

// keepInMemory keeps the flight of a chunk for the next readers: they read it in
// smaller parts, one after the other.
func (c *cache) keepInMemory(im *image, i int64, fl *flight) {
	c.memory.Lock()
	defer c.memory.Unlock()
	c.through[c.passed%len(c.through)] = through{im, i, fl}
	c.passed++
}

// inMemory returns the flight of a chunk that is kept in memory, or nil.
func (c *cache) inMemory(im *image, i int64) *flight {
	c.memory.Lock()
	defer c.memory.Unlock()
	for _, t := range c.through {
		if t.im == im && t.i == i {
			return t.fl
		}
	}
	return nil
}

// makeRoom lets chunks go until need more bytes fit into the limit, or, where the
// disk is full, need bytes, and reports whether any went: first those of images
// that nobody uses, the longest unused first; then, of images that only FUSE
// serves, chunks that were not read lately. What fanotify serves must stay: a
// reader that was told long ago that it may read a chunk may be about to.
func (c *cache) makeRoom(need int64, diskFull bool) bool {
	_, limits := c.settings()
	over := func() int64 { return c.bytes.Load() + c.coming.Load() + need - limits.CacheBytes }
	if over() <= 0 && !diskFull {
		return false
	}
	c.evict.Lock()
	defer c.evict.Unlock()
	want := over() // others may have made room meanwhile
	if diskFull {
		want = need
	}
	freed := int64(0)
	images := c.all()
	for _, spare := range []bool{false, true} {
		for _, im := range images {
			if freed >= want || !im.mayShrink(spare) {
				continue
			}
			// Nobody has the file open now; whoever opens it meanwhile waits.
			im.exclusive(func() { freed += c.drop(im, want-freed, spare) })
			if im.ops.TryLock() { // else it is being opened, or whoever releases it does this
				im.rest()
				im.ops.Unlock()
			}
		}
	}
	return freed > 0
}

// rest has an image that nobody uses any more hold no files, if it has no chunk. Its
// ops are held.
func (c *cache) rest(im *image) {
	c.evict.Lock()
	defer c.evict.Unlock()
	im.rest()
}

// mayShrink reports whether chunks may go: of an image that nobody uses, or,
// where used is set, of one that only FUSE serves.
func (im *image) mayShrink(used bool) bool {
	im.mu.Lock()
	defer im.mu.Unlock()
	return im.count > 0 && im.inUse == used && !im.armed && !im.lost
}

// drop lets about want bytes of an image go. With spare, a chunk that was read
// since the last drop is kept this time.
func (c *cache) drop(im *image, want int64, spare bool) (freed int64) {
	c.crash("evict.begin")
	for i := range im.chunks() {
		if freed >= want {
			break
		}
		im.hole.Lock()
		if im.droppable(i, spare) {
			if err := c.dropChunk(im, i); err != nil {
				c.log.Warn("chunk not evicted", "key", im.Key, "chunk", i, "error", err)
			} else {
				freed += im.chunk(i).Length
			}
		}
		im.hole.Unlock()
	}
	return freed
}

func (im *image) droppable(i int64, spare bool) bool {
	im.mu.Lock()
	defer im.mu.Unlock()
	if im.states[i] == absent || im.flights[i] != nil {
		return false
	}
	if spare && im.touched[i] {
		im.touched[i] = false
		return false
	}
	return true
}

// dropChunk frees one chunk: first the map forgets it, so that whatever dies in
// between leaves a chunk too much and never one too few.
func (c *cache) dropChunk(im *image, i int64) error {
	if err := im.setState(i, absent); err != nil {
		return err
	}
	c.crash("evict.forgotten")
	if err := im.punch(i); err != nil {
		return err
	}
	c.crash("evict.punched")
	return nil
}
