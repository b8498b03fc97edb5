package edge

import (
	"context"
	"errors"
	"maps"
	"slices"
	"strings"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/backend"
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

// DegradeLayer tells that reads of a layer fail for a reason, or, where that is
// empty, that they do not any more.
func (e *Edge) DegradeLayer(digest, reason string) {
	for _, s := range e.using(digest) {
		s.mu.Lock()
		switch {
		case s.state != dsec.StateRunning && s.state != dsec.StatePaused:
		case reason != "":
			s.reason = degradedPrefix + digest + " cannot be read: " + reason
			if !s.has(conditionDegraded) {
				s.conditions = append(s.conditions, conditionDegraded)
			}
		default:
			s.well(digest)
		}
		s.mu.Unlock()
	}
}

const degradedPrefix = "layer "

// well takes the degradation of a layer, or of any where that is empty, back. The
// caller holds s.mu.
func (s *sandbox) well(digest string) {
	if s.has(conditionDegraded) && strings.HasPrefix(s.reason, degradedPrefix+digest) {
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

// settle has a lost layer unmounted, so that it can be opened again.
func (e *Edge) settle(ctx context.Context, digest string) error {
	for _, b := range e.cfg.Backends {
		if d, ok := b.(backend.LayerDropper); ok {
			if err := d.DropLayer(ctx, digest); err != nil {
				return err
			}
		}
	}
	return e.cfg.Layers.Settle(ctx, digest)
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
