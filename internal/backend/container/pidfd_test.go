package container

import (
	"os"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec"
)

// A PID alone names nobody: a process is found again by what no other has.
func TestReopenKnowsTheProcess(t *testing.T) {
	self := os.Getpid()
	fd, err := unix.PidfdOpen(self, 0)
	check(t, err)
	defer unix.Close(fd)
	inode, err := pidfdInode(fd)
	check(t, err)
	start, err := startTime(self)
	check(t, err)
	for _, c := range []struct {
		name string
		h    handle
		lost bool
	}{
		{"by its inode", handle{PID: self, Inode: inode, Start: start}, false},
		{"by its start", handle{PID: self, Start: start}, false},
		{"another's inode", handle{PID: self, Inode: inode + 1, Start: start}, true},
		{"another's start", handle{PID: self, Start: start + 1}, true},
		{"another's PID", handle{PID: os.Getppid(), Inode: inode, Start: start}, true},
		{"no PID", handle{PID: 1 << 30, Inode: inode, Start: start}, true},
	} {
		p, err := reopen(&c.h)
		if c.lost && dsec.CodeOf(err) != dsec.CodeLost || !c.lost && err != nil {
			t.Errorf("%s: %v", c.name, err)
		}
		if p != nil {
			p.close()
		}
	}
}
