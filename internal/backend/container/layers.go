package container

import (
	"context"
	"os"
	"slices"
	"strings"
	"sync"

	"golang.org/x/sync/singleflight"
	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/backend"
)

// layers keeps one mount of each image that a container of this node uses, so
// that all of them share its page cache. Unused ones stay mounted for a while,
// because a next create usually wants the same.
type layers struct {
	ns *layerNS

	flight singleflight.Group
	mu     sync.Mutex
	byName map[string]*layer // by digest
	unused []string          // digests without references, oldest first
	plans  map[string]*rootPlan
}

type layer struct {
	fd   int  // its root, O_PATH
	free bool // it is copied from outside of the namespace, see layerNS.mount
	refs int
}

// maxUnused bounds the mounted layers that no container uses.
const maxUnused = 32

func newLayers(ns *layerNS) *layers {
	return &layers{ns: ns, byName: map[string]*layer{}, plans: map[string]*rootPlan{}}
}

// lower is what is below a root: directories (O_PATH), lowest first.
type lower struct {
	fds  []int
	free bool // all of them, see layerNS.mount
}

// hold takes a reference to each layer, mounting what is not mounted, and
// returns their root directories, which stay valid until release.
func (s *layers) hold(ctx context.Context, want []backend.Layer) (lower, error) {
	l := lower{free: true}
	for i, w := range want {
		fd, free, err := s.holdOne(ctx, w)
		if err != nil {
			s.release(want[:i])
			return lower{}, err
		}
		l.fds = append(l.fds, fd)
		l.free = l.free && free
	}
	return l, nil
}

func (s *layers) holdOne(ctx context.Context, w backend.Layer) (fd int, free bool, err error) {
	for {
		s.mu.Lock()
		if l := s.byName[w.Digest]; l != nil {
			l.refs++
			s.unused = slices.DeleteFunc(s.unused, func(d string) bool { return d == w.Digest })
			s.mu.Unlock()
			return l.fd, l.free, nil
		}
		s.mu.Unlock()
		// Creates that want the same layer wait for one mount, which the
		// context of none of them cancels.
		ch := s.flight.DoChan(w.Digest, func() (any, error) { return nil, s.mount(w) })
		select {
		case r := <-ch:
			if r.Err != nil {
				return -1, false, r.Err
			}
		case <-ctx.Done():
			return -1, false, context.Cause(ctx)
		}
	}
}

func (s *layers) mount(w backend.Layer) error {
	s.mu.Lock()
	known := s.byName[w.Digest] != nil // since the caller looked
	s.mu.Unlock()
	if known {
		return nil
	}
	if name, ok := strings.CutPrefix(w.Digest, "sha256:"); !ok || !isHex(name) {
		return dsec.Invalid("layers", "want a digest sha256:<64 hex digits>, have %q", w.Digest)
	}
	image, err := os.Open(w.Path)
	if err != nil {
		return &dsec.Error{Code: dsec.CodeNotFound, Field: "layers", Message: "the image of layer " + w.Digest + " cannot be read", Err: err}
	}
	defer image.Close()
	fd, free, err := s.ns.mount(w.Digest, int(image.Fd()))
	if err != nil {
		return &dsec.Error{Code: dsec.CodeInternal, Field: "layers", Message: "the image of layer " + w.Digest + " cannot be mounted", Err: err}
	}
	s.mu.Lock()
	s.byName[w.Digest] = &layer{fd: fd, free: free}
	s.unused = append(s.unused, w.Digest)
	s.mu.Unlock()
	return nil
}

func isHex(s string) bool {
	return len(s) == 64 && strings.Trim(s, "0123456789abcdef") == ""
}

// release gives references back.
func (s *layers) release(held []backend.Layer) {
	var drop []string
	s.mu.Lock()
	for _, h := range held {
		l := s.byName[h.Digest]
		if l == nil || l.refs == 0 {
			continue
		}
		if l.refs--; l.refs == 0 {
			s.unused = append(s.unused, h.Digest)
		}
	}
	for len(s.unused) > maxUnused {
		digest := s.unused[0]
		s.unused = s.unused[1:]
		_ = unix.Close(s.byName[digest].fd)
		delete(s.byName, digest)
		clear(s.plans)
		drop = append(drop, digest)
	}
	s.mu.Unlock()
	for _, digest := range drop {
		_ = s.ns.drop(digest) // a layer that stays mounted costs memory only
	}
}

// plan returns what a root of these layers needs in its upper directory.
func (s *layers) plan(want []backend.Layer, fds []int) (*rootPlan, error) {
	var key strings.Builder
	for _, w := range want {
		key.WriteString(w.Digest)
	}
	s.mu.Lock()
	p := s.plans[key.String()]
	s.mu.Unlock()
	if p != nil {
		return p, nil
	}
	p, err := planRoot(fds)
	if err != nil {
		return nil, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.plans) >= 4*maxUnused {
		clear(s.plans)
	}
	s.plans[key.String()] = p
	return p, nil
}

func (s *layers) close() {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, l := range s.byName {
		_ = unix.Close(l.fd)
	}
	clear(s.byName)
	s.unused = nil
}
