// Package trajectory is the trajectory log of a node: per sandbox, in order,
// what was done to it, who asked for it and what came of it.
//
// Entries of all sandboxes go into one stream of numbered segments, each by one
// write(2) of one checksummed record, so that one sync covers what all of them
// did within 50 ms; the page cache, which outlives the process, has an entry when
// its call returns. Each record leads to the one of its sandbox before it, and
// memory holds only where the last one is. A full segment ends with a footer that
// says so, and opening the log reads footers and the last segment.
//
// An action has two entries. Begin refuses where there is no room for both, so
// that End never lacks it, on a full disk either. Output goes into the entry of
// its action up to 64 KiB, and beyond into an object named by its digest.
//
// Seal writes what there is of a sandbox to the store, from where it is read once
// it is no longer here. A segment goes when nothing in it is only there; over
// MaxBytes the oldest is sealed for that, or dropped where there is no store.
// What is gone or damaged is told as a gap, never left out.
//
// The life of a command:
//
//	act, earlier, err := log.Begin(ctx, id, entry) // before anything is done
//	switch {
//	case err != nil:            // exhausted, diverged, outcome_unknown, ...
//	case earlier != nil && earlier.Ended != nil: // done before: answer from it
//	case earlier != nil:        // under way: wait for earlier.Action.Done, ask again
//	default:
//		act.Output(stream, data) // as it comes
//		err = act.End(entry)     // before the answer leaves
//		err = log.Sync(ctx)      // where the caller asks for it
//	}
//
// After a restart whoever recovers a sandbox asks for what is Unfinished and
// either goes on (Resume) or ends it as outcome_unknown.
package trajectory

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"hash/crc32"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/hostos"
	"github.com/opendsec/dsec/internal/layer/blob"
)

// Options of Open.
type Options struct {
	// Dir holds the log; it is made if missing.
	Dir string
	// Store is where Seal writes to; nil: nowhere.
	Store blob.Store
	// SegmentBytes is the size of a segment; 0 is 64 MiB.
	SegmentBytes int64
	// MaxBytes bounds segments and outputs together; 0 is 8 GiB. It is at least
	// four segments. Where the store takes nothing, it is up to twice as much. Where there
	// is none, a sandbox whose entries have a sixteenth of it begins no more actions.
	MaxBytes int64
	// MaxOutput and MaxInput are the most output and input of one action that are
	// kept; 0 is 64 MiB.
	MaxOutput, MaxInput int64
	// MaxSandboxOutput and MaxSandboxInput are the most of a sandbox; 0 is 512 MiB.
	MaxSandboxOutput, MaxSandboxInput int64
	// SyncEvery is the most time that an entry waits for its sync to begin; 0 is 25 ms.
	SyncEvery time.Duration
	Logger    *slog.Logger
}

func (o *Options) fill() error {
	o.SegmentBytes = cmp.Or(o.SegmentBytes, 64<<20)
	o.MaxBytes = cmp.Or(o.MaxBytes, 8<<30)
	o.MaxOutput = cmp.Or(o.MaxOutput, 64<<20)
	o.MaxSandboxOutput = cmp.Or(o.MaxSandboxOutput, 512<<20)
	o.MaxInput = cmp.Or(o.MaxInput, 64<<20)
	o.MaxSandboxInput = cmp.Or(o.MaxSandboxInput, 512<<20)
	o.SyncEvery = cmp.Or(o.SyncEvery, 25*time.Millisecond)
	o.Logger = cmp.Or(o.Logger, slog.Default())
	switch {
	case o.SegmentBytes < 2*maxPayload || o.SegmentBytes > 1<<30:
		return fmt.Errorf("trajectory: segments of %d bytes, want %d to %d", o.SegmentBytes, 2*maxPayload, 1<<30)
	case o.MaxBytes < 4*o.SegmentBytes:
		return fmt.Errorf("trajectory: at most %d bytes, want at least four segments of %d", o.MaxBytes, o.SegmentBytes)
	}
	for what, n := range map[string]int64{"output": o.MaxOutput, "input": o.MaxInput} {
		if n < 0 || n > MaxKept {
			return fmt.Errorf("trajectory: %d bytes of %s kept of an action, want up to %d", n, what, int64(MaxKept))
		}
	}
	return nil
}

// MaxKept bounds what can be kept of one action.
const MaxKept = 1 << 31

// flow is what goes out of an action, or into it: each is bounded by itself.
type flow uint8

const (
	flowOut flow = iota
	flowIn
	flows
)

// bounds are the most of a flow that is kept of a sandbox, and of one action.
func (o *Options) bounds(f flow) (ofSandbox, ofAction int64) {
	if f == flowIn {
		return o.MaxSandboxInput, o.MaxInput
	}
	return o.MaxSandboxOutput, o.MaxOutput
}

// Recovery is what Open found broken.
type Recovery struct {
	// Cut is how many bytes of a record that a crash cut off were at the end.
	Cut int64
	// Damaged counts stretches of segments that are no records any more. What
	// they held is a gap where it is read.
	Damaged int
	// Unclaimed counts those at the end of what was read of which no sandbox can
	// be told: the last entry of one may have been there.
	Unclaimed int
}

// ErrInUse means that another process has the log open.
var ErrInUse = errors.New("trajectory: in use by another process")

// Log is an open log. Its methods may be called from any goroutine.
type Log struct {
	opts    Options
	lock    *os.File
	salt    [8]byte
	seed    uint32 // checksum of salt
	outputs *outputs
	group   group
	ctx     context.Context // of background work
	cancel  context.CancelFunc
	tasks   sync.WaitGroup
	wake    chan struct{} // there may be something to maintain

	mu        sync.Mutex
	err       error // sticky: nothing can be written any more
	sandboxes map[dsec.SandboxID]*sandbox
	segments  []*segment // full, oldest first
	cur       *segment
	ahead     []*segment // empty ones that come next; none where there is no room
	gone      []*segment // to be removed
	finished  int64      // bytes of segments
	reserved  int64      // for the ends of actions
	indexes   indexes
	pieces    pieces
}

// sandbox is what is in memory of each.
type sandbox struct {
	id dsec.SandboxID
	state
	head     position // of its last record
	segments int      // that have records of it
	actions  map[uint64]*Action
	taken    [flows]int64 // bytes that actions under way keep
	index    *index
	changed  chan struct{} // closed by the next entry; nil: nobody waits
	sealing  sync.Mutex
}

// Open opens the log in a directory and repairs what a crash left.
func Open(opts Options) (*Log, Recovery, error) {
	if err := opts.fill(); err != nil {
		return nil, Recovery{}, err
	}
	if err := os.MkdirAll(opts.Dir, 0o700); err != nil {
		return nil, Recovery{}, err
	}
	lock, err := hostos.Lock(filepath.Join(opts.Dir, "lock"))
	if errors.Is(err, hostos.ErrLocked) {
		return nil, Recovery{}, ErrInUse
	} else if err != nil {
		return nil, Recovery{}, err
	}
	l := &Log{opts: opts, lock: lock, sandboxes: make(map[dsec.SandboxID]*sandbox), wake: make(chan struct{}, 1)}
	l.ctx, l.cancel = context.WithCancel(context.Background())
	l.group.init(opts)
	recovery, err := l.load()
	if err == nil {
		l.outputs, err = openOutputs(filepath.Join(opts.Dir, "outputs"), l.has, &l.group)
	}
	if err != nil {
		l.closeFiles()
		return nil, recovery, err
	}
	l.tasks.Go(func() { l.group.run(l.ctx) })
	l.tasks.Go(l.maintain)
	return l, recovery, nil
}

func (l *Log) has(id dsec.SandboxID) bool {
	sb := l.sandboxes[id]
	return sb != nil && !sb.forgotten
}

func (l *Log) setSalt(salt [8]byte) {
	l.salt, l.seed = salt, crc32.Checksum(salt[:], castagnoli)
}

// Close syncs what there is and closes the log; calls after it fail.
func (l *Log) Close() error {
	l.cancel()
	l.tasks.Wait()
	err := l.group.sync()
	l.mu.Lock()
	defer l.mu.Unlock()
	l.err = cmp.Or(l.err, l.closed())
	l.closeFiles()
	return err
}

// closed is an error once Close was called.
func (l *Log) closed() error {
	if l.ctx.Err() == nil {
		return nil
	}
	return dsec.Errorf(dsec.CodeUnavailable, "the trajectory log is closed")
}

func (l *Log) closeFiles() {
	for _, s := range slices.Concat(l.all(), l.ahead, l.gone) {
		_ = s.f.Close()
	}
	_ = l.lock.Close()
}

// all are the segments with records, oldest first. The caller holds mu.
func (l *Log) all() []*segment {
	out := append(make([]*segment, 0, len(l.segments)+1), l.segments...)
	if l.cur != nil {
		out = append(out, l.cur)
	}
	return out
}

// Add has the log take entries of a sandbox. One that it has stays as it is.
func (l *Log) Add(id dsec.SandboxID, project string) error {
	if _, err := dsec.ParseSandboxID(string(id)); err != nil {
		return err
	}
	if !blob.ValidPart(project) {
		return dsec.Invalid("project", "%.64q cannot be part of a key of the store", project)
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if sb := l.sandboxes[id]; sb != nil {
		if sb.forgotten {
			return notFound(id)
		}
		return nil
	}
	sb := &sandbox{id: id, state: state{project: project}}
	if err := l.putState(sb, l.slack()); err != nil {
		return err
	}
	l.sandboxes[id] = sb
	return nil
}

// Sandboxes are those that the log has, in no order.
func (l *Log) Sandboxes() []dsec.SandboxID {
	l.mu.Lock()
	defer l.mu.Unlock()
	var ids []dsec.SandboxID
	for id, sb := range l.sandboxes {
		if !sb.forgotten {
			ids = append(ids, id)
		}
	}
	return ids
}

// Last is the number of a sandbox's last entry; 0: it has none.
func (l *Log) Last(id dsec.SandboxID) (uint64, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	sb, err := l.find(id)
	if err != nil {
		return 0, err
	}
	return sb.seq, nil
}

// find returns a sandbox of the log. The caller holds mu.
func (l *Log) find(id dsec.SandboxID) (*sandbox, error) {
	sb := l.sandboxes[id]
	if sb == nil || sb.forgotten {
		return nil, notFound(id)
	}
	return sb, nil
}

func notFound(id dsec.SandboxID) error {
	return dsec.Errorf(dsec.CodeNotFound, "no trajectory of sandbox %s", id)
}

// put writes a record of sb's chain. The caller holds mu and has seen to it
// that there is room.
func (l *Log) put(sb *sandbox, h header, d *draft) (position, error) {
	if l.err != nil {
		return position{}, l.err
	}
	if l.cur.size+int64(len(d.record)) > l.cur.room {
		if err := l.rotate(); err != nil {
			return position{}, l.failed(err)
		}
	}
	h.prev = sb.head
	copy(h.sandbox[:], sb.id)
	h.seal(d.record, d.sum)
	at := position{l.cur.number, uint32(l.cur.size)}
	if err := l.cur.append(d.record); err != nil {
		return position{}, l.failed(err)
	}
	if sb.head.segment != at.segment {
		l.cur.members = append(l.cur.members, member{sb: sb})
		sb.segments++
	}
	sb.head = at
	l.group.written(l.cur.f)
	return at, nil
}

// putState writes a record that takes no seq, where it leaves so much room. The
// caller holds mu.
func (l *Log) putState(sb *sandbox, leaves int64) error {
	d := newDraft()
	defer d.free()
	d.record = sb.append(d.record)
	d.sum = crc32.Update(l.seed, castagnoli, d.record[headerLen:])
	if err := l.roomFor(int64(len(d.record)), leaves); err != nil {
		return err
	}
	_, err := l.put(sb, header{typ: typeState, seq: sb.seq}, d)
	return err
}

// failed is what a caller is told where a record was not written. The caller
// holds mu.
func (l *Log) failed(err error) error {
	if errors.Is(err, unix.ENOSPC) || errors.Is(err, unix.EDQUOT) {
		return errNoRoom(err)
	}
	out := &dsec.Error{Code: dsec.CodeUnavailable, Message: "the trajectory log of the node cannot be written", Err: err}
	if _, ok := errors.AsType[*brokenError](err); ok {
		l.err = out
	}
	return out
}

func errNoRoom(err error) error {
	return &dsec.Error{Code: dsec.CodeExhausted, Message: "the disk of the node has no room for the trajectory log", Err: err}
}
