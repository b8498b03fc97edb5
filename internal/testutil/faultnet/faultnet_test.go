package faultnet

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

// echo is a server that sends back what it is sent.
func echo(t *testing.T) string {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = ln.Close() })
	go func() {
		for {
			c, err := ln.Accept()
			if err != nil {
				return
			}
			go func() {
				defer c.Close()
				_, _ = io.Copy(c, c)
			}()
		}
	}()
	return ln.Addr().String()
}

func start(t *testing.T) *Proxy {
	t.Helper()
	p, err := Listen(echo(t))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = p.Close() })
	return p
}

func dial(t *testing.T, p *Proxy) net.Conn {
	t.Helper()
	c, err := net.Dial("tcp", p.Addr())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() })
	return c
}

// ask sends b, and returns what comes back until it is as long.
func ask(c net.Conn, b []byte) ([]byte, error) {
	go func() { _, _ = c.Write(b) }()
	got := make([]byte, len(b))
	n, err := io.ReadFull(c, got)
	return got[:n], err
}

func TestPasses(t *testing.T) {
	p := start(t)
	c := dial(t, p)
	want := bytes.Repeat([]byte("0123456789"), 100_000)
	if got, err := ask(c, want); err != nil || !bytes.Equal(got, want) {
		t.Errorf("%d bytes, %v", len(got), err)
	}
	if p.FromServer() != int64(len(want)) || p.Connections() != 1 {
		t.Errorf("counted %d bytes, %d connections", p.FromServer(), p.Connections())
	}
}

// TestIsSlow checks lower bounds: a machine that is busy only makes it slower.
func TestIsSlow(t *testing.T) {
	p := start(t)
	c := dial(t, p)
	p.Set(Fault{Delay: 20 * time.Millisecond})
	begin := time.Now()
	for range 3 {
		if _, err := ask(c, []byte("x")); err != nil {
			t.Fatal(err)
		}
	}
	if took := time.Since(begin); took < 60*time.Millisecond {
		t.Errorf("3 questions with 20 ms each took %v", took)
	}
	p.Set(Fault{BytesPerSecond: 1 << 20})
	begin = time.Now()
	if _, err := ask(c, make([]byte, 200<<10)); err != nil {
		t.Fatal(err)
	}
	if took := time.Since(begin); took < 150*time.Millisecond {
		t.Errorf("200 KiB at 1 MiB/s took %v", took)
	}
}

func TestCuts(t *testing.T) {
	p := start(t)
	c := dial(t, p)
	p.Set(Fault{CutAfter: 1000})
	got, err := ask(c, make([]byte, 5000))
	if len(got) > 1000 || !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("%d bytes, then %v; want at most 1000 and a reset", len(got), err)
	}
	if p.FromServer() != 1000 {
		t.Errorf("%d bytes went through", p.FromServer())
	}
	p.Set(Fault{})
	idle := dial(t, p)
	if _, err := ask(idle, []byte("x")); err != nil {
		t.Fatal(err)
	}
	p.Set(Fault{Refuse: true})
	if _, err := idle.Read(make([]byte, 1)); !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("a connection that was there: %v", err)
	}
	if _, err := dial(t, p).Read(make([]byte, 1)); !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("a new connection: %v", err)
	}
}

func TestHangs(t *testing.T) {
	p := start(t)
	c := dial(t, p)
	if _, err := ask(c, []byte("x")); err != nil {
		t.Fatal(err)
	}
	p.Set(Fault{Hang: true})
	_ = c.SetReadDeadline(time.Now().Add(20 * time.Millisecond))
	if got, err := ask(c, []byte("yz")); len(got) != 0 || !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("%q, %v", got, err)
	}
	_ = c.SetReadDeadline(time.Time{})
	p.Set(Fault{})
	got := make([]byte, 2)
	if _, err := io.ReadFull(c, got); err != nil || string(got) != "yz" {
		t.Errorf("%q, %v", got, err)
	}
}

func TestCloseEndsWhatHangs(t *testing.T) {
	p := start(t)
	c := dial(t, p)
	p.Set(Fault{Hang: true})
	_, _ = c.Write([]byte("x"))
	if err := p.Close(); err != nil {
		t.Error(err)
	}
}
