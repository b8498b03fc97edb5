package edge

import (
	"time"

	"golang.org/x/sys/unix"
)

// bootClock is the time since boot, suspends counted.
func bootClock() time.Duration {
	var ts unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_BOOTTIME, &ts); err != nil {
		panic(err) // every kernel that we run on has it
	}
	return time.Duration(ts.Nano())
}
