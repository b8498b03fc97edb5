package apiserver

import (
	"bufio"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"testing"

	"github.com/opendsec/dsec/proto/dsec/v1/dsecv1connect"
)

// A client that sends all of its upload before it looks for the answer still
// gets the answer to one that was refused at once. The size is more than the
// sockets' buffers and what net/http itself takes.
func TestAnAnswerBeforeTheEndOfAnUploadArrives(t *testing.T) {
	refuse := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		_ = r.Body.Close() // as the protocol library does
		w.WriteHeader(http.StatusNotFound)
	})
	srv := httptest.NewServer(bodyDeadlines(refuse))
	defer srv.Close()
	conn, err := net.Dial("tcp", srv.Listener.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = conn.Close() }()
	const size = 64 << 20
	if _, err := fmt.Fprintf(conn, "POST %s HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n",
		dsecv1connect.FileServiceUploadProcedure, size); err != nil {
		t.Fatal(err)
	}
	piece := make([]byte, 1<<20)
	for sent := 0; sent < size; sent += len(piece) {
		if _, err := conn.Write(piece); err != nil {
			t.Fatalf("after %d bytes: %v", sent, err)
		}
	}
	resp, err := http.ReadResponse(bufio.NewReader(conn), nil)
	if err != nil {
		t.Fatal(err)
	}
	_ = resp.Body.Close()
	if resp.StatusCode != http.StatusNotFound {
		t.Errorf("status %d, want 404", resp.StatusCode)
	}
}
