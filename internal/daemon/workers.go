package daemon

import (
	"sync"
	"time"
)

// workers run functions on goroutines that wait a while for the next one: the
// stack of a new goroutine would grow, by copying, four times in each call.
type workers struct {
	once sync.Once
	next chan func() // has a receiver for each goroutine that waits
}

// workerIdle is how long a goroutine waits.
const workerIdle = time.Second

func (w *workers) run(f func()) {
	w.once.Do(func() { w.next = make(chan func()) })
	select {
	case w.next <- f:
	default:
		go w.work(f)
	}
}

func (w *workers) work(f func()) {
	idle := time.NewTimer(workerIdle)
	defer idle.Stop()
	for {
		f()
		f = nil // may be all that holds a sandbox in memory
		idle.Reset(workerIdle)
		select {
		case f = <-w.next:
		case <-idle.C:
			return
		}
	}
}
