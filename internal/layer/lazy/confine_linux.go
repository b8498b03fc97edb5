package lazy

import (
	"fmt"
	"os"
	"unsafe"

	"github.com/landlock-lsm/go-landlock/landlock"
	"golang.org/x/sys/unix"
	"kernel.org/pub/linux/libs/security/libcap/psx"
)

// confine takes from layerd what it does not need: all capabilities but the one by
// which it reads a store whose files are others', and, where the kernel has
// Landlock, writing outside of its two directories. What it needs rights for, the
// fanotify group and the FUSE mount, it has from the client, as descriptors.
func confine(run, cache *os.File) error {
	err := landlock.V11.BestEffort().RestrictPaths(
		landlock.RODirs("/"),
		landlock.RWDirs(below(run, "."), below(cache, ".")))
	if err != nil {
		return fmt.Errorf("layerd: landlock: %w", err)
	}
	header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var old, sets [2]unix.CapUserData
	if err := unix.Capget(&header, &old[0]); err != nil {
		return fmt.Errorf("layerd: capabilities: %w", err)
	}
	const keep = 1 << unix.CAP_DAC_READ_SEARCH
	sets[0].Effective, sets[0].Permitted = old[0].Permitted&keep, old[0].Permitted&keep
	// Of all threads: those of the runtime are many.
	_, _, errno := psx.Syscall3(unix.SYS_CAPSET, uintptr(unsafe.Pointer(&header)), uintptr(unsafe.Pointer(&sets[0])), 0)
	if errno != 0 {
		return fmt.Errorf("layerd: capabilities: %w", errno)
	}
	return nil
}
