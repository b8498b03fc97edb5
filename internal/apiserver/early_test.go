package apiserver

import (
	"bufio"
	"bytes"
	"context"
	"encoding/binary"
	"io"
	"net"
	"net/http"
	"net/http/httputil"
	"strings"
	"testing"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/daemon"
	"github.com/opendsec/dsec/internal/watcher"
)

// An import that the node has answered is answered at once, also while its client
// says nothing more.
func TestImportIsAnsweredEarly(t *testing.T) {
	e := newStub("fake")
	e.badBuild = dsec.Invalid("data", "no archive at all")
	r := newRigOver(t, []watcher.Endpoint{{Name: "memory", Transport: &daemon.Local{Handler: e.handler()}}})
	h2 := new(http.Protocols)
	h2.SetUnencryptedHTTP2(true)
	for name, tr := range map[string]*http.Transport{"HTTP/1.1": {}, "HTTP/2": {Protocols: h2}} {
		t.Run(name, func(t *testing.T) {
			ctx, cancel := context.WithTimeout(t.Context(), uploadReadTimeout/2)
			defer cancel()
			body, say := io.Pipe()
			defer say.Close()
			req, err := http.NewRequestWithContext(ctx, http.MethodPost, r.url+"/dsec.v1.LayerService/ImportLayer", body)
			check(t, err)
			req.Header.Set("Content-Type", "application/connect+json")
			req.Header.Set("Authorization", "Bearer "+r.secret)
			go func() { _, _ = say.Write(envelope(`{"open":{"name":"base"}}`)) }() // and nothing else
			start := time.Now()
			res, err := tr.RoundTrip(req)
			check(t, err)
			defer func() { _ = res.Body.Close() }()
			head := make([]byte, 5)
			_, err = io.ReadFull(res.Body, head)
			check(t, err)
			end := make([]byte, binary.BigEndian.Uint32(head[1:]))
			_, err = io.ReadFull(res.Body, end)
			check(t, err)
			if head[0]&2 == 0 || !strings.Contains(string(end), "no archive at all") {
				t.Errorf("after %s: %q", time.Since(start), end)
			}
		})
	}
}

// A call that is refused before its upload is read ends soon, also while its client says
// nothing of that: its error, and the answer's end.
func TestRefusedUploadEndsSoon(t *testing.T) {
	r := newRig(t, newStub("fake"))
	for name, tc := range map[string]struct{ key, contentType, message string }{
		"key":  {"e2b_00", "application/connect+json", ""},
		"name": {r.secret, "application/connect+json", `{"open":{"name":"BASE"}}`},
		"type": {r.secret, "text/plain", ""},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			conn, err := net.Dial("tcp", strings.TrimPrefix(r.url, "http://"))
			check(t, err)
			defer conn.Close()
			check(t, conn.SetDeadline(time.Now().Add(drainTimeout*3/4)))
			_, err = io.WriteString(conn, "POST /dsec.v1.LayerService/ImportLayer HTTP/1.1\r\nHost: dsec\r\nTransfer-Encoding: chunked\r\n"+
				"Content-Type: "+tc.contentType+"\r\nAuthorization: Bearer "+tc.key+"\r\n\r\n")
			check(t, err)
			if tc.message != "" {
				_, err = httputil.NewChunkedWriter(conn).Write(envelope(tc.message))
				check(t, err)
			}
			res, err := http.ReadResponse(bufio.NewReader(conn), nil)
			check(t, err)
			defer res.Body.Close()
			if end, err := io.ReadAll(res.Body); err != nil || !strings.Contains(string(end), "ErrorDetail") {
				t.Errorf("%q, %v", end, err)
			}
		})
	}
}

// A client that goes on sending after the answer has it: its connection is not closed
// under it.
func TestImportIsAnsweredWhileItIsSent(t *testing.T) {
	e := newStub("fake")
	e.badBuild = dsec.Invalid("data", "no archive at all")
	r := newRigOver(t, []watcher.Endpoint{{Name: "memory", Transport: &daemon.Local{Handler: e.handler()}}})
	conn, err := net.Dial("tcp", strings.TrimPrefix(r.url, "http://"))
	check(t, err)
	defer conn.Close()
	check(t, conn.SetDeadline(time.Now().Add(uploadReadTimeout/2)))
	sent := make(chan error, 1)
	go func() {
		_, err := io.WriteString(conn, "POST /dsec.v1.LayerService/ImportLayer HTTP/1.1\r\nHost: dsec\r\nTransfer-Encoding: chunked\r\n"+
			"Content-Type: application/connect+json\r\nAuthorization: Bearer "+r.secret+"\r\n\r\n")
		w := httputil.NewChunkedWriter(conn)
		msg := `{"open":{"name":"base"}}`
		for range 400 { // more than there is room for on the way
			if err == nil {
				_, err = w.Write(envelope(msg))
			}
			msg = `{"data":"` + strings.Repeat("QUJD", 20_000) + `"}`
		}
		if err == nil {
			_, err = io.WriteString(conn, "0\r\n\r\n")
		}
		sent <- err
	}()
	res, err := http.ReadResponse(bufio.NewReader(conn), nil)
	check(t, err)
	defer res.Body.Close()
	if end, err := io.ReadAll(res.Body); err != nil || !strings.Contains(string(end), "no archive at all") {
		t.Errorf("%q, %v", end, err)
	}
	if err := <-sent; err != nil {
		t.Errorf("sending what follows: %v", err)
	}
}

// envelope is a message of a stream of Connect's.
func envelope(msg string) []byte {
	var b bytes.Buffer
	b.WriteByte(0)
	_ = binary.Write(&b, binary.BigEndian, uint32(len(msg)))
	b.WriteString(msg)
	return b.Bytes()
}
