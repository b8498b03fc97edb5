package testutil

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// Each leak is made for real, must be found by a ledger that has its name, and
// must not be found by one that has not.
func TestLedgerSeesWhatIsLeftInTheKernel(t *testing.T) {
	Require(t, Root, CgroupV2)
	for _, tc := range []struct {
		name, want string
		leak       func(t *testing.T, name string) (undo func())
	}{
		{"mount", "+1 mount ", leakMount},
		{"mount in a pinned namespace", "+1 mount ", leakPinnedMount},
		{"cgroup", "+1 cgroup ", leakCgroup},
		{"process in a cgroup", "+1 process ", leakGroupProcess},
		{"link", "+1 link ", leakLink},
		{"loop", "+1 loop ", leakLoop},
	} {
		t.Run(tc.name, func(t *testing.T) {
			name := Name(t)
			if tc.name == "link" {
				name = LinkName(t)
			}
			if got := seen(t, []string{name}, func() func() { return tc.leak(t, name) }); !strings.Contains(got, tc.want) {
				t.Errorf("found %q, want %q in it", got, tc.want)
			}
			other := Name(t)
			if got := seen(t, []string{other}, func() func() { return tc.leak(t, name) }); strings.Contains(got, tc.want) && tc.name != "process in a cgroup" {
				t.Errorf("a ledger of %s counts what is not its own: %s", other, got)
			}
		})
	}
}

func leakMount(t *testing.T, name string) func() {
	dir := filepath.Join(t.TempDir(), name)
	check(t, os.Mkdir(dir, 0o755))
	check(t, unix.Mount("tmpfs", dir, "tmpfs", 0, ""))
	return func() { check(t, unix.Unmount(dir, 0)); check(t, os.Remove(dir)) }
}

// leakPinnedMount leaves a mount that no process can see: in a namespace kept
// by a bind mount, whose own path does not carry the name.
func leakPinnedMount(t *testing.T, name string) func() {
	base := t.TempDir()
	check(t, unix.Mount("tmpfs", base, "tmpfs", 0, ""))
	check(t, unix.Mount("", base, "", unix.MS_PRIVATE, "")) // a namespace may be pinned only below a private mount
	pin := filepath.Join(base, "pin")
	check(t, os.WriteFile(pin, nil, 0o600))
	dir := filepath.Join(base, name)
	check(t, os.Mkdir(dir, 0o755))
	check(t, onThread(func() error {
		for _, err := range []error{
			unix.Unshare(unix.CLONE_FS | unix.CLONE_NEWNS),
			unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""),
			unix.Mount("tmpfs", dir, "tmpfs", 0, ""),
		} {
			if err != nil {
				return err
			}
		}
		ns := fmt.Sprintf("/proc/self/task/%d/ns/mnt", unix.Gettid())
		host, err := os.Open("/proc/self/ns/mnt") // of the main thread, which is still on the host
		if err != nil {
			return err
		}
		defer func() { _ = host.Close() }()
		own, err := os.Open(ns)
		if err != nil {
			return err
		}
		defer func() { _ = own.Close() }()
		if err := unix.Setns(int(host.Fd()), unix.CLONE_NEWNS); err != nil {
			return err
		}
		return unix.Mount(fmt.Sprintf("/proc/self/fd/%d", own.Fd()), pin, "", unix.MS_BIND, "")
	}))
	return func() {
		check(t, unix.Unmount(pin, 0))
		check(t, unix.Unmount(base, unix.MNT_DETACH))
	}
}

func leakCgroup(t *testing.T, name string) func() {
	dir := filepath.Join(cgroupRoot(t), name)
	check(t, os.Mkdir(dir, 0o755))
	return func() { check(t, os.Remove(dir)) }
}

func leakGroupProcess(t *testing.T, name string) func() {
	undo := leakCgroup(t, name)
	group, err := os.Open(filepath.Join(cgroupRoot(t), name))
	check(t, err)
	cmd := exec.Command("cat")
	cmd.SysProcAttr = &unix.SysProcAttr{UseCgroupFD: true, CgroupFD: int(group.Fd())}
	in, err := cmd.StdinPipe()
	check(t, err)
	check(t, cmd.Start())
	check(t, group.Close())
	return func() { check(t, in.Close()); check(t, cmd.Wait()); undo() }
}

func leakLink(t *testing.T, name string) func() {
	attrs := netlink.NewLinkAttrs()
	attrs.Name = name
	link := &netlink.Bridge{LinkAttrs: attrs}
	check(t, netlink.LinkAdd(link))
	return func() { check(t, netlink.LinkDel(link)) }
}

func leakLoop(t *testing.T, name string) func() {
	Require(t, Program("losetup"))
	file := filepath.Join(t.TempDir(), name)
	check(t, os.WriteFile(file, make([]byte, 1<<20), 0o600))
	out, err := exec.Command("losetup", "--show", "--find", file).CombinedOutput()
	if err != nil {
		t.Fatalf("losetup: %v: %s", err, out)
	}
	return func() { check(t, exec.Command("losetup", "--detach", strings.TrimSpace(string(out))).Run()) }
}

func cgroupRoot(t *testing.T) string {
	dirs, err := cgroupMounts("cgroup2")
	check(t, err)
	return dirs[0]
}

func check(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
