package container

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/backend"
	"github.com/opendsec/dsec/internal/chronusapi"
	"github.com/opendsec/dsec/internal/confine"
)

// inside runs insideMain in the sandbox and returns its lines.
func (s *sandbox) inside(args ...string) []string {
	s.Helper()
	o := s.run(append([]string{"/bin/inside"}, args...)...)
	if !o.OK() {
		s.Fatalf("inside %v: %+v\n%s", args, o.Outcome, o.out)
	}
	return strings.Split(strings.TrimSpace(o.out), "\n")
}

// onHost runs it on the host, in a mount namespace of its own: the control
// that shows that a refusal inside is the sandbox's doing.
func onHost(t testing.TB, args ...string) []string {
	t.Helper()
	dir, err := programs()
	check(t, err)
	cmd := exec.Command("unshare", append([]string{"--mount", "--propagation", "private", filepath.Join(dir, "inside")}, args...)...)
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("control: %v\n%s", err, out)
	}
	return strings.Split(strings.TrimSpace(string(out)), "\n")
}

// S02: a process has the three standard descriptors, and no link of its own
// leads to the host.
func TestNoDescriptorLeaks(t *testing.T) {
	s := newHost(t, nil).create()
	for range 2 { // the first process, and one that came after
		for _, line := range s.inside("fds") {
			f := strings.Fields(line)
			switch f[0] {
			case "fd":
				if strings.HasPrefix(f[2], "/sys/fs/cgroup/") {
					continue // opened by the Go runtime of the program itself
				}
				if !slices.Contains([]string{"0", "1", "2"}, f[1]) {
					t.Errorf("a descriptor more: %s", line)
				}
				if !strings.HasPrefix(f[2], "pipe:") && f[2] != "/dev/null" {
					t.Errorf("a descriptor of something: %s", line)
				}
			case "cwd", "root":
				if f[1] != "/" {
					t.Errorf("have %s, want /", line)
				}
			case "exe":
				if f[1] != "/bin/inside" {
					t.Errorf("have %s", line)
				}
			}
		}
	}
}

// S04: an image whose directories of the platform are symlinks is refused, and
// files of the platform's that are symlinks are not followed.
func TestImageSymlinks(t *testing.T) {
	h := newHost(t, nil)
	target := filepath.Join(t.TempDir(), "target")
	check(t, os.WriteFile(target, []byte("the host's\n"), 0o644))
	replace := func(path, with string) func(string) {
		return func(root string) {
			check(t, os.RemoveAll(filepath.Join(root, path)))
			check(t, os.MkdirAll(filepath.Dir(filepath.Join(root, path)), 0o755))
			check(t, os.Symlink(with, filepath.Join(root, path)))
		}
	}
	for _, path := range []string{"proc", "sys", "dev", "etc", "tmp"} {
		for _, with := range []string{"/bin", "../../../../" + filepath.Dir(target), "/proc/self/fd"} {
			_, err := h.b.Create(t.Context(), h.request(image(t, replace(path, with))))
			if err == nil || dsec.CodeOf(err) != dsec.CodeInvalid || !strings.Contains(err.Error(), "/"+path) {
				t.Errorf("/%s -> %s: %v, want invalid that names /%s", path, with, err, path)
			}
		}
	}
	for _, path := range []string{"dev/null", "dev/pts", "dev/console", "dev/shm", "etc/hosts", "etc/hostname", "etc/resolv.conf"} {
		s := h.create(image(t, replace(path, target)))
		if o := s.sh("echo x >> /" + path + "; cat /etc/hosts"); !strings.Contains(o.out, "127.0.0.1") {
			t.Errorf("%s: /etc/hosts has %q", path, o.out)
		}
	}
	if b, err := os.ReadFile(target); err != nil || string(b) != "the host's\n" {
		t.Errorf("the host's file has %q, %v", b, err)
	}
	// The control: a name that is missing is made.
	s := h.create(image(t, func(root string) { check(t, os.RemoveAll(filepath.Join(root, "tmp"))) }))
	if o := s.sh("echo hello > /tmp/x; cat /tmp/x"); o.out != "hello\n" {
		t.Errorf("have %q", o.out)
	}
}

// S06: no mount call works, and what masks cover stays covered.
func TestNoMounts(t *testing.T) {
	s := newHost(t, nil).create()
	for _, line := range s.inside("mounts") {
		if !strings.HasSuffix(line, " EPERM") {
			t.Errorf("%s, want EPERM", line)
		}
	}
	if o := s.sh("cat /proc/kallsyms /proc/keys /proc/kmsg 2>/dev/null | wc -c; ls /proc/acpi /proc/driver"); !strings.HasPrefix(o.out, "0\n") {
		t.Errorf("masked files have %q", o.out)
	}
	control := onHost(t, "mounts")
	for _, want := range []string{"fsopen ok", "mount ok", "open_tree ok", "unshare_mnt ok"} {
		if !slices.Contains(control, want) {
			t.Errorf("control: %v has no %q", control, want)
		}
	}
}

// S12: what would run a program on the host or change the kernel cannot be
// opened for writing.
func TestNoKernelKnobs(t *testing.T) {
	s := newHost(t, nil).create()
	knobs := []string{
		"/proc/sys/kernel/core_pattern", "/proc/sys/kernel/modprobe", "/proc/sysrq-trigger", "/proc/sys/fs/binfmt_misc/register",
		"/sys/fs/cgroup/memory/release_agent", "/sys/kernel/uevent_helper", "/proc/sys/kernel/hostname", "/proc/sys/vm/overcommit_memory",
		"/proc/sys/net/ipv4/ip_forward", "/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory.max",
	}
	before, err := os.ReadFile("/proc/sys/kernel/core_pattern")
	check(t, err)
	for _, line := range s.inside(append([]string{"open"}, knobs...)...) {
		if f := strings.Fields(line); f[2] != "EROFS" && f[2] != "ENOENT" && f[2] != "EACCES" {
			t.Errorf("%s, want EROFS, ENOENT or EACCES", line)
		}
	}
	s.sh("kill -SEGV $$")
	if after, err := os.ReadFile("/proc/sys/kernel/core_pattern"); err != nil || string(after) != string(before) {
		t.Errorf("core_pattern is %q, %v", after, err)
	}
	if control := onHost(t, "open", "/proc/sys/kernel/core_pattern"); control[0] != "open /proc/sys/kernel/core_pattern ok" {
		t.Errorf("control: %v", control)
	}
}

// S17: a fork bomb ends at the limit, and neither chronus nor others notice.
func TestForkBomb(t *testing.T) {
	h := newHost(t, nil)
	s, neighbour := h.create(), h.create()
	lines := s.inside("forks", "100000")
	var forked int
	_, err := fmt.Sscanf(lines[0], "forked %d", &forked)
	check(t, err)
	if limit := int(h.request().Spec.Limits.Pids); forked < limit/2 || forked >= limit || lines[1] != "fork EAGAIN" {
		t.Errorf("have %v, want EAGAIN below %d", lines, limit)
	}
	if o := neighbour.inside("forks", "20"); o[0] != "forked 20" {
		t.Errorf("neighbour: %v", o)
	}
	if o := s.sh("echo alive"); o.out != "alive\n" {
		t.Errorf("have %q", o.out)
	}
	// One that is still full of processes when it is destroyed.
	ev, err := s.client.Start(t.Context(), chronusapi.StartRequest{
		Command: chronusapi.Command{Argv: []string{"/bin/sh", "-c", "while :; do sleep 1000 & done"}, Env: []string{"PATH=/bin"}, Cwd: "/"},
		Detach:  true,
	})
	check(t, err)
	check(t, ev.Close())
	check(t, s.i.Destroy(t.Context()))
	select {
	case <-s.i.Done():
	default:
		t.Error("destroyed, and not done")
	}
}

// S28: nothing inside leads to the platform.
func TestNoEndpoints(t *testing.T) {
	h := newHost(t, nil)
	s := h.create()
	h.create()
	lines := s.inside("endpoints")
	for _, line := range lines {
		if strings.HasPrefix(line, "connected") || strings.HasPrefix(line, "vsock") && strings.HasSuffix(line, "ok") {
			t.Error(line)
		}
		if f := strings.Fields(line); f[0] == "listeners" && f[2] != "0" {
			t.Errorf("%s, want none", line)
		}
	}
	if !slices.Contains(lines, "walked true") {
		t.Errorf("the walk saw nothing: %v", lines)
	}
	// The control: the socket of chronus can be reached from the host.
	c, err := s.i.Dial(t.Context())
	check(t, err)
	check(t, c.Close())
}

// S44: nothing inside tells of other sandboxes or of the host's paths.
func TestNothingTellsOfTheHost(t *testing.T) {
	h := newHost(t, nil)
	s, other := h.create(), h.create()
	o := s.sh("cat /proc/self/mountinfo /proc/self/cgroup /proc/1/cgroup /proc/net/* /proc/mounts /proc/*/cmdline /proc/*/environ /etc/hosts; " +
		"ls -R /sys /dev; dmesg; hostname; grep -r . /sys/fs/cgroup 2>/dev/null; grep -rs . /proc/sys/kernel; exit 0")
	if len(o.out) < 1000 {
		t.Fatalf("too little to search: %q", o.out)
	}
	host, err := os.Hostname()
	check(t, err)
	for name, secret := range map[string]string{
		"its ID": string(s.id), "the other's ID": string(other.id), "the run directory": h.config.RunDir, "the disk's directory": h.config.Disk.Dir,
		"the tree of cgroups": h.config.Cgroup, "the other's cgroup": h.groupOf(other), "the image's path": filepath.Dir(imagePath(h.image)),
		"the host's name": "hostname=" + host,
	} {
		for line := range strings.Lines(o.out) {
			if strings.Contains(line, secret) {
				t.Errorf("%s is seen: %s", name, line)
			}
		}
	}
	for _, control := range []string{"overlay", "hostname:sandbox"} {
		if !strings.Contains(o.out, control) {
			t.Errorf("control: %q is not seen either", control)
		}
	}
}

func (h *host) groupOf(s *sandbox) string { return s.i.(*instance).sh.group.Name() }

// Of /proc, root inside can read what is kept and of processes, and no byte of
// anything else, whether it is covered or the host's root's.
func TestNothingElseOfProcIsRead(t *testing.T) {
	h := newHost(t, nil)
	s := h.create()
	kept := strings.Join(confine.ProcKeep, "|")
	o := s.sh(`cd /proc; n=0
for f in *; do
	case $f in [0-9]*|` + kept + `) continue;; esac
	n=$((n+1))
	if [ -d $f ]; then
		[ -z "$(ls -A $f)" ] || echo "$f is not empty"
	elif [ -n "$(head -c 1 $f 2>/dev/null | tr '\0' x)" ]; then
		echo "$f can be read"
	fi
	[ ! -d $f ] && (: >> $f) 2>/dev/null && echo "$f can be opened for writing"
done; [ $n -gt 20 ] && echo done`)
	if o.out != "done\n" {
		t.Errorf("have %q, %+v", o.out, o.Outcome)
	}
}

// S45: the bytes of a shared image cannot be changed from inside.
func TestLayerCannotBeAltered(t *testing.T) {
	h := newHost(t, nil)
	before := sum(t, imagePath(h.image))
	a, b := h.create(), h.create()
	want := b.sh("cat /etc/shared /bin/busybox | sha256sum").out
	lines := a.inside("alter", "/etc/shared", "/bin/busybox")
	if !slices.Contains(lines, "write /etc/shared ok") {
		t.Errorf("control: its own copy cannot be written: %v", lines)
	}
	if o := b.sh("cat /etc/shared /bin/busybox | sha256sum"); o.out != want || o.Code != 0 {
		t.Errorf("the neighbour reads %q, before %q", o.out, want)
	}
	if o := h.create().sh("cat /etc/shared /bin/busybox | sha256sum"); o.out != want {
		t.Errorf("a new sandbox reads %q, before %q", o.out, want)
	}
	if after := sum(t, imagePath(h.image)); after != before {
		t.Error("the image's bytes are not what they were")
	}
}

// Two layers, the higher one wins; and none at all.
func TestLayerOrder(t *testing.T) {
	h := newHost(t, nil)
	top := image(t, func(root string) {
		check(t, os.RemoveAll(root+"/bin"))
		check(t, os.WriteFile(root+"/etc/shared", []byte("from the top\n"), 0o644))
	})
	if o := h.create(h.image, top).sh("cat /etc/shared; ls /bin | grep -c busybox"); o.out != "from the top\n1\n" {
		t.Errorf("have %q", o.out)
	}
	req := h.request()
	req.Layers = []backend.Layer{}
	i, err := h.b.Create(t.Context(), req)
	check(t, err)
	check(t, i.Destroy(t.Context()))
}
