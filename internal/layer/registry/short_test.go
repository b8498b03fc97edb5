package registry

import (
	"errors"
	"fmt"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/opendsec/dsec"
)

// A registry that has less of a blob than the manifest says is not asked for the rest
// over and over, however it tells so. (S95)
func TestShortBlob(t *testing.T) {
	s := newServer(t, false)
	layer := noise(100_000, 9)
	s.push("app", image(t, layer))
	const have = 70_000
	chunked := func(w http.ResponseWriter, b []byte) { // without a length, and with an end
		w.WriteHeader(http.StatusOK)
		_, _ = w.Write(b)
		w.(http.Flusher).Flush()
	}
	for name, tc := range map[string]struct {
		answer func(w http.ResponseWriter, ranged bool)
		asked  int // at most
	}{
		"its length": {func(w http.ResponseWriter, _ bool) {
			w.Header().Set("Content-Length", fmt.Sprint(have))
			_, _ = w.Write(layer[:have])
		}, 1},
		"no such range": {func(w http.ResponseWriter, ranged bool) {
			if !ranged {
				chunked(w, layer[:have])
				return
			}
			w.Header().Set("Content-Range", fmt.Sprintf("bytes */%d", have))
			w.WriteHeader(http.StatusRequestedRangeNotSatisfiable)
		}, 2},
		"a part of less": {func(w http.ResponseWriter, ranged bool) {
			if !ranged {
				chunked(w, layer[:have/2])
				return
			}
			w.Header().Set("Content-Range", fmt.Sprintf("bytes %d-%d/%d", have/2, have-1, have))
			w.WriteHeader(http.StatusPartialContent)
			_, _ = w.Write(layer[have/2 : have])
		}, 2},
		"it ends there": {func(w http.ResponseWriter, _ bool) { chunked(w, layer[:have]) }, 2},
		"it ends there, and refuses ranges": {func(w http.ResponseWriter, ranged bool) {
			if ranged {
				w.WriteHeader(http.StatusRequestedRangeNotSatisfiable)
				return
			}
			chunked(w, layer[:have])
		}, 3},
		"nothing": {func(w http.ResponseWriter, _ bool) { chunked(w, nil) }, 2},
		"less and then less": {func(w http.ResponseWriter, ranged bool) {
			chunked(w, layer[:map[bool]int{false: have, true: have / 2}[ranged]])
		}, 3},
	} {
		t.Run(name, func(t *testing.T) {
			s.misbehave(func(w http.ResponseWriter, r *http.Request) bool {
				if !strings.HasSuffix(r.URL.Path, digestOf(layer)) {
					return false
				}
				tc.answer(w, r.Header.Get("Range") != "")
				return true
			})
			s.fetched("")
			_, err := pull(t.Context(), s.client(), Request{Ref: s.host + "/app"})
			e, ok := errors.AsType[*dsec.Error](err)
			if !ok || e.Code != dsec.CodeInvalid || e.Field != "ref" || !strings.Contains(e.Message, "its manifest says 100000") {
				t.Errorf("%v, want invalid with both sizes", err)
			}
			if asked := s.fetched(digestOf(layer)); len(asked) > tc.asked {
				t.Errorf("asked %d times, want at most %d: %q", len(asked), tc.asked, asked)
			}
		})
	}
}

// What a mirror has too little of, the registry has.
func TestShortBlobOfAMirror(t *testing.T) {
	s, m := newServer(t, false), newServer(t, false)
	layer := noise(100_000, 9)
	img := image(t, layer)
	s.push("app", img)
	m.push("app", img)
	m.misbehave(func(w http.ResponseWriter, r *http.Request) bool {
		if !strings.HasSuffix(r.URL.Path, digestOf(layer)) {
			return false
		}
		w.WriteHeader(http.StatusOK)
		_, _ = w.Write(layer[:70_000])
		w.(http.Flusher).Flush()
		return true
	})
	c := s.client(func(c *Config) { c.Mirrors = map[string][]string{s.host: {"http://" + m.host}} })
	wantImage(t, c, Request{Ref: s.host + "/app"}, img)
	if asked := m.fetched(digestOf(layer)); len(asked) != 2 {
		t.Errorf("the mirror was asked %q", asked)
	}
}

// Where a mirror ended says nothing of where the registry does.
func TestBlobThatBreaksOffOfAMirrorAndOfItsRegistry(t *testing.T) {
	s, m := newServer(t, false), newServer(t, false)
	layer := noise(100_000, 9)
	img := image(t, layer)
	s.push("app", img)
	m.push("app", img)
	const have = 70_000
	ofLayer := func(r *http.Request) bool { return strings.HasSuffix(r.URL.Path, digestOf(layer)) }
	m.misbehave(func(w http.ResponseWriter, r *http.Request) bool {
		if !ofLayer(r) {
			return false
		}
		if r.Header.Get("Range") != "" {
			w.WriteHeader(http.StatusNotFound) // it has lost it
			return true
		}
		_, _ = w.Write(layer[:have])
		w.(http.Flusher).Flush()
		return true
	})
	var once atomic.Bool
	s.misbehave(func(w http.ResponseWriter, r *http.Request) bool {
		if !ofLayer(r) || once.Swap(true) {
			return false
		}
		w.Header().Set("Content-Range", fmt.Sprintf("bytes %d-%d/%d", have, len(layer)-1, len(layer)))
		w.WriteHeader(http.StatusPartialContent)
		w.(http.Flusher).Flush()
		return true
	})
	c := s.client(func(c *Config) { c.Mirrors = map[string][]string{s.host: {"http://" + m.host}} })
	wantImage(t, c, Request{Ref: s.host + "/app"}, img)
}
