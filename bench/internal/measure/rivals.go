package measure

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// HybridForCrun lets crun run on the v1+v2 hybrid: it refuses to while a
// controller is on v2, which mounting hugetlb as v1, anywhere, takes away.
func HybridForCrun(work string) func() {
	controllers := strings.Fields(ReadFile("/sys/fs/cgroup/unified/cgroup.controllers"))
	if !slices.Contains(controllers, "hugetlb") {
		return func() {}
	}
	dir := filepath.Join(work, "hugetlb")
	if os.Mkdir(dir, 0o700) != nil || unix.Mount("cgroup", dir, "cgroup", 0, "hugetlb") != nil {
		return func() {}
	}
	return func() { _ = unix.Unmount(dir, unix.MNT_DETACH) }
}

// RemovePodmanParent returns what removes the empty cgroups that podman leaves
// in every hierarchy, unless it was there before.
func RemovePodmanParent() func() {
	places := func() []string {
		one, _ := filepath.Glob("/sys/fs/cgroup/libpod_parent")
		more, _ := filepath.Glob("/sys/fs/cgroup/*/libpod_parent")
		return append(one, more...)
	}
	if len(places()) > 0 {
		return func() {}
	}
	return func() {
		// conmon ends some time after podman rm has returned.
		for try := 0; try < 100 && len(places()) > 0; try++ {
			for _, dir := range places() {
				below, _ := filepath.Glob(dir + "/*")
				for _, d := range append(below, dir) {
					_ = unix.Rmdir(d) // refuses what is in use
				}
			}
			<-time.After(20 * time.Millisecond)
		}
	}
}
