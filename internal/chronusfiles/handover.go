package chronusfiles

import (
	"context"
	"errors"
	"io"
	"net"
	"os"
	"sync"
	"time"

	"github.com/opendsec/dsec/internal/chronusapi"
	"golang.org/x/sys/unix"
)

// IdleTime is how long a connection for files may be without a call, and how
// long the process that serves them stays without a connection.
const IdleTime = 10 * time.Second

// ServeHandOvers serves the connections that come through control, a socket of
// type SOCK_SEQPACKET. A message of it is one byte, which means nothing, and one
// connection, as a descriptor (SCM_RIGHTS), of which nothing was read.
//
// It returns when the other side closed control, or no connection was there
// for idle, and then has shut control down, so that the other side cannot lose
// a connection in it: what was sent before is still served.
func (fs *Files) ServeHandOvers(control *os.File, idle time.Duration) error {
	nc, err := net.FileConn(control)
	if err != nil {
		return err
	}
	defer nc.Close()
	uc, ok := nc.(*net.UnixConn)
	if !ok {
		return errors.New("want a Unix socket, got " + nc.LocalAddr().Network())
	}
	h := &handOvers{files: fs, control: uc, idle: idle, since: time.Now()}
	err = h.receive()
	h.all.Wait()
	return err
}

// handOvers is the work of ServeHandOvers.
type handOvers struct {
	files   *Files
	control *net.UnixConn
	idle    time.Duration
	all     sync.WaitGroup

	mu     sync.Mutex
	active int
	since  time.Time // when active became 0
}

// receive takes connections until there are no more.
func (h *handOvers) receive() error {
	buf := make([]byte, 1)
	oob := make([]byte, unix.CmsgSpace(4))
	for last := false; ; {
		if !last {
			if err := h.control.SetReadDeadline(h.idleUntil()); err != nil {
				return err
			}
		}
		_, oobn, flags, _, err := h.control.ReadMsgUnix(buf, oob) // sets MSG_CMSG_CLOEXEC
		switch {
		case errors.Is(err, os.ErrDeadlineExceeded):
			if last = time.Until(h.idleUntil()) <= 0; last {
				if err := h.shutdown(); err != nil {
					return err
				}
			}
		case errors.Is(err, io.EOF):
			return nil
		case err != nil:
			return err
		default:
			h.take(oob[:oobn], flags)
		}
	}
}

// idleUntil is when to look again whether anybody needs this process.
func (h *handOvers) idleUntil() time.Time {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.active > 0 {
		return time.Now().Add(h.idle)
	}
	return h.since.Add(h.idle)
}

// shutdown makes the other side see the end, and its next message fail. What
// it sent before can still be received, up to io.EOF.
func (h *handOvers) shutdown() error {
	raw, err := h.control.SyscallConn()
	if err != nil {
		return err
	}
	var serr error
	if err := raw.Control(func(fd uintptr) { serr = unix.Shutdown(int(fd), unix.SHUT_RDWR) }); err != nil {
		return err
	}
	if serr != nil {
		return serr
	}
	return h.control.SetReadDeadline(time.Time{})
}

// take serves the connection of one message. A message that is more than that has
// its descriptors closed, which their clients see.
func (h *handOvers) take(oob []byte, flags int) {
	fd := received(oob)
	if fd < 0 {
		return
	}
	f := os.NewFile(uintptr(fd), "connection")
	nc, err := net.FileConn(f) // with a descriptor of its own
	f.Close()
	if err != nil {
		return
	}
	if flags&(unix.MSG_TRUNC|unix.MSG_CTRUNC) != 0 {
		nc.Close()
		return
	}
	h.mu.Lock()
	h.active++
	h.mu.Unlock()
	h.all.Go(func() {
		// How it ended concerns its client alone.
		_ = chronusapi.ServeFiles(context.Background(), nc, h.files, h.idle)
		h.mu.Lock()
		h.active--
		h.since = time.Now()
		h.mu.Unlock()
	})
}

// received returns the one descriptor of a message, or -1. It closes those of
// a message that has another count.
func received(oob []byte) int {
	msgs, err := unix.ParseSocketControlMessage(oob)
	if err != nil {
		return -1
	}
	var fds []int
	for i := range msgs {
		if list, err := unix.ParseUnixRights(&msgs[i]); err == nil {
			fds = append(fds, list...)
		}
	}
	if len(fds) == 1 {
		return fds[0]
	}
	for _, fd := range fds {
		unix.Close(fd)
	}
	return -1
}
