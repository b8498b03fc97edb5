package lazy

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"

	"github.com/opendsec/dsec"
)

// greet takes what a new client brings, and tells it what there is. It returns
// what handles the client's calls.
func (s *server) greet(c *connection, h *hello, files []*os.File) (*calls, error) {
	group, events, dev, mnt, err := h.split(files)
	if err != nil {
		closeFiles(files)
		return nil, err
	}
	holds, data, err := receiveHolds(c, h.Holds)
	if err != nil {
		return nil, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.calls != nil {
		closeFiles(files)
		return nil, &dsec.Error{Code: dsec.CodeConflict, Message: "layerd has a client"}
	}
	if err := s.configure(h); err != nil {
		closeFiles(files)
		return nil, err
	}
	if !s.loaded {
		if err := s.load(holds, data, h.Lost, group != nil && !h.Fresh, dev != nil && !h.Fresh); err != nil {
			return nil, err
		}
		s.loaded = true
	}
	if s.group == nil && group != nil {
		if err := s.startFanotify(group, events); err != nil {
			return nil, err
		}
	} else {
		closeFiles(some(group, events))
	}
	if s.dev == nil && dev != nil {
		if err := s.startFUSE(dev, mnt, !h.Fresh); err != nil {
			return nil, err
		}
	} else {
		closeFiles(some(dev, mnt))
	}
	return s.welcome(c)
}

// split names the files that came with a greeting.
func (h *hello) split(files []*os.File) (group, events, dev, mnt *os.File, err error) {
	want := 0
	if h.Group {
		want += 2
	}
	if h.FUSE {
		want += 2
	}
	switch {
	case h.Version != protocolVersion:
		err = &dsec.Error{Code: dsec.CodeUnsupported,
			Message: fmt.Sprintf("protocol of layerd: version %d, want %d", h.Version, protocolVersion)}
	case len(files) != want || h.Holds < 0:
		err = errors.New("layerd protocol: descriptors are missing")
	}
	if err != nil {
		return nil, nil, nil, nil, err
	}
	if h.Group {
		group, events, files = files[0], files[1], files[2:]
	}
	if h.FUSE {
		dev, mnt = files[0], files[1]
	}
	return group, events, dev, mnt, nil
}

func some(files ...*os.File) (there []*os.File) {
	for _, f := range files {
		if f != nil {
			there = append(there, f)
		}
	}
	return there
}

// receiveHolds reads the Hold messages that follow a greeting: by the images'
// names, and the descriptors of data files.
func receiveHolds(c *connection, n int) (map[string]hold, map[string]*os.File, error) {
	holds, data := map[string]hold{}, map[string]*os.File{}
	for range n {
		m, files, err := c.receive()
		if err != nil {
			return nil, nil, err
		}
		if m.Hold == nil || (len(files) == 1) != (m.Hold.FrontEnd == Fanotify) {
			closeFiles(files)
			return nil, nil, errors.New("layerd protocol: not a hold")
		}
		holds[name(m.Hold.Key)] = *m.Hold
		if len(files) == 1 {
			data[name(m.Hold.Key)] = files[0]
		}
	}
	return holds, data, nil
}

func (s *server) configure(h *hello) error {
	if s.store.URL == h.Store.URL && s.store.Requests == h.Store.Requests && equalSecrets(s.store.Secrets, h.Store.Secrets) && s.loaded {
		s.cache.configure(nil, h.Limits)
		return nil
	}
	store, err := s.cfg.OpenStore(context.Background(), h.Store)
	if err != nil {
		return err
	}
	s.cache.configure(store, h.Limits)
	s.store = h.Store
	return nil
}

func equalSecrets(a, b map[string]string) bool {
	if len(a) != len(b) {
		return false
	}
	for k, v := range a {
		if w, ok := b[k]; !ok || v != w {
			return false
		}
	}
	return true
}

// load reads the cache, and finds out what is to be served on and what is lost:
// what was served and of which the descriptors did not come, and what was lost
// before and not settled.
func (s *server) load(holds map[string]hold, data map[string]*os.File, lost []string, group, fuse bool) error {
	entries, err := s.served.list()
	if err != nil {
		return err
	}
	quiet := map[string]bool{}
	for n := range entries {
		quiet[n] = data[n] == nil
	}
	if err := s.cache.load(data, quiet); err != nil {
		return err
	}
	for n, h := range holds {
		im := s.cache.images[n]
		if im == nil {
			continue // its description is gone, so nothing can be verified; readers get errors
		}
		im.inUse = h.InUse
		if h.FrontEnd == Fanotify {
			im.armed, im.marked = true, true // it may have one, though it is complete
		} else {
			im.left = !h.InUse
		}
	}
	for n, e := range entries {
		im := s.cache.images[n]
		there := e.FrontEnd == Fanotify && group || e.FrontEnd == FUSE && fuse
		switch _, held := holds[n]; {
		case slices.Contains(lost, e.Key):
			s.lose(e, im)
		case there && held:
		case there || e.FrontEnd == Fanotify && im != nil && im.complete():
			// One died before the client had it, so nobody reads it; or it needs nobody.
			if err := s.served.dir.remove(n); err != nil {
				return err
			}
		default:
			s.lose(e, im)
		}
	}
	for _, im := range s.cache.images {
		im.rest()
	}
	return nil
}

// lose notes that an image is lost; nil is one whose description is gone.
func (s *server) lose(e servedEntry, im *image) {
	s.lost[e.Key] = true
	if im != nil {
		im.lost, im.armed = true, e.FrontEnd == Fanotify
	}
}

// startFanotify begins to answer events. What is lost is marked anew: its readers,
// if there are any left, get errors instead of zeros.
func (s *server) startFanotify(group, events *os.File) error {
	var armed []*image
	for _, im := range s.cache.all() {
		if !im.armed {
			continue
		}
		if !im.complete() { // the other one may have died before it set the mark
			if err := mark(group, im.data, true); err != nil {
				return err
			}
			im.marked = true
		}
		armed = append(armed, im)
	}
	fan, err := newFanotify(s.cache, group, events, armed)
	if err != nil {
		return err
	}
	fan.unmarked = s.forget
	s.group, s.events, s.fan = group, events, fan
	for _, im := range armed {
		fan.release(im)
	}
	return nil
}

// forget removes the record of an image that fanotify need not serve any more.
func (s *server) forget(im *image) {
	if err := s.served.remove(im); err != nil {
		s.log.Warn("record of a complete image stays", "key", im.Key, "error", err)
	}
}

// startFUSE begins to answer FUSE requests. A connection that cannot be taken over
// is given up, and what is served by it is lost; the client makes another.
func (s *server) startFUSE(dev, mnt *os.File, again bool) error {
	f, err := newFUSEServer(s.cache, dev, again, func(f *fuseServer) { s.janitor.Go(func() { s.fuseGone(f) }) })
	if errors.Is(err, errCutOff) {
		closeFiles(some(dev, mnt))
		s.loseFUSE()
		return nil
	}
	if err != nil {
		return err
	}
	s.dev, s.mnt, s.fuse = dev, mnt, f
	return nil
}

// fuseGone gives up a connection that the kernel has ended. The client comes again,
// and is told what is lost.
func (s *server) fuseGone(f *fuseServer) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.fuse != f {
		return
	}
	f.close()
	closeFiles(some(s.dev, s.mnt))
	s.dev, s.mnt, s.fuse = nil, nil, nil
	s.loseFUSE()
	if s.calls != nil {
		s.calls.c.close()
	}
}

// loseFUSE notes that what FUSE serves is lost. s.mu is held.
func (s *server) loseFUSE() {
	for _, im := range s.cache.all() {
		im.mu.Lock()
		if (im.inUse || im.left) && !im.armed {
			im.lost = true
			s.lost[im.Key] = true
		}
		im.mu.Unlock()
	}
}

// welcome is the answer to a greeting: all descriptors, and all that is served.
func (s *server) welcome(c *connection) (*calls, error) {
	h := &hello{Version: protocolVersion, Group: s.group != nil, FUSE: s.dev != nil}
	for key := range s.lost {
		h.Lost = append(h.Lost, key)
	}
	var holds []hold
	var data []*os.File
	for _, im := range s.cache.all() {
		im.mu.Lock()
		switch {
		case im.lost:
		case im.armed:
			holds, data = append(holds, hold{im.Key, Fanotify, im.inUse}), append(data, im.data)
		case im.inUse:
			holds, data = append(holds, hold{im.Key, FUSE, true}), append(data, nil)
		case im.left:
			holds, data = append(holds, hold{im.Key, FUSE, false}), append(data, nil)
		}
		im.mu.Unlock()
	}
	h.Holds = len(holds)
	if err := c.send(&message{Hello: h}, some(s.group, s.events, s.dev, s.mnt)...); err != nil {
		return nil, err
	}
	for i := range holds {
		if err := c.send(&message{Hold: &holds[i]}, some(data[i])...); err != nil {
			return nil, err
		}
	}
	s.calls = newCalls(s, c)
	s.wake()
	return s.calls, nil
}
