package client

import (
	"context"
	"math"
	"sync"
	"time"

	"connectrpc.com/connect"

	dsecv1 "github.com/opendsec/dsec/proto/dsec/v1"
	"github.com/opendsec/dsec/proto/dsec/v1/dsecv1connect"
)

// What was typed once a command had asked for it is typed then again: before input, a
// signal or a change of its terminal's size the command is to have written as much as it
// had then. Typed ahead, a terminal would show it elsewhere.

// written counts what a command of the fresh sandbox has written.
type written struct {
	mu      sync.Mutex
	n       int64
	short   int64         // so much less than the original wrote
	over    bool          // nothing more comes
	changed chan struct{} // closed at the next change
}

func newWritten() *written { return &written{changed: make(chan struct{})} }

// take takes in an event of the command.
func (w *written) take(ev *dsecv1.ProcessEvent) {
	switch {
	case ev.GetOutput() != nil:
		w.set(int64(ev.GetOutput().Seq)+int64(len(ev.GetOutput().Data)), false)
	case ev.GetGap() != nil:
		w.set(int64(ev.GetGap().To), false)
	}
}

// end says that nothing more comes.
func (w *written) end() { w.set(0, true) }

func (w *written) set(n int64, over bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.n, w.over = max(w.n, n), w.over || over
	close(w.changed)
	w.changed = make(chan struct{})
}

// until returns once the command has written n bytes, or has not come so far within the
// limit: then it writes less, now and from then on, and its output tells that in the end.
func (w *written) until(ctx context.Context, n int64, limit time.Duration) {
	timer := time.NewTimer(limit)
	defer timer.Stop()
	for {
		w.mu.Lock()
		enough, changed := w.over || w.n+w.short >= n, w.changed
		w.mu.Unlock()
		if enough {
			return
		}
		select {
		case <-changed:
		case <-timer.C:
			w.mu.Lock()
			w.short = max(0, n-w.n)
			w.mu.Unlock()
		case <-ctx.Done():
			return
		}
	}
}

// paceLimit bounds a wait for output that took the original no longer than took.
func paceLimit(took time.Duration) time.Duration { return 10*time.Second + 2*max(0, took) }

// writtenBy is what the fresh sandbox's command counts that a process of the original is;
// nil where that is not known.
func (r *replayer) writtenBy(process uint64) *written {
	if id, ok := r.processes[process]; ok {
		process = id
	}
	return r.written[process]
}

// pace waits until an action may begin.
func (r *replayer) pace(e *dsecv1.TrajectoryEntry) {
	if w := r.writtenBy(e.Request.GetProcessId()); w != nil {
		w.until(r.context, e.Request.OutputBytes, paceLimit(e.Time.AsTime().Sub(r.before)))
	}
}

// start starts a command, and counts what it writes.
func (r *replayer) start(st *step) (func(context.Context) error, error) {
	m, err := parsed[dsecv1.StartRequest](r, st)
	if err != nil {
		return nil, err
	}
	st.written = newWritten()
	var process uint64
	do, err := streamStep(r, st, r.to.c.process.Start, dsecv1connect.ProcessServiceStartProcedure, func(ev *dsecv1.ProcessEvent) {
		st.written.take(ev)
		if s := ev.GetStarted(); s != nil && process == 0 {
			process = s.ProcessId
			st.started <- process
		}
	})
	if err != nil {
		return nil, err
	}
	return func(ctx context.Context) error {
		defer st.written.end()
		err := do(ctx)
		if err == nil && m.Detach && (m.Pty != nil || m.OpenStdin) {
			r.count(ctx, process, st.written)
		}
		return err
	}, nil
}

// count counts what a command writes that nobody is attached to.
func (r *replayer) count(ctx context.Context, process uint64, w *written) {
	stream, err := r.to.c.process.Attach(ctx, connect.NewRequest(&dsecv1.AttachRequest{SandboxId: string(r.to.id), ProcessId: process}))
	if err != nil {
		return
	}
	defer func() { _ = stream.Close() }()
	for stream.Receive() {
		w.take(stream.Msg())
	}
}

// upTo waits until the input may go on from a byte, and returns how much of it may then be
// sent at once.
func (st *step) upTo(ctx context.Context, sent int) int {
	for st.end != nil && len(st.end.marks) > 0 {
		mark := st.end.marks[0]
		if n := mark.InputBytes - int64(sent); n > 0 {
			return int(min(n, math.MaxInt32))
		}
		if st.written != nil {
			st.written.until(ctx, mark.OutputBytes, paceLimit(time.Duration(mark.Milliseconds-st.paced)*time.Millisecond))
		}
		st.paced, st.end.marks = mark.Milliseconds, st.end.marks[1:]
	}
	return math.MaxInt32
}

// stdin gives a command what was streamed to it. An end of the input is an action of its own.
func (r *replayer) stdin(st *step) (func(context.Context) error, error) {
	open, err := parsed[dsecv1.WriteStdinRequest](r, st)
	if err != nil {
		return nil, err
	}
	st.written = r.written[open.ProcessId]
	return func(ctx context.Context) error {
		return given(ctx, r.to.c, st, r.to.c.process.StreamStdin(ctx), open, func(b []byte) *dsecv1.WriteStdinRequest {
			return &dsecv1.WriteStdinRequest{SandboxId: open.SandboxId, ProcessId: open.ProcessId, Data: b}
		})
	}, nil
}
