package testutil

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strings"

	"golang.org/x/sys/unix"
)

// The needs. Each check only looks; none changes the host.
var (
	// Root is effective user 0 with CAP_SYS_ADMIN: what a node runs as.
	Root = newNeed("root", checkRoot)
	// CgroupV2 is a cgroup v2 tree that this process may make groups in; on
	// the v1+v2 hybrid it is the one without controllers.
	CgroupV2 = newNeed("cgroup2", func() error { return checkMounted("cgroup2") })
	// CgroupV1 is a host whose controllers are on cgroup v1.
	CgroupV1 = newNeed("cgroup1", func() error { return checkMounted("cgroup") })
	// KVM is hardware virtualisation. /dev/kvm alone does not say so: under
	// PVM the device is there and an ordinary guest kernel hangs.
	KVM = newNeed("kvm", checkKVM)
	// EROFS and the others are file systems the kernel knows now or can load.
	EROFS   = newNeed("erofs", func() error { return checkFilesystem("erofs") })
	Overlay = newNeed("overlay", func() error { return checkFilesystem("overlay") })
	Btrfs   = newNeed("btrfs", func() error { return checkFilesystem("btrfs") })
)

// Program is a need for a program in PATH.
func Program(name string) Need {
	return newNeed("program:"+name, func() error {
		_, err := exec.LookPath(name)
		return err
	})
}

// Kernel is a need for a kernel version of at least major.minor.
func Kernel(major, minor int) Need {
	return newNeed(fmt.Sprintf("kernel:%d.%d", major, minor), func() error {
		var u unix.Utsname
		if err := unix.Uname(&u); err != nil {
			return err
		}
		release := unix.ByteSliceToString(u.Release[:])
		var gotMajor, gotMinor int
		if _, err := fmt.Sscanf(release, "%d.%d", &gotMajor, &gotMinor); err != nil {
			return fmt.Errorf("kernel release %q: %w", release, err)
		}
		if gotMajor < major || gotMajor == major && gotMinor < minor {
			return fmt.Errorf("the kernel is %s", release)
		}
		return nil
	})
}

func checkRoot() error {
	if os.Geteuid() != 0 {
		return fmt.Errorf("running as uid %d", os.Geteuid())
	}
	hdr := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var data [2]unix.CapUserData
	if err := unix.Capget(&hdr, &data[0]); err != nil {
		return fmt.Errorf("capget: %w", err)
	}
	if data[0].Effective&(1<<unix.CAP_SYS_ADMIN) == 0 {
		return errors.New("uid 0 without CAP_SYS_ADMIN")
	}
	return nil
}

func checkMounted(fstype string) error {
	dirs, err := cgroupMounts(fstype)
	if err != nil {
		return err
	}
	for _, dir := range dirs {
		if unix.Access(dir, unix.W_OK) == nil {
			return nil
		}
	}
	return fmt.Errorf("no writable %s mount", fstype)
}

func checkKVM() error {
	f, err := os.OpenFile("/dev/kvm", os.O_RDWR, 0)
	if err != nil {
		return err
	}
	_ = f.Close()
	for _, module := range []string{"kvm_intel", "kvm_amd"} {
		if _, err := os.Stat("/sys/module/" + module); err == nil {
			return nil
		}
	}
	return errors.New("/dev/kvm is not backed by hardware (neither kvm_intel nor kvm_amd)")
}

// checkFilesystem also believes a module that modprobe could load, which is
// how Debian kernels ship most file systems.
func checkFilesystem(name string) error {
	b, err := os.ReadFile("/proc/filesystems")
	if err != nil {
		return err
	}
	for line := range strings.Lines(string(b)) {
		if f := strings.Fields(line); len(f) > 0 && f[len(f)-1] == name {
			return nil
		}
	}
	if err := exec.Command("modprobe", "--dry-run", name).Run(); err == nil {
		return nil
	}
	return fmt.Errorf("the kernel has no %s", name)
}
