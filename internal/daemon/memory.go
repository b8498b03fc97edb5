package daemon

import (
	"context"
	"net"
	"os"
	"sync"

	"golang.org/x/sys/unix"
)

// Memory is a listener inside the process, and its dialer. Each connection is
// a pair of connected sockets without a name: unlike a pipe between goroutines
// it has the kernel's buffers and exact deadlines, on which net/http relies to
// tell the end of a request from the end of its connection.
func Memory() (net.Listener, func(context.Context) (net.Conn, error)) {
	l := &memory{conns: make(chan net.Conn), closed: make(chan struct{})}
	return l, l.dial
}

type memory struct {
	conns  chan net.Conn
	once   sync.Once
	closed chan struct{}
}

func (l *memory) dial(ctx context.Context) (net.Conn, error) {
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		return nil, os.NewSyscallError("socketpair", err)
	}
	ours, err := fileConn(fds[0])
	if err != nil {
		_ = unix.Close(fds[1])
		return nil, err
	}
	theirs, err := fileConn(fds[1])
	if err != nil {
		_ = ours.Close()
		return nil, err
	}
	select {
	case l.conns <- theirs:
		return ours, nil
	case <-l.closed:
		err = net.ErrClosed
	case <-ctx.Done():
		err = ctx.Err()
	}
	_, _ = ours.Close(), theirs.Close()
	return nil, err
}

// fileConn takes fd over.
func fileConn(fd int) (net.Conn, error) {
	f := os.NewFile(uintptr(fd), "memory")
	defer func() { _ = f.Close() }() // net.FileConn has its own copy
	return net.FileConn(f)
}

// Accept implements net.Listener.
func (l *memory) Accept() (net.Conn, error) {
	select {
	case c := <-l.conns:
		return c, nil
	case <-l.closed:
		return nil, net.ErrClosed
	}
}

// Close implements net.Listener.
func (l *memory) Close() error {
	l.once.Do(func() { close(l.closed) })
	return nil
}

// Addr implements net.Listener.
func (l *memory) Addr() net.Addr { return &net.UnixAddr{Net: "unix", Name: "memory"} }
