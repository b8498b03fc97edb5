package container

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/sync/singleflight"
	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/backend"
)

// layers keeps one mount of each image that a container of this node uses, so
// that all of them share its page cache. Unused ones stay mounted for a while,
// because a next create usually wants the same.
type layers struct {
	ns        *layerNS
	platforms platforms

	flight singleflight.Group
	mu     sync.Mutex
	byName map[string]*layer    // by digest
	unused []string             // digests without references, oldest first
	plans  map[string]*platform // by the digests of their lists of layers
}

type layer struct {
	fd   int  // its root, O_PATH
	free bool // it is copied from outside of the namespace, see layerNS.mount
	refs int
	// unmounted is the Release of who opened it, or of who used it since.
	unmounted func()
}

// maxUnused bounds the mounted layers that no container uses.
const maxUnused = 32

// newLayers keeps the layers in ns. runDir and diskDir are as in Config.
func newLayers(ns *layerNS, runDir, diskDir string) *layers {
	return &layers{ns: ns, platforms: platforms{temp: runDir, dir: diskDir}, byName: map[string]*layer{}, plans: map[string]*platform{}}
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
			return lower{}, ofLayer(err, i)
		}
		l.fds = append(l.fds, fd)
		l.free = l.free && free
	}
	return l, nil
}

// ofLayer says which of the layers an error is about.
func ofLayer(err error, i int) error {
	e, ok := errors.AsType[*dsec.Error](err)
	if !ok || e.Field != "layers" {
		return err
	}
	named := *e
	named.Field = fmt.Sprintf("layers[%d]", i)
	return &named
}

// holdRoot takes a reference to each layer of a root: those that are wanted,
// and above them the platform's, so that the upper directory can be empty. held
// is what to release.
func (s *layers) holdRoot(ctx context.Context, want []backend.Layer) (l lower, held []backend.Layer, err error) {
	if l, err = s.hold(ctx, want); err != nil {
		return lower{}, nil, err
	}
	held = slices.Clone(want)
	defer func() {
		if err != nil {
			s.release(held)
			l, held = lower{}, nil
		}
	}()
	p, err := s.plan(want, l.fds)
	if err != nil {
		return l, held, err
	}
	fd, free, err := s.holdOne(ctx, p.layer())
	if err != nil {
		return l, held, err
	}
	return lower{append(l.fds, fd), l.free && free}, append(held, p.layer()), nil
}

// holdOne takes a reference to a layer, which is opened if it is not mounted.
func (s *layers) holdOne(ctx context.Context, want backend.Layer) (fd int, free bool, err error) {
	for {
		s.mu.Lock()
		if l := s.byName[want.Digest]; l != nil {
			l.refs++
			if l.unmounted == nil {
				l.unmounted = want.Release
			}
			s.unused = slices.DeleteFunc(s.unused, func(d string) bool { return d == want.Digest })
			s.mu.Unlock()
			return l.fd, l.free, nil
		}
		s.mu.Unlock()
		// Creates that want the same layer wait for one mount, which the
		// context of none of them cancels.
		ch := s.flight.DoChan(want.Digest, func() (any, error) { return nil, s.mount(context.WithoutCancel(ctx), want) })
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

func (s *layers) mount(ctx context.Context, want backend.Layer) error {
	digest := want.Digest
	s.mu.Lock()
	known := s.byName[digest] != nil // since the caller looked
	s.mu.Unlock()
	if known {
		return nil
	}
	if name, ok := strings.CutPrefix(digest, "sha256:"); !ok || !isHex(name) {
		return dsec.Invalid("layers", "want a digest sha256:<64 hex digits>, have %q", digest)
	}
	fd, free, err := s.ns.mount(digest, func() (backend.Devices, error) { return openLayer(ctx, want) })
	if e, ok := errors.AsType[*dsec.Error](err); ok {
		return e
	} else if err != nil {
		return &dsec.Error{Code: dsec.CodeInternal, Field: "layers", Message: "the image of layer " + digest + " cannot be mounted", Err: err}
	}
	s.mu.Lock()
	s.byName[digest] = &layer{fd: fd, free: free, unmounted: want.Release}
	s.unused = append(s.unused, digest)
	s.mu.Unlock()
	return nil
}

// openLayer opens what a layer is mounted from. A container that was taken over
// has nothing to open its layers with: they are mounted, or it is lost.
func openLayer(ctx context.Context, l backend.Layer) (backend.Devices, error) {
	err := os.ErrNotExist
	if l.Open != nil {
		var devices backend.Devices
		if devices, err = l.Open(ctx); err == nil {
			return devices, nil
		}
	}
	if e, ok := errors.AsType[*dsec.Error](err); ok {
		return backend.Devices{}, e
	}
	return backend.Devices{}, &dsec.Error{Code: dsec.CodeNotFound, Field: "layers", Message: "the image of layer " + l.Digest + " cannot be read", Err: err}
}

func isHex(s string) bool {
	return len(s) == 64 && strings.Trim(s, "0123456789abcdef") == ""
}

// dropTimeout bounds how long the end of a container waits for the end of mounts
// that nothing uses.
const dropTimeout = time.Second

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
		drop = append(drop, s.unused[0])
		s.unused = s.unused[1:]
	}
	forgotten := s.forget(drop)
	s.mu.Unlock()
	ctx, cancel := context.WithTimeout(context.Background(), dropTimeout)
	defer cancel()
	for i, digest := range drop {
		_ = s.unmount(ctx, digest, forgotten[i]) // a layer that stays mounted costs memory only
	}
}

// forget takes unused layers out of the table. The caller holds s.mu.
func (s *layers) forget(digests []string) (forgotten []*layer) {
	for _, digest := range digests {
		l := s.byName[digest]
		_ = unix.Close(l.fd)
		delete(s.byName, digest)
		clear(s.plans)
		forgotten = append(forgotten, l)
	}
	return forgotten
}

// unmount unmounts a layer that was forgotten; nil is one that an earlier process
// had mounted.
func (s *layers) unmount(ctx context.Context, digest string, l *layer) error {
	gone := func() {
		s.mu.Lock()
		again := s.byName[digest] != nil // it is released when that goes
		s.mu.Unlock()
		if !again && l != nil && l.unmounted != nil {
			l.unmounted()
		}
	}
	dropped := false
	// Not while it is mounted again, which would take what is there for its own.
	_, err, _ := s.flight.Do(digest, func() (any, error) {
		dropped = true
		return nil, s.ns.drop(ctx, digest, gone)
	})
	if err == nil && !dropped {
		err = dsec.Errorf(dsec.CodeConflict, "layer %s is being mounted again", digest)
	}
	return err
}

// drop unmounts a layer that no container uses.
func (s *layers) drop(ctx context.Context, digest string) error {
	s.mu.Lock()
	l := s.byName[digest]
	if l != nil && l.refs > 0 {
		s.mu.Unlock()
		return dsec.Errorf(dsec.CodeConflict, "layer %s is used by %d containers", digest, l.refs)
	}
	if l != nil {
		s.unused = slices.DeleteFunc(s.unused, func(d string) bool { return d == digest })
		s.forget([]string{digest})
	}
	s.mu.Unlock()
	return s.unmount(ctx, digest, l)
}

// DropLayer implements backend.LayerDropper.
func (b *Backend) DropLayer(ctx context.Context, digest string) error {
	b.pool.dropSpares(ctx, digest)
	return b.layers.drop(ctx, digest)
}

// plan returns the platform's layer for these.
func (s *layers) plan(want []backend.Layer, fds []int) (*platform, error) {
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
	p, err := s.platforms.plan(fds)
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
