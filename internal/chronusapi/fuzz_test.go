package chronusapi

import (
	"bytes"
	"context"
	"encoding/binary"
	"io"
	"net"
	"reflect"
	"runtime"
	"testing"
	"time"

	"github.com/opendsec/dsec"
)

// scripted is a connection whose peer's bytes are given.
type scripted struct {
	net.Conn
	in  io.Reader
	out io.Writer
}

func (s *scripted) Read(p []byte) (int, error)      { return s.in.Read(p) }
func (s *scripted) Write(p []byte) (int, error)     { return s.out.Write(p) }
func (s *scripted) Close() error                    { return nil }
func (s *scripted) SetReadDeadline(time.Time) error { return nil }

// quietHandler answers everything, and reads all data.
type quietHandler struct {
	Handler
	FileHandler
}

func (quietHandler) Info(context.Context) (Info, error) { return Info{}, nil }
func (quietHandler) Start(_ context.Context, req StartRequest, sink Sink) error {
	if err := req.Validate(); err != nil {
		panic(err) // the server checks before
	}
	_ = sink(Event{Kind: EventStarted, Process: 1, PID: 1})
	return sink(exited(0))
}
func (quietHandler) FindTag(context.Context, uint64) (uint64, error)             { return 0, nil }
func (quietHandler) ForgetTag(context.Context, uint64) error                     { return nil }
func (quietHandler) Attach(context.Context, uint64, uint64, Sink) error          { return nil }
func (quietHandler) Processes(context.Context) ([]Process, error)                { return nil, nil }
func (quietHandler) Signal(context.Context, uint64, int, bool) error             { return nil }
func (quietHandler) Resize(context.Context, uint64, WindowSize) error            { return nil }
func (quietHandler) RunCommand(context.Context, SessionCommand, Sink) error      { return nil }
func (quietHandler) Sessions(context.Context) ([]Session, error)                 { return nil, nil }
func (quietHandler) CloseSession(context.Context, string) error                  { return nil }
func (quietHandler) Interrupt(context.Context, string) error                     { return nil }
func (quietHandler) Stat(context.Context, string, bool) (FileInfo, error)        { return FileInfo{}, nil }
func (quietHandler) Mkdir(context.Context, string, uint32, bool) error           { return nil }
func (quietHandler) Rename(context.Context, string, string) error                { return nil }
func (quietHandler) Remove(context.Context, string, bool) error                  { return nil }
func (quietHandler) Read(context.Context, string, int64, int64, io.Writer) error { return nil }
func (quietHandler) Download(context.Context, string, io.Writer) error           { return nil }
func (quietHandler) OpenSession(context.Context, SessionRequest) (Session, error) {
	return Session{}, nil
}
func (quietHandler) WriteStdin(_ context.Context, _ uint64, data []byte, _ bool) (int, error) {
	return len(data), nil
}
func (quietHandler) ListDir(context.Context, string, string, int) ([]FileInfo, bool, error) {
	return nil, false, nil
}
func (quietHandler) Write(_ context.Context, _ WriteRequest, r io.Reader) (int64, error) {
	return io.Copy(io.Discard, r)
}
func (quietHandler) Upload(_ context.Context, _ UploadRequest, r io.Reader) (UploadResult, error) {
	n, err := io.Copy(io.Discard, r)
	return UploadResult{Bytes: n}, err
}

func request(f func(*enc)) []byte {
	var e enc
	f(&e)
	return e.b
}

func framed(msgs ...any) []byte {
	c := &conn{}
	c.out = append(append(c.out, preface[:]...), Version-1)
	for i := 0; i < len(msgs); i += 2 {
		c.put(msgs[i].(uint8), msgs[i+1].([]byte))
	}
	return c.out
}

// FuzzServe gives a server any bytes. It must end, and never panic.
func FuzzServe(f *testing.F) {
	start := StartRequest{Command: Command{Argv: []string{"a"}, Env: []string{"A=b"}}, Stdin: []byte("in"), PTY: &WindowSize{1, 2}}
	f.Add(framed(callInfo, []byte(nil), callStart, request(func(e *enc) { e.startRequest(&start) }), callProcesses, []byte(nil)))
	f.Add(framed(callWrite, request(func(e *enc) { e.writeRequest(&WriteRequest{Path: "/a"}) }), frameData, []byte("data"), frameEnd, []byte(nil),
		callUpload, request(func(e *enc) { e.uploadRequest(&UploadRequest{Path: "/a"}) }), frameAbort, []byte(nil)))
	f.Add(framed(callRunCommand, request(func(e *enc) { e.sessionCommand(&SessionCommand{Session: "s", Command: "x"}) }),
		callStat, request(func(e *enc) { e.str("/a"); e.bool(true) })))
	f.Add(framed(callStartTagged, request(func(e *enc) { e.u64(7); e.startRequest(&start) }), callFindTag, request(func(e *enc) { e.u64(7) }),
		callForgetTag, request(func(e *enc) { e.u64(7) }), callFindTag, request(func(e *enc) { e.u64(0) })))
	f.Add(append(framed(), frameMore, 0xff, 0xff, 0xff, 0xff))
	f.Add(append(framed(), callStart, 0, 0, 0, 4, 0xff, 0xff, 0xff, 0xff))
	f.Add([]byte("GET / HTTP/1.1\r\n\r\n"))
	f.Fuzz(func(t *testing.T, in []byte) {
		_ = Serve(context.Background(), &scripted{in: bytes.NewReader(in), out: io.Discard}, quietHandler{})
	})
}

// FuzzClient gives a client any bytes as answers. Nothing but a whole exited
// event may look like an exit, and no more than 127 signals exist.
func FuzzClient(f *testing.F) {
	ev := func(ev Event) []byte {
		return request(func(e *enc) { e.eventHead(&ev); e.b = append(e.b, ev.Data...) })
	}
	seed := framed(frameEvent, ev(Event{Kind: EventStarted, Process: 1, PID: 2}), frameEvent, ev(Event{Kind: EventOutput, Stream: Stdout, Data: []byte("x")}),
		frameEvent, ev(Event{Kind: EventGap, To: 4}), frameEvent, ev(exited(3)), frameResult, []byte(nil))
	f.Add(seed[len(preface)+1:])
	f.Add(framed(frameError, request(func(e *enc) { e.error(ErrNeedGroup) }))[len(preface)+1:])
	f.Add(framed(frameResult, request(func(e *enc) { e.u32(1 << 31) }))[len(preface)+1:])
	f.Add(framed(frameData, []byte("abc"), frameResult, []byte(nil))[len(preface)+1:])
	f.Fuzz(func(t *testing.T, in []byte) {
		c := NewClient(func(context.Context) (net.Conn, error) {
			return &scripted{in: bytes.NewReader(in), out: io.Discard}, nil
		})
		ctx := context.Background()
		if s, err := c.Start(ctx, StartRequest{Command: Command{Argv: []string{"x"}}}); err == nil {
			for {
				ev, err := s.Next()
				if err != nil {
					break
				}
				if ev.Kind == EventExited && (ev.Outcome.Code > 255 || ev.Outcome.Signal > 127) {
					t.Fatalf("impossible outcome %+v", ev.Outcome)
				}
			}
		}
		c.Close()
		_, _ = c.Processes(ctx)
		_, _ = c.FindTag(ctx, 1)
		_, _, _ = c.ListDir(ctx, "/", "", 1)
		if r, err := c.Read(ctx, "/", 0, -1); err == nil {
			_, _ = io.Copy(io.Discard, r)
		}
		_, _ = c.Write(ctx, WriteRequest{Path: "/a"}, bytes.NewReader(in))
	})
}

// FuzzMessages decodes any bytes as each message; what decodes must encode to
// the same bytes again.
func FuzzMessages(f *testing.F) {
	f.Add(request(func(e *enc) {
		e.startRequest(&StartRequest{Command: Command{Argv: []string{"a"}}, PTY: &WindowSize{1, 1}})
	}))
	o := exited(1).Outcome
	f.Add(request(func(e *enc) { e.process(&Process{Outcome: &o, Argv: []string{"x"}}) }))
	f.Add(request(func(e *enc) { e.fileInfo(&FileInfo{Name: "x", Modified: time.Unix(1, 1)}) }))
	f.Fuzz(func(t *testing.T, in []byte) {
		check := func(decode func(*dec) func(*enc)) {
			d := &dec{b: in}
			encode := decode(d)
			if !d.ok() {
				return
			}
			var e enc
			encode(&e)
			if !bytes.Equal(e.b, in) {
				t.Fatalf("%x decodes and encodes to %x", in, e.b)
			}
		}
		check(func(d *dec) func(*enc) { v := d.startRequest(); return func(e *enc) { e.startRequest(&v) } })
		check(func(d *dec) func(*enc) { v := d.process(); return func(e *enc) { e.process(&v) } })
		check(func(d *dec) func(*enc) { v := d.fileInfo(); return func(e *enc) { e.fileInfo(&v) } })
		check(func(d *dec) func(*enc) { v := d.sessionCommand(); return func(e *enc) { e.sessionCommand(&v) } })
		check(func(d *dec) func(*enc) {
			v := d.event()
			return func(e *enc) { e.eventHead(&v); e.b = append(e.b, v.Data...) }
		})
	})
}

// TestMalformedLengthAllocatesAtMostOneFrame sends the header of the longest
// frame and no payload.
func TestMalformedLengthAllocatesAtMostOneFrame(t *testing.T) {
	for _, n := range []uint32{MaxFrame, MaxFrame + 1, 1<<32 - 1} {
		in := binary.BigEndian.AppendUint32(append(framed(), callStart), n)
		got := allocated(func() {
			_ = Serve(context.Background(), &scripted{in: bytes.NewReader(in), out: io.Discard}, quietHandler{})
		})
		if got > MaxFrame+32<<10 {
			t.Errorf("length %d: allocated %d bytes", n, got)
		}
	}
}

func allocated(f func()) uint64 {
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	f()
	runtime.ReadMemStats(&after)
	return after.TotalAlloc - before.TotalAlloc
}

func TestErrorTextsAreBounded(t *testing.T) {
	long := string(bytes.Repeat([]byte("é"), 5000))
	err := (&dec{b: request(func(e *enc) { e.error(&dsec.Error{Code: "strange", Field: "f", Message: long}) })}).error()
	want := &dsec.Error{Code: dsec.CodeInternal, Field: "f", Message: long[:4096]}
	if !reflect.DeepEqual(err, error(want)) {
		t.Errorf("got %v", err)
	}
}
