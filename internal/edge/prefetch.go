package edge

import (
	"context"
	"errors"
	"sync/atomic"
	"time"

	"connectrpc.com/connect"

	dsecv1 "github.com/opendsec/dsec/proto/dsec/v1"
)

// PrefetchLayer brings a layer to this node.
func (v service) PrefetchLayer(ctx context.Context, req *connect.Request[dsecv1.PrefetchLayerRequest], stream *connect.ServerStream[dsecv1.PrefetchLayerResponse]) error {
	if err := v.enter(req.Header().Get(projectHeader)); err != nil {
		return err
	}
	defer v.e.end()
	if v.e.cfg.Layers == nil {
		return errNoLayers
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	var now atomic.Pointer[dsecv1.PrefetchLayerResponse]
	done := make(chan error, 1)
	go func() {
		done <- v.e.prefetch(ctx, req.Msg.Name, func(bytes, size int64) {
			now.Store(&dsecv1.PrefetchLayerResponse{Bytes: bytes, Size: size})
		})
	}()
	tick := time.NewTicker(progressEvery)
	defer tick.Stop()
	for {
		var err error
		ended := false
		select {
		case err = <-done:
			ended = true
		case <-tick.C:
		}
		if p := now.Swap(nil); p != nil && err == nil {
			if err = stream.Send(p); err != nil && !ended {
				cancel() // whoever asked is gone
				return errors.Join(err, <-done)
			}
		}
		if ended || err != nil {
			return err
		}
	}
}

// prefetch brings a layer and those that it goes on, lowest first.
func (e *Edge) prefetch(ctx context.Context, digest string, progress func(bytes, size int64)) error {
	top, err := e.cfg.Layers.Get(ctx, digest)
	if err != nil {
		return err
	}
	var before, size int64
	chain := top.Chain()
	sizes := make([]int64, len(chain))
	for i, digest := range chain {
		meta, err := e.cfg.Layers.Get(ctx, digest)
		if err != nil {
			return err
		}
		sizes[i] = meta.Size
		size += meta.Size
	}
	for i, digest := range chain {
		if err := e.cfg.Layers.Prefetch(ctx, digest, func(done, _ int64) { progress(before+done, size) }); err != nil {
			return err
		}
		before += sizes[i]
	}
	return nil
}
