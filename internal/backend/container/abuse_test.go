package container

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/opendsec/dsec/internal/backend"
	"github.com/opendsec/dsec/internal/chronusapi"
	"github.com/opendsec/dsec/internal/testutil"
)

// taskCount counts the threads of all of the sandbox's processes, as the host has them.
func (s *sandbox) taskCount() (n int) {
	s.Helper()
	for _, pid := range s.processes() {
		n += len(tasks(s, pid))
	}
	return n
}

// S17: bombs of several commands at once, of daemons and of threads, share one
// limit; the host never has more.
func TestForkBombsOfManyCommands(t *testing.T) {
	h := newHost(t, nil)
	limit := h.request().Spec.Limits.Pids
	neighbour := h.create()
	for name, argv := range map[string][]string{
		"children": {"/bin/sh", "-c", "while :; do sleep 1000 & done"},
		"daemons":  {"/bin/sh", "-c", "while :; do (setsid sh -c 'sleep 1000 & sleep 1000' &) ; done"},
		"a bomb":   {"/bin/sh", "-c", "b() { b | b & }; b; sleep 1000"},
		"threads":  {"/bin/inside", "threads", "100000"},
	} {
		t.Run(name, func(t *testing.T) {
			s := h.create()
			own := s.taskCount() // chronus's own
			for range 3 {
				stream := s.start(chronusapi.StartRequest{Command: chronusapi.Command{Argv: argv}, Detach: true})
				_ = stream.Close()
			}
			most := 0
			testutil.WaitFor(t, time.Minute, "the limit is reached", func() error {
				n := s.taskCount() - own
				most = max(most, n)
				u, err := s.i.Usage(t.Context())
				if err == nil && u.Pids < limit*8/10 && name != "threads" && name != "a bomb" {
					err = fmt.Errorf("%d of %d", u.Pids, limit)
				}
				return err
			})
			for range 20 {
				most = max(most, s.taskCount()-own)
				if o := neighbour.sh("echo here"); o.out != "here\n" {
					t.Fatalf("the neighbour says %q", o.out)
				}
			}
			if int64(most) > limit+10 {
				t.Errorf("the host has %d tasks of it, the limit is %d", most, limit)
			}
			if _, err := s.client.Info(t.Context()); err != nil {
				t.Errorf("health: %v", err)
			}
			check(t, s.i.Destroy(t.Context()))
			if left := s.leftInGroup(); left != 0 {
				t.Errorf("%d processes are left", left)
			}
		})
	}
}

// leftInGroup counts what is left in the sandbox's cgroup.
func (s *sandbox) leftInGroup() (n int) {
	s.Helper()
	_ = filepath.WalkDir("/sys/fs/cgroup", func(path string, d os.DirEntry, err error) error {
		if err == nil && d.Name() == "cgroup.procs" && strings.Contains(path, "/"+s.config.Cgroup+"/"+s.groupOf(s)+"/") {
			text, _ := os.ReadFile(path)
			n += len(strings.Fields(string(text)))
		}
		return nil
	})
	return n
}

// S20: entries of every kind end at the limit of the disk or of inodes, the host
// loses no more than that, and all comes back.
func TestFillInodes(t *testing.T) {
	h := newHost(t, nil)
	neighbour := h.create()
	const metadata = 8 << 20 // of the whole store
	limits := h.request().Spec.Limits
	limits.DiskBytes, limits.DiskInodes = 8<<20, 2000
	for _, how := range []string{"file", "dir", "symlink", "long", "xattr"} {
		t.Run(how, func(t *testing.T) {
			s := h.createAs(func(r *backend.CreateRequest) { r.Spec.Limits = limits })
			free, allocated := h.diskFree(), h.diskAllocated()
			o := s.run("/bin/inside", "inodes", "/root", how)
			var made int64
			if _, err := fmt.Sscanf(o.out, "made %d", &made); err != nil {
				t.Fatalf("%+v %q", o.Outcome, o.out)
			}
			if !strings.Contains(o.out, "end ENOSPC") && !strings.Contains(o.out, "end EDQUOT") {
				t.Errorf("it ended with %q", o.out)
			}
			// Where inodes are not counted, each takes bytes of the limit.
			if most := max(limits.DiskInodes*105/100, limits.DiskBytes/256); made > most || made < 100 {
				t.Errorf("made %d, want at most %d", made, most)
			}
			if n := free - h.diskFree(); n > limits.DiskBytes*105/100+metadata {
				t.Errorf("the store has %d bytes less, the limit is %d", n, limits.DiskBytes)
			}
			if n := h.diskAllocated() - allocated; n > limits.DiskBytes*105/100 {
				t.Errorf("the host's files have grown by %d bytes", n)
			}
			if o := neighbour.sh("echo x > /file && mkdir /d && rmdir /d && rm /file && echo works"); o.out != "works\n" {
				t.Errorf("the neighbour says %q", o.out)
			}
			t.Logf("%d made", made)
			_ = s.client.Close()
			check(t, s.i.Destroy(t.Context()))
			testutil.WaitFor(t, 60*time.Second, "the space comes back", func() error {
				if n := free - h.diskFree(); n > metadata {
					return fmt.Errorf("%d bytes are missing", n)
				}
				return nil
			})
		})
	}
}

// S19: whatever of a sandbox can be written, all of it ends at a limit: of the
// disk, of the mount or of memory.
func TestEveryWritableMountEnds(t *testing.T) {
	h := newHost(t, nil)
	s := h.createProbed()
	limits := h.request().Spec.Limits
	for point, file := range s.writableFiles() {
		if point == "/dev/pts" || file == "/proc/self/comm" {
			continue // files there hold no bytes
		}
		o := s.sh("dd if=/dev/zero of=" + file + " bs=1M count=400; stat -c %s " + file + "; rm -f " + file)
		lines := strings.Split(strings.TrimSpace(o.out), "\n")
		size, err := strconv.ParseInt(lines[len(lines)-1], 10, 64)
		if o.OOM || err != nil && strings.Contains(o.out, "dd:") {
			continue // refused or killed
		}
		if err != nil || size > max(limits.DiskBytes, limits.MemoryBytes) {
			t.Errorf("%s: %d bytes written, %q", point, size, o.out)
		}
		t.Logf("%s: %d bytes", point, size)
		s.sh("rm -f " + file) // where dd was killed
	}
	u, err := s.i.Usage(t.Context())
	check(t, err)
	if u.MemoryBytes > limits.MemoryBytes {
		t.Errorf("%d bytes of memory used, the limit is %d", u.MemoryBytes, limits.MemoryBytes)
	}
	if o := s.sh("echo works"); o.out != "works\n" {
		t.Errorf("afterwards: %q %+v", o.out, o.Outcome)
	}
}

// S19: a sandbox that fills its disk in other ways takes no more either: with
// holes, reserved space, hard links, files that are open and have no name.
func TestFillDiskByOtherWays(t *testing.T) {
	h := newHost(t, nil)
	limit := h.request().Spec.Limits.DiskBytes
	const metadata = 8 << 20
	for name, script := range map[string]string{
		"reserved":       "i=0; while fallocate -l 10M /root/f$i 2>/dev/null; do i=$((i+1)); [ $i -gt 30 ] && break; done; echo end",
		"open, no name":  "for i in 1 2 3 4 5 6 7 8; do (exec 3>/root/f$i; rm /root/f$i; dd if=/dev/zero bs=1M count=20 >&3 2>/dev/null; echo > /dev/shm/up$i; sleep 1000) & done; until [ $(ls /dev/shm | grep -c up) = 8 ]; do :; done; echo end",
		"a large hole":   "truncate -s 1T /root/hole; dd if=/dev/zero of=/root/hole bs=1M count=200 conv=notrunc seek=1000 2>/dev/null; echo end",
		"copies of bin":  "i=0; while cp /bin/busybox /root/c$i 2>/dev/null; do i=$((i+1)); [ $i -gt 200 ] && break; done; echo end",
		"layer rewrites": "i=0; while [ $i -lt 30 ]; do chmod 755 /bin/inside; cp /bin/inside /root/i$i 2>/dev/null || break; i=$((i+1)); done; echo end",
	} {
		t.Run(name, func(t *testing.T) {
			s := h.create()
			free, allocated := h.diskFree(), h.diskAllocated()
			o, err := s.try(chronusapi.Command{Argv: []string{"/bin/sh", "-c", script}, Cwd: "/"})
			if err != nil || !strings.HasSuffix(o.out, "end\n") {
				t.Errorf("%q, %+v, %v", o.out, o.Outcome, err)
			}
			if n := free - h.diskFree(); n > limit*105/100+metadata {
				t.Errorf("the store has %d bytes less, the limit is %d", n, limit)
			}
			if n := h.diskAllocated() - allocated; n > limit*105/100 {
				t.Errorf("the host's files have grown by %d bytes", n)
			}
			_ = s.client.Close()
			check(t, s.i.Destroy(t.Context()))
		})
	}
}

// U07: dozens of sandboxes at once are each alive and each itself.
func TestDozensAlive(t *testing.T) {
	h := newHost(t, nil)
	var all []*sandbox
	for range 64 {
		all = append(all, h.createAs(func(r *backend.CreateRequest) { r.Spec.Limits.MemoryBytes = 32 << 20 }))
	}
	for _, s := range all {
		s.sh("echo " + string(s.id) + " >/tmp/id")
	}
	for _, s := range all {
		if o := s.sh("cat /tmp/id; ip -o link | grep -c ."); o.out != string(s.id)+"\n1\n" {
			t.Errorf("%s says %q", s.id, o.out)
		}
	}
	// U46: and they end together.
	done := make(chan error)
	for _, s := range all {
		go func() { done <- s.i.Destroy(t.Context()) }()
	}
	for range all {
		check(t, <-done)
	}
}
