package hostos

import (
	"fmt"
	"unsafe"

	"golang.org/x/sys/unix"
	"kernel.org/pub/linux/libs/security/libcap/psx"
)

// KeepCapabilities takes all capabilities from this process, all its threads,
// but those of the mask that it has.
func KeepCapabilities(mask uint32) error {
	header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var old, sets [2]unix.CapUserData
	if err := unix.Capget(&header, &old[0]); err != nil {
		return fmt.Errorf("capabilities: %w", err)
	}
	sets[0].Effective, sets[0].Permitted = old[0].Permitted&mask, old[0].Permitted&mask
	// Of all threads: those of the runtime are many.
	_, _, errno := psx.Syscall3(unix.SYS_CAPSET, uintptr(unsafe.Pointer(&header)), uintptr(unsafe.Pointer(&sets[0])), 0)
	if errno != 0 {
		return fmt.Errorf("capabilities: %w", errno)
	}
	return nil
}
