package apiserver

import (
	"bytes"
	"context"
	"encoding/binary"
	"io"
	"net/http"
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

// envelope is a message of a stream of Connect's.
func envelope(msg string) []byte {
	var b bytes.Buffer
	b.WriteByte(0)
	_ = binary.Write(&b, binary.BigEndian, uint32(len(msg)))
	b.WriteString(msg)
	return b.Bytes()
}
