package container

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/backend"
	"github.com/opendsec/dsec/internal/chronusapi"
)

func TestSandboxRunsCommands(t *testing.T) {
	h := newHost(t, nil)
	s := h.create()
	o := s.sh("echo hello; exit 3")
	if o.out != "hello\n" || o.Code != 3 {
		t.Errorf("have %q, %+v", o.out, o.Outcome)
	}
	if s.i.Warm() {
		t.Error("warm without a pool")
	}
}

func TestProbe(t *testing.T) {
	// One host after the other: what the first still closes is not the second's.
	t.Run("here", func(t *testing.T) {
		h := newHost(t, nil)
		info, err := h.b.Probe(t.Context())
		check(t, err)
		if !info.Available || info.Kind != dsec.KindContainer || len(info.Features) == 0 {
			t.Errorf("have %+v", info)
		}
	})
	t.Run("a host that lacks something says what", func(t *testing.T) {
		h := newHost(t, func(c *Config) { c.Launcher = []string{"/nonexistent"} })
		info, err := h.b.Probe(t.Context())
		check(t, err)
		if info.Available || len(info.Notes) != 1 || !strings.Contains(info.Notes[0], "nonexistent") {
			t.Errorf("have %+v", info)
		}
	})
}

// What programs see of the machine is what the sandbox may use.
func TestWhatProgramsSee(t *testing.T) {
	s := newHost(t, nil).create()
	for script, want := range map[string]string{
		"nproc":                              "1",
		"grep -c ^processor /proc/cpuinfo":   "1",
		"cat /sys/devices/system/cpu/online": "0",
		"grep MemTotal /proc/meminfo":        "MemTotal:         131072 kB",
		"cat /proc/loadavg":                  "0.00 0.00 0.00 1/1 1",
		"grep ^cpu /proc/stat":               "cpu  0 0 0 0 0 0 0 0 0 0\ncpu0 0 0 0 0 0 0 0 0 0 0",
		"echo 1 2>/dev/null > /proc/loadavg; echo 1 2>/dev/null > /proc/stat; cut -c 1-4 /proc/loadavg": "0.00",
		"hostname":                              "sandbox",
		"cat /etc/hostname":                     "sandbox",
		"id -u":                                 "0",
		"stat -c %u:%g:%a /etc /tmp /root":      "0:0:755\n0:0:755\n0:0:755",
		"stat -f -c %T /dev/shm":                "tmpfs",
		"df -k /dev/shm | awk 'END {print $2}'": "65536",
		"cat /sys/fs/cgroup/pids/pids.max 2>/dev/null || cat /sys/fs/cgroup/pids.max": "64",
		"grep -c . /proc/self/uid_map":  "1",
		"ls /dev | sort | tr '\\n' ' '": "fd full mqueue null ptmx pts random shm stderr stdin stdout tty urandom zero ",
	} {
		if o := s.sh(script); strings.TrimSuffix(o.out, "\n") != want {
			t.Errorf("%s: have %q, want %q", script, o.out, want)
		}
	}
}

// What a socket has of options no cgroup counts, so each gets little; all that
// a Unix socket may pass on at once is less.
func TestOptionsOfASocketAreFew(t *testing.T) {
	if _, err := os.Stat("/proc/sys/net/core/optmem_max"); err != nil {
		t.Fatal(err)
	}
	s := newHost(t, nil).create()
	if o := s.sh("cat /proc/sys/net/core/optmem_max 2>/dev/null"); o.out != "4096\n" && o.out != "" { // before Linux 6.8 it is the host's alone
		t.Errorf("have %q", o.out)
	}
	lines := s.inside("sockets")
	for _, want := range []string{"20 groups ok", "pass 250 ok"} {
		if !slices.Contains(lines, want) {
			t.Errorf("no %q in %v", want, lines)
		}
	}
	if s.sh("test -e /proc/sys/net/core/optmem_max").OK() && !slices.Contains(lines, "1000 groups of IPv6 ENOMEM") {
		t.Errorf("a thousand groups: %v", lines)
	}
}

func init() { tries["sockets"] = sockets }

// sockets joins multicast groups and passes descriptors on.
func sockets([]string) {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM, 0)
	for n := byte(0); n < 20 && err == nil; n++ {
		err = unix.SetsockoptIPMreqn(fd, unix.IPPROTO_IP, unix.IP_ADD_MEMBERSHIP, &unix.IPMreqn{Multiaddr: [4]byte{239, 1, 1, n}, Ifindex: 1})
	}
	say("20 groups", err)
	fd, err = unix.Socket(unix.AF_INET6, unix.SOCK_DGRAM, 0)
	for n := 0; n < 1000 && err == nil; n++ {
		err = unix.SetsockoptIPv6Mreq(fd, unix.IPPROTO_IPV6, unix.IPV6_JOIN_GROUP, &unix.IPv6Mreq{Multiaddr: [16]byte{0: 0xff, 1: 1, 14: byte(n >> 8), 15: byte(n)}, Interface: 1})
	}
	say("1000 groups of IPv6", err)
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM, 0)
	if err == nil {
		err = unix.Sendmsg(pair[0], []byte("x"), unix.UnixRights(slices.Repeat([]int{0}, 250)...), nil, 0)
	}
	say("pass 250", err)
}

// Low ports and ping need rights that root inside does not have; both work.
func TestLowPortsAndPing(t *testing.T) {
	s := newHost(t, nil).create()
	if lines := s.inside("icmp"); lines[0] != "icmp datagram ok" || lines[1] != "icmp raw EPERM" {
		t.Errorf("have %v", lines)
	}
	if o := s.sh("(echo pong | nc -l -p 80 &) ; for i in 1 2 3 4 5 6 7 8 9; do nc 127.0.0.1 80 </dev/null 2>/dev/null && exit; sleep 0.1; done"); o.out != "pong\n" {
		t.Errorf("have %q", o.out)
	}
}

func TestLimits(t *testing.T) {
	h := newHost(t, nil)
	s := h.create()
	limits := h.request().Spec.Limits
	t.Run("disk", func(t *testing.T) {
		o := s.sh("dd if=/dev/zero of=/big bs=1M count=1000; stat -c %s /big; rm /big")
		lines := strings.Split(strings.TrimSpace(o.out), "\n")
		size, err := strconv.ParseInt(lines[len(lines)-1], 10, 64)
		check(t, err)
		if size > limits.DiskBytes || size < limits.DiskBytes*9/10 {
			t.Errorf("wrote %d bytes of %d\n%s", size, limits.DiskBytes, o.out)
		}
	})
	t.Run("memory", func(t *testing.T) {
		o := s.sh("dd if=/dev/zero of=/dev/null bs=1000M count=1")
		if !o.OOM {
			t.Errorf("have %+v, want OOM", o)
		}
	})
	if o := s.sh("echo alive"); o.out != "alive\n" {
		t.Errorf("have %q", o.out)
	}
	u, err := s.i.Usage(t.Context())
	check(t, err)
	if u.MemoryLimit != limits.MemoryBytes || u.PidsLimit != limits.Pids || u.DiskLimit != limits.DiskBytes || u.OOMKills < 1 || u.CPU <= 0 {
		t.Errorf("have %+v", u)
	}
}

// A create that cannot work names the field at fault and leaves nothing.
func TestBadRequests(t *testing.T) {
	h := newHost(t, nil)
	for name, tc := range map[string]struct {
		change func(*backend.CreateRequest)
		code   dsec.Code
		field  string
	}{
		"id":            {func(r *backend.CreateRequest) { r.ID = "../x" }, dsec.CodeInvalid, "sandbox_id"},
		"no memory":     {func(r *backend.CreateRequest) { r.Spec.Limits.MemoryBytes = 0 }, dsec.CodeInvalid, "limits.memory_bytes"},
		"negative disk": {func(r *backend.CreateRequest) { r.Spec.Limits.DiskBytes = -1 }, dsec.CodeInvalid, "limits.disk_bytes"},
		"no pids":       {func(r *backend.CreateRequest) { r.Spec.Limits.Pids = 0 }, dsec.CodeInvalid, "limits.pids"},
		"digest":        {func(r *backend.CreateRequest) { r.Layers[0].Digest = "sha256:../../etc" }, dsec.CodeInvalid, "layers[0]"},
		"missing image": {func(r *backend.CreateRequest) {
			r.Layers = []backend.Layer{backend.FileLayer("sha256:"+strings.Repeat("0", 64), "/nonexistent")}
		}, dsec.CodeNotFound, "layers[0]"},
		"not an image": {func(r *backend.CreateRequest) {
			r.Layers = []backend.Layer{backend.FileLayer("sha256:"+strings.Repeat("1", 64), "/etc/passwd")}
		}, dsec.CodeInternal, "layers[0]"},
		"too many layers": {func(r *backend.CreateRequest) { r.Layers = make([]backend.Layer, 1000) }, dsec.CodeInvalid, "layers"},
	} {
		req := h.request()
		tc.change(&req)
		_, err := h.b.Create(t.Context(), req)
		var e *dsec.Error
		if err == nil || dsec.CodeOf(err) != tc.code {
			t.Errorf("%s: %v, want %s", name, err, tc.code)
		} else if !errors.As(err, &e) || e.Field != tc.field {
			t.Errorf("%s: field %q, want %q (%v)", name, e.Field, tc.field, err)
		}
	}
	s := h.create()
	req := h.request()
	req.ID = s.id
	if _, err := h.b.Create(t.Context(), req); err == nil || dsec.CodeOf(err) != dsec.CodeConflict {
		t.Errorf("twice: %v, want conflict", err)
	}
	if o := s.sh("echo first"); o.out != "first\n" {
		t.Errorf("the first one has %q", o.out)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := h.b.Create(ctx, h.request()); err == nil {
		t.Error("a canceled create worked")
	}
}

// Creates, commands and destroys at once, each destroyed by two at once.
func TestManyAtOnce(t *testing.T) {
	h := newHost(t, func(c *Config) { c.Warm = 2 })
	var wg sync.WaitGroup
	for n := range 4 {
		wg.Go(func() {
			for range 5 {
				req := h.request()
				i, err := h.b.Create(t.Context(), req)
				if err != nil {
					t.Error(cause(err))
					return
				}
				s := &sandbox{host: h, id: req.ID}
				s.use(i)
				word := fmt.Sprintf("worker %d", n)
				if o := s.sh("echo " + word); o.out != word+"\n" {
					t.Errorf("have %q", o.out)
				}
				_ = s.client.Close()
				for range 2 {
					wg.Go(func() {
						if err := i.Destroy(t.Context()); err != nil {
							t.Error(cause(err))
						}
					})
				}
			}
		})
	}
	wg.Wait()
}

// Each command has a control group of its own, made when one is needed.
func TestCommandGroups(t *testing.T) {
	s := newHost(t, nil).create()
	start := func() (*chronusapi.Events, error) {
		return s.client.Start(t.Context(), chronusapi.StartRequest{Command: chronusapi.Command{
			Argv: []string{"/bin/cat"}, Env: []string{"PATH=/bin"}, Cwd: "/",
		}, OpenStdin: true})
	}
	var running []*chronusapi.Events
	for range 5 {
		ev, err := start()
		if err != nil {
			check(t, s.i.(backend.Grouper).AddGroup(t.Context()))
			ev, err = start()
		}
		check(t, err)
		running = append(running, ev)
	}
	if o := s.sh("ls /proc | grep -c '^[0-9]'"); o.Code != 0 {
		t.Errorf("have %+v", o)
	}
	for _, ev := range running {
		check(t, ev.Close())
	}
}

// Kernels before 6.15 need the layers attached while the overlay is made.
func TestAttachedLayers(t *testing.T) {
	h := newHost(t, nil)
	h.b.composer.attached.Store(true)
	top := image(t, func(root string) {
		check(t, os.RemoveAll(root+"/bin"))
		check(t, os.WriteFile(root+"/etc/shared", []byte("from the top\n"), 0o644))
	})
	s := h.create(h.image, top)
	if o := s.sh("cat /etc/shared; echo mine > /etc/shared; cat /etc/shared"); o.out != "from the top\nmine\n" {
		t.Errorf("have %q", o.out)
	}
	check(t, h.b.ns.do(func() error {
		left, err := os.ReadDir("/compose")
		if err == nil && len(left) > 0 {
			err = fmt.Errorf("left attached: %v", left)
		}
		return err
	}))
}
