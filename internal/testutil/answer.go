package testutil

import (
	"bytes"
	"io"
	"net/http"
	"strings"
	"sync"
)

// Answered is an http.RoundTripper that tells when an answer was read that a test
// waits for.
type Answered struct {
	path, text string
	once       sync.Once
	done       chan struct{}
}

// NewAnswered waits for an answer to a call of that path with that text in it.
func NewAnswered(path, text string) *Answered {
	return &Answered{path: path, text: text, done: make(chan struct{})}
}

// Done is closed once such an answer was read and closed.
func (a *Answered) Done() <-chan struct{} { return a.done }

// RoundTrip implements http.RoundTripper.
func (a *Answered) RoundTrip(req *http.Request) (*http.Response, error) {
	res, err := http.DefaultTransport.RoundTrip(req)
	if err == nil && req.URL.Path == a.path {
		res.Body = &answer{ReadCloser: res.Body, of: a}
	}
	return res, err
}

// answer is the body of one.
type answer struct {
	io.ReadCloser
	of   *Answered
	read bytes.Buffer
}

// Read implements io.Reader.
func (b *answer) Read(p []byte) (int, error) {
	n, err := b.ReadCloser.Read(p)
	b.read.Write(p[:n])
	return n, err
}

// Close implements io.Closer.
func (b *answer) Close() error {
	err := b.ReadCloser.Close()
	if strings.Contains(b.read.String(), b.of.text) {
		b.of.once.Do(func() { close(b.of.done) })
	}
	return err
}
