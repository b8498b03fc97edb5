package container

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec/internal/testutil"
)

// S09: of all socket families a program gets four, and of netlink the one
// protocol that tells of routes, however it asks.
func TestSocketFamilies(t *testing.T) {
	// The oracle: asking for a family makes the host's kernel load its module.
	before := protocols(t)
	s := newHost(t, nil).createProbed()
	var have map[string]any
	s.probe(&have, "sockets")
	native, netlink := stringMap(have["native"]), stringMap(have["netlink"])
	if len(native) != 47 || len(netlink) < 23 {
		t.Fatalf("%d families and %d protocols tried, want 47 and 23", len(native), len(netlink))
	}
	for family, r := range native {
		want := "EAFNOSUPPORT"
		if slices.Contains([]string{"1", "2", "10", "16"}, family) { // unix, inet, inet6, netlink
			want = "ok"
		}
		if r != want {
			t.Errorf("family %s: %s, want %s", family, r, want)
		}
	}
	for protocol, r := range netlink {
		want := "EPROTONOSUPPORT"
		if protocol == "0" { // route
			want = "ok"
		}
		if r != want {
			t.Errorf("netlink protocol %s: %s, want %s", protocol, r, want)
		}
	}
	for _, name := range []string{"i386_socketcall", "i386_socket", "x32_socket"} {
		if have[name] != "SIGSYS" {
			t.Errorf("%s: %v, want SIGSYS", name, have[name])
		}
	}
	// A ring opens sockets without the socket call.
	for nr, r := range s.sweep(425, 427) {
		if r != "EPERM" && r != "ENOSYS" {
			t.Errorf("io_uring call %d: %s, want EPERM or ENOSYS", nr, r)
		}
	}
	if after := protocols(t); !slices.Equal(before, after) {
		t.Errorf("the kernel has loaded protocols: %v, before %v", after, before)
	}

	var control map[string]any
	probeFree(t, &control, "sockets")
	if r := stringMap(control["native"])["17"]; r != "ok" { // packet
		t.Errorf("control: a packet socket is %s without a sandbox, want ok", r)
	}
	if r := stringMap(control["netlink"])["15"]; r != "ok" { // uevent
		t.Errorf("control: uevent netlink is %s without a sandbox, want ok", r)
	}
}

func stringMap(v any) map[string]string {
	m := map[string]string{}
	values, _ := v.(map[string]any)
	for k, v := range values {
		m[k] = fmt.Sprint(v)
	}
	return m
}

// protocols are the names of what the host's kernel has sockets for.
func protocols(t testing.TB) []string {
	t.Helper()
	text, err := os.ReadFile("/proc/net/protocols")
	check(t, err)
	var names []string
	for line := range strings.Lines(string(text)) {
		names = append(names, strings.Fields(line)[0])
	}
	slices.Sort(names)
	return names
}

// sweepResult is what dsec-probe syscalls prints.
type sweepResult struct{ Results map[string]string }

func (r sweepResult) byNumber(t testing.TB) map[int]string {
	t.Helper()
	all := map[int]string{}
	for name, result := range r.Results {
		nr, err := strconv.Atoi(name)
		check(t, err)
		all[nr] = result
	}
	return all
}

// sweep makes each system call of a range with null arguments.
func (s *sandbox) sweep(from, to int) map[int]string {
	s.Helper()
	var r sweepResult
	s.probe(&r, "syscalls", strconv.Itoa(from), strconv.Itoa(to))
	return r.byNumber(s)
}

const lastCall = 600

// S10: each system call that a program may make is one that the golden file
// has, and a refusal neither waits nor leaves a process.
func TestSyscallSweep(t *testing.T) {
	s := newHost(t, nil).createProbed()
	host, err := os.Hostname()
	check(t, err)
	quiet := watchKernel(t)
	start := len(s.processes())
	have := s.sweep(0, lastCall)
	if len(have) != lastCall+1 {
		t.Fatalf("%d calls tried, want %d", len(have), lastCall+1)
	}
	testutil.WaitFor(t, 10*time.Second, "the processes of the sweep end", func() error {
		if now := s.processes(); len(now) != start {
			return fmt.Errorf("%d processes, %d before: %v", len(now), start, now)
		}
		return nil
	})
	if now, err := os.Hostname(); err != nil || now != host {
		t.Errorf("the host is called %q, %v", now, err)
	}
	quiet()
	if o := s.sh("echo alive > /dev/null && echo alive"); o.out != "alive\n" {
		t.Errorf("have %q", o.out)
	}

	var r sweepResult
	probeFree(t, &r, "syscalls", "0", strconv.Itoa(lastCall))
	control := r.byNumber(t)
	if *update {
		golden(t, "syscalls.golden", formatSweep(have))
	}
	want := readSweep(t)
	refused := 0
	for nr := range lastCall + 1 {
		h, w, c := verdict(have[nr]), want[nr], verdict(control[nr])
		if h != "allowed" && c == "allowed" {
			refused++
		}
		// A kernel may lack what is allowed; the golden file's kernel has no shadow
		// stacks.
		if h != w && (w != "allowed" || c == "allowed") && (nr != unix.SYS_MAP_SHADOW_STACK || h != c) {
			t.Errorf("call %d: %s (%s), want %s; without a sandbox %s", nr, h, have[nr], w, control[nr])
		}
	}
	if refused < 30 {
		t.Errorf("control: only %d calls are refused that work without a sandbox", refused)
	}
	t.Logf("%d calls are refused that work without a sandbox", refused)
}

// verdict is what a result says of whether the call was made at all.
func verdict(result string) string {
	switch result {
	case "EPERM", "ENOSYS", "SIGSYS":
		return result
	}
	return "allowed"
}

// formatSweep has a line for each range of calls with one verdict.
func formatSweep(results map[int]string) string {
	var b strings.Builder
	for from := 0; from <= lastCall; {
		to := from
		for to < lastCall && verdict(results[to+1]) == verdict(results[from]) {
			to++
		}
		fmt.Fprintf(&b, "%d %d %s\n", from, to, verdict(results[from]))
		from = to + 1
	}
	return b.String()
}

func readSweep(t testing.TB) map[int]string {
	t.Helper()
	text, err := os.ReadFile("testdata/syscalls.golden")
	check(t, err)
	all := map[int]string{}
	for line := range strings.Lines(string(text)) {
		var from, to int
		var v string
		_, err := fmt.Sscanf(line, "%d %d %s", &from, &to, &v)
		check(t, err)
		for nr := from; nr <= to; nr++ {
			all[nr] = v
		}
	}
	if len(all) != lastCall+1 {
		t.Fatalf("the golden file has %d calls", len(all))
	}
	return all
}

// ioctlResults is what dsec-probe ioctls prints.
type ioctlResults struct {
	Results, Controls map[string]struct{ Plain, Bit32 string }
}

// S11: no writable file of a sandbox, and no terminal, is a way to the file
// system below it, and bits that the kernel ignores do not help.
func TestIoctlDenyList(t *testing.T) {
	h := newHost(t, nil)
	s := h.createProbed()
	quiet := watchKernel(t)
	files := s.writableFiles()
	for _, point := range []string{"/", "/dev/shm", "/dev/mqueue", "/dev/pts"} {
		if files[point] == "" {
			t.Errorf("%s is not writable, among %v", point, files)
		}
	}
	for point, file := range files {
		var r ioctlResults
		s.probe(&r, "ioctls", file)
		if len(r.Results) < 30 {
			t.Errorf("%s: only %d commands tried", point, len(r.Results))
		}
		for name, got := range r.Results {
			if got.Plain != "ENOTTY" || got.Bit32 != "ENOTTY" {
				t.Errorf("%s on %s: %+v, want ENOTTY", name, file, got)
			}
		}
		if point != "/" {
			continue
		}
		// On a regular file commands do get through.
		if got := r.Controls["FS_IOC_GETFLAGS"]; got.Plain != "ok" || got.Bit32 != "ok" {
			t.Errorf("control: FS_IOC_GETFLAGS on %s: %+v", file, got)
		}
	}
	var free ioctlResults
	probeFree(t, &free, "ioctls", filepath.Join(t.TempDir(), "file"))
	for _, name := range []string{"FIBMAP", "FIFREEZE"} {
		if got := free.Results[name]; got.Plain == "ENOTTY" || got.Bit32 == "ENOTTY" {
			t.Errorf("control: %s is %+v without a sandbox too", name, got)
		}
	}
	h.checkDisk(s)
	quiet()
}

// writableFiles has a file of each writable mount, by the mount's path.
func (s *sandbox) writableFiles() map[string]string {
	s.Helper()
	var m struct {
		Mounts []struct{ Point, Options, Type string }
	}
	s.probe(&m, "mounts")
	files := map[string]string{}
	for _, m := range m.Mounts {
		if !strings.HasPrefix(m.Options+",", "rw,") {
			continue
		}
		switch m.Type {
		case "proc": // one cannot make files there
			files[m.Point] = "/proc/self/comm"
		case "devpts":
			files[m.Point] = "/dev/ptmx"
		default:
			files[m.Point] = filepath.Join(m.Point, "ioctls")
		}
	}
	return files
}

// checkDisk takes the sandbox and the backend down and has the image of the
// volumes checked.
func (h *host) checkDisk(s *sandbox) {
	h.Helper()
	_ = s.client.Close()
	check(h, s.i.Destroy(h.Context()))
	check(h, h.b.Close())
	image := filepath.Join(h.config.Disk.Dir, "btrfs.img")
	if _, err := os.Stat(image); err != nil {
		h.Logf("the volumes are not in an image, which is what could be checked: %v", err)
		return
	}
	out, err := exec.Command("btrfs", "check", "--readonly", "--force", image).CombinedOutput()
	switch {
	case strings.Contains(string(out), "unsupported option features"):
		h.Log("this btrfs-progs does not know simple quotas: what the kernel says of the file system counts")
	case err != nil:
		h.Errorf("the image of the volumes is damaged: %v\n%s", err, out)
	}
}
