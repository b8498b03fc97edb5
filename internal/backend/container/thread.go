package container

import (
	"runtime"

	"golang.org/x/sys/unix"
)

// onThread runs f on a thread that nothing else will use, before or after, so
// that f may move it to other namespaces; it ends with f. It is never the main
// thread, whose namespaces /proc/self shows for the whole process.
func onThread(f func()) {
	go func() {
		runtime.LockOSThread()
		if unix.Gettid() != unix.Getpid() {
			f() // without an unlock, so that the thread ends with the goroutine
			return
		}
		taken := make(chan struct{})
		onThread(func() {
			close(taken)
			f()
		})
		<-taken // until then the main thread is kept from being the other one's
		runtime.UnlockOSThread()
	}()
}
