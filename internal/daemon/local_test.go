package daemon

import (
	"context"
	"errors"
	"io"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"
	"time"
)

const (
	unary  = "application/proto"
	stream = "application/connect+proto"
)

func local(t *testing.T, h http.HandlerFunc) func(ctx context.Context, contentType string, body io.Reader) (*http.Response, error) {
	t.Helper()
	return func(ctx context.Context, contentType string, body io.Reader) (*http.Response, error) {
		req, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://edge/p.S/M", body)
		if err != nil {
			t.Fatal(err)
		}
		req.Header.Set("Content-Type", contentType)
		return (&Local{Handler: h}).RoundTrip(req)
	}
}

func TestLocalCarriesRequestsAndAnswers(t *testing.T) {
	type key struct{}
	h := func(w http.ResponseWriter, r *http.Request) {
		if r.Context().Value(key{}) != nil {
			t.Error("the caller's context values reached the handler")
		}
		if r.URL.Path != "/p.S/M" || r.Header.Get("X-A") == "set by the handler" {
			t.Errorf("got %s %v", r.URL, r.Header)
		}
		r.Header.Set("X-A", "set by the handler")
		body, err := io.ReadAll(r.Body)
		if err != nil {
			t.Error(err)
		}
		w.Header().Set("X-B", "b")
		w.WriteHeader(http.StatusTeapot)
		w.Header().Set("X-C", "too late")
		w.WriteHeader(http.StatusOK)
		_, _ = w.Write(append(body, '!'))
	}
	for _, contentType := range []string{unary, stream} {
		res, err := local(t, h)(context.WithValue(t.Context(), key{}, 1), contentType, strings.NewReader("hello"))
		if err != nil {
			t.Fatal(err)
		}
		body, err := io.ReadAll(res.Body)
		if err != nil || string(body) != "hello!" || res.StatusCode != http.StatusTeapot || res.Header.Get("X-B") != "b" {
			t.Errorf("%s: got %d %v %q, %v", contentType, res.StatusCode, res.Header, body, err)
		}
		if contentType == stream && res.Header.Get("X-C") != "" {
			t.Error("a header after the head was carried")
		}
	}
}

func TestLocalShowsWhatIsFlushedWhileTheHandlerRuns(t *testing.T) {
	more := make(chan struct{})
	h := func(w http.ResponseWriter, _ *http.Request) {
		_ = http.NewResponseController(w).Flush() // the head alone
		<-more
		_, _ = io.WriteString(w, "one")
		_ = http.NewResponseController(w).Flush()
		<-more
		_, _ = io.WriteString(w, "two")
	}
	res, err := local(t, h)(t.Context(), stream, nil)
	if err != nil {
		t.Fatal(err)
	}
	more <- struct{}{}
	buf := make([]byte, 16)
	if n, err := res.Body.Read(buf); string(buf[:n]) != "one" || err != nil {
		t.Errorf("read %q, %v", buf[:n], err)
	}
	more <- struct{}{}
	if rest, err := io.ReadAll(res.Body); string(rest) != "two" || err != nil {
		t.Errorf("read %q, %v", rest, err)
	}
}

func TestLocalMakesAHandlerWaitForItsReader(t *testing.T) {
	var wrote atomic.Int64
	full := make(chan struct{})
	h := func(w http.ResponseWriter, _ *http.Request) {
		for range 64 {
			if wrote.Load() == pipeSize {
				close(full) // the next write waits
			}
			n, err := w.Write(make([]byte, pipeSize/4))
			wrote.Add(int64(n))
			if err != nil {
				t.Error(err)
			}
		}
	}
	res, err := local(t, h)(t.Context(), stream, nil)
	if err != nil {
		t.Fatal(err)
	}
	<-full
	if n := wrote.Load(); n > pipeSize {
		t.Errorf("%d bytes were taken with nobody reading", n)
	}
	if n, err := io.Copy(io.Discard, res.Body); n != 16*pipeSize || err != nil {
		t.Errorf("read %d bytes, %v", n, err)
	}
}

func TestLocalTellsTheHandlerThatItsCallerIsGone(t *testing.T) {
	for name, leave := range map[string]func(cancel context.CancelFunc, res *http.Response){
		"canceled": func(cancel context.CancelFunc, _ *http.Response) { cancel() },
		"closed":   func(_ context.CancelFunc, res *http.Response) { _ = res.Body.Close() },
	} {
		t.Run(name, func(t *testing.T) {
			ended := make(chan error, 1)
			h := func(w http.ResponseWriter, r *http.Request) {
				var err error
				for err == nil { // until the reader's space is full, and then for ever
					_, err = w.Write(make([]byte, 1000))
				}
				<-r.Context().Done()
				ended <- err
			}
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			res, err := local(t, h)(ctx, stream, nil)
			if err != nil {
				t.Fatal(err)
			}
			leave(cancel, res)
			if err := <-ended; err == nil {
				t.Error("the handler could write for ever")
			}
			if _, err := io.ReadAll(res.Body); err == nil || errors.Is(err, io.EOF) {
				t.Errorf("an answer that was broken off reads as whole: %v", err)
			}
		})
	}
}

// A call with a deadline returns by it, whatever the handler does.
func TestLocalDoesNotWaitForAHandlerBeyondADeadline(t *testing.T) {
	for _, contentType := range []string{unary, stream} {
		ctx, cancel := context.WithTimeout(t.Context(), time.Hour)
		release := make(chan struct{})
		h := func(http.ResponseWriter, *http.Request) {
			cancel()
			<-release
		}
		if _, err := local(t, h)(ctx, contentType, nil); !errors.Is(err, context.Canceled) {
			t.Errorf("%s: got %v", contentType, err)
		}
		close(release)
	}
}

func TestLocalEndsAnUploadThatIsAnsweredEarly(t *testing.T) {
	h := func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.ReadFull(r.Body, make([]byte, 3))
		w.WriteHeader(http.StatusConflict)
	}
	r, w := io.Pipe()
	sent := make(chan error, 1)
	go func() {
		for {
			if _, err := io.WriteString(w, "abc"); err != nil {
				sent <- err
				return
			}
		}
	}()
	res, err := local(t, h)(t.Context(), stream, r)
	if err != nil || res.StatusCode != http.StatusConflict {
		t.Fatal(res, err)
	}
	if err := <-sent; !errors.Is(err, io.ErrClosedPipe) {
		t.Errorf("the sender ended with %v", err)
	}
}

// An upload that was given up must not look complete, also where its sender then
// closes it in order, as Connect's client does.
func TestLocalUploadThatWasGivenUpHasNoEnd(t *testing.T) {
	ended := make(chan error, 1)
	h := func(_ http.ResponseWriter, r *http.Request) {
		_, err := io.ReadAll(r.Body)
		ended <- err
	}
	r, w := io.Pipe()
	ctx, cancel := context.WithCancel(t.Context())
	go func() {
		_, _ = io.WriteString(w, "half of it")
		cancel()
		_ = w.Close()
	}()
	if _, err := local(t, h)(ctx, stream, r); !errors.Is(err, context.Canceled) {
		t.Errorf("got %v", err)
	}
	if err := <-ended; !errors.Is(err, context.Canceled) {
		t.Errorf("the handler read to %v", err)
	}
}

func TestLocalKeepsAPanicToItsCall(t *testing.T) {
	h := func(w http.ResponseWriter, _ *http.Request) {
		_, _ = io.WriteString(w, "half")
		_ = http.NewResponseController(w).Flush()
		panic("bug")
	}
	if _, err := local(t, h)(t.Context(), unary, nil); err == nil || !strings.Contains(err.Error(), "bug") {
		t.Errorf("got %v", err)
	}
	res, err := local(t, h)(t.Context(), stream, nil)
	if err != nil {
		t.Fatal(err)
	}
	if body, err := io.ReadAll(res.Body); string(body) != "half" || err == nil {
		t.Errorf("read %q, %v", body, err)
	}
}
