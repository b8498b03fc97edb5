package container

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec"
)

// The backend and its launcher are one binary's two processes, so what goes
// between them needs no version: JSON messages, one a packet, with descriptors.

// request is what the backend asks of the launcher. Exactly one of its parts
// is set.
type request struct {
	ID    uint64
	Hello *helloRequest `json:",omitempty"`
	Start *startRequest `json:",omitempty"`
	// Files starts what serves the files of a container. Descriptors: the pidfd of
	// its PID 1, the control socket, the v2 cgroup, and up to maxJoins v1 tasks
	// files. The answer has the pidfd of the process.
	Files bool `json:",omitempty"`
}

// helloRequest comes first and once, with the chronus and chronus-files
// binaries as its descriptors.
type helloRequest struct {
	Cgroup string // name of the tree of cgroups to live in
	// CommandNamespaces: it is commands that get cgroup namespaces, not chronus.
	CommandNamespaces bool
	NetSlots          int  // network namespaces to hold ready
	Debug             bool // chronus's stderr goes to the launcher's
}

// startRequest starts a container up to the point where chronus waits for
// Setup. Descriptors: the listening socket, the v2 cgroup. The answer has the
// pidfd and the user namespace.
type startRequest struct {
	Base uint32 // host's ID of root inside
}

// reply answers one request.
type reply struct {
	ID    uint64
	PID   int        `json:",omitempty"`
	Error *wireError `json:",omitempty"`
}

type wireError struct {
	Code    dsec.Code
	Field   string `json:",omitempty"`
	Message string // of the user where Code is not internal, else for the log
}

func toWire(err error) *wireError {
	if err == nil {
		return nil
	}
	var e *dsec.Error
	if errors.As(err, &e) && e.Code != dsec.CodeInternal {
		return &wireError{Code: e.Code, Field: e.Field, Message: e.Message}
	}
	return &wireError{Code: dsec.CodeInternal, Message: err.Error()}
}

func (w *wireError) err() error {
	if w == nil {
		return nil
	}
	if w.Code == dsec.CodeInternal {
		return fmt.Errorf("launcher: %s", w.Message)
	}
	return &dsec.Error{Code: w.Code, Field: w.Field, Message: w.Message}
}

const (
	maxMessage = 8 << 10
	maxRights  = 3 + maxJoins
)

// packetConn is the backend's end, in the runtime's poller.
type packetConn struct {
	c *net.UnixConn

	wmu sync.Mutex

	buf, oob []byte // of recv, which has one caller
}

func newPacketConn(fd int) (*packetConn, error) {
	f := os.NewFile(uintptr(fd), "launcher")
	defer f.Close() // FileConn has a copy
	c, err := net.FileConn(f)
	if err != nil {
		return nil, err
	}
	uc, ok := c.(*net.UnixConn)
	if !ok {
		_ = c.Close()
		return nil, fmt.Errorf("launcher: descriptor %d is a %T", fd, c)
	}
	return &packetConn{c: uc, buf: make([]byte, maxMessage), oob: make([]byte, unix.CmsgSpace(maxRights*4))}, nil
}

func (p *packetConn) send(v any, fds ...int) error {
	b, oob, err := encode(v, fds)
	if err != nil {
		return err
	}
	p.wmu.Lock()
	defer p.wmu.Unlock()
	_, _, err = p.c.WriteMsgUnix(b, oob, nil)
	return err
}

// recv reads one message. The descriptors are the caller's. Its error is
// net.ErrClosed at the end.
func (p *packetConn) recv(v any) ([]int, error) {
	n, oobn, flags, _, err := p.c.ReadMsgUnix(p.buf, p.oob)
	if err != nil {
		return nil, err
	}
	if n == 0 {
		return nil, net.ErrClosed
	}
	return decode(p.buf[:n], p.oob[:oobn], flags, v)
}

// packetSocket is the launcher's end: each of its threads waits in the kernel.
type packetSocket struct{ fd int }

// packetBuffer is what a thread receives into.
type packetBuffer struct{ data, oob []byte }

func newPacketBuffer() *packetBuffer {
	return &packetBuffer{make([]byte, maxMessage), make([]byte, unix.CmsgSpace(maxRights*4))}
}

func newPacketSocket(fd int) (*packetSocket, error) {
	unix.CloseOnExec(fd)
	return &packetSocket{fd}, unix.SetNonblock(fd, false)
}

func (p *packetSocket) send(v any, fds ...int) error {
	b, oob, err := encode(v, fds)
	if err != nil {
		return err
	}
	for {
		if err = unix.Sendmsg(p.fd, b, oob, nil, unix.MSG_NOSIGNAL); err != unix.EINTR {
			return err
		}
	}
}

// recv reads one message. The descriptors are the caller's. Its error is io.EOF
// at the end.
func (p *packetSocket) recv(b *packetBuffer, v any) ([]int, error) {
	for {
		n, oobn, flags, _, err := unix.Recvmsg(p.fd, b.data, b.oob, unix.MSG_CMSG_CLOEXEC)
		switch {
		case err == unix.EINTR:
		case err != nil:
			return nil, err
		case n == 0:
			return nil, io.EOF
		default:
			return decode(b.data[:n], b.oob[:oobn], flags, v)
		}
	}
}

func encode(v any, fds []int) (b, oob []byte, err error) {
	if b, err = json.Marshal(v); err != nil {
		return nil, nil, err
	}
	if len(b) > maxMessage {
		return nil, nil, fmt.Errorf("launcher: message of %d bytes", len(b))
	}
	if len(fds) > 0 {
		oob = unix.UnixRights(fds...)
	}
	return b, oob, nil
}

func decode(b, oob []byte, flags int, v any) ([]int, error) {
	var fds []int
	if len(oob) > 0 {
		msgs, err := unix.ParseSocketControlMessage(oob)
		if err != nil {
			return nil, err
		}
		for i := range msgs {
			got, err := unix.ParseUnixRights(&msgs[i])
			if err != nil {
				return nil, err
			}
			fds = append(fds, got...)
		}
	}
	if flags&(unix.MSG_TRUNC|unix.MSG_CTRUNC) != 0 {
		closeAll(fds)
		return nil, errors.New("launcher: message too long")
	}
	if err := json.Unmarshal(b, v); err != nil {
		closeAll(fds)
		return nil, fmt.Errorf("launcher: %w", err)
	}
	return fds, nil
}

// closeAll closes descriptors; -1 stands for none.
func closeAll(fds []int) {
	for _, fd := range fds {
		if fd >= 0 {
			_ = unix.Close(fd)
		}
	}
}
