package chronusfiles

import (
	"bytes"
	"context"
	"io"
	"net"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/opendsec/dsec/internal/chronusapi"
	"golang.org/x/sys/unix"
)

// control is what the backend has of a chronus-files: the other end of its socket.
type control struct {
	fd    int
	close func()
}

// newControl starts ServeHandOvers, as chronus-files does. ended tells what it
// returned. Messages of before are in the socket when it starts.
func newControl(t *testing.T, idle time.Duration, before ...func(*control)) (c *control, ended <-chan error) {
	t.Helper()
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	c = &control{fd: fds[0], close: sync.OnceFunc(func() { unix.Close(fds[0]) })}
	t.Cleanup(c.close)
	for _, f := range before {
		f(c)
	}
	done := make(chan error, 1)
	go func() {
		theirs := os.NewFile(uintptr(fds[1]), "control")
		defer theirs.Close()
		done <- New().ServeHandOvers(theirs, idle)
	}()
	return c, done
}

// dial makes a connection and hands the other end over.
func (c *control) dial(context.Context) (net.Conn, error) {
	a, b, err := socketPair()
	if err != nil {
		return nil, err
	}
	defer b.Close()
	return a, c.send([]byte{0}, b.(*net.UnixConn))
}

func (c *control) send(first []byte, conns ...*net.UnixConn) error {
	var fds []int
	for _, nc := range conns {
		f, err := nc.File()
		if err != nil {
			return err
		}
		defer f.Close()
		fds = append(fds, int(f.Fd()))
	}
	return unix.Sendmsg(c.fd, first, unix.UnixRights(fds...), nil, 0)
}

func TestHandedOverConnectionsServeFiles(t *testing.T) {
	c, ended := newControl(t, time.Hour)
	client := chronusapi.NewClient(c.dial)
	path := filepath.Join(t.TempDir(), "file")
	for _, size := range []int{0, 1, 1_000_000} {
		want := bytes.Repeat([]byte("x"), size)
		if n, err := client.Write(t.Context(), chronusapi.WriteRequest{Path: path}, bytes.NewReader(want)); err != nil || n != int64(size) {
			t.Fatal(n, err)
		}
		r, err := client.Read(t.Context(), path, 0, -1)
		if err != nil {
			t.Fatal(err)
		}
		if got, err := io.ReadAll(r); err != nil || !bytes.Equal(got, want) {
			t.Errorf("%d of %d bytes, %v", len(got), size, err)
		}
		r.Close()
	}
	client.Close()
	c.close() // the backend has ended
	if err := <-ended; err != nil {
		t.Error(err)
	}
}

// What the backend sent before it could see the end is served, and what it sends
// afterwards fails there.
func TestHandOversEndWithoutLosingAny(t *testing.T) {
	path := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(path, []byte("12345"), 0o600); err != nil {
		t.Fatal(err)
	}
	sent := make(chan struct{})
	size := make(chan int64, 1)
	c, ended := newControl(t, time.Second, func(c *control) {
		client := chronusapi.NewClient(func(ctx context.Context) (net.Conn, error) {
			defer close(sent)
			return c.dial(ctx)
		})
		go func() {
			f, err := client.Stat(context.Background(), path, false)
			if err != nil {
				t.Error(err)
			}
			size <- f.Size
		}()
		<-sent
	})
	if err := <-ended; err != nil {
		t.Fatal(err)
	}
	if n := <-size; n != 5 {
		t.Errorf("size %d", n)
	}
	if n, err := unix.Read(c.fd, make([]byte, 1)); n != 0 || err != nil {
		t.Errorf("read %d, %v, want the end", n, err)
	}
	a, b, err := socketPair()
	if err != nil {
		t.Fatal(err)
	}
	defer a.Close()
	defer b.Close()
	if err := unix.Sendmsg(c.fd, []byte("x"), nil, nil, unix.MSG_NOSIGNAL); err != unix.EPIPE {
		t.Errorf("got %v, want EPIPE", err)
	}
}

// A message that is not one byte and one connection has no effect
// but that its descriptors are closed.
func TestMalformedHandOversAreClosed(t *testing.T) {
	c, _ := newControl(t, time.Hour)
	pair := func() (ours net.Conn, theirs *net.UnixConn) {
		a, b, err := socketPair()
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { a.Close() })
		return a, b.(*net.UnixConn)
	}
	var ours []net.Conn
	for _, n := range []int{0, 1, 2, 3, 5} {
		var theirs []*net.UnixConn
		for range n {
			a, b := pair()
			ours, theirs = append(ours, a), append(theirs, b)
		}
		first := "g"
		if n == 1 {
			first = "garbage"
		}
		if err := c.send([]byte(first), theirs...); err != nil {
			t.Fatal(err)
		}
		for _, b := range theirs {
			b.Close()
		}
	}
	for i, a := range ours {
		if n, err := a.Read(make([]byte, 1)); n != 0 || err != io.EOF {
			t.Errorf("connection %d: %d, %v", i, n, err)
		}
	}
	// No socket at all.
	null, err := os.Open("/dev/null")
	if err != nil {
		t.Fatal(err)
	}
	defer null.Close()
	if err := unix.Sendmsg(c.fd, []byte("garbage"), unix.UnixRights(int(null.Fd())), nil, 0); err != nil {
		t.Fatal(err)
	}
	// It still serves.
	client := chronusapi.NewClient(c.dial)
	defer client.Close()
	if f, err := client.Stat(t.Context(), "/", false); err != nil || f.Type != "dir" {
		t.Errorf("got %+v, %v", f, err)
	}
}
