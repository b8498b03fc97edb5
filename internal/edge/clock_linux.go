package edge

import (
	"bytes"
	"os"
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

// readBootID tells one boot of the host from another.
func readBootID() (string, error) {
	b, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	return string(bytes.TrimSpace(b)), err
}
