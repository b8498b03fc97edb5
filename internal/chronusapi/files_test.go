package chronusapi

import (
	"bytes"
	"context"
	"errors"
	"io"
	"net"
	"path/filepath"
	"runtime"
	"sync/atomic"
	"testing"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/rawnet"
)

func TestReadAndWriteStream(t *testing.T) {
	content := bytes.Repeat([]byte("0123456789abcdef"), 20000)
	h := &stub{}
	c, dials := serve(t, h)
	set(h, &h.read, func(_ context.Context, w io.Writer) error {
		_, err := w.Write(content)
		return err
	})
	r, err := c.Read(t.Context(), "/f", 0, -1)
	if err != nil {
		t.Fatal(err)
	}
	if got, err := io.ReadAll(r); err != nil || !bytes.Equal(got, content) {
		t.Fatalf("read %d bytes, %v", len(got), err)
	}
	r.Close()

	var got []byte
	set(h, &h.write, func(_ WriteRequest, r io.Reader) (int64, error) {
		var err error
		got, err = io.ReadAll(r)
		return int64(len(got)), err
	})
	size, err := c.Write(t.Context(), WriteRequest{Path: "/f"}, bytes.NewReader(content))
	if err != nil || size != int64(len(content)) || !bytes.Equal(got, content) {
		t.Fatalf("wrote %d: %v", size, err)
	}

	// A source that fails is told apart from one that ends.
	srcErr := errors.New("source broke")
	var seen error
	set(h, &h.write, func(_ WriteRequest, r io.Reader) (int64, error) {
		_, seen = io.Copy(io.Discard, r)
		return 0, seen
	})
	_, err = c.Write(t.Context(), WriteRequest{Path: "/f"}, io.MultiReader(bytes.NewReader(content), &failing{srcErr}))
	if err != srcErr || seen == nil {
		t.Fatalf("got %v, handler saw %v", err, seen)
	}

	// An early answer stops the sender, who may have an endless source.
	full := dsec.Errorf(dsec.CodeExhausted, "disk full")
	set(h, &h.write, func(_ WriteRequest, r io.Reader) (int64, error) {
		_, _ = io.CopyN(io.Discard, r, 100_000)
		return 0, full
	})
	if _, err = c.Write(t.Context(), WriteRequest{Path: "/f"}, endless{}); err == nil || dsec.CodeOf(err) != dsec.CodeExhausted {
		t.Fatalf("got %v, want exhausted", err)
	}
	set(h, &h.stat, func(string) (FileInfo, error) { return FileInfo{Name: "f"}, nil })
	if _, err := c.Stat(t.Context(), "/f", false); err != nil {
		t.Fatal(err)
	}
	if n := dials.Load(); n != 1 {
		t.Errorf("%d connections, want 1", n)
	}
}

// Calls for files and others are served by two processes, and no connection
// changes sides.
func TestFileCallsHaveConnectionsOfTheirOwn(t *testing.T) {
	h := &stub{stat: func(string) (FileInfo, error) { return FileInfo{}, nil }}
	c, dials := serve(t, h)
	for range 3 {
		if _, err := c.Info(t.Context()); err != nil {
			t.Fatal(err)
		}
		if _, err := c.Stat(t.Context(), "/f", false); err != nil {
			t.Fatal(err)
		}
	}
	if n := dials.Load(); n != 2 {
		t.Errorf("%d connections, want one for files and one for the rest", n)
	}
}

// No call is sent on a connection that the other side is about to close.
func TestAnOldConnectionForFilesIsNotUsed(t *testing.T) {
	c, dials := serve(t, &stub{stat: func(string) (FileInfo, error) { return FileInfo{}, nil }})
	for i := range 2 {
		if _, err := c.Stat(t.Context(), "/f", false); err != nil {
			t.Fatal(err)
		}
		if _, err := c.Info(t.Context()); err != nil {
			t.Fatal(err)
		}
		if n := dials.Load(); int(n) != 2+i {
			t.Errorf("%d connections after round %d", n, i)
		}
		c.mu.Lock()
		c.files[0].idleSince = c.files[0].idleSince.Add(-maxIdleTime)
		c.calls[0].idleSince = c.calls[0].idleSince.Add(-maxIdleTime)
		c.mu.Unlock()
	}
}

// handOver serves a socket pair as another process would that was given the
// first bytes of the connection.
func filesConn(t *testing.T, h FileHandler, idle time.Duration) (c net.Conn, ended <-chan error) {
	t.Helper()
	c, nc := unixPair(t)
	done := make(chan error, 1)
	go func() { done <- ServeFiles(t.Context(), nc, h, idle) }()
	return c, done
}

func unixPair(t *testing.T) (ours, theirs net.Conn) {
	t.Helper()
	l, err := net.Listen("unix", filepath.Join(t.TempDir(), "s"))
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	if ours, err = net.Dial("unix", l.Addr().String()); err != nil {
		t.Fatal(err)
	}
	if theirs, err = l.Accept(); err != nil {
		t.Fatal(err)
	}
	return ours, theirs
}

func TestFilesConnectionServesFilesOnly(t *testing.T) {
	content := bytes.Repeat([]byte("x"), 300_000)
	h := &stub{
		stat: func(string) (FileInfo, error) { return FileInfo{Name: "f", Type: "file"}, nil },
		write: func(_ WriteRequest, r io.Reader) (int64, error) {
			got, err := io.ReadAll(r)
			if !bytes.Equal(got, content) {
				return 0, dsec.Errorf(dsec.CodeInternal, "another content")
			}
			return int64(len(got)), err
		},
	}
	nc, ended := filesConn(t, h, time.Hour)
	c := NewClient(func(context.Context) (net.Conn, error) { return nc, nil })
	for range 2 {
		if n, err := c.Write(t.Context(), WriteRequest{Path: "/f"}, bytes.NewReader(content)); err != nil || n != int64(len(content)) {
			t.Fatal(n, err)
		}
		if f, err := c.Stat(t.Context(), "/f", false); err != nil || f.Name != "f" {
			t.Fatal(f, err)
		}
	}
	// The client keeps apart what this does by hand.
	cn := c.takeIdle(callStat)
	cn.put(callInfo, nil)
	if err := cn.flush(); err != nil {
		t.Fatal(err)
	}
	if err := <-ended; err != errMalformed {
		t.Errorf("a call that is not for files: %v", err)
	}
}

func TestFilesConnectionEndsWhenIdle(t *testing.T) {
	nc, ended := filesConn(t, &stub{stat: func(string) (FileInfo, error) { return FileInfo{}, nil }}, time.Millisecond)
	c := NewClient(func(context.Context) (net.Conn, error) { return nc, nil })
	if _, err := c.Stat(t.Context(), "/f", false); err != nil {
		t.Fatal(err)
	}
	if err := <-ended; err != nil {
		t.Errorf("got %v", err)
	}
}

// breaking serves a client's connections in turn: the first ones are closed once
// a request came.
func breaking(t *testing.T, n int, h Handler) (c *Client, dials *int) {
	dials = new(int)
	c = NewClient(func(context.Context) (net.Conn, error) {
		a, b := net.Pipe()
		if *dials++; *dials > n {
			go Serve(t.Context(), b, h)
			return a, nil
		}
		go func() {
			_, _ = b.Read(make([]byte, 100))
			b.Close()
		}()
		return a, nil
	})
	return c, dials
}

// What reads only is tried again where what served it was killed, and what
// changes something is not, for it may have been done.
func TestReadsSurviveTheEndOfWhatServesThem(t *testing.T) {
	h := &stub{
		stat: func(string) (FileInfo, error) { return FileInfo{Name: "f"}, nil },
		list: func() ([]FileInfo, bool, error) { return []FileInfo{{Name: "f"}}, false, nil },
		read: func(_ context.Context, w io.Writer) error {
			_, err := io.WriteString(w, "text")
			return err
		},
	}
	for n := range fileTries + 1 {
		for name, call := range map[string]func(c *Client) error{
			"stat": func(c *Client) error {
				f, err := c.Stat(t.Context(), "/f", false)
				if err == nil && f.Name != "f" {
					t.Errorf("got %+v", f)
				}
				return err
			},
			"list": func(c *Client) error {
				list, _, err := c.ListDir(t.Context(), "/", "", 1)
				if err == nil && len(list) != 1 {
					t.Errorf("got %+v", list)
				}
				return err
			},
			"read": func(c *Client) error {
				r, err := c.Read(t.Context(), "/f", 0, -1)
				if err != nil {
					return err
				}
				defer r.Close()
				text, err := io.ReadAll(r)
				if string(text) != "text" {
					t.Errorf("got %q", text)
				}
				return err
			},
		} {
			c, dials := breaking(t, n, h)
			err := call(c)
			if n < fileTries && err != nil || n == fileTries && dsec.CodeOf(err) != dsec.CodeUnavailable {
				t.Errorf("%s, %d connections broke: %v", name, n, err)
			}
			if *dials != min(n+1, fileTries) {
				t.Errorf("%s, %d connections broke: %d were made", name, n, *dials)
			}
		}
	}
	c, dials := breaking(t, 1, h)
	if err := c.Mkdir(t.Context(), "/d", 0, false); dsec.CodeOf(err) != dsec.CodeOutcomeUnknown || *dials != 1 {
		t.Errorf("mkdir: %v after %d connections", err, *dials)
	}
}

type failing struct{ err error }

func (f *failing) Read([]byte) (int, error) { return 0, f.err }

type endless struct{}

func (endless) Read(p []byte) (int, error) { return len(p), nil }

// A call for files that could not be sent is sent to the next that serves them,
// also one that changes something, for it cannot have been begun; another call is
// chronus's, of which there is no other.
func TestWhatCouldNotBeSentIsSentAgain(t *testing.T) {
	for n := range fileTries + 1 {
		dials := 0
		c := NewClient(func(context.Context) (net.Conn, error) {
			a, b := net.Pipe()
			if dials++; dials > n {
				go Serve(t.Context(), b, &dirs{})
			} else {
				b.Close()
			}
			return a, nil
		})
		if err := c.Mkdir(t.Context(), "/d", 0, false); (err == nil) != (n < fileTries) || err != nil && dsec.CodeOf(err) != dsec.CodeUnavailable {
			t.Errorf("mkdir, %d servers were gone: %v", n, err)
		}
		if dials != min(n+1, fileTries) {
			t.Errorf("mkdir, %d servers were gone: %d connections were made", n, dials)
		}
		dials = 0
		if _, err := c.Info(t.Context()); (err == nil) != (n == 0) || dials != 1 {
			t.Errorf("info, %d servers were gone: %v after %d connections", n, err, dials)
		}
	}
}

// dirs makes any directory.
type dirs struct{ stub }

func (*dirs) Mkdir(context.Context, string, uint32, bool) error { return nil }

// wakesLate is a connection whose reader finds, when it begins to wait, that the time
// for that is over, as after it was frozen: the first time once something is there.
type wakesLate struct {
	*net.UnixConn
	waits int
}

func (c *wakesLate) SetReadDeadline(at time.Time) error {
	if !at.IsZero() {
		for c.waits++; c.waits == 1 && rawnet.Peek(c.UnixConn) == rawnet.Quiet; {
			runtime.Gosched()
		}
		if c.waits != 2 { // that is the second look
			at = time.Unix(1, 0)
		}
	}
	return c.UnixConn.SetReadDeadline(at)
}

// A call that came while its server was frozen is served, whatever time it is then.
func TestFilesConnectionThatWasFrozen(t *testing.T) {
	ours, theirs := unixPair(t)
	var asked atomic.Int32
	h := &stub{stat: func(string) (FileInfo, error) { return FileInfo{Name: "f"}, nil }}
	served := make(chan error, 1)
	c := NewClient(func(context.Context) (net.Conn, error) {
		asked.Add(1)
		return ours, nil
	})
	defer c.Close()
	answered := make(chan error, 1)
	go func() {
		f, err := c.Stat(t.Context(), "/f", false)
		if err == nil && f.Name != "f" {
			err = errors.New("another answer")
		}
		answered <- err
	}()
	go func() { served <- ServeFiles(t.Context(), &wakesLate{UnixConn: theirs.(*net.UnixConn)}, h, time.Hour) }()
	if err := <-answered; err != nil || asked.Load() != 1 {
		t.Errorf("%v, with %d connections", err, asked.Load())
	}
	if err := <-served; err != nil { // nothing came in that time
		t.Errorf("its end: %v", err)
	}
}
