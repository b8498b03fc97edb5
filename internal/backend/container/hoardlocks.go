package container

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec"
)

// The kernel tells locks in the fdinfo of the descriptor by which they were
// made, and nowhere that is quick to read for one sandbox. A sandbox decides how
// many descriptors there are and how long the kernel takes for each, so its
// locks are counted a little at a time, and the sandboxes take turns.

const (
	lockTurnTime = 20 * time.Millisecond  // of one sandbox before it is the next one's turn
	lockPassTime = 100 * time.Millisecond // of all of them before the next pass
	// lockRest is how often a pass's time goes by until the next: one fdinfo,
	// which cannot be read in part, may take longer than a pass should.
	lockRest = 8
)

// A lockLook has the sandboxes whose locks are still to be counted.
type lockLook struct {
	now   func() time.Time
	log   *slog.Logger
	turns []*lockTurn
	rest  time.Time // no pass before
}

// A lockTurn is one sandbox of a look.
type lockTurn struct {
	id      dsec.SandboxID
	walk    lockWalk
	counted func(locks int) // of the walk, which stops at its limit
}

// add has a sandbox counted, unless it is about to be.
func (l *lockLook) add(t *lockTurn) {
	if !slices.ContainsFunc(l.turns, func(o *lockTurn) bool { return o.id == t.id }) {
		l.turns = append(l.turns, t)
	}
}

// pass goes on with counting for lockPassTime, and where it stopped with the next.
func (l *lockLook) pass() {
	start := l.now()
	if start.Before(l.rest) {
		return
	}
	for now := start; len(l.turns) > 0 && now.Sub(start) < lockPassTime; now = l.now() {
		t := l.turns[0]
		l.turns = l.turns[1:]
		turn := min(lockTurnTime, lockPassTime-now.Sub(start))
		done, err := t.walk.run(func() bool { return l.now().Sub(now) >= turn })
		switch {
		case err != nil:
			l.log.Debug("locks of files are not known", "sandbox", t.id, "err", err)
		case !done:
			l.turns = append(l.turns, t)
		default:
			t.counted(t.walk.sum)
		}
	}
	l.rest = start.Add(l.now().Sub(start) * lockRest)
}

// A lockWalk goes through the processes of a sandbox, the tables of descriptors
// that their threads have, and the descriptors in each, and keeps where it is.
type lockWalk struct {
	list  func() ([]int, error) // the sandbox's processes
	limit int                   // there is no need to count further

	begun  bool
	left   []int           // processes still to be looked at
	pid    int             // the one that is looked at, or 0
	tables []descriptor    // its threads whose tables are still to be looked at
	next   int             // descriptor of the first of those
	seen   map[string]bool // in this table, see locksOf
	held   int             // locks of pid
	sum    int             // locks of the processes before
	large  []descriptor    // large ones that were looked at, see isLarge
}

// run goes on until all is counted, or until over, which is asked after each
// descriptor.
func (w *lockWalk) run(over func() bool) (done bool, err error) {
	if !w.begun {
		if w.left, err = w.list(); err != nil {
			return true, err
		}
		w.begun = true
	}
	for {
		switch {
		case len(w.tables) > 0:
			if !w.table(over) {
				return false, nil
			}
			w.tables, w.next, w.seen = w.tables[1:], 0, nil
			if w.full() {
				w.tables = nil
			}
		case w.pid != 0:
			if err := w.settle(); err != nil {
				return true, err
			}
		case len(w.left) == 0 || w.full():
			return true, nil
		default:
			w.pid, w.left = w.left[0], w.left[1:]
			w.tables = fileTables(w.pid)
		}
		if over() {
			return false, nil
		}
	}
}

func (w *lockWalk) full() bool { return w.sum+w.held >= w.limit }

// settle adds what a process has, if it is still the sandbox's: one that ended
// has nothing any more, and its number may be another's, of the host.
func (w *lockWalk) settle() error {
	if w.held > 0 {
		pids, err := w.list()
		if err != nil {
			return err
		}
		if slices.Contains(pids, w.pid) {
			w.sum += w.held
		}
	}
	w.pid, w.held = 0, 0
	return nil
}

// table goes on with the first table, and reports whether that is done.
func (w *lockWalk) table(over func() bool) bool {
	tid := w.tables[0].tid
	dir := fmt.Sprintf("/proc/%d/task/%d/", w.pid, tid)
	d, err := os.Open(dir + "fd")
	if err != nil {
		return true // it has ended
	}
	defer d.Close()
	// The kernel's place in this directory is the descriptor, after "." and "..".
	if _, err := d.Seek(int64(w.next)+2, io.SeekStart); err != nil {
		return true
	}
	if w.seen == nil {
		w.seen = map[string]bool{}
	}
	for !w.full() {
		names, err := d.Readdirnames(64)
		for _, name := range names {
			fd, nerr := strconv.Atoi(name)
			if nerr != nil || fd < w.next {
				continue
			}
			if w.next = fd + 1; !isLarge(dir+"fd/"+name) || w.firstLook(descriptor{tid, fd}) {
				w.held += locksOf(dir+"fdinfo/"+name, w.limit-w.sum-w.held, w.seen)
			}
			if w.full() {
				return true
			}
			if over() {
				return false
			}
		}
		if err != nil {
			return true
		}
	}
	return true
}

// isLarge reports whether a descriptor is of a kind whose fdinfo lists all that
// it watches. Such files can be locked too, as pipes and sockets can.
func isLarge(link string) bool {
	target, err := os.Readlink(link)
	return err == nil && (target == "anon_inode:[eventpoll]" || target == "anon_inode:inotify")
}

// firstLook reports whether the open file was not looked at by another
// descriptor, of which there may be thousands.
func (w *lockWalk) firstLook(h descriptor) (first bool) {
	w.large, first = addNew(w.large, kcmpFile, h)
	return first
}

// A descriptor is that of a thread, or in lists of tables just the thread.
type descriptor struct{ tid, fd int }

// What kcmp(2) compares.
const (
	kcmpFile  = 0 // open files
	kcmpFiles = 2 // tables of descriptors
)

// addNew adds a descriptor to a list, which the kernel's order sorts, unless it has
// one of the same object. Where one has ended they are taken for different ones.
func addNew(list []descriptor, kind int, h descriptor) (_ []descriptor, added bool) {
	at, found := slices.BinarySearchFunc(list, h, func(x, h descriptor) int {
		order, _, errno := unix.Syscall6(unix.SYS_KCMP, uintptr(x.tid), uintptr(h.tid), uintptr(kind), uintptr(x.fd), uintptr(h.fd), 0)
		switch {
		case errno == 0 && order == 0, errors.Is(errno, unix.ENOSYS):
			return 0
		case errno == 0 && order == 2:
			return 1
		}
		return -1
	})
	if found {
		return list, false
	}
	return slices.Insert(list, at, h), true
}

// fileTables lists a thread for each table of descriptors that a process has.
// A thread may have one of its own, and where the first thread has ended that
// one has none.
func fileTables(pid int) (tables []descriptor) {
	d, err := os.Open(fmt.Sprintf("/proc/%d/task", pid))
	if err != nil {
		return nil
	}
	defer d.Close()
	names, _ := d.Readdirnames(-1)
	for _, name := range names {
		if tid, err := strconv.Atoi(name); err == nil {
			tables, _ = addNew(tables, kcmpFiles, descriptor{tid: tid})
		}
	}
	return tables
}

// locksOf counts the locks in an fdinfo, up to limit. It tells those that were
// made by this open file, whichever descriptor of it that was. The ranges that a
// process has locked in a file by POSIX locks do not overlap, so where the first
// of them was seen, the others were, too.
func locksOf(path string, limit int, seen map[string]bool) (n int) {
	f, err := os.Open(path)
	if err != nil {
		return 0
	}
	defer f.Close()
	r := bufio.NewReader(io.LimitReader(f, int64(limit)*256+4096))
	known, posix := false, false
	for n < limit {
		line, err := r.ReadSlice('\n')
		name, _, _ := strings.Cut(string(line[:min(len(line), 8)]), ":")
		switch {
		case name == "lock" && bytes.Contains(line, []byte("POSIX")):
			if !posix {
				posix, known = true, seen[string(line)]
				seen[string(line)] = true
			}
			if !known {
				n++
			}
		case name == "lock":
			n++
		case name != "pos" && name != "flags" && name != "mnt_id" && name != "ino":
			return n // what comes after the locks
		}
		if err != nil {
			return n
		}
	}
	return n
}
