package registry

import (
	"net/http"
	"sync"
	"testing"
)

// Blobs that follow are fetched while one is, no more than a few of them.
func TestBlobsAreFetchedAhead(t *testing.T) {
	s := newServer(t, false)
	var layers [][]byte
	for i := range 6 {
		layers = append(layers, noise(20_000+i, byte(i)))
	}
	img := image(t, layers...)
	s.push("app", img)
	var mu sync.Mutex
	now, most := 0, 0
	enough := make(chan struct{}) // closed once as many were asked for at once
	s.misbehave(func(w http.ResponseWriter, r *http.Request) bool {
		if !isBlob(r) {
			return false
		}
		mu.Lock()
		now++
		if most = max(most, now); now == fetches {
			select {
			case <-enough:
			default:
				close(enough)
			}
		}
		mu.Unlock()
		select {
		case <-enough:
		case <-r.Context().Done():
		}
		mu.Lock()
		now-- // before the answer, after which the next may be asked for
		mu.Unlock()
		s.real.ServeHTTP(w, r)
		return true
	})
	wantImage(t, s.client(), Request{Ref: s.host + "/app"}, img)
	if most != fetches {
		t.Errorf("%d at once, want %d", most, fetches)
	}
}
