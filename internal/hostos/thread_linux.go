package hostos

import (
	"runtime"

	"golang.org/x/sys/unix"
)

// OnThread runs f on a thread that nothing else will use, before or after, so
// that f may change what belongs to a thread; it ends with f. It is never the
// main thread, which would not end and is what /proc/self shows of the process.
func OnThread(f func()) {
	go func() {
		runtime.LockOSThread()
		if unix.Gettid() != unix.Getpid() {
			f() // without an unlock, so that the thread ends with the goroutine
			return
		}
		taken := make(chan struct{})
		OnThread(func() {
			close(taken)
			f()
		})
		<-taken // until then the main thread is kept from being the other one's
		runtime.UnlockOSThread()
	}()
}
