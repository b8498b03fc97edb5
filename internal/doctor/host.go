package doctor

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

func swap(context.Context, Options) (string, error) {
	text, err := os.ReadFile("/proc/swaps")
	if err != nil {
		return "", err
	}
	lines := strings.Split(strings.TrimSpace(string(text)), "\n")
	if len(lines) < 2 {
		detail := "none"
		if size, err := os.ReadFile("/sys/block/zram0/disksize"); err == nil {
			detail = "none; zram0 has size " + strings.TrimSpace(string(size))
		}
		return detail, errors.New("no swap")
	}
	var names []string
	for _, line := range lines[1:] {
		names = append(names, strings.Fields(line)[0])
	}
	return strings.Join(names, ", "), nil
}

func landlock(context.Context, Options) (string, error) {
	version, _, e := unix.Syscall(unix.SYS_LANDLOCK_CREATE_RULESET, 0, 0, unix.LANDLOCK_CREATE_RULESET_VERSION)
	if e != 0 {
		return "", e
	}
	return fmt.Sprintf("ABI %d", version), nil
}

func apparmor(context.Context, Options) (string, error) {
	text, err := os.ReadFile("/sys/module/apparmor/parameters/enabled")
	if err != nil || strings.TrimSpace(string(text)) != "Y" {
		return "", errors.New("not in this kernel, or off")
	}
	return "on", nil
}

// kvm looks and does not boot: only a guest that answers shows that it works.
func kvm(context.Context, Options) (string, error) {
	fd, err := unix.Open("/dev/kvm", unix.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		return "", fmt.Errorf("/dev/kvm: %w", err)
	}
	defer unix.Close(fd)
	const getAPIVersion = 0xae00
	version, err := unix.IoctlRetInt(fd, getAPIVersion)
	if err != nil || version != 12 {
		return "", fmt.Errorf("/dev/kvm has API version %d: %w", version, err)
	}
	// PVM runs guests whose kernel knows it; an ordinary one hangs.
	if _, err := os.Stat("/sys/module/kvm_pvm"); err == nil {
		return "/dev/kvm is PVM", errors.New("it runs no ordinary guest kernel")
	}
	return "/dev/kvm answers", nil
}

// hardened are the settings that matter where a sandbox shares the kernel: the
// least value of each. One that the kernel does not have is no gap.
var hardened = []struct {
	name  string
	least int
	most  int
}{
	{"kernel/unprivileged_bpf_disabled", 1, 2},
	{"kernel/io_uring_disabled", 2, 2},
	{"kernel/dmesg_restrict", 1, 1},
	{"kernel/kptr_restrict", 1, 2},
	{"dev/tty/legacy_tiocsti", 0, 0},
}

func hardening(context.Context, Options) (string, error) {
	var open []string
	for _, h := range hardened {
		text, err := os.ReadFile("/proc/sys/" + h.name)
		if err != nil {
			continue
		}
		var n int
		if _, err := fmt.Sscan(string(text), &n); err != nil || n < h.least || n > h.most {
			open = append(open, strings.ReplaceAll(h.name, "/", ".")+"="+strings.TrimSpace(string(text)))
		}
	}
	if len(open) > 0 {
		return strings.Join(open, " "), errors.New("sandboxes are refused these by other means, but not doubly")
	}
	return "the kernel's own switches are set", nil
}

func ksm(context.Context, Options) (string, error) {
	text, err := os.ReadFile("/sys/kernel/mm/ksm/run")
	if err != nil || strings.TrimSpace(string(text)) == "0" {
		return "off", nil
	}
	return "on", errors.New("memory of sandboxes is merged")
}

// criu tells whether the processes of a sandbox could be kept on a disk.
func criu(ctx context.Context, _ Options) (string, error) {
	path, err := exec.LookPath("criu")
	if err != nil {
		return "", errors.New("criu is not installed: packs, forks and migrations lose memory")
	}
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	out, err := exec.CommandContext(ctx, path, "check").CombinedOutput()
	if lines := strings.Split(strings.TrimSpace(string(out)), "\n"); err != nil || strings.HasPrefix(lines[len(lines)-1], "Error") {
		return path, fmt.Errorf("criu does not work with this kernel: %.200s", lines[0])
	}
	return path + " works", errors.New("dsec does not use it yet: packs, forks and migrations lose memory")
}

func program(name string) func(context.Context, Options) (string, error) {
	return func(context.Context, Options) (string, error) {
		path, err := exec.LookPath(name)
		if err != nil {
			return "", errors.New("not installed")
		}
		return path, nil
	}
}
