package rawnet

import (
	"bytes"
	"errors"
	"io"
	"net"
	"os"
	"syscall"
	"testing"
	"time"
)

// pair is a connection of this package and its peer, of package net.
func pair(t *testing.T, network string) (ours, theirs net.Conn) {
	t.Helper()
	address := "127.0.0.1:0"
	if network == "unix" {
		address = t.TempDir() + "/s"
	}
	l, err := net.Listen(network, address)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = l.Close() })
	theirs, err = net.Dial(network, l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	ours, err = NewListener(l).Accept()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _, _ = ours.Close(), theirs.Close() })
	return ours, theirs
}

func both(t *testing.T, f func(t *testing.T, ours, theirs net.Conn)) {
	for _, network := range []string{"tcp", "unix"} {
		t.Run(network, func(t *testing.T) {
			ours, theirs := pair(t, network)
			f(t, ours, theirs)
		})
	}
}

func TestBytesOfEveryLength(t *testing.T) {
	both(t, func(t *testing.T, ours, theirs net.Conn) {
		for _, n := range []int{1, 4096, 1<<16 - 1, 1 << 16, 1<<16 + 1, 8 << 20} { // more than a socket holds
			want := bytes.Repeat([]byte("0123456789abcdef!"), n/17+1)[:n]
			go func() { _, _ = theirs.Write(want) }()
			got := make([]byte, n)
			if _, err := io.ReadFull(ours, got); err != nil || !bytes.Equal(got, want) {
				t.Fatalf("read of %d: %v", n, err)
			}
			go func() {
				if k, err := ours.Write(want); k != n || err != nil {
					t.Errorf("write of %d: %d, %v", n, k, err)
				}
			}()
			if _, err := io.ReadFull(theirs, got); err != nil || !bytes.Equal(got, want) {
				t.Fatalf("write of %d arrived otherwise: %v", n, err)
			}
		}
	})
}

// What was written by several at once is not mixed, small beside large.
func TestWritesAreWhole(t *testing.T) {
	both(t, func(t *testing.T, ours, theirs net.Conn) {
		const size, writers = 1 << 20, 8
		for i := range writers {
			go func() {
				_, _ = ours.Write(bytes.Repeat([]byte{byte(i)}, size))
				_, _ = ours.Write(bytes.Repeat([]byte{byte(i)}, 60_000))
			}()
		}
		all := make([]byte, writers*(size+60_000))
		if _, err := io.ReadFull(theirs, all); err != nil {
			t.Fatal(err)
		}
		for len(all) > 0 {
			n := len(all) - len(bytes.TrimLeft(all, string(all[:1])))
			switch n {
			case size, 60_000, size + 60_000, 2 * size:
			default:
				t.Fatalf("%d bytes of one writer together", n)
			}
			all = all[n:]
		}
	})
}

func TestEnds(t *testing.T) {
	both(t, func(t *testing.T, ours, theirs net.Conn) {
		buf := make([]byte, 8)
		if err := ours.SetReadDeadline(time.Now()); err != nil {
			t.Fatal(err)
		}
		if _, err := ours.Read(buf); !errors.Is(err, os.ErrDeadlineExceeded) {
			t.Errorf("past the deadline: %v", err)
		}
		var op *net.OpError
		if _, err := ours.Read(buf); !errors.As(err, &op) || op.Op != "read" || !op.Timeout() {
			t.Errorf("past the deadline: %#v", err)
		}
		_ = ours.SetReadDeadline(time.Time{})
		if s := Peek(ours); s != Quiet {
			t.Errorf("quiet: %v", s)
		}
		if err := ours.(interface{ CloseWrite() error }).CloseWrite(); err != nil {
			t.Error(err)
		}
		if n, err := theirs.Read(buf); n != 0 || err != io.EOF {
			t.Errorf("after CloseWrite: %d, %v", n, err)
		}
		_, _ = theirs.Write([]byte("x"))
		for Peek(ours) == Quiet { // on its way
		}
		if s := Peek(ours); s != Bytes {
			t.Errorf("a byte: %v", s)
		}
		_ = theirs.Close()
		if n, err := ours.Read(buf); n != 1 || err != nil {
			t.Errorf("%d, %v", n, err)
		}
		if n, err := ours.Read(buf); n != 0 || err != io.EOF {
			t.Errorf("at the end: %d, %v", n, err)
		}
		if s := Peek(ours); s != End {
			t.Errorf("the end: %v", s)
		}
		if _, err := ours.Write(buf); !errors.Is(err, syscall.EPIPE) || !errors.As(err, &op) || op.Op != "write" {
			t.Errorf("after the end: %v", err)
		}
		_ = ours.Close()
		if _, err := ours.Read(buf); !errors.Is(err, net.ErrClosed) {
			t.Errorf("closed: %v", err)
		}
		if _, err := ours.Write(buf); !errors.Is(err, net.ErrClosed) {
			t.Errorf("closed: %v", err)
		}
		if s := Peek(ours); s != End {
			t.Errorf("closed: %v", s)
		}
	})
}

// A read that waits ends with its connection.
func TestCloseWakesAReader(t *testing.T) {
	both(t, func(t *testing.T, ours, _ net.Conn) {
		ended := make(chan error)
		go func() {
			_, err := ours.Read(make([]byte, 1))
			ended <- err
		}()
		_ = ours.Close()
		if err := <-ended; !errors.Is(err, net.ErrClosed) {
			t.Errorf("%v", err)
		}
	})
}

func TestAPipeIsLeftAlone(t *testing.T) {
	a, b := net.Pipe()
	defer func() { _, _ = a.Close(), b.Close() }()
	if New(a) != a || Peek(a) != Quiet {
		t.Error("a pipe in memory was taken for a socket")
	}
}

func TestNothingIsAllocated(t *testing.T) {
	ours, theirs := pair(t, "unix")
	buf := make([]byte, 1)
	if n := testing.AllocsPerRun(100, func() {
		_, _ = ours.Write(buf)
		_, _ = theirs.Read(buf)
		_, _ = theirs.Write(buf)
		_, _ = ours.Read(buf)
	}); n != 0 {
		t.Errorf("%v allocations for a byte there and back", n)
	}
}
