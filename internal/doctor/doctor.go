// Package doctor tells what a host can do for dsec, what is missing and how to
// get it. It finds out by trying where trying leaves nothing behind, and by
// looking where it does not.
package doctor

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec/internal/cgroup"
	"github.com/opendsec/dsec/internal/disk"
	"github.com/opendsec/dsec/internal/units"
)

// Need says how much depends on a finding.
type Need string

// The needs.
const (
	Required    Need = "required"    // dsec does not run without
	Recommended Need = "recommended" // something is slower, smaller or less guarded without
	Optional    Need = "optional"    // one feature is missing without
)

// Finding is what was found about one thing.
type Finding struct {
	Name   string `json:"name"`
	Need   Need   `json:"need"`
	OK     bool   `json:"ok"`
	Detail string `json:"detail"` // what is there
	// Fix is what to do where OK is false: a command, or what to ask for.
	Fix string `json:"fix,omitempty"`
}

// Options say what the answers are for.
type Options struct {
	// Dir is where volumes will be: drivers differ by its file system. The
	// nearest directory above it that exists is looked at.
	Dir string
	// Volumes is the directory of the volumes themselves, where there may be some,
	// and how the server is configured to share it.
	Volumes disk.Options
	// More is what else the program wants to be looked at.
	More []Question
}

// Question is one thing to look at. An error of Run means no, and Fix is what to do then.
type Question struct {
	Name string
	Need Need
	Run  func(ctx context.Context, o Options) (detail string, err error)
	Fix  string
}

func questions() []Question {
	return []Question{
		{"kernel", Required, kernel, "install Linux 6.1 or later; 6.14 fills layers on first touch"},
		{"privileges", Required, privileges, "run dsec as root"},
		{"user namespaces", Required, userns, "sysctl -w user.max_user_namespaces=65536; sysctl -w kernel.unprivileged_userns_clone=1 where that exists"},
		{"overlay", Required, filesystem("overlay"), "modprobe overlay"},
		{"erofs", Required, filesystem("erofs"), "modprobe erofs"},
		{"erofs from files", Recommended, erofsFromFile, "install Linux 6.12 or later; without, layers of one file take loop devices too"},
		{"cgroups", Required, cgroups, "mount cgroup v2 with memory, pids and cpu: systemd.unified_cgroup_hierarchy=1 on the kernel command line"},
		{"disk limits", Required, disks, "turn project quotas on for the data directory's file system, or apt-get install btrfs-progs (Linux 6.7 or later), or e2fsprogs"},
		{"disk space", Recommended, diskSpace, "end sandboxes, free space on the data directory's file system, or raise container.disk_image_max_bytes: commands that run while the disk is full have no outcome"},
		{"seccomp", Required, seccomp, "use a kernel with CONFIG_SECCOMP_FILTER"},
		{"raise limits", Recommended, resource, "give dsec CAP_SYS_RESOURCE: without, it keeps neither its own oom_score_adj nor 65,536 files for commands"},
		{"open files", Recommended, nofile, "raise the hard limit: LimitNOFILE=1048576 in the systemd unit, or /etc/security/limits.conf"},
		{"process numbers", Recommended, pidMax, "sysctl -w kernel.pid_max=4194304"},
		{"shared tables", Recommended, sharedTables, "sysctl -w kernel.pty.max=1048576"},
		{"swap", Optional, swap, "give the node swap or zram: paused sandboxes free their memory only with it"},
		{"process memory", Optional, criu, "nothing that dsec could use yet: it keeps what is on a sandbox's disk, and not its processes"},
		{"landlock", Recommended, landlock, "put landlock in the kernel's list of LSMs; the import helper is confined by it"},
		{"apparmor", Optional, apparmor, "boot with apparmor=1 security=apparmor for one more layer around containers"},
		{"kvm", Optional, kvm, "turn on virtualisation, or nested virtualisation, for microvm and vm sandboxes; they are emulated without"},
		{"hardening", Recommended, hardening, "sysctl -w kernel.unprivileged_bpf_disabled=1 kernel.io_uring_disabled=2 kernel.dmesg_restrict=1 kernel.kptr_restrict=2 dev.tty.legacy_tiocsti=0"},
		{"page merging", Recommended, ksm, "echo 0 > /sys/kernel/mm/ksm/run: merged pages tell sandboxes about each other"},
		{"mmdebstrap", Optional, program("mmdebstrap"), "apt-get install mmdebstrap, which the demo makes its base environment with"},
	}
}

// Check looks at everything. It changes nothing that lasts.
func Check(ctx context.Context, o Options) []Finding {
	var found []Finding
	for _, q := range append(questions(), o.More...) {
		detail, err := q.Run(ctx, o)
		f := Finding{Name: q.Name, Need: q.Need, OK: err == nil, Detail: detail}
		if err != nil {
			f.Fix = q.Fix
			f.Detail = strings.Trim(detail+": "+err.Error(), ": ")
		}
		found = append(found, f)
	}
	return found
}

// OK tells whether dsec can run: nothing that is required is missing.
func OK(findings []Finding) bool {
	for _, f := range findings {
		if f.Need == Required && !f.OK {
			return false
		}
	}
	return true
}

func kernel(context.Context, Options) (string, error) {
	var u unix.Utsname
	if err := unix.Uname(&u); err != nil {
		return "", err
	}
	release := unix.ByteSliceToString(u.Release[:])
	return "Linux " + release, olderThan(release, 6, 1)
}

// olderThan is an error if a release, such as 6.12.3-amd64, comes before a version.
func olderThan(release string, major, minor int) error {
	var a, b int
	if _, err := fmt.Sscanf(release, "%d.%d", &a, &b); err != nil {
		return fmt.Errorf("release %q: %w", release, err)
	}
	if cmp.Or(cmp.Compare(a, major), cmp.Compare(b, minor)) < 0 {
		return fmt.Errorf("want %d.%d or later", major, minor)
	}
	return nil
}

func privileges(context.Context, Options) (string, error) {
	if uid := os.Geteuid(); uid != 0 {
		return fmt.Sprintf("uid %d", uid), errors.New("want root")
	}
	have, err := effective()
	if err != nil {
		return "", err
	}
	var missing []string
	for name, bit := range map[string]int{
		"CAP_SYS_ADMIN": unix.CAP_SYS_ADMIN, "CAP_NET_ADMIN": unix.CAP_NET_ADMIN, "CAP_SETUID": unix.CAP_SETUID,
		"CAP_SETGID": unix.CAP_SETGID, "CAP_CHOWN": unix.CAP_CHOWN, "CAP_DAC_OVERRIDE": unix.CAP_DAC_OVERRIDE,
		"CAP_MKNOD": unix.CAP_MKNOD, "CAP_KILL": unix.CAP_KILL,
	} {
		if have&(1<<bit) == 0 {
			missing = append(missing, name)
		}
	}
	if len(missing) > 0 {
		return "root", fmt.Errorf("without %s", strings.Join(missing, ", "))
	}
	return "root", nil
}

func effective() (uint64, error) {
	header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var data [2]unix.CapUserData
	if err := unix.Capget(&header, &data[0]); err != nil {
		return 0, fmt.Errorf("capget: %w", err)
	}
	return uint64(data[1].Effective)<<32 | uint64(data[0].Effective), nil
}

func resource(context.Context, Options) (string, error) {
	have, err := effective()
	if err != nil {
		return "", err
	}
	if have&(1<<unix.CAP_SYS_RESOURCE) == 0 {
		return "", errors.New("no CAP_SYS_RESOURCE")
	}
	return "CAP_SYS_RESOURCE", nil
}

// userns starts a program in the namespaces that a sandbox has.
func userns(ctx context.Context, _ Options) (string, error) {
	cmd := exec.CommandContext(ctx, "/bin/true")
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags: syscall.CLONE_NEWUSER | syscall.CLONE_NEWNS | syscall.CLONE_NEWPID | syscall.CLONE_NEWIPC |
			syscall.CLONE_NEWUTS | syscall.CLONE_NEWNET | syscall.CLONE_NEWCGROUP,
		UidMappings: []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Getuid(), Size: 1}},
		GidMappings: []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Getgid(), Size: 1}},
	}
	if err := cmd.Run(); err != nil {
		return "", err
	}
	return "user, mount, pid, ipc, uts, net and cgroup namespaces", nil
}

// filesystem asks the kernel for a file system, which loads its module.
func filesystem(name string) func(context.Context, Options) (string, error) {
	return func(context.Context, Options) (string, error) {
		fd, err := unix.Fsopen(name, unix.FSOPEN_CLOEXEC)
		if err == unix.EPERM {
			return "", errors.New("only root can tell")
		}
		if err != nil {
			return "", fmt.Errorf("the kernel has none: %w", err)
		}
		return "there", unix.Close(fd)
	}
}

// erofsFromFile gives the kernel a file that is no image: one that mounts
// files reads it and says so, and one that does not wants a block device.
func erofsFromFile(_ context.Context, o Options) (string, error) {
	fd, err := unix.Fsopen("erofs", unix.FSOPEN_CLOEXEC)
	if err != nil {
		return "", err
	}
	defer unix.Close(fd)
	f, err := os.CreateTemp(Above(o.Dir), ".dsec-doctor-")
	if err != nil {
		return "", err
	}
	defer f.Close()
	defer os.Remove(f.Name())
	if err := f.Truncate(1 << 20); err != nil {
		return "", err
	}
	if err := unix.FsconfigSetString(fd, "source", f.Name()); err != nil {
		return "", err
	}
	if err := unix.FsconfigCreate(fd); errors.Is(err, unix.ENOTBLK) {
		return "", errors.New("the kernel wants a block device")
	}
	return "what is filled when it is read, and layers of one file, are mounted without loop devices", nil
}

// Above is the nearest existing directory at or above dir.
func Above(dir string) string {
	if dir == "" {
		return ""
	}
	for dir != "/" && dir != "." {
		if info, err := os.Stat(dir); err == nil && info.IsDir() {
			return dir
		}
		dir = dir[:max(strings.LastIndex(dir, "/"), 0)]
		if dir == "" {
			dir = "/"
		}
	}
	return dir
}

func cgroups(context.Context, Options) (string, error) {
	layout, err := cgroup.Detect()
	if err != nil {
		return "", err
	}
	if layout.Unified {
		return "v2 at " + layout.V2, nil
	}
	return "v2 at " + layout.V2 + " beside memory, pids and cpu on v1", nil
}

func disks(_ context.Context, o Options) (string, error) {
	var usable, notes []string
	for _, d := range disk.Probe(Above(o.Dir)) {
		if d.Err != nil {
			notes = append(notes, d.Name+": "+strings.ReplaceAll(d.Err.Error(), "\n", ", "))
			continue
		}
		usable = append(usable, d.Name)
		if d.Note != "" {
			notes = append(notes, d.Name+": "+d.Note)
		}
	}
	detail := strings.Join(append([]string{strings.Join(usable, ", ")}, notes...), "; ")
	if len(usable) == 0 {
		return strings.Trim(detail, "; "), errors.New("no driver works")
	}
	return detail, nil
}

// diskSpace tells how full the disk of all sandboxes is.
func diskSpace(_ context.Context, o Options) (string, error) {
	driver, space, largest, err := disk.Inspect(o.Volumes)
	if errors.Is(err, os.ErrPermission) {
		return "", errors.New("only root can tell")
	}
	if err != nil || driver == "" {
		return "no sandbox was made yet", err
	}
	detail := fmt.Sprintf("%s: size %s, used %s, allocated %s, free %s", driver, units.Bytes(space.Size), units.Bytes(space.Used), units.Bytes(space.Allocated), units.Bytes(space.Free))
	if largest > 0 {
		detail += ", limit of one sandbox at most " + units.Bytes(largest)
	}
	if space.Free < disk.Room(space.Size) {
		return detail, errors.New("creates are refused")
	}
	return detail, nil
}

func seccomp(context.Context, Options) (string, error) {
	text, err := os.ReadFile("/proc/sys/kernel/seccomp/actions_avail")
	if err != nil {
		return "", err
	}
	for _, want := range []string{"errno", "kill_process"} {
		if !strings.Contains(string(text), want) {
			return strings.TrimSpace(string(text)), fmt.Errorf("no %s", want)
		}
	}
	return "filters with " + strings.TrimSpace(string(text)), nil
}

func nofile(context.Context, Options) (string, error) {
	var l unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &l); err != nil {
		return "", err
	}
	detail := fmt.Sprintf("hard limit %d", l.Max)
	if l.Max < 65536 {
		return detail, errors.New("want 65536 or more")
	}
	return detail, nil
}

// sharedTables looks at what the kernel counts for all sandboxes together: one
// that takes all, or some that take what each may, leave none to others. What it
// counts by user (inotify, queued signals) is each sandbox's own, and of aio
// sandboxes have none.
func sharedTables(context.Context, Options) (string, error) {
	const want = 1 << 17
	text, err := os.ReadFile("/proc/sys/kernel/pty/max")
	if errors.Is(err, os.ErrNotExist) {
		return "no terminals in this kernel", nil
	}
	if err != nil {
		return "", err
	}
	detail := "kernel.pty.max " + strings.TrimSpace(string(text))
	if n, err := strconv.ParseInt(strings.TrimSpace(string(text)), 10, 64); err != nil || n < want {
		return detail, fmt.Errorf("want %d: a sandbox may have 256 terminals, and some that do leave none to others", want)
	}
	return detail, nil
}

func pidMax(context.Context, Options) (string, error) {
	text, err := os.ReadFile("/proc/sys/kernel/pid_max")
	if err != nil {
		return "", err
	}
	n, err := strconv.Atoi(strings.TrimSpace(string(text)))
	if err == nil && n < 1<<20 {
		err = errors.New("want 1048576 or more: a thousand sandboxes with thirty processes each fill it")
	}
	return fmt.Sprintf("pid_max %d", n), err
}
