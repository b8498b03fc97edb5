package chronus

import (
	"os"
	"os/signal"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// exit is how a child ended, from wait4.
type exit struct {
	status syscall.WaitStatus
	cpu    time.Duration
	maxRSS int64 // bytes
}

// reaper waits for all children of this process: those that were started, and
// the orphans that came to PID 1. There is one per process, since wait4(-1)
// takes the status of any child.
type reaper struct {
	mu       sync.Mutex
	exited   map[int]func(exit)
	starting int          // starts whose pid is not known yet
	early    map[int]exit // children that ended while starting > 0, by pid
}

var theReaper = sync.OnceValue(func() *reaper {
	r := &reaper{exited: make(map[int]func(exit)), early: make(map[int]exit)}
	signals := make(chan os.Signal, 1) // one is enough: each wakes a loop over all that ended
	signal.Notify(signals, syscall.SIGCHLD)
	go func() {
		for range signals {
			r.reap()
		}
	}()
	return r
})

// reap takes the status of every child that has ended.
func (r *reaper) reap() {
	for {
		// A pid stays taken until wait4 has returned it, and the lock is held
		// until the table knows, so no pid in the table is ever another's.
		r.mu.Lock()
		var e exit
		var ru syscall.Rusage
		pid, err := syscall.Wait4(-1, &e.status, syscall.WNOHANG, &ru)
		if err == syscall.EINTR {
			r.mu.Unlock()
			continue
		}
		if err != nil || pid <= 0 {
			r.mu.Unlock()
			return
		}
		e.cpu = time.Duration(ru.Utime.Nano() + ru.Stime.Nano())
		e.maxRSS = ru.Maxrss << 10
		f := r.exited[pid]
		delete(r.exited, pid)
		if f == nil && r.starting > 0 {
			r.early[pid] = e
		}
		r.mu.Unlock()
		if f != nil {
			f(e)
		}
	}
}

// begin announces a start; every begin is followed by one end.
func (r *reaper) begin() {
	r.mu.Lock()
	r.starting++
	r.mu.Unlock()
}

// end tells the pid of the child that was started, and what is called, once,
// when it has ended: f gets the lock of nothing and may be called before end
// returns. A nil f, or pid 0, is for a start that failed.
func (r *reaper) end(pid int, f func(exit)) {
	r.mu.Lock()
	r.starting--
	e, early := r.early[pid]
	delete(r.early, pid)
	if early && f != nil && exists(pid) {
		early = false // an orphan that had the number before
	}
	if !early && f != nil {
		r.exited[pid] = f
	}
	if r.starting == 0 {
		clear(r.early)
	}
	r.mu.Unlock()
	if early && f != nil {
		f(e)
	}
}

// exists reports whether pid is a child that has not been waited for.
func exists(pid int) bool {
	return unix.Waitid(unix.P_PID, pid, nil, unix.WEXITED|unix.WNOHANG|unix.WNOWAIT, nil) == nil
}

// signal sends a signal to a child that has not been waited for.
func (r *reaper) signal(pid int, sig syscall.Signal) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.exited[pid] == nil {
		return syscall.ESRCH
	}
	return syscall.Kill(pid, sig)
}
