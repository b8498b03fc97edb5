package lazy

import (
	"fmt"
	"os"

	"github.com/landlock-lsm/go-landlock/landlock"
	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec/internal/hostos"
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
	if err := hostos.KeepCapabilities(1 << unix.CAP_DAC_READ_SEARCH); err != nil {
		return fmt.Errorf("layerd: %w", err)
	}
	return nil
}
