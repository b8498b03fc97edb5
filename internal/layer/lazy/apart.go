package lazy

import (
	"encoding/json"
	"errors"
	"net"
	"os"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec/internal/hostos"
)

// openApart opens a file of the FUSE mount for a process that holds the FUSE
// connection too. A request of such a process that is not answered any more, for
// layerd has died, cannot be given up once layerd had taken it: the thread waits
// for the connection to end, and the connection ends when all who hold it have
// closed it, which a process does when its last thread is gone. So the requests
// are made by a thread with descriptors of its own, none of which is the
// connection.
//
// Only looking up a name makes requests: opening and closing are answered once by
// "do not ask any more". Both are done here before the file is handed out; or each
// child that is started would wait, when it closes what it inherited, for the
// layerd that it is to become.
func openApart(mnt *os.File, name string) (*os.File, error) {
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}
	ours := os.NewFile(uintptr(fds[0]), "apart")
	conn, err := net.FileConn(ours)
	_ = ours.Close()
	if err != nil {
		_ = unix.Close(fds[1])
		return nil, err
	}
	defer conn.Close()
	dir := int(mnt.Fd())
	ready := make(chan struct{})
	hostos.OnThread(func() {
		err := unix.Unshare(unix.CLONE_FILES)
		close(ready)
		if err == nil {
			closeAllBut(dir, fds[1])
			err = openAndSend(dir, name, fds[1])
		}
		if err != nil {
			b, _ := json.Marshal(&message{Reply: &reply{Error: toWire(err)}})
			_ = unix.Sendmsg(fds[1], b, nil, nil, unix.MSG_NOSIGNAL)
		}
		// The thread's descriptors go with it.
	})
	<-ready
	_ = unix.Close(fds[1]) // the thread has a copy
	c := newConnection(conn.(*net.UnixConn))
	m, files, err := c.receive()
	if err != nil {
		return nil, err
	}
	// Once the thread has ended the file is its caller's alone, see openElsewhere.
	_, more, _ := c.receive()
	closeFiles(more)
	if m.Reply == nil || m.Reply.Error != nil || len(files) != 1 {
		closeFiles(files)
		if m.Reply != nil && m.Reply.Error != nil {
			return nil, m.Reply.Error.err()
		}
		return nil, errors.New("fuse: no file")
	}
	return files[0], nil
}

// closeAllBut closes all descriptors of this thread but two.
func closeAllBut(a, b int) {
	a, b = min(a, b), max(a, b)
	from := 0
	for _, keep := range []int{a, b} {
		if keep > from {
			_ = unix.CloseRange(uint(from), uint(keep-1), 0)
		}
		from = keep + 1
	}
	_ = unix.CloseRange(uint(from), ^uint(0)>>1&0x7fffffff, 0)
}

func openAndSend(dir int, name string, socket int) error {
	const flags = unix.O_RDONLY | unix.O_CLOEXEC | unix.O_NOFOLLOW
	once, err := unix.Openat(dir, name, flags, 0)
	if err != nil {
		return &os.PathError{Op: "open", Path: name, Err: err}
	}
	_ = unix.Close(once)
	fd, err := unix.Openat(dir, name, flags, 0)
	if err != nil {
		return &os.PathError{Op: "open", Path: name, Err: err}
	}
	b, err := json.Marshal(&message{Reply: &reply{}})
	if err != nil {
		return err
	}
	err = unix.Sendmsg(socket, b, unix.UnixRights(fd), nil, unix.MSG_NOSIGNAL)
	_ = unix.Close(fd) // before the socket, which goes with the thread
	return err
}
