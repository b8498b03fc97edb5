package container

import (
	"crypto/rand"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/backend"
	"github.com/opendsec/dsec/internal/chronusapi"
)

// timed runs a command with a timeout, and returns how it ended.
func (s *sandbox) timed(timeout time.Duration, env []string, argv ...string) dsec.Outcome {
	s.Helper()
	req := chronusapi.StartRequest{Command: chronusapi.Command{
		Argv: argv, Env: append([]string{"PATH=/bin"}, env...), Cwd: "/", Timeout: timeout,
	}}
	stream, err := s.client.Start(s.Context(), req)
	if errors.Is(err, chronusapi.ErrNeedGroup) { // of one before, which timed out, processes are still ending
		check(s, s.i.(backend.Grouper).AddGroup(s.Context()))
		stream, err = s.client.Start(s.Context(), req)
	}
	check(s, err)
	defer stream.Close()
	for {
		ev, err := stream.Next()
		check(s, err)
		if ev.Kind == chronusapi.EventExited {
			return ev.Outcome
		}
	}
}

// S38: what a sandbox does to clocks is seen by nobody else: times and
// timeouts are the host's.
func TestClock(t *testing.T) {
	s := newHost(t, nil).createProbed()
	offset := clockOffset(t)
	for name, nr := range map[string]int{"settimeofday": 164, "clock_settime": 227} {
		if r := s.sweep(nr, nr)[nr]; r != "EPERM" {
			t.Errorf("%s: %s, want EPERM", name, r)
		}
	}
	if o := s.sh("adjtimex | grep -c tick; adjtimex -t 10000 && echo set"); o.out[:1] != "1" || strings.Contains(o.out, "set\n") {
		t.Errorf("adjtimex: %q, want it read and not set", o.out)
	}
	before := time.Now()
	o := s.sh("date -s '2040-01-01 00:00:00' 2>&1 | grep -o 'Operation not permitted'; TZ=UTC0 touch -d '2040-01-01 00:00:00' /tmp/future; stat -c %Y /tmp/future")
	after := time.Now()
	// The control is the file: that can be of the future.
	if want := fmt.Sprintf("Operation not permitted\n%d\n", time.Date(2040, 1, 1, 0, 0, 0, 0, time.UTC).Unix()); o.out != want {
		t.Errorf("have %q, want %q", o.out, want)
	}
	if o.Started.Before(before.Add(-time.Second)) || o.Started.After(after.Add(time.Second)) || o.Duration <= 0 || o.Duration > after.Sub(before) {
		t.Errorf("started %v and took %v, between %v and %v", o.Started, o.Duration, before, after)
	}
	// The timeout of a command whose library would tell it another time.
	const timeout = 500 * time.Millisecond
	end := s.timed(timeout, []string{"LD_PRELOAD=/tmp/faketime.so", "FAKETIME=-10y"}, "/bin/sleep", "1000")
	if !end.TimedOut || end.Duration < timeout {
		t.Errorf("have %+v, want a timeout", end)
	}
	if now := clockOffset(t); (now - offset).Abs() > time.Second {
		t.Errorf("the host's clock was set by %v", now-offset)
	}
	var r sweepResult
	probeFree(t, &r, "syscalls", "227", "227")
	if got := r.byNumber(t)[227]; got != "EFAULT" {
		t.Errorf("control: clock_settime is %s without a sandbox, want EFAULT", got)
	}
}

// clockOffset changes when the host's clock is set.
func clockOffset(t testing.TB) time.Duration {
	t.Helper()
	var wall, mono unix.Timespec
	check(t, unix.ClockGettime(unix.CLOCK_REALTIME, &wall))
	check(t, unix.ClockGettime(unix.CLOCK_MONOTONIC, &mono))
	return time.Duration(wall.Nano() - mono.Nano())
}

// search looks for a canary wherever a sandbox can read: its files, shared
// memory, what /proc tells of processes, and blocks that it has not written.
// Its own arguments hold the pattern, which does not match itself.
const search = `p='[c]anary-%s'
grep -rl "$p" /etc /root /tmp /dev/shm /dev/mqueue /canary.txt 2>/dev/null
find / -xdev -name "$p" 2>/dev/null
for f in /proc/*/environ /proc/*/cmdline /proc/*/mountinfo /proc/*/cgroup /proc/sys/kernel/* /proc/sysvipc/* /proc/net/*; do
	[ -f "$f" ] && grep -l "$p" "$f" 2>/dev/null
done
hostname | grep "$p"
fallocate -l 50M /blocks
[ $(tr -d '\000' < /blocks | wc -c) = 0 ] || echo /blocks
[ $(stat -c %%b /blocks) -ge 102400 ] && echo searched
rm /blocks`

// S39: nothing of a sandbox that is gone is in one that comes after it.
func TestNothingRemains(t *testing.T) {
	h := newHost(t, func(c *Config) { c.Warm = 2 })
	word := rand.Text()
	script := fmt.Sprintf(search, word)
	s := h.create()
	// The canary goes in by the environment, so that no argument has it.
	s.hold([]string{"CANARY=canary-" + word}, "/bin/sh", "-c", `echo $CANARY > /canary.txt; echo $CANARY > /dev/shm/x; echo $CANARY > /tmp/x
mkdir -p /root/$CANARY; yes $CANARY | head -c 8388608 > /root/many; sync; echo ready; read wait`)
	control := s.sh(script).out
	for _, want := range []string{"/canary.txt\n", "/dev/shm/x\n", "/tmp/x\n", "/root/many\n", "/root/canary-", "/environ\n", "searched\n"} {
		if !strings.Contains(control, want) {
			t.Errorf("control: the search of its own sandbox does not find %q: %s", want, control)
		}
	}
	_ = s.client.Close()
	check(t, s.i.Destroy(t.Context()))
	for n := range 20 {
		h.awaitWarm(1)
		next := h.create()
		if o := next.sh(script); o.out != "searched\n" {
			t.Errorf("sandbox %d finds %q", n, o.out)
		}
		_ = next.client.Close()
		check(t, next.i.Destroy(t.Context()))
	}
	// The host's oracle: nothing that is left is of that sandbox.
	for _, dir := range []string{h.config.RunDir, h.config.Disk.Dir} {
		check(t, filepath.WalkDir(dir, func(path string, _ os.DirEntry, err error) error {
			if strings.Contains(path, word) || strings.Contains(path, string(s.id)) {
				t.Errorf("left on the host: %s", path)
			}
			if os.IsNotExist(err) {
				return nil
			}
			return err
		}))
	}
}

// S101: a program that reads everything it finds hurts neither the kernel nor
// others, and reads nothing of what is covered.
func TestRecursiveRead(t *testing.T) {
	h := newHost(t, nil)
	s, neighbour := h.create(), h.create()
	quiet := watchKernel(t)
	for _, script := range []string{
		"grep -rs . /proc /sys > /dev/null; exit 0",
		"find /proc /sys -type f 2>/dev/null | while read f; do dd if=$f of=/dev/null bs=64k count=16 2>/dev/null; done; exit 0",
		"find / -xdev -type f -exec cat {} + > /dev/null 2>&1; exit 0",
	} {
		if o := s.timed(5*time.Second, nil, "/bin/sh", "-c", script); !o.TimedOut && !o.OK() {
			t.Errorf("%s: %+v", script, o)
		}
	}
	quiet()
	for name, other := range map[string]*sandbox{"the same": s, "the neighbour": neighbour, "a new one": h.create()} {
		if o := other.sh("echo alive"); o.out != "alive\n" {
			t.Errorf("%s: have %q, %+v", name, o.out, o.Outcome)
		}
	}
	o := s.sh("cat /proc/kallsyms /proc/keys /proc/kmsg /proc/modules /proc/iomem /proc/timer_list 2>/dev/null | wc -c; grep -c . /proc/stat")
	if f := strings.Fields(o.out); len(f) != 2 || f[0] != "0" || f[1] == "0" {
		t.Errorf("of covered files and of /proc/stat it reads %q", o.out)
	}
}
