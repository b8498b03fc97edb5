// Package rawnet reads and writes sockets without telling Go's scheduler.
//
// A system call made in the usual way announces itself, in case it blocks. The
// first one of a process that was idle wakes the scheduler's monitor, a thread
// that then looks about every 20 µs until the process is idle again. A server
// whose every request begins and ends idle pays that at each: an eighth of the
// CPU of a session's command. A read or write of a socket of the runtime's
// poller never blocks, so it need not be announced.
package rawnet

import (
	"net"
	"syscall"
)

// NewListener returns l with its connections wrapped by New.
func NewListener(l net.Listener) net.Listener { return &listener{l} }

type listener struct{ net.Listener }

// Accept implements net.Listener.
func (l *listener) Accept() (net.Conn, error) {
	nc, err := l.Listener.Accept()
	if err != nil {
		return nil, err
	}
	return New(nc), nil
}

// State is what Peek finds.
type State int

// The states of a connection.
const (
	Quiet State = iota // nothing, or no socket to look at
	Bytes
	End // the peer has closed it, and all that it sent before was read
)

// Peek looks at a connection, without waiting and without taking anything.
func Peek(nc net.Conn) State {
	sc, ok := nc.(syscall.Conn)
	if !ok {
		return Quiet
	}
	raw, err := sc.SyscallConn()
	if err != nil {
		return End
	}
	found := End
	if err := raw.Control(func(fd uintptr) { found = peek(fd) }); err != nil {
		return End
	}
	return found
}
