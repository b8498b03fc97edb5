package client

import (
	"context"
	"errors"
	"io"
	"syscall"
	"time"

	"github.com/opendsec/dsec"
	dsecv1 "github.com/opendsec/dsec/proto/dsec/v1"
	"github.com/opendsec/dsec/proto/dsec/v1/dsecv1connect"
)

// chunk is how much is sent in one message of a stream.
const chunk = 256 << 10

// ProcessInfo describes a command of a sandbox.
type ProcessInfo struct {
	ID      uint64
	PID     int
	Args    []string
	Started time.Time
	// Outcome is nil while it runs.
	Outcome *dsec.Outcome
	// NextSeq counts the bytes of output so far; FirstSeq is the first that
	// the spool still holds.
	NextSeq, FirstSeq uint64
	PTY               bool
	// Lingering: it ended, and processes that it started still run.
	Lingering bool
	Session   string
	// Fault is why one that ended has no outcome that could be judged.
	Fault string
}

// Ended reports whether the command has ended, with an outcome or a fault.
func (p *ProcessInfo) Ended() bool { return p.Outcome != nil || p.Fault != "" }

// Processes lists the sandbox's commands.
func (s *Sandbox) Processes(ctx context.Context) ([]ProcessInfo, error) {
	res, err := call(ctx, s.c, s.c.process.ListProcesses, &dsecv1.ListProcessesRequest{SandboxId: string(s.id)}, dsec.Retryable)
	if err != nil {
		return nil, err
	}
	out := make([]ProcessInfo, len(res.Processes))
	for i, p := range res.Processes {
		out[i] = ProcessInfo{
			ID: p.ProcessId, PID: int(p.Pid), Args: p.Argv, Started: timeOf(p.Started),
			NextSeq: p.NextSeq, FirstSeq: p.FirstSeq, PTY: p.Pty, Lingering: p.Lingering, Session: p.SessionId, Fault: p.Fault,
		}
		if o, ok := outcomeOf(p.Outcome); ok {
			out[i].Outcome = &o
		}
	}
	return out, nil
}

// Signal sends a signal to the process alone.
func (p *Process) Signal(ctx context.Context, sig syscall.Signal) error {
	return p.signal(ctx, sig, false)
}

// SignalTree sends a signal to every process that the command started. None
// escapes SIGKILL.
func (p *Process) SignalTree(ctx context.Context, sig syscall.Signal) error {
	return p.signal(ctx, sig, true)
}

// Kill kills every process that the command started. It is a success where the
// command has ended already.
func (p *Process) Kill(ctx context.Context) error {
	err := p.signal(ctx, syscall.SIGKILL, true)
	if err != nil && dsec.CodeOf(err) == dsec.CodeConflict {
		return nil // it has ended, or its sandbox has
	}
	return err
}

func (p *Process) signal(ctx context.Context, sig syscall.Signal, tree bool) error {
	_, err := call(ctx, p.sandbox.c, p.sandbox.c.process.Signal, &dsecv1.SignalRequest{
		SandboxId: string(p.sandbox.id), ProcessId: p.ID, Signal: int32(sig), Tree: tree,
	}, never)
	return err
}

// Resize changes the size of the process's terminal.
func (p *Process) Resize(ctx context.Context, size WindowSize) error {
	_, err := call(ctx, p.sandbox.c, p.sandbox.c.process.Resize, &dsecv1.ResizeRequest{
		SandboxId: string(p.sandbox.id), ProcessId: p.ID, Size: size.message(),
	}, dsec.Retryable)
	return err
}

// WriteStdin appends to the input of a process that was started with one.
func (p *Process) WriteStdin(ctx context.Context, data []byte) (int, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	sent := 0
	for sent < len(data) {
		part := data[sent:min(len(data), sent+chunk)]
		res, err := call(ctx, p.sandbox.c, p.sandbox.c.process.WriteStdin, &dsecv1.WriteStdinRequest{
			SandboxId: string(p.sandbox.id), ProcessId: p.ID, Data: part,
		}, never)
		if err != nil {
			return sent, err
		}
		sent += int(res.Written)
		if int(res.Written) < len(part) {
			return sent, io.ErrShortWrite
		}
	}
	return sent, nil
}

// CloseStdin ends the input of the process.
func (p *Process) CloseStdin(ctx context.Context) error {
	_, err := call(ctx, p.sandbox.c, p.sandbox.c.process.CloseStdin, &dsecv1.CloseStdinRequest{
		SandboxId: string(p.sandbox.id), ProcessId: p.ID,
	}, dsec.Retryable)
	return err
}

// sendStdin streams r until its end, which becomes the end of the input. It closes sent when only the answer
// is missing.
func (p *Process) sendStdin(ctx context.Context, r io.Reader, sent chan<- struct{}) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel() // a reader that failed must not look like the end of the input
	api := p.sandbox.c
	stream := api.process.StreamStdin(ctx)
	typed := func(err error) error { return api.typed(err, dsecv1connect.ProcessServiceStreamStdinProcedure) }
	buf := make([]byte, chunk)
	for {
		n, rerr := r.Read(buf)
		if n > 0 || errors.Is(rerr, io.EOF) {
			err := stream.Send(&dsecv1.WriteStdinRequest{
				SandboxId: string(p.sandbox.id), ProcessId: p.ID, Data: buf[:n], Eof: errors.Is(rerr, io.EOF),
			})
			if errors.Is(err, io.EOF) {
				_, err = stream.CloseAndReceive()
			}
			if err != nil {
				return typed(err)
			}
		}
		if errors.Is(rerr, io.EOF) {
			close(sent)
			if _, err := stream.CloseAndReceive(); err != nil {
				return typed(err)
			}
			return nil
		}
		if rerr != nil {
			return readError{rerr}
		}
	}
}
