package edge

import (
	"context"
	"fmt"
	"log/slog"
	"strings"
	"sync/atomic"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/backend"
	"github.com/opendsec/dsec/internal/chronusapi"
)

// offer is one backend and what it can do.
type offer struct {
	backend.Backend
	info atomic.Pointer[backend.Info]
}

// probe asks what the backend can do on this host.
func (o *offer) probe(ctx context.Context, log *slog.Logger) {
	info, err := o.Probe(ctx)
	if err != nil {
		info.Available = false
		info.Notes = append(info.Notes, "the probe failed")
		log.Error("backend cannot be probed", "backend", info.Kind, "err", err)
	}
	if !info.Available {
		log.Warn("backend cannot run here", "backend", info.Kind, "notes", info.Notes)
	}
	o.info.Store(&info)
}

// What keeps a backend from working may pass: a disk that is full, a module that
// is loaded later.
const (
	probeFirst   = time.Second
	probeLongest = time.Minute
	probeTimeout = 2 * time.Minute
)

// probeAgain asks until the backend can run. It works from then on.
func (e *Edge) probeAgain(o *offer) {
	for wait := probeFirst; ; wait = min(2*wait, probeLongest) {
		select {
		case <-time.After(wait):
		case <-e.closing.Done():
			return
		}
		ctx, cancel := context.WithTimeout(e.closing, probeTimeout)
		o.probe(ctx, e.log)
		cancel()
		if info := o.info.Load(); info.Available {
			e.log.Info("backend can run now", "backend", info.Kind)
			return
		}
	}
}

// Ready is nil where the edge can make sandboxes of some kind, and tells why
// where it cannot.
func (e *Edge) Ready() error {
	switch {
	case !e.ready.Load():
		return errStarting
	case e.draining.Load():
		return errDraining
	}
	var why []string
	for _, kind := range e.kinds {
		info := e.backends[kind].info.Load()
		if info.Available {
			return nil
		}
		why = append(why, fmt.Sprintf("%s: %s", kind, strings.Join(info.Notes, ", ")))
	}
	return dsec.Errorf(dsec.CodeUnavailable, "no backend can run here: %s; `dsec doctor` tells what is missing", strings.Join(why, "; "))
}

// starved is the error of a process that ended while the node had not what it
// promised: the disk that all sandboxes share was full, or had no more for this one,
// or commands were killed for what all sandboxes kept in the kernel. It may have
// failed for that, or have taken a failed write for nothing: how it ended says nothing
// about it.
func (c *call) starved(process uint64, o *dsec.Outcome) error {
	if o == nil {
		return nil
	}
	until := o.Started.Add(o.Duration)
	if node, ok := c.inst.(backend.NodeUser); ok && node.KilledForNode(o.Started, until) {
		return dsec.Errorf(dsec.CodeOutcomeUnknown, "process %d ended, and while it ran this sandbox's commands were killed, because all sandboxes of the node together held too much of its kernel's memory: "+
			"how it ended must not be scored; run it again. Its output can be read by attaching to it", process)
	}
	disk, ok := c.inst.(backend.DiskUser)
	if !ok || !disk.DiskStarved(o.Started, until) {
		return nil
	}
	return dsec.Errorf(dsec.CodeOutcomeUnknown, "process %d ended, and while it ran the node's disk was full, or this sandbox had all that it could have of it: "+
		"how it ended must not be scored; run it again where there is room. Its output can be read by attaching to it", process)
}

// whoseDisk puts right what chronus, which knows of its own sandbox alone, says of
// a file that it could not write for lack of room in a call since began.
func (c *call) whoseDisk(began time.Time, err error) error {
	de := asError(err)
	if de == nil || de.Code != dsec.CodeExhausted {
		return err
	}
	name, full := strings.CutSuffix(de.Message, chronusapi.DiskFull)
	disk, ok := c.inst.(backend.DiskUser)
	if !full || !ok || !disk.DiskStarved(began, time.Now()) {
		return err
	}
	return &dsec.Error{Code: dsec.CodeUnavailable, Field: de.Field, Message: name + "the node's disk, which all its sandboxes share, is full", Err: err}
}

// ended counts a command that ended, and is the error of one whose end says nothing.
func (c *call) ended(process uint64, o *dsec.Outcome) error {
	c.e.metrics.command(*o)
	err := c.noOutcome(process, o)
	if err != nil && !c.s.wasCutOff(process) {
		c.e.metrics.starved.Inc()
	}
	return err
}

// noOutcome is the error of a process that ended and whose end says nothing.
func (c *call) noOutcome(process uint64, o *dsec.Outcome) error {
	if o != nil && c.s.wasCutOff(process) {
		return errCutOff(process)
	}
	return c.starved(process, o)
}
