package chronus_test

import (
	"bufio"
	"encoding/binary"
	"errors"
	"io"
	"net"
	"strings"
	"syscall"
	"testing"

	"github.com/opendsec/dsec/internal/chronusapi"
)

// Types of frames, which chronusapi keeps to itself.
const (
	callInfo  = 1
	callStart = 2
	callStat  = 12
	callWrite = 18

	callRunCommand = 9

	callStartTagged = 25
	callFindTag     = 26
	callForgetTag   = 27

	frameResult = 0x80
	frameError  = 0x81
	frameData   = 0x83
	frameAbort  = 0x85
	frameMore   = 0x86
)

const (
	preface = "dsec\x01"
	newer   = "dsec\x02"
)

func frame(typ byte, payload ...string) string {
	all := strings.Join(payload, "")
	return string(binary.BigEndian.AppendUint32([]byte{typ}, uint32(len(all)))) + all
}

func u32(n uint32) string { return string(binary.BigEndian.AppendUint32(nil, n)) }

func str(s string) string { return u32(uint32(len(s))) + s }

// startFrame is a request that starts true, detached, with parts changed by name.
func startFrame(change map[string]string) string {
	var all string
	for _, part := range [][2]string{
		{"argv", u32(1) + str("true")}, {"shell", str("")}, {"env", u32(0)}, {"cwd", str("")}, {"user", str("")},
		{"timeout", u32(0) + u32(0)}, {"output limit", u32(0) + u32(0)}, {"stdin", str("")},
		{"open stdin", "\x00"}, {"detach", "\x01"}, {"orphan", "\x00"}, {"pty", "\x00"}, {"end", ""},
	} {
		if text, ok := change[part[0]]; ok {
			part[1] = text
		}
		all += part[1]
	}
	return frame(callStart, all)
}

// talk sends bytes on a connection of their own and returns all that chronus
// says: until it ends the connection, or, where it has given n answers, we do.
func (f *fixture) talk(t testing.TB, n int, parts ...string) string {
	t.Helper()
	conn, err := net.Dial("unix", f.socket)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	nc := conn.(*net.UnixConn)
	for _, part := range parts {
		if _, err := io.WriteString(nc, part); err != nil && !ended(err) {
			t.Fatal(err)
		}
	}
	if n == 0 {
		_ = nc.CloseWrite()
	}
	r := bufio.NewReader(nc)
	var said []byte
	for {
		var h [5]byte
		got, err := io.ReadFull(r, h[:])
		said = append(said, h[:got]...)
		if err != nil {
			if !ended(err) {
				t.Fatal(err)
			}
			return string(said)
		}
		payload := make([]byte, binary.BigEndian.Uint32(h[1:]))
		if _, err := io.ReadFull(r, payload); err != nil {
			t.Fatal(err)
		}
		said = append(said, payload...)
		if h[0] == frameResult || h[0] == frameError {
			if n--; n == 0 {
				_ = nc.CloseWrite()
			}
		}
	}
}

// ended reports whether err is how the other side ends a connection.
func ended(err error) bool {
	return errors.Is(err, io.EOF) || errors.Is(err, syscall.EPIPE) || errors.Is(err, syscall.ECONNRESET)
}

func TestMalformedMessagesEndTheirConnectionOnly(t *testing.T) {
	each(t, func(t *testing.T, f *fixture) {
		req := argv("cat")
		req.OpenStdin = true
		s, err := f.Start(t.Context(), req)
		if err != nil {
			t.Fatal(err)
		}
		defer s.Close()
		if r := f.talk(t, 1, preface, startFrame(nil)); !strings.HasSuffix(r, frame(frameResult)) {
			t.Fatalf("the control: %q", r)
		}
		huge := strings.Repeat(frame(frameMore, strings.Repeat("x", chronusapi.MaxFrame)), 14)
		for name, in := range map[string]string{
			"nothing":             "",
			"half a preface":      "dse",
			"another protocol":    "GET / HTTP/1.1\r\n\r\n",
			"half a header":       preface + "\x01\x00",
			"half a payload":      preface + "\x02\x00\x00\x00\x10abc",
			"no such call":        preface + frame(28),
			"call 0":              preface + frame(0),
			"a call for files":    preface + frame(callStat, str("/"), "\x00"),
			"a file's content":    preface + frame(callWrite, str("/x"), u32(0), str(""), "\x00") + frame(frameData, "x"),
			"an answer":           preface + frame(frameResult),
			"data for no call":    preface + frame(frameData, "x"),
			"a payload too much":  preface + frame(callInfo, "x"),
			"too long a frame":    preface + string([]byte{callStart}) + u32(chronusapi.MaxFrame+1),
			"the longest length":  preface + string([]byte{callStart}) + u32(1<<32-1),
			"an empty part":       preface + frame(frameMore) + frame(callInfo),
			"too long a message":  preface + huge + frame(callStart, "x"),
			"too many strings":    preface + startFrame(map[string]string{"argv": u32(1<<32 - 1)}),
			"more than there are": preface + startFrame(map[string]string{"argv": u32(100) + str("true")}),
			"a string too long":   preface + startFrame(map[string]string{"end": "", "stdin": u32(1 << 20)}),
			"a bool of 2":         preface + startFrame(map[string]string{"detach": "\x02"}),
			"a rest":              preface + startFrame(map[string]string{"end": "x"}),
			"no end":              preface + frame(callStart, u32(1)),
			"a long user":         preface + startFrame(map[string]string{"user": str(strings.Repeat("u", 300))}),
			"a tag alone":         newer + frame(callStartTagged, u32(0)+u32(1)),
			"no tag to find":      newer + frame(callFindTag),
			"half a tag":          newer + frame(callForgetTag, u32(1)),
			"a long directory":    preface + startFrame(map[string]string{"cwd": str("/" + strings.Repeat("d", 5000))}),
		} {
			n := 1 // it ends the connection in place of an answer
			if name == "nothing" || strings.HasPrefix(name, "half") {
				n = 0 // it waits for the rest
			}
			if r := f.talk(t, n, in); r != "" {
				t.Errorf("%s: got %q", name, r)
			}
		}
		for _, call := range []string{frame(callStartTagged, u32(0)+u32(0)+startFrame(nil)[5:]), frame(callFindTag, u32(0)+u32(0)), frame(callForgetTag, u32(0)+u32(0))} {
			if r := f.talk(t, 1, newer, call); r == "" || r[0] != frameError || !strings.Contains(r, str("invalid")+str("tag")) {
				t.Errorf("tag 0: got %q", r)
			}
		}
		if r := f.talk(t, 1, newer, frame(callInfo)); r[0] != frameResult {
			t.Errorf("the newer version: %q", r)
		}
		for _, other := range []string{"0", "3"} {
			v := string(other[0] - '0')
			if r := f.talk(t, 2, "dsec"+v); r[0] != frameError || !strings.Contains(r, "unsupported") || !strings.Contains(r, "versions 1 and 2, not "+other) {
				t.Errorf("version %s: %q", other, r)
			}
		}
		// What can be read and is wrong is an answer.
		for field, change := range map[string]map[string]string{
			"command.argv":         {"argv": u32(0)},
			"command.cwd":          {"cwd": str("relative")},
			"command.env":          {"env": u32(1) + str("x")},
			"command.timeout":      {"timeout": u32(1<<32-1) + u32(0)},
			"command.output_limit": {"output limit": u32(1<<32-1) + u32(0)},
			"pty":                  {"pty": "\x01\x00\x00\x00\x00"},
		} {
			if r := f.talk(t, 1, preface, startFrame(change)); r == "" || r[0] != frameError || !strings.Contains(r, str("invalid")+str(field)) {
				t.Errorf("%s: got %q", field, r)
			}
		}
		// The control's process may be told before it is waited for.
		eventually(t, "only the process that was there before is left", func() bool {
			info, err := f.Info(t.Context())
			return err != nil || info.Processes == 1
		})
		if r := f.run(t, argv("echo", "still")); r.stdout != "still\n" {
			t.Errorf("got %+v", r)
		}
	})
}

// A peer that sends a message in small pieces gets its answer, and one that
// does not send its rest keeps nobody waiting.
func TestAMessageInPieces(t *testing.T) {
	each(t, func(t *testing.T, f *fixture) {
		slow, err := net.Dial("unix", f.socket)
		if err != nil {
			t.Fatal(err)
		}
		defer slow.Close()
		if _, err := io.WriteString(slow, preface+"\x01\x00"); err != nil {
			t.Fatal(err)
		}
		all := preface + frame(callInfo) + startFrame(nil) + frame(callInfo)
		if r := f.talk(t, 3, strings.Split(all, "")...); strings.Count(r, frame(frameResult)) != 1 || strings.Count(r, string([]byte{frameResult, 0, 0, 0, 12})) != 2 {
			t.Errorf("got %q", r)
		}
		if _, err := io.WriteString(slow, "\x00\x00\x00"); err != nil {
			t.Fatal(err)
		}
		var answer [17]byte
		if _, err := io.ReadFull(slow, answer[:]); err != nil || answer[0] != frameResult {
			t.Errorf("got %q, %v", answer, err)
		}
	})
}

// Messages of several frames are one message.
func TestAMessageInFrames(t *testing.T) {
	each(t, func(t *testing.T, f *fixture) {
		whole := startFrame(nil)[5:]
		var in string
		for len(whole) > 10 {
			in += frame(frameMore, whole[:10])
			whole = whole[10:]
		}
		if r := f.talk(t, 1, preface, in, frame(callStart, whole)); !strings.HasSuffix(r, frame(frameResult)) {
			t.Errorf("got %q", r)
		}
	})
}
