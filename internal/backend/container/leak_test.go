package container

import (
	"fmt"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec/internal/testutil"
)

// S49: no address is reached by any way of sending, and each try fails at once;
// what listens on the host, on all of its addresses, hears nothing.
func TestNoNetwork(t *testing.T) {
	s := newHost(t, nil).create()
	var heard atomic.Int32
	tcp, err := net.Listen("tcp", ":0")
	check(t, err)
	defer tcp.Close()
	go func() {
		for {
			c, err := tcp.Accept()
			if err != nil {
				return
			}
			heard.Add(1)
			_ = c.Close()
		}
	}()
	port := tcp.Addr().(*net.TCPAddr).Port
	udp, err := net.ListenUDP("udp", &net.UDPAddr{Port: port})
	check(t, err)
	defer udp.Close()
	go func() {
		for b := make([]byte, 100); ; {
			if _, _, err := udp.ReadFrom(b); err != nil {
				return
			}
			heard.Add(1)
		}
	}()
	addrs := []string{"169.254.169.254:80", "10.0.0.1:443", "172.16.0.1:22", "192.168.1.1:80", "8.8.8.8:53", "1.1.1.1:853", "224.0.0.251:5353", "255.255.255.255:67", "100.64.0.1:80", "[fe80::1]:80", "[2001:4860:4860::8888]:53", "[ff02::fb]:5353", "[fd00::1]:80", "[::ffff:10.0.0.1]:80"}
	own, err := net.InterfaceAddrs()
	check(t, err)
	var host []string // the addresses on which it would be heard
	for _, a := range own {
		if ip := a.(*net.IPNet).IP; !ip.IsLoopback() && !ip.IsLinkLocalUnicast() {
			host = append(host, net.JoinHostPort(ip.String(), fmt.Sprint(port)))
		}
	}
	begun := time.Now()
	lines := s.inside(append([]string{"network"}, append(addrs, host...)...)...)
	if len(lines) != 1 || !strings.HasPrefix(lines[0], "failed ") {
		t.Errorf("%v, want only failures", lines)
	}
	if d := time.Since(begun); d > 30*time.Second {
		t.Errorf("the refusals took %v", d)
	}
	// Loopback is the sandbox's own: the host's listener is not there.
	if lines := s.inside("network", fmt.Sprintf("127.0.0.1:%d", port)); slices.ContainsFunc(lines, func(l string) bool { return strings.HasPrefix(l, "reached tcp") }) {
		t.Errorf("%v", lines)
	}
	if n := heard.Load(); n != 0 {
		t.Errorf("the host has heard %d times", n)
	}
	if len(host) == 0 {
		t.Log("no address but loopback: what the host hears is not tested")
		return
	}
	for _, network := range []string{"tcp", "udp"} { // the control
		c, err := net.Dial(network, host[0])
		check(t, err)
		_, _ = c.Write([]byte("x"))
		_ = c.Close()
	}
	testutil.WaitFor(t, 20*time.Second, "the control is heard", func() error {
		if n := heard.Load(); n < 2 {
			return fmt.Errorf("heard %d times, want 2", n)
		}
		return nil
	})
}

// S44: what the kernel tells by netlink, keyrings, and files that S44's other
// test does not read, is the sandbox's own.
func TestDumpsTellOfItselfAlone(t *testing.T) {
	h := newHost(t, nil)
	s, other := h.create(), h.create()
	links := 0
	var messages []string
	for _, line := range s.inside("netlink") {
		if strings.Contains(line, " message ") {
			messages = append(messages, line)
		}
		if strings.HasPrefix(line, fmt.Sprint("link message ", unix.RTM_NEWLINK)) {
			if links++; !strings.Contains(line, `lo\x00`) {
				t.Errorf("a link that is not loopback: %s", line)
			}
		}
	}
	if links != 1 {
		t.Errorf("%d links, want 1", links)
	}
	own, err := net.InterfaceAddrs()
	check(t, err)
	dump := strings.Join(messages, "\n")
	for _, a := range own {
		ip := a.(*net.IPNet).IP
		if v4 := ip.To4(); v4 != nil {
			ip = v4
		}
		quoted := strings.Trim(fmt.Sprintf("%q", string(ip)), `"`)
		if !ip.IsLoopback() && strings.Contains(dump, quoted) {
			t.Errorf("netlink tells of %v", a)
		}
	}
	host, err := os.Hostname()
	check(t, err)
	machine, _ := os.ReadFile("/etc/machine-id")
	domain, err := os.ReadFile("/proc/sys/kernel/domainname")
	check(t, err)
	if o := s.sh("cat /proc/sys/kernel/domainname"); o.out != "(none)\n" {
		t.Errorf("the domain is %q, on the host %q", o.out, domain)
	}
	o := s.sh(`for f in /proc/sys/kernel/* /proc/self/* /proc/1/* /proc/sysvipc/* /proc/net/*/* /proc/sys/net/*/*/*/* /sys/*/*/* /sys/fs/cgroup/*/*; do [ -f $f ] && echo $f && head -c 4096 $f 2>/dev/null; done; env; uname -a; df; mount; cat /etc/mtab /etc/machine-id 2>/dev/null; exit 0`)
	for name, secret := range map[string]string{
		"the other's ID": string(other.id), "the run directory": h.config.RunDir, "the disk": h.config.Disk.Dir, "the tree of cgroups": h.config.Cgroup,
		"the image": filepath.Dir(imagePath(h.image)), "the host's name": host, "the machine's ID": strings.TrimSpace(string(machine)),
	} {
		if secret == "" {
			continue
		}
		for line := range strings.Lines(o.out) {
			if strings.Contains(line, secret) && (name != "the host's name" || len(secret) >= 6) {
				t.Errorf("%s is seen: %.200s", name, line)
			}
		}
	}
	if len(o.out) < 5000 || !strings.Contains(o.out, "/proc/self/mountinfo\n") || !strings.Contains(o.out, "overlay") {
		t.Errorf("control: too little was read: %.500q", o.out)
	}
}

// S45: nor can the bytes of a shared layer be changed by copies that share
// blocks, pipes of its pages or mappings.
func TestLayerCannotBeOverwritten(t *testing.T) {
	h := newHost(t, nil)
	before := sum(t, imagePath(h.image))
	a, b := h.create(), h.create()
	const read = "cat /etc/shared /bin/busybox /bin/inside | sha256sum"
	want := b.sh(read).out
	lines := a.inside("overwrite", "/etc/shared", "/bin/busybox", "/bin/inside")
	if len(lines) < 20 || !slices.Contains(lines, "mmap for writing /etc/shared ok") && !strings.Contains(strings.Join(lines, "\n"), "reopened") {
		t.Errorf("control: little was tried: %v", lines)
	}
	for _, s := range []*sandbox{b, h.create()} {
		if o := s.sh(read); o.out != want || o.Code != 0 {
			t.Errorf("another reads %q, before %q", o.out, want)
		}
	}
	// From the disk, and not from the cache that they share.
	check(t, os.WriteFile("/proc/sys/vm/drop_caches", []byte("1"), 0))
	if after := sum(t, imagePath(h.image)); after != before {
		t.Error("the image's bytes are not what they were")
	}
	if o := h.create().sh(read); o.out != want {
		t.Errorf("after the cache was dropped: %q, before %q", o.out, want)
	}
}

// S39: blocks that a sandbox gave back are not read by the next, however they
// are asked for.
func TestFreedBlocksAreNotRead(t *testing.T) {
	h := newHost(t, nil)
	s := h.create()
	if o := s.sh("yes canary-of-the-first | head -c 30000000 > /root/x; sync; rm /root/x; yes canary-of-the-first | head -c 30000000 > /root/y; sync"); !o.OK() {
		t.Fatal(o.out)
	}
	_ = s.client.Close()
	check(t, s.i.Destroy(t.Context()))
	next := h.create()
	o := next.sh(`fallocate -l 40M /root/a; truncate -s 40M /root/b; dd if=/dev/zero of=/root/c bs=1 count=1 seek=10000000 2>/dev/null
cat /root/a /root/b /root/c | tr -d '\000' | wc -c; grep -c canary-of-the-first /root/a /root/b /root/c; dd if=/root/a bs=4096 iflag=direct 2>/dev/null | tr -d '\000' | wc -c`)
	if want := "0\n/root/a:0\n/root/b:0\n/root/c:0\n0\n"; o.out != want {
		t.Errorf("%q, want %q", o.out, want)
	}
}
