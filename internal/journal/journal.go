// Package journal is a small keyed log on local disk: the last value put for a
// key wins. It is what an edge knows after its death, so it is written before
// every effect.
//
// A put is one write(2) of one checksummed record and reaches the page cache,
// which outlives the process; Sync is for what must outlive a loss of power.
// A torn tail is cut. A damaged record takes only its own key with it. Every
// so often the log is rewritten without what was overwritten: into a temporary
// file, synced, renamed.
//
// Space for about a thousand more records is always allocated ahead, so that
// records still go through on a full disk, while Reserved tells the owner to
// take nothing new on. A second copy, on a file system that is emptied at
// boot, shows by its sequence number where the first was put back to an older
// one, and takes its place.
package journal

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"sync"

	"github.com/opendsec/dsec/internal/hostos"
)

// ErrInUse means that another process has the journal open.
var ErrInUse = errors.New("journal: in use by another process")

// Options of Open.
type Options struct {
	// Dir holds the journal; it is made if missing.
	Dir string
	// Mirror is a directory for the second copy; empty is none.
	Mirror string
	// Compact is the size at which a rewrite is worth while, provided that
	// half of the file is overwritten; 0 is 4 MiB.
	Compact int64
	Logger  *slog.Logger
}

// Replay is what Open found.
type Replay struct {
	// Values holds the last value of each key.
	Values map[string]json.RawMessage
	// Damaged names the keys whose last record may be lost: a record that
	// cannot be read any more was theirs.
	Damaged map[string]bool
	// Unclaimed counts damaged records of which the key cannot be told.
	Unclaimed int
	// RolledBack means that Dir held an older state than the mirror, from
	// which Values were taken.
	RolledBack bool
}

// Journal is an open log. Its methods may be called from any goroutine.
type Journal struct {
	opts Options
	lock *os.File

	mu     sync.Mutex
	main   *file
	mirror *file // nil: none, or given up after a write error
	seq    uint64
	live   map[string]json.RawMessage
	size   int64 // of live, as records
	buf    []byte
	err    error  // sticky: the main file is in an unknown state
	synced uint64 // what was put up to it survives a loss of power, until a rewrite

	// While a rewrite is under way, tail holds what was put since it began.
	rewriting bool
	tail      []byte
	rewrites  sync.WaitGroup
}

const (
	fileName = "journal"
	lockName = "lock"
)

// Open reads the journal and makes it ready for puts. It starts each life with
// a rewrite, so that damage is gone and both copies are alike.
func Open(opts Options) (*Journal, Replay, error) {
	if opts.Compact == 0 {
		opts.Compact = 4 << 20
	}
	if opts.Logger == nil {
		opts.Logger = slog.Default()
	}
	if err := os.MkdirAll(opts.Dir, 0o700); err != nil {
		return nil, Replay{}, err
	}
	lock, err := hostos.Lock(filepath.Join(opts.Dir, lockName))
	if errors.Is(err, hostos.ErrLocked) {
		return nil, Replay{}, ErrInUse
	} else if err != nil {
		return nil, Replay{}, err
	}
	j := &Journal{opts: opts, lock: lock}
	replay, err := j.load()
	if err != nil {
		return nil, Replay{}, errors.Join(err, j.Close())
	}
	return j, replay, nil
}

func (j *Journal) load() (Replay, error) {
	first, err := readFile(j.opts.Dir)
	if err != nil {
		return Replay{}, err
	}
	img := decodeImage(first)
	var replay Replay
	if j.opts.Mirror != "" {
		if err := os.MkdirAll(j.opts.Mirror, 0o700); err != nil {
			return Replay{}, err
		}
		copied, err := readFile(j.opts.Mirror)
		if err != nil {
			return Replay{}, err
		}
		second := img
		if !bytes.Equal(first, copied) {
			second = decodeImage(copied)
		}
		switch {
		case second.seq > img.seq:
			// Every put goes to the main file first, so a mirror that is ahead
			// of an undamaged main file means that somebody put it back.
			replay.RolledBack = len(img.damaged) == 0
			img = second
		case len(img.damaged) > 0 && second.seq == img.seq && len(second.damaged) == 0:
			img = second // the same state, without the damage
		}
	}
	replay.Values = img.values
	replay.Damaged = make(map[string]bool)
	claimants := newClaimants(img.values)
	for _, bad := range img.damaged {
		keys, unclaimed := claimants.of(bad)
		for _, k := range keys {
			replay.Damaged[k] = true
		}
		replay.Unclaimed += unclaimed
	}
	j.seq, j.live = img.seq, maps.Clone(img.values)
	if j.live == nil {
		j.live = make(map[string]json.RawMessage)
	}
	return replay, j.rewrite()
}

// readFile gives what a journal file has; one that is not there has nothing.
func readFile(dir string) ([]byte, error) {
	b, err := os.ReadFile(filepath.Join(dir, fileName))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	return b, err
}

// Put stores value, which is encoded as JSON, under key.
func (j *Journal) Put(key string, value any) error {
	v, err := json.Marshal(value)
	if err != nil {
		return fmt.Errorf("journal: encode %s: %w", key, err)
	}
	if len(v) > MaxValue {
		return fmt.Errorf("journal: value of %s has %d bytes, at most %d", key, len(v), MaxValue)
	}
	return j.append(entry{Key: key, Value: v})
}

// Delete forgets key.
func (j *Journal) Delete(key string) error { return j.append(entry{Key: key}) }

func (j *Journal) append(e entry) error {
	j.mu.Lock()
	defer j.mu.Unlock()
	if j.err != nil {
		return j.err
	}
	e.Seq = j.seq + 1
	var err error
	if j.buf, err = appendRecord(j.buf[:0], e); err != nil {
		return err
	}
	if err := j.main.append(j.buf); err != nil {
		if _, ok := errors.AsType[*brokenError](err); ok {
			j.err = fmt.Errorf("journal: %w", err)
		}
		return err
	}
	if j.mirror != nil {
		if err := j.mirror.append(j.buf); err != nil {
			j.opts.Logger.Warn("journal: second copy given up until the next rewrite", "err", err)
			_ = j.mirror.close()
			j.mirror = nil
		}
	}
	j.seq++
	j.apply(e)
	if j.rewriting {
		j.tail = append(j.tail, j.buf...)
	} else if j.main.size >= j.opts.Compact && j.size < j.main.size/2 {
		j.rewriting, j.tail = true, nil
		live, seq := maps.Clone(j.live), j.seq
		j.rewrites.Go(func() { j.rewriteAside(live, seq) })
	}
	return nil
}

func (j *Journal) apply(e entry) {
	if old, ok := j.live[e.Key]; ok {
		j.size -= liveSize(e.Key, old)
	}
	if e.Value == nil {
		delete(j.live, e.Key)
		return
	}
	j.live[e.Key] = e.Value
	j.size += liveSize(e.Key, e.Value)
}

// liveSize is about what a value takes on disk.
func liveSize(key string, v json.RawMessage) int64 {
	return int64(headerLen + 32 + len(key) + len(v))
}

// encode is the content of a file that holds live and nothing else.
func encode(live map[string]json.RawMessage, seq uint64) (out []byte, err error) {
	size := int64(0)
	for k, v := range live {
		size += liveSize(k, v)
	}
	out = make([]byte, 0, size)
	for _, k := range slices.Sorted(maps.Keys(live)) {
		// The sequence number of the whole is that of its newest record.
		if out, err = appendRecord(out, entry{Key: k, Seq: seq, Value: live[k]}); err != nil {
			return nil, err
		}
	}
	if len(live) == 0 && seq > 0 {
		// Keeps the number when nothing else does.
		return appendRecord(out, entry{Key: "-", Seq: seq})
	}
	return out, nil
}

// rewrite replaces both files, before the first put.
func (j *Journal) rewrite() error {
	out, err := encode(j.live, j.seq)
	if err != nil {
		return err
	}
	for k, v := range j.live {
		j.size += liveSize(k, v)
	}
	if j.main, err = prepare(j.opts.Dir, out); err != nil {
		return err
	}
	if err := j.main.install(j.opts.Dir); err != nil {
		return err
	}
	if j.opts.Mirror != "" {
		mirror, err := prepare(j.opts.Mirror, out)
		if err == nil {
			j.mirror, err = mirror, mirror.install(j.opts.Mirror)
		}
		if err != nil {
			return err
		}
	}
	return errors.Join(hostos.SyncDir(j.opts.Dir), j.syncMirror())
}

func (j *Journal) syncMirror() error {
	if j.opts.Mirror == "" {
		return nil
	}
	return hostos.SyncDir(j.opts.Mirror)
}

// rewriteAside replaces both files while puts go on: the bulk is written and
// synced aside, what was put meanwhile follows under the lock.
func (j *Journal) rewriteAside(live map[string]json.RawMessage, seq uint64) {
	var main, mirror *file
	out, err := encode(live, seq)
	if err == nil {
		main, err = prepare(j.opts.Dir, out)
	}
	if err == nil && j.opts.Mirror != "" {
		// Without it the second copy is given up until the next rewrite.
		var merr error
		if mirror, merr = prepare(j.opts.Mirror, out); merr != nil {
			j.opts.Logger.Warn("journal: no second copy", "err", merr)
		}
	}
	j.mu.Lock()
	defer j.mu.Unlock()
	if err == nil && j.err == nil {
		err = j.swap(main, mirror)
	}
	j.rewriting, j.tail = false, nil
	if err != nil || j.err != nil {
		_, _ = main.close(), mirror.close()
		// The old file is whole and goes on; tried again when it has grown.
		j.opts.Logger.Warn("journal: not rewritten", "err", err)
		if j.main != nil {
			j.opts.Compact = 2 * j.main.size
		}
	}
}

// swap puts new files in the place of the old ones. The caller holds mu.
func (j *Journal) swap(main, mirror *file) error {
	j.synced = 0 // its tail is in the page cache alone
	if len(j.tail) > 0 {
		if err := main.append(j.tail); err != nil {
			return err
		}
	}
	if err := main.install(j.opts.Dir); err != nil {
		return err
	}
	_ = j.main.close()
	j.main = main
	if j.opts.Mirror == "" {
		return nil
	}
	var err error
	if mirror != nil {
		if len(j.tail) > 0 {
			err = mirror.append(j.tail)
		}
		if err == nil {
			err = mirror.install(j.opts.Mirror)
		}
		if err != nil {
			j.opts.Logger.Warn("journal: no second copy", "err", err)
			_ = mirror.close()
			mirror = nil
		}
	}
	_ = j.mirror.close()
	j.mirror = mirror
	return nil
}

// Reserved reports whether the space allocated ahead is there. Without it the
// owner should take nothing new on, so that what it has can still be ended.
func (j *Journal) Reserved() bool {
	j.mu.Lock()
	defer j.mu.Unlock()
	return j.err == nil && j.main.reserved()
}

// Sync makes everything put so far survive a loss of power.
func (j *Journal) Sync() error {
	j.mu.Lock()
	defer j.mu.Unlock()
	if j.err != nil {
		return j.err
	}
	if j.synced == j.seq {
		return nil
	}
	// The name too: a rewrite does not wait for it.
	if err := errors.Join(j.main.f.Sync(), hostos.SyncDir(j.opts.Dir)); err != nil {
		return err
	}
	j.synced = j.seq
	return nil
}

// Close closes the journal; puts after it fail.
func (j *Journal) Close() error {
	j.rewrites.Wait()
	j.mu.Lock()
	defer j.mu.Unlock()
	err := errors.Join(j.main.close(), j.mirror.close(), j.lock.Close())
	j.main, j.mirror = nil, nil
	j.err = fs.ErrClosed
	return err
}
