package lazy

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

// Client and layerd exchange JSON messages, one a packet, with descriptors. What
// may be long, such as hashes, is the content of a memfd among these.
const (
	protocolVersion = 1
	maxPacket       = 16 << 10
	maxFiles        = 8
	maxBulk         = maxMeta
)

// message is what goes either way. Exactly one of its parts is set.
type message struct {
	ID uint64 `json:",omitempty"` // of a call and its answers

	// From the client. The first message is Hello.
	Hello    *hello        `json:",omitempty"`
	Open     *openCall     `json:",omitempty"` // file: the description, as of a meta file
	Release  *releaseCall  `json:",omitempty"`
	Settle   *keyCall      `json:",omitempty"`
	Trace    *keyCall      `json:",omitempty"`
	Stats    bool          `json:",omitempty"`
	Prefetch *prefetchCall `json:",omitempty"` // files: the description, the ranges as JSON
	Cancel   bool          `json:",omitempty"` // of the call with this ID
	Stop     bool          `json:",omitempty"`
	Ping     bool          `json:",omitempty"`

	// From layerd, beside Hello.
	Reply    *reply    `json:",omitempty"` // with a file, if the answer has one
	Progress *Progress `json:",omitempty"`
	Event    *Event    `json:",omitempty"`

	// Either way: an image that layerd serves. File: its data, where fanotify does.
	Hold *hold `json:",omitempty"`
}

// hello begins a connection and is answered by one. Its files are those that are
// said to be there, in the order of the fields.
type hello struct {
	Version int

	// From the client.
	Store   Store
	Limits  Limits
	Fresh   bool       // the descriptors were made now: nothing was served by them
	Holds   int        // so many Hold messages follow
	Group   bool       // the fanotify group, and the event log
	FUSE    bool       // the FUSE connection, and the mount
	Lost    []string   `json:",omitempty"` // keys: from layerd, and what the client was told by the one before
	Refused *wireError `json:",omitempty"` // from layerd: why it does not talk
}

type openCall struct{ FrontEnd FrontEnd }

type keyCall struct{ Key string }

// releaseCall says that an image is not used any more. Of FUSE's, layerd cannot see
// who has it open.
type releaseCall struct {
	Key string
	// Open: somebody has it open still.
	Open bool `json:",omitempty"`
	// Last: nobody has any more, of one of which a call before this said so.
	Last bool `json:",omitempty"`
}

type prefetchCall struct{ All bool }

// hold says that an image is being served.
type hold struct {
	Key      string
	FrontEnd FrontEnd
	InUse    bool
}

type reply struct {
	Error *wireError `json:",omitempty"`
	Idle  bool       `json:",omitempty"` // of Release: nobody has it open
}

type wireError struct {
	Code    dsec.Code
	Field   string `json:",omitempty"`
	Message string
}

func toWire(err error) *wireError {
	if err == nil {
		return nil
	}
	if e, ok := errors.AsType[*dsec.Error](err); ok && e.Code != dsec.CodeInternal {
		return &wireError{Code: e.Code, Field: e.Field, Message: e.Message}
	}
	return &wireError{Code: dsec.CodeInternal, Message: err.Error()} // for the client's log
}

func (w *wireError) err() error {
	if w == nil {
		return nil
	}
	if w.Code == dsec.CodeInternal {
		return fmt.Errorf("layerd: %s", w.Message)
	}
	return &dsec.Error{Code: w.Code, Field: w.Field, Message: w.Message}
}

// connection is one end of the socket.
type connection struct {
	c *net.UnixConn

	wmu      sync.Mutex
	buf, oob []byte // of receive, which has one caller
}

func newConnection(c *net.UnixConn) *connection {
	return &connection{c: c, buf: make([]byte, maxPacket), oob: make([]byte, unix.CmsgSpace(maxFiles*4))}
}

func (c *connection) close() { _ = c.c.Close() }

// send sends a message. It waits as long as the other end does not read.
func (c *connection) send(m *message, files ...*os.File) error {
	b, err := json.Marshal(m)
	if err != nil {
		return err
	}
	if len(b) > maxPacket {
		return fmt.Errorf("message of %d bytes, want at most %d", len(b), maxPacket)
	}
	var oob []byte
	if len(files) > 0 {
		fds := make([]int, len(files))
		for i, f := range files {
			fds[i] = int(f.Fd())
		}
		oob = unix.UnixRights(fds...)
	}
	c.wmu.Lock()
	defer c.wmu.Unlock()
	_, _, err = c.c.WriteMsgUnix(b, oob, nil)
	return err
}

// receive returns the next message. The files are the caller's. The error is
// io.EOF at the end.
func (c *connection) receive() (*message, []*os.File, error) {
	n, oobn, flags, _, err := c.c.ReadMsgUnix(c.buf, c.oob)
	if err != nil {
		return nil, nil, err
	}
	if n == 0 && oobn == 0 {
		return nil, nil, io.EOF
	}
	return decode(c.buf[:n], c.oob[:oobn], flags)
}

// decode reads a packet. After an error no file is left open.
func decode(b, oob []byte, flags int) (*message, []*os.File, error) {
	files, err := filesOf(oob)
	if err == nil && flags&(unix.MSG_TRUNC|unix.MSG_CTRUNC) != 0 {
		err = errors.New("message too long")
	}
	m := new(message)
	if err == nil {
		err = json.Unmarshal(b, m)
	}
	if err != nil {
		closeFiles(files)
		return nil, nil, fmt.Errorf("layerd protocol: %w", err)
	}
	return m, files, nil
}

func filesOf(oob []byte) (files []*os.File, err error) {
	if len(oob) == 0 {
		return nil, nil
	}
	messages, err := unix.ParseSocketControlMessage(oob)
	if err != nil {
		return nil, err
	}
	for i := range messages {
		fds, err := unix.ParseUnixRights(&messages[i])
		if err != nil {
			return files, err
		}
		for _, fd := range fds {
			files = append(files, os.NewFile(uintptr(fd), "received"))
		}
	}
	return files, nil
}

func closeFiles(files []*os.File) {
	for _, f := range files {
		_ = f.Close()
	}
}

// bulk puts bytes into a memfd, for a message.
func bulk(b []byte) (*os.File, error) {
	fd, err := unix.MemfdCreate("dsec-layerd-message", unix.MFD_CLOEXEC)
	if err != nil {
		return nil, err
	}
	f := os.NewFile(uintptr(fd), "message")
	if _, err := f.WriteAt(b, 0); err != nil {
		_ = f.Close()
		return nil, err
	}
	return f, nil
}

// readBulk reads what bulk made.
func readBulk(f *os.File) ([]byte, error) {
	b, err := io.ReadAll(io.NewSectionReader(f, 0, maxBulk+1))
	if err == nil && len(b) > maxBulk {
		err = errors.New("layerd protocol: content too long")
	}
	return b, err
}

// bulkJSON is bulk of v as JSON.
func bulkJSON(v any) (*os.File, error) {
	b, err := json.Marshal(v)
	if err != nil {
		return nil, err
	}
	return bulk(b)
}
