package lazy

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"sync"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// newGroup makes a fanotify group for pre-content events. Its queue has no limit:
// what does not fit into a queue is allowed unanswered.
func newGroup() (*os.File, error) {
	fd, err := unix.FanotifyInit(unix.FAN_CLASS_PRE_CONTENT|unix.FAN_CLOEXEC|unix.FAN_NONBLOCK|unix.FAN_UNLIMITED_QUEUE|unix.FAN_UNLIMITED_MARKS,
		unix.O_RDONLY|unix.O_CLOEXEC|unix.O_LARGEFILE)
	if err != nil {
		return nil, fmt.Errorf("fanotify: %w", err)
	}
	return os.NewFile(uintptr(fd), "fanotify"), nil
}

// probeFanotify reports why files of dir cannot be filled by fanotify; nil if they can.
func probeFanotify(dir *os.File) error {
	group, err := newGroup()
	if err != nil {
		return err
	}
	defer group.Close()
	const probe = ".probe"
	d := directory{dir}
	f, err := d.open(probe, unix.O_CREAT|unix.O_RDWR)
	if err != nil {
		return err
	}
	defer f.Close()
	return errors.Join(mark(group, f, true), d.remove(probe))
}

func mark(group, f *os.File, on bool) error {
	flags := uint(unix.FAN_MARK_ADD)
	if !on {
		flags = unix.FAN_MARK_REMOVE
	}
	err := unix.FanotifyMark(int(group.Fd()), flags, unix.FAN_PRE_ACCESS, int(f.Fd()), "")
	if !on && err == unix.ENOENT {
		return nil // it has none
	}
	if err != nil {
		return fmt.Errorf("fanotify mark: %w", err)
	}
	return nil
}

// The event log is memory that both processes hold. The kernel writes an event to
// a slot of it by the read that takes the event from the queue: so there is no
// moment at which an event was taken and is not on record. A slot whose first four
// bytes are zero is free; it is freed after the event was answered.
const (
	eventSlots = 1024
	slotSize   = 64
	eventSize  = 24 + 24 // event and range record, as the kernel writes them
	slotName   = eventSize
)

// eventLog is the event log as this process sees it.
type eventLog struct {
	f   *os.File
	mem []byte
}

func newEventLog() (*os.File, error) {
	fd, err := unix.MemfdCreate("dsec-layerd-events", unix.MFD_CLOEXEC)
	if err != nil {
		return nil, err
	}
	f := os.NewFile(uintptr(fd), "events")
	if err := f.Truncate(eventSlots * slotSize); err != nil {
		_ = f.Close()
		return nil, err
	}
	return f, nil
}

func mapEventLog(f *os.File) (*eventLog, error) {
	mem, err := unix.Mmap(int(f.Fd()), 0, eventSlots*slotSize, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		return nil, fmt.Errorf("event log: %w", err)
	}
	return &eventLog{f, mem}, nil
}

func (l *eventLog) slot(i int) []byte { return l.mem[i*slotSize:][:slotSize:slotSize] }

func (l *eventLog) close() error { return unix.Munmap(l.mem) }

// accessEvent is one read that the kernel holds.
type accessEvent struct {
	fd     int32 // descriptor of the file, in the process that read the event; the event's name to the kernel
	r      Range
	image  uint64 // nameHash of the image; 0 is not known
	broken bool   // not an event of the kind that was asked for
}

func nameHash(name string) uint64 {
	var n uint64
	for _, c := range []byte(name[:16]) { // hexadecimal
		d := c - '0'
		if c >= 'a' {
			d = c - 'a' + 10
		}
		n = n<<4 | uint64(d)
	}
	return n
}

// parseSlot reads a slot. ok is false if it is free.
func parseSlot(b []byte) (e accessEvent, ok bool) {
	if binary.NativeEndian.Uint32(b) == 0 {
		return e, false
	}
	// struct fanotify_event_metadata, then struct fanotify_event_info_range
	e.fd = int32(binary.NativeEndian.Uint32(b[16:]))
	e.r = Range{int64(binary.NativeEndian.Uint64(b[32:])), int64(binary.NativeEndian.Uint64(b[40:]))}
	e.image = binary.NativeEndian.Uint64(b[slotName:])
	e.broken = binary.NativeEndian.Uint32(b) != eventSize || b[4] != unix.FANOTIFY_METADATA_VERSION ||
		binary.NativeEndian.Uint64(b[8:])&unix.FAN_PRE_ACCESS == 0 || b[24] != unix.FAN_EVENT_INFO_TYPE_RANGE || e.r.Offset < 0
	if e.r.Length <= 0 && !e.broken { // to the end of the file
		e.r.Length = maxImage
	}
	return e, true
}

// fanotify answers the events of one group.
type fanotify struct {
	cache *cache
	log   *slog.Logger
	group *os.File
	slots *eventLog
	free  chan int
	// unmarked, where set, is told that an image is complete and has no mark any more.
	unmarked func(*image)

	mu     sync.Mutex
	inodes map[uint64]*image // what was marked, by inode

	ctx     context.Context //nolint:containedctx // of the goroutines
	end     context.CancelFunc
	running sync.WaitGroup
}

// newFanotify begins to answer. Events that a dead process took are answered
// first. The images that are marked must be in marked.
func newFanotify(c *cache, group, events *os.File, marked []*image) (*fanotify, error) {
	slots, err := mapEventLog(events)
	if err != nil {
		return nil, err
	}
	f := &fanotify{cache: c, log: c.log, group: group, slots: slots, free: make(chan int, eventSlots), inodes: map[uint64]*image{}}
	f.ctx, f.end = context.WithCancel(context.Background())
	for _, im := range marked {
		if err := f.know(im); err != nil {
			return nil, errors.Join(err, slots.close())
		}
	}
	if err := f.takeOver(); err != nil {
		return nil, errors.Join(err, slots.close())
	}
	return f, nil
}

func (f *fanotify) know(im *image) error {
	var st unix.Stat_t
	if err := unix.Fstat(int(im.data.Fd()), &st); err != nil {
		return err
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	f.inodes[st.Ino] = im
	return nil
}

// takeOver answers what a dead process took from the queue, and begins to read.
// An event is named by the number of a descriptor of that process. The kernel
// must not give that number to a new event as long as the old one is not
// answered, so the number is taken by a descriptor for nothing.
func (f *fanotify) takeOver() error {
	null, err := unix.Open("/dev/null", unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(null)
	var first sync.WaitGroup // those whose number could not be taken
	for i := range eventSlots {
		e, ok := parseSlot(f.slots.slot(i))
		if !ok {
			f.free <- i
			continue
		}
		hold := -1
		if e.fd >= 0 {
			if hold, err = unix.FcntlInt(uintptr(null), unix.F_DUPFD_CLOEXEC, int(e.fd)); err != nil {
				return err
			}
		}
		answer := func() {
			f.answer(i, e, f.candidates(e.image))
			if hold >= 0 {
				_ = unix.Close(hold)
			}
			f.free <- i
		}
		if hold != int(e.fd) {
			first.Go(answer)
		} else {
			f.running.Go(answer)
		}
	}
	f.running.Go(func() {
		first.Wait()
		f.serve()
	})
	return nil
}

// candidates returns the images that an event may be about: one, or all that are
// marked where the dead process did not get to write which.
func (f *fanotify) candidates(hash uint64) []*image {
	f.mu.Lock()
	defer f.mu.Unlock()
	var list []*image
	for _, im := range f.inodes {
		if hash == 0 || nameHash(im.name) == hash {
			list = append(list, im)
		}
	}
	return list
}

// serve reads events until close.
func (f *fanotify) serve() {
	raw, err := f.group.SyscallConn()
	if err != nil {
		f.log.Error("fanotify group cannot be read", "error", err)
		return
	}
	for {
		var slot int
		select {
		case slot = <-f.free:
		case <-f.ctx.Done():
			return
		}
		var n int
		var errno error
		err := raw.Read(func(fd uintptr) bool {
			n, errno = unix.Read(int(fd), f.slots.slot(slot)[:eventSize])
			return errno != unix.EAGAIN
		})
		switch {
		case err != nil: // closed
			f.free <- slot
			return
		case errno != nil:
			// The kernel denies an event that it cannot hand out, as where there is no
			// descriptor left, and tells why here.
			if errno != unix.EINTR {
				f.log.Warn("an event was not readable, its reader got an error", "error", errno)
			}
			f.free <- slot
		case n == 0:
			f.free <- slot
		default:
			f.cache.crash("event.taken")
			f.take(slot)
		}
	}
}

// take answers the event that the kernel put into a slot.
func (f *fanotify) take(slot int) {
	b := f.slots.slot(slot)
	e, _ := parseSlot(b)
	var images []*image
	var st unix.Stat_t
	if e.fd < 0 { // of an overflow, which nobody waits for
		f.freeSlot(slot)
		return
	}
	if err := unix.Fstat(int(e.fd), &st); err == nil {
		f.mu.Lock()
		if im := f.inodes[st.Ino]; im != nil {
			images = []*image{im}
			binary.NativeEndian.PutUint64(b[slotName:], nameHash(im.name))
		}
		f.mu.Unlock()
	}
	f.cache.crash("event.named")
	f.running.Go(func() {
		f.answer(slot, e, images)
		_ = unix.Close(int(e.fd))
		f.free <- slot
	})
}

func (f *fanotify) freeSlot(slot int) {
	clear(f.slots.slot(slot))
	f.free <- slot
}

// answer fills what a reader wants and lets it go on, or fails it.
func (f *fanotify) answer(slot int, e accessEvent, images []*image) {
	err := f.fill(e, images)
	if f.ctx.Err() != nil && err != nil {
		return // the slot stays for whoever comes next
	}
	f.cache.crash("event.filled")
	r := unix.FanotifyResponse{Fd: e.fd, Response: unix.FAN_ALLOW}
	if err != nil {
		// EIO, whatever the reason, a full disk too: the reader asked for no space.
		r.Response = unix.FAN_DENY | uint32(unix.EIO)<<unix.FAN_ERRNO_SHIFT
	}
	_, werr := unix.Write(int(f.group.Fd()), unsafe.Slice((*byte)(unsafe.Pointer(&r)), unsafe.Sizeof(r)))
	if werr != nil && werr != unix.ENOENT { // it has been answered already
		f.log.Error("an event was not answered", "error", werr)
	}
	f.cache.crash("event.answered")
	clear(f.slots.slot(slot))
	for _, im := range images {
		f.release(im)
	}
}

var errUnknownFile = errors.New("an event for a file that is no image")

func (f *fanotify) fill(e accessEvent, images []*image) error {
	if e.broken || len(images) == 0 {
		return errUnknownFile
	}
	for _, im := range images {
		im.mu.Lock()
		lost := im.lost
		im.mu.Unlock()
		if lost {
			return errLostImage
		}
		if err := f.cache.wait(f.ctx, im, e.r); err != nil {
			return err
		}
	}
	return nil
}

var errLostImage = errors.New("the image was served by a layerd that died together with its client")

// arm puts the mark on an image's data before it is handed out. A complete one
// needs none: no chunk goes as long as it may be open.
func (f *fanotify) arm(im *image) error {
	if err := f.know(im); err != nil {
		return err
	}
	im.mu.Lock()
	defer im.mu.Unlock()
	im.armed = true
	if im.marked || im.missing == 0 {
		return nil
	}
	if err := mark(f.group, im.data, true); err != nil {
		return err
	}
	im.marked = true
	return nil
}

// release takes the mark off an image that is complete: its readers need not ask
// any more.
func (f *fanotify) release(im *image) {
	im.mu.Lock()
	defer im.mu.Unlock()
	if !im.marked || im.missing > 0 || im.lost {
		return
	}
	if err := mark(f.group, im.data, false); err != nil {
		f.log.Warn("a complete image keeps its mark", "key", im.Key, "error", err)
		return
	}
	im.marked = false
	f.cache.crash("image.unmarked")
	if f.unmarked != nil {
		f.unmarked(im)
	}
}

// disarm takes the mark off an image that nobody has open; then its chunks may
// go. It reports false if somebody has.
func (f *fanotify) disarm(im *image) bool {
	ok := false
	im.exclusive(func() {
		im.mu.Lock()
		defer im.mu.Unlock()
		if im.inUse && !im.lost { // opened again meanwhile
			return
		}
		if im.marked {
			if err := mark(f.group, im.data, false); err != nil {
				f.log.Warn("a released image keeps its mark", "key", im.Key, "error", err)
				return
			}
		}
		im.marked, im.armed = false, false
		ok = true
	})
	return ok
}

// close stops answering. What is taken and not answered stays on record.
func (f *fanotify) close() {
	f.end()
	_ = f.group.SetReadDeadline(time.Unix(1, 0))
	f.running.Wait()
	_ = f.slots.close()
}
