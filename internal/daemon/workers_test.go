package daemon

import (
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"
)

// A function runs on a goroutine that waits for one, beside others on ones of
// their own, and no goroutine waits for ever: the bubble would not end.
func TestWorkers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var w workers
		hold := make(chan bool)
		var ran atomic.Int32
		w.run(func() { ran.Add(1) })
		synctest.Wait()
		select {
		case w.next <- func() { ran.Add(1); <-hold }:
		default:
			t.Fatal("no goroutine waits")
		}
		w.run(func() { ran.Add(1) }) // while that one is busy
		synctest.Wait()
		close(hold)
		synctest.Wait()
		if ran.Load() != 3 {
			t.Errorf("%d functions ran, want 3", ran.Load())
		}
		<-time.After(workerIdle) // of the bubble
		synctest.Wait()
		select {
		case w.next <- func() {}:
			t.Errorf("a goroutine still waits after %v", workerIdle)
		default:
		}
	})
}
