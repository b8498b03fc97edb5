package chronusapi

import (
	"bufio"
	"encoding/binary"
	"errors"
	"io"
	"net"
	"time"

	"github.com/opendsec/dsec/internal/rawnet"
)

// A frame is one byte of type, four of length, and the payload. A message is
// one frame, or several where it is longer: all but the last have type
// frameMore. The memory of a frame is allocated when its header is there, so
// a peer makes us hold at most one frame more than it really sent.
const (
	headerLen  = 5
	maxMessage = MaxArgBytes + MaxStdin + 256<<10 // argv + env, first input, the rest
	keepBuffer = 16 << 10                         // a larger buffer is given back after its call
)

// Types of frames. Requests have the number of their call.
const (
	callInfo uint8 = iota + 1
	callStart
	callAttach
	callProcesses
	callSignal
	callWriteStdin
	callResize
	callOpenSession
	callRunCommand
	callSessions
	callCloseSession
	callStat
	callListDir
	callMkdir
	callRename
	callRemove
	callRead
	callWrite
	callDownload
	callUpload
	callSetup
	callAddGroup
	callInterrupt
	callHold // this and all that follow since version 2
	callStartTagged
	callFindTag
	callForgetTag

	frameResult uint8 = 0x80 // last of a call: it worked
	frameError  uint8 = 0x81 // last of a call: it did not
	frameEvent  uint8 = 0x82 // one event of a process stream
	frameData   uint8 = 0x83 // bytes of a file or tar, either way
	frameEnd    uint8 = 0x84 // end of what a client sends
	frameAbort  uint8 = 0x85 // the client's source failed: forget the call; or, while a session's command runs: interrupt it
	frameMore   uint8 = 0x86 // a message goes on in the next frame
)

// preface is what a client sends first: a name, so that a stray connection
// is told apart, and the version it speaks.
var preface = [4]byte{'d', 's', 'e', 'c'}

// versionOf is the first version that has a call: which a client speaks to make it,
// so that a chronus of the version before serves all others.
func versionOf(call uint8) uint8 {
	if call >= callHold {
		return Version
	}
	return Version - 1
}

var errMalformed = errors.New("chronusapi: malformed message")

// conn reads and writes messages. It has one reader and one writer at a time.
type conn struct {
	nc net.Conn
	r  *bufio.Reader
	w  io.Writer

	in  []byte // payload of the last message read; valid until the next
	out []byte // frames not yet written

	version   uint8     // of a client's: what it speaks
	idleSince time.Time // of one in the client's pool
}

func newConn(nc net.Conn) *conn {
	raw := rawnet.New(nc)
	return &conn{nc: nc, r: bufio.NewReaderSize(raw, 4096), w: raw}
}

// read returns the next message. The payload is valid until the next read.
// The error is io.EOF only between messages.
func (c *conn) read() (typ uint8, payload []byte, err error) {
	if cap(c.in) > keepBuffer {
		c.in = nil
	}
	c.in = c.in[:0]
	for {
		var h [headerLen]byte
		if _, err := io.ReadFull(c.r, h[:]); err != nil {
			if err == io.EOF && len(c.in) > 0 {
				err = io.ErrUnexpectedEOF
			}
			return 0, nil, err
		}
		typ, n := h[0], binary.BigEndian.Uint32(h[1:])
		if n > MaxFrame || len(c.in)+int(n) > maxMessage || typ == frameMore && n == 0 {
			return 0, nil, errMalformed
		}
		if err := c.readPayload(int(n)); err != nil {
			return 0, nil, err
		}
		if typ != frameMore {
			return typ, c.in, nil
		}
	}
}

func (c *conn) readPayload(n int) error {
	old := len(c.in)
	if cap(c.in)-old < n {
		grown := make([]byte, old, old+n) // append would round up
		copy(grown, c.in)
		c.in = grown
	}
	c.in = c.in[:old+n]
	_, err := io.ReadFull(c.r, c.in[old:])
	if err == io.EOF {
		err = io.ErrUnexpectedEOF
	}
	return err
}

// put adds a message to what the next flush writes.
func (c *conn) put(typ uint8, payload []byte) {
	for len(payload) > MaxFrame {
		c.frame(frameMore, payload[:MaxFrame])
		payload = payload[MaxFrame:]
	}
	c.frame(typ, payload)
}

func (c *conn) frame(typ uint8, payload []byte) {
	c.out = append(c.out, typ)
	c.out = binary.BigEndian.AppendUint32(c.out, uint32(len(payload)))
	c.out = append(c.out, payload...)
}

// putData adds a data-bearing frame whose payload is head and then data, and
// writes it with everything before it. Much data is not copied.
func (c *conn) putData(typ uint8, head, data []byte) error {
	c.out = append(c.out, typ)
	c.out = binary.BigEndian.AppendUint32(c.out, uint32(len(head)+len(data)))
	c.out = append(c.out, head...)
	if len(data) < 4096 {
		c.out = append(c.out, data...)
		return c.flush()
	}
	v := net.Buffers{c.out, data}
	c.out = c.out[:0]
	_, err := v.WriteTo(c.nc)
	return err
}

func (c *conn) flush() error {
	_, err := c.w.Write(c.out)
	c.out = c.out[:0]
	if cap(c.out) > keepBuffer {
		c.out = nil
	}
	return err
}

// ready reports whether a whole message of one frame is in memory.
func (c *conn) ready() bool {
	if c.r.Buffered() < headerLen {
		return false
	}
	h, err := c.r.Peek(headerLen)
	return err == nil && h[0] != frameMore && c.r.Buffered()-headerLen >= int(binary.BigEndian.Uint32(h[1:]))
}
