package container

import (
	"testing"

	"golang.org/x/sys/unix"
)

func TestCloserClosesAll(t *testing.T) {
	var pipe [2]int
	check(t, unix.Pipe2(pipe[:], unix.O_CLOEXEC))
	defer unix.Close(pipe[0])
	var c closer
	c.later()
	for range maxToClose + 3 {
		fd, err := unix.FcntlInt(uintptr(pipe[1]), unix.F_DUPFD_CLOEXEC, 3)
		check(t, err)
		c.later(fd, -1)
	}
	if len(c.fds) >= maxToClose {
		t.Errorf("%d descriptors wait", len(c.fds))
	}
	c.later(pipe[1])
	c.close()
	// A pipe ends when its last writer is closed.
	if n, err := unix.Read(pipe[0], make([]byte, 1)); n != 0 || err != nil {
		t.Errorf("read %d, %v", n, err)
	}
}
