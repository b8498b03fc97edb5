package h1

import (
	"bufio"
	"context"
	"encoding/binary"
	"errors"
	"io"
	"net"
	"net/http"
	"runtime"
	"strconv"
	"testing"
	"time"

	"github.com/opendsec/dsec/internal/rawnet"
)

// message is one message of a Connect stream.
func message(text string) []byte {
	return append(binary.BigEndian.AppendUint32([]byte{0}, uint32(len(text))), text...)
}

func TestBothSidesSendAtOnce(t *testing.T) {
	tr, url, _ := server(t, func(w http.ResponseWriter, r *http.Request) {
		c := http.NewResponseController(w)
		if err := c.EnableFullDuplex(); err != nil {
			t.Error(err)
		}
		buf := make([]byte, 100)
		for {
			n, err := io.ReadFull(r.Body, buf[:6])
			if err != nil {
				return
			}
			_, _ = w.Write(buf[5:n])
			_ = c.Flush()
		}
	})
	r, w := io.Pipe()
	if _, err := post(t.Context(), t, tr, url, r); !errors.Is(err, errOther) {
		t.Errorf("a transport that is not for both ways at once: %v", err)
	}
	tr.Duplex = true
	send := func(m []byte) {
		for _, piece := range [][]byte{m[:5], m[5:]} {
			if _, err := w.Write(piece); err != nil {
				t.Error(err)
			}
		}
	}
	go send(message("0"))
	res, err := post(t.Context(), t, tr, url, r)
	if err != nil {
		t.Fatal(err)
	}
	for i := range 5 {
		buf := make([]byte, 1)
		if _, err := io.ReadFull(res.Body, buf); string(buf) != strconv.Itoa(i) || err != nil {
			t.Fatalf("%q, %v", buf, err)
		}
		send(message(strconv.Itoa(i + 1)))
	}
	_ = w.Close()
	if rest, err := io.ReadAll(res.Body); string(rest) != "5" || err != nil {
		t.Errorf("%q, %v", rest, err)
	}
}

// A stream that breaks off in the middle must not look complete.
func TestHalfAMessageBreaksTheRequestOff(t *testing.T) {
	ended := make(chan error, 1)
	tr, url, _ := server(t, func(w http.ResponseWriter, r *http.Request) {
		_ = http.NewResponseController(w).EnableFullDuplex()
		_ = http.NewResponseController(w).Flush()
		_, err := io.ReadAll(r.Body)
		ended <- err
	})
	tr.Duplex = true
	for _, part := range []int{1, 5, 7} {
		r, w := io.Pipe()
		res, err := post(t.Context(), t, tr, url, r)
		if err != nil {
			t.Fatal(err)
		}
		_, _ = w.Write(message("message")[:part])
		_ = w.Close()
		if err := <-ended; err == nil {
			t.Errorf("%d bytes look whole", part)
		}
		_ = res.Body.Close()
	}
}

func TestWhoeverStillSendsIsToldThatTheCallHasEnded(t *testing.T) {
	tr, url, _ := server(t, func(w http.ResponseWriter, _ *http.Request) {
		_ = http.NewResponseController(w).EnableFullDuplex()
		w.Header().Set("Connection", "close")
		w.WriteHeader(http.StatusConflict)
	})
	tr.Duplex = true
	r, w := io.Pipe()
	sent := make(chan error, 1)
	go func() {
		for {
			if _, err := w.Write(message("x")); err != nil {
				sent <- err
				return
			}
		}
	}()
	res, err := post(t.Context(), t, tr, url, r)
	if err != nil || res.StatusCode != http.StatusConflict {
		t.Fatal(res, err)
	}
	_ = res.Body.Close()
	if err := <-sent; !errors.Is(err, io.ErrClosedPipe) {
		t.Errorf("the sender ended with %v", err)
	}
}

// TestAMessageForAServerThatHasGoneIsNotTaken: whoever sends it knows then that
// nobody has read it.
func TestAMessageForAServerThatHasGoneIsNotTaken(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = l.Close() }()
	go func() {
		nc, err := l.Accept()
		if err != nil {
			return
		}
		r := bufio.NewReader(nc)
		for line := "-"; line != "\r\n" && err == nil; { // the head
			line, err = r.ReadString('\n')
		}
		_, _ = io.ReadFull(r, make([]byte, len("a\r\n")+5+len("hello\r\n")))
		_, _ = io.WriteString(nc, "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n")
		_ = nc.Close()
	}()
	var nc net.Conn
	tr := &Transport{IdleTimeout: time.Minute, Duplex: true, Dial: func(ctx context.Context) (net.Conn, error) {
		nc, err = dialer(l.Addr().String())(ctx)
		return nc, err
	}}
	body, w := io.Pipe()
	go func() { _, _ = w.Write(message("hello")) }()
	res, err := post(t.Context(), t, tr, "http://"+l.Addr().String(), body)
	if err != nil {
		t.Fatal(err)
	}
	if got := make([]byte, 2); func() error { _, err := io.ReadFull(res.Body, got); return err }() != nil || string(got) != "ok" {
		t.Fatalf("%q", got)
	}
	for rawnet.Peek(nc) != rawnet.End { // the server's end is on its way
		runtime.Gosched()
	}
	if _, err := w.Write(message("again")); !errors.Is(err, io.ErrClosedPipe) {
		t.Errorf("%v: a message was taken", err)
	}
	_ = res.Body.Close()
}
