package edge

import (
	"context"
	"errors"
	"io"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/backend"
	"github.com/opendsec/dsec/internal/layer"
)

// layerOf is a layer of the store for a backend.
func (e *Edge) layerOf(digest string) backend.Layer {
	return backend.Layer{
		Digest: digest,
		Open: func(ctx context.Context) (backend.Devices, error) {
			files, onRead, err := e.cfg.Layers.Open(ctx, digest)
			return backend.Devices{Files: files, OnRead: onRead}, err
		},
		Release: func() { e.cfg.Layers.Release(digest) },
	}
}

// conditionDegraded: reads of a layer fail. The sandbox goes on, and is well again
// when they do not.
const conditionDegraded = "degraded"

// degraded is why reads of layers fail, by digest.
type degraded struct {
	mu  sync.Mutex
	why map[string]string
}

func (d *degraded) set(digest, reason string) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.why == nil {
		d.why = map[string]string{}
	}
	if d.why[digest] = reason; reason == "" {
		delete(d.why, digest)
	}
}

// of is what fails of these layers; empty: nothing.
func (d *degraded) of(digests []string) string {
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, digest := range digests {
		if why := d.why[digest]; why != "" {
			return degradedPrefix + digest + " cannot be read: " + why
		}
	}
	return ""
}

// DegradeLayer tells that reads of a layer fail for a reason, or, where that is
// empty, that they do not any more: all sandboxes that have it, and those that are
// made of it from now on.
func (e *Edge) DegradeLayer(digest, reason string) {
	e.degraded.set(digest, reason)
	for _, s := range e.using(digest) {
		s.mu.Lock()
		e.tellReads(s)
		s.mu.Unlock()
	}
}

const degradedPrefix = "layer "

// tellReads has a live sandbox tell whether reads of its layers fail. The caller
// holds s.mu.
func (e *Edge) tellReads(s *sandbox) {
	if s.state != dsec.StateRunning && s.state != dsec.StatePaused {
		return
	}
	why := e.degraded.of(s.spec.Layers)
	if why == "" {
		s.well()
		return
	}
	s.reason = why
	if !s.has(conditionDegraded) {
		s.conditions = append(s.conditions, conditionDegraded)
	}
}

// well takes back that reads fail. The caller holds s.mu.
func (s *sandbox) well() {
	if s.has(conditionDegraded) && strings.HasPrefix(s.reason, degradedPrefix) {
		s.reason = ""
		s.conditions = slices.DeleteFunc(s.conditions, func(c string) bool { return c == conditionDegraded })
	}
}

// using are the live sandboxes that are made of a layer.
func (e *Edge) using(digest string) (found []*sandbox) {
	e.mu.RLock()
	all := slices.Collect(maps.Values(e.sandboxes))
	e.mu.RUnlock()
	for _, s := range all {
		s.mu.Lock()
		has := slices.Contains(s.spec.Layers, digest)
		s.mu.Unlock()
		if has {
			found = append(found, s)
		}
	}
	return found
}

// LoseLayers ends the sandboxes of layers whose readers may have got other bytes.
// What is still made of one of them cannot be opened.
func (e *Edge) LoseLayers(ctx context.Context) error {
	if e.cfg.Layers == nil {
		return nil
	}
	var errs []error
	for _, digest := range e.cfg.Layers.Lost() {
		for _, s := range e.using(digest) {
			s.mu.Lock()
			if s.state != dsec.StateRunning && s.state != dsec.StatePaused {
				s.mu.Unlock()
				continue
			}
			_ = s.move(dsec.StateLost, lostReason(digest))
			e.writeAnyway(s)
			s.mu.Unlock()
			e.log.Warn("sandbox is lost", "sandbox", s.id, "layer", digest)
			e.reap(s)
		}
		errs = append(errs, e.settle(ctx, digest))
	}
	return errors.Join(errs...)
}

func lostReason(digest string) string {
	return "reads of layer " + digest + " may have given other bytes: they were cut off, or the layer is damaged in the store"
}

// settleTimeout bounds one attempt to settle a layer: the end of a mount may wait
// for a store that does not answer.
const settleTimeout = 10 * time.Second

// settleEvery is how often it is tried to settle what is lost: a sandbox of it may
// just have been made, or take its time to end.
const settleEvery = 10 * time.Second

// settleLost ends what uses lost layers, again and again as long as there are any.
func (e *Edge) settleLost() {
	every := time.NewTicker(e.cfg.settleEvery)
	defer every.Stop()
	for {
		select {
		case <-every.C:
		case <-e.closing.Done():
			return
		}
		if err := e.LoseLayers(e.closing); err != nil && e.closing.Err() == nil {
			e.log.Warn("layer stays lost for now", "err", err)
		}
	}
}

// settle has a lost layer unmounted, so that it can be opened again.
func (e *Edge) settle(ctx context.Context, digest string) error {
	ctx, cancel := context.WithTimeout(ctx, settleTimeout)
	defer cancel()
	if err := e.dropLayer(ctx, digest); err != nil {
		return err
	}
	return e.cfg.Layers.Settle(ctx, digest)
}

// dropLayer has the backends unmount a layer that no sandbox has.
func (e *Edge) dropLayer(ctx context.Context, digest string) error {
	for _, b := range e.cfg.Backends {
		if d, ok := b.(backend.LayerDropper); ok {
			if err := d.DropLayer(ctx, digest); err != nil {
				return err
			}
		}
	}
	return nil
}

// letGo has layers unmounted that no sandbox has, and whose data another process
// serves: it ends once nobody reads through it, and not before.
func (e *Edge) letGo() {
	if e.cfg.Layers == nil || !e.ready.Load() {
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), closeGrace)
	defer cancel()
	for _, digest := range e.cfg.Layers.Served() {
		if ctx.Err() != nil { // the next edge may end sooner
			return
		}
		if slices.ContainsFunc(e.using(digest), (*sandbox).holds) {
			continue
		}
		if err := e.dropLayer(ctx, digest); err != nil {
			e.log.Info("layer stays mounted", "digest", digest, "err", err)
			continue
		}
		e.cfg.Layers.Release(digest) // also where an earlier edge has mounted it
	}
}

// holds reports whether a sandbox may have objects.
func (s *sandbox) holds() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return !s.reaped
}

// buildLayer makes a layer of an archive. Where that mended one whose data were
// damaged, or one that it goes on, what has that mounted ends first.
func (e *Edge) buildLayer(ctx context.Context, opt layer.BuildOptions, archive io.Reader) (layer.Meta, []string, error) {
	meta, findings, err := e.cfg.Layers.Build(ctx, opt, archive)
	lost := e.cfg.Layers.Lost()
	if err == nil && slices.ContainsFunc(meta.Chain(), func(digest string) bool { return slices.Contains(lost, digest) }) {
		if err := e.LoseLayers(ctx); err != nil {
			e.log.Warn("layer stays lost for now", "err", err)
		}
	}
	return meta, findings, err
}

// lostLayer is one of the layers of a sandbox that was lost; empty: none was.
func lostLayer(s *sandbox, lost []string) string {
	for _, digest := range lost {
		if slices.Contains(s.spec.Layers, digest) {
			return digest
		}
	}
	return ""
}
