package container

import (
	"context"
	"errors"
	"sync"
	"time"

	"github.com/opendsec/dsec/internal/backend"
)

var _ backend.Snapshotter = (*instance)(nil)

// standstill is the time for which an instance stands still so that its disk can be read.
type standstill struct {
	end  func() error // once
	took time.Duration
}

// standStill freezes an instance, if it is not paused, and keeps it as it is until end.
func (i *instance) standStill(ctx context.Context, sh *shell) (*standstill, error) {
	give, err := i.pauses.takeNow(ctx)
	if err != nil {
		return nil, err
	}
	s, begun := new(standstill), time.Now()
	paused, err := sh.group.Frozen()
	if err == nil && !paused {
		err = i.freeze(ctx, sh, false)
	}
	if err != nil {
		give()
		return nil, err
	}
	s.end = sync.OnceValue(func() error {
		defer give()
		var err error
		if !paused {
			err = i.goOn(context.WithoutCancel(ctx), sh)
		}
		s.took = time.Since(begun)
		return err
	})
	return s, nil
}

// Snapshot implements backend.Snapshotter. What is in an overlay's files is in those of
// the volume, also where programs have mapped them: the kernel keeps it nowhere else.
func (i *instance) Snapshot(ctx context.Context) (backend.Snapshot, error) {
	sh := i.shell()
	if sh == nil || i.isKilled() {
		return backend.Snapshot{}, errGone
	}
	var still *standstill
	freeze := func() (_ func() error, err error) {
		still, err = i.standStill(ctx, sh)
		if err != nil {
			return nil, err
		}
		i.b.crash("snapshot")
		return still.end, nil
	}
	out := backend.Snapshot{Owner: sh.slot.base(), Frozen: func() time.Duration { return still.took }}
	if i.b.disk.CanSnapshot() {
		snap, err := i.volume.Snapshot(freeze)
		if err != nil {
			return out, i.whyNot(err)
		}
		out.Upper, out.Close = snap.Upper, snap.Close
		return out, nil
	}
	goOn, err := freeze()
	if err != nil {
		return out, i.whyNot(err)
	}
	if out.Upper, err = i.volume.Upper(); err != nil {
		return out, i.whyNot(errors.Join(err, goOn()))
	}
	out.GoOn = func() error {
		err := goOn()
		if i.isKilled() { // its files may have gone while they were read
			return errGone
		}
		return i.whyNot(err)
	}
	out.Close = func() error { return errors.Join(out.Upper.Close(), i.whyNot(goOn())) }
	return out, nil
}

// whyNot is the error of something that failed, maybe since the instance has ended.
func (i *instance) whyNot(err error) error {
	if err != nil && (i.isKilled() || !i.running()) {
		return errGone
	}
	return err
}
