package edge

import (
	"syscall"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// bootClock is the time since boot, suspends counted. It is read at each call, so
// in the way of package rawnet.
func bootClock() time.Duration {
	var ts unix.Timespec
	if _, _, errno := syscall.RawSyscall(syscall.SYS_CLOCK_GETTIME, unix.CLOCK_BOOTTIME, uintptr(unsafe.Pointer(&ts)), 0); errno != 0 {
		panic(errno) // every kernel that we run on has it
	}
	return time.Duration(ts.Nano())
}
