//go:build linux && !race

package rawnet

import (
	"io"
	"net"
	"os"
	"sync"
	"syscall"
	"unsafe"
)

// most is how many bytes one call moves: the scheduler can stop no thread that
// is in a call it knows nothing of, so that none may take long. What is larger
// is read in parts, and written in the usual way.
const most = 64 << 10

// New returns nc, of the runtime's poller, with Read and Write of this package.
// What is no such socket is returned as it is.
func New(nc net.Conn) net.Conn {
	switch nc.(type) {
	case *net.TCPConn, *net.UnixConn:
	default:
		return nc
	}
	raw, err := nc.(syscall.Conn).SyscallConn()
	if err != nil {
		return nc
	}
	c := &conn{Conn: nc, raw: raw}
	c.in.call = c.in.step(syscall.SYS_READ)
	c.out.call = c.out.step(syscall.SYS_WRITE)
	return c
}

type conn struct {
	net.Conn
	raw     syscall.RawConn
	in, out half
}

// half is one direction. Its call is made once, so that a read or a write allocates nothing.
type half struct {
	mu    sync.Mutex // one call at a time, as in package net
	rest  []byte     // what is to be filled or written
	n     int        // bytes done
	errno syscall.Errno
	call  func(fd uintptr) (done bool)
}

// step makes a system call, again for the rest of what is written, until it would block.
func (h *half) step(trap uintptr) func(uintptr) bool {
	return func(fd uintptr) bool {
		for {
			r, _, errno := syscall.RawSyscall(trap, fd, uintptr(unsafe.Pointer(&h.rest[0])), uintptr(len(h.rest)))
			switch {
			case errno == syscall.EINTR:
				continue
			case errno == syscall.EAGAIN:
				return false
			case errno != 0:
				h.errno = errno
				return true
			}
			h.n += int(r)
			h.rest = h.rest[r:]
			if trap == syscall.SYS_READ || len(h.rest) == 0 {
				return true
			}
		}
	}
}

func (h *half) run(b []byte, wait func(func(uintptr) bool) error) (n int, errno syscall.Errno, err error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.rest, h.n, h.errno = b, 0, 0
	err = wait(h.call)
	h.rest = nil
	return h.n, h.errno, err
}

// Read implements net.Conn.
func (c *conn) Read(b []byte) (int, error) {
	if len(b) == 0 {
		return c.Conn.Read(b)
	}
	n, errno, err := c.in.run(b[:min(len(b), most)], c.raw.Read)
	if err == nil && errno == 0 && n == 0 {
		return 0, io.EOF
	}
	return n, c.error("read", errno, err)
}

// Write implements net.Conn.
func (c *conn) Write(b []byte) (int, error) {
	if len(b) == 0 || len(b) > most {
		return c.Conn.Write(b)
	}
	n, errno, err := c.out.run(b, c.raw.Write)
	return n, c.error("write", errno, err)
}

// error is what package net gives for the same: err is the poller's, with another Op.
func (c *conn) error(op string, errno syscall.Errno, err error) error {
	if errno != 0 {
		return &net.OpError{Op: op, Net: c.LocalAddr().Network(), Source: c.LocalAddr(), Addr: c.RemoteAddr(), Err: os.NewSyscallError(op, errno)}
	}
	if o, ok := err.(*net.OpError); ok { //nolint:errorlint // nothing is wrapped around it
		o.Op = op
	}
	return err
}

// CloseWrite ends what is written, for the servers and clients that ask whether a connection can.
func (c *conn) CloseWrite() error {
	return c.Conn.(interface{ CloseWrite() error }).CloseWrite()
}

// SyscallConn implements syscall.Conn.
func (c *conn) SyscallConn() (syscall.RawConn, error) { return c.raw, nil }

func peek(fd uintptr) State {
	var b [1]byte
	n, _, errno := syscall.RawSyscall6(syscall.SYS_RECVFROM, fd, uintptr(unsafe.Pointer(&b[0])), 1, syscall.MSG_PEEK|syscall.MSG_DONTWAIT, 0, 0)
	switch {
	case errno == syscall.EAGAIN, errno == syscall.EINTR:
		return Quiet
	case errno == 0 && n > 0:
		return Bytes
	}
	return End
}
