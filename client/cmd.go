package client

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"io"
	"sync"
	"time"
	"unicode/utf8"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/opendsec/dsec"
	dsecv1 "github.com/opendsec/dsec/proto/dsec/v1"
	"github.com/opendsec/dsec/proto/dsec/v1/dsecv1connect"
)

// WindowSize is a terminal's size in characters.
type WindowSize struct{ Rows, Cols int }

// Cmd is a command to run in a sandbox. Like an exec.Cmd it is used once, and
// not by several goroutines at once.
type Cmd struct {
	// Args are the program and its arguments; they may hold any bytes but NUL.
	Args []string
	// Script, in place of Args, is run by bash -c, or sh -c where there is no bash.
	Script string
	// Env is added to the sandbox's environment.
	Env map[string]string
	// Dir is absolute, or relative to the sandbox's workdir.
	Dir string
	// User is name, uid, name:group or uid:gid; empty is the sandbox's user.
	User string
	// Timeout ends the command with all its processes, inside the sandbox; the
	// outcome is then TimedOut. 0 is none.
	Timeout time.Duration
	// OutputLimit ends the command at one more byte of output; 0 is none, but for
	// Output 16 MiB.
	OutputLimit int64

	// Stdin is sent in chunks as the command takes them; nil is no input.
	Stdin io.Reader
	// Stdout and Stderr get the output as it comes; nil discards it. With a
	// PTY all output goes to Stdout.
	Stdout, Stderr io.Writer
	// PTY, where not nil, runs the command on a terminal of this size.
	PTY *WindowSize
	// ActionID, where not empty, has the command run once, whoever asks for it how
	// often: one that is known in the sandbox is answered by what came of it then, or
	// waited for; with another request it is diverged. Such a command goes on where its
	// caller goes away. At most 128 bytes.
	ActionID string
	// Replayed is set by Output where the answer was that of an earlier call.
	Replayed bool

	sandbox *Sandbox
	process *Process
	ctx     context.Context // of the command
	cancel  context.CancelFunc
	events  *connect.ServerStreamForClient[dsecv1.ProcessEvent]
	stdin   chan error    // result of sending Stdin
	allSent chan struct{} // closed when only the answer to it is missing
}

// Headers of what is done once: see docs/state.md.
const (
	actionHeader   = "Dsec-Action-Id"
	replayedHeader = "Dsec-Replayed"
)

// acting is a request with the action ID of a command.
func acting[T any](c *Cmd, msg *T) *connect.Request[T] {
	req := connect.NewRequest(msg)
	if c.ActionID != "" {
		req.Header().Set(actionHeader, c.ActionID)
	}
	return req
}

// Command is a command of the program argv[0] with the rest as arguments.
func (s *Sandbox) Command(argv ...string) *Cmd { return &Cmd{Args: argv, sandbox: s} }

// Shell is a command that is run by bash -c, or sh -c where there is no bash:
// not a login shell, and with a status of its own that is fit for rewards.
func (s *Sandbox) Shell(script string) *Cmd { return &Cmd{Script: script, sandbox: s} }

func (c *Cmd) message() *dsecv1.Command {
	m := &dsecv1.Command{Shell: c.Script, Env: c.Env, Cwd: c.Dir, User: c.User, OutputLimitBytes: c.OutputLimit}
	if c.Timeout != 0 {
		m.Timeout = durationpb.New(c.Timeout)
	}
	if c.Script != "" {
		return m
	}
	for _, arg := range c.Args {
		if !utf8.ValidString(arg) {
			for _, a := range c.Args {
				m.RawArgv = append(m.RawArgv, []byte(a))
			}
			return m
		}
	}
	m.Argv = c.Args
	return m
}

// Run runs the command to its end. Canceling ctx kills it.
func (c *Cmd) Run(ctx context.Context) (dsec.Outcome, error) {
	if err := c.Start(ctx); err != nil {
		return dsec.Outcome{}, err
	}
	return c.Wait()
}

// MaxOutput is how many bytes of output are held in memory where a Cmd names no
// limit: a command may write for ever.
const MaxOutput = 16 << 20

// Output runs the command and returns its standard output, also where the
// outcome is a timeout or another failure of the command. It goes on over a
// restart of the server as Wait does. Where neither Stdin nor PTY is set it costs
// one round trip, and then what it goes on with is a command that ran for half a
// second before, and wrote no more than the server keeps of it, 256 KiB or less
// where many commands write: else the error's code is outcome_unknown.
func (c *Cmd) Output(ctx context.Context) ([]byte, dsec.Outcome, error) {
	if c.Stdin == nil && c.PTY == nil {
		return c.exec(ctx)
	}
	var out bytes.Buffer
	c.Stdout, c.OutputLimit = &out, cmp.Or(c.OutputLimit, MaxOutput)
	o, err := c.Run(ctx)
	return out.Bytes(), o, err
}

// Start starts the command and returns once it runs. Wait must be called. The
// command is killed when ctx is canceled before its end.
func (c *Cmd) Start(ctx context.Context) error {
	if c.events != nil {
		return errors.New("client: Cmd used twice")
	}
	ctx, c.cancel = context.WithCancel(ctx)
	c.ctx = ctx
	if err := c.start(ctx, false); err != nil {
		c.cancel()
		return err
	}
	c.stdin, c.allSent = make(chan error, 1), make(chan struct{})
	if c.Stdin == nil {
		c.stdin <- nil
		return nil
	}
	go func() {
		err := c.process.sendStdin(ctx, c.Stdin, c.allSent)
		c.stdin <- err
		if errors.As(err, new(readError)) {
			c.cancel() // the command would wait for the rest for ever
		}
	}()
	return nil
}

// Detach starts the command and leaves it running: it is killed only by
// Process.Signal, its timeout or the end of the sandbox. Output is kept in a
// bounded spool, for Process.Attach. Stdin is closed.
func (c *Cmd) Detach(ctx context.Context) (*Process, error) {
	ctx, c.cancel = context.WithCancel(ctx)
	defer c.cancel()
	if err := c.start(ctx, true); err != nil {
		return nil, err
	}
	return c.process, c.events.Close()
}

func (c *Cmd) start(ctx context.Context, detach bool) error {
	return overRestart(ctx, nil, func() error { return c.startOnce(ctx, detach) })
}

func (c *Cmd) startOnce(ctx context.Context, detach bool) error {
	req := &dsecv1.StartRequest{
		SandboxId: string(c.sandbox.id), Command: c.message(), OpenStdin: c.Stdin != nil && !detach, Detach: detach, Pty: c.PTY.message(),
	}
	api := c.sandbox.c
	stream, err := api.process.Start(ctx, acting(c, req))
	if err != nil {
		return api.typed(err, dsecv1connect.ProcessServiceStartProcedure)
	}
	c.events = stream
	for stream.Receive() {
		if st := stream.Msg().GetStarted(); st != nil {
			c.process = &Process{sandbox: c.sandbox, ID: st.ProcessId, PID: int(st.Pid)}
			return nil
		}
	}
	_ = stream.Close()
	if err := stream.Err(); err != nil {
		return api.typed(err, dsecv1connect.ProcessServiceStartProcedure)
	}
	return dsec.Errorf(dsec.CodeOutcomeUnknown, "the stream ended before the command's start was told")
}

func (w *WindowSize) message() *dsecv1.TerminalSize {
	if w == nil {
		return nil
	}
	return &dsecv1.TerminalSize{Rows: uint32(w.Rows), Cols: uint32(w.Cols)}
}

// Process is the started command's, valid after Start.
func (c *Cmd) Process() *Process { return c.process }

// sentStdin returns what came of sending Stdin, if that is over. A reader that blocks is not waited for:
// nobody takes its input any more. The answer to what was sent whole is: given up it would be one more
// action of which the log does not know what came of it.
func (c *Cmd) sentStdin() (over bool, err error) {
	select {
	case err = <-c.stdin:
		return true, err
	case <-c.allSent:
	default:
		return false, nil
	}
	timer := time.NewTimer(stdinAnswer)
	defer timer.Stop()
	select {
	case err = <-c.stdin:
		return true, err
	case <-c.ctx.Done():
	case <-timer.C:
	}
	return false, nil
}

// stdinAnswer bounds how long the answer to the end of the input takes once its command has ended.
const stdinAnswer = 10 * time.Second

// Wait copies output until the command ends and returns how it ended. Where the
// server is restarted meanwhile, or the connection breaks, it goes on with the
// same command once the server is back, within a minute; but not where the input
// was not sent whole. An error means that the end is not known; the command may
// then go on, and Process.Attach finds it.
func (c *Cmd) Wait() (dsec.Outcome, error) {
	defer c.cancel()
	f := follower{p: c.process, stdout: c.Stdout, stderr: c.Stderr, own: true}
	var lost uint64
	if c.Stdout != nil || c.Stderr != nil {
		f.gap = func(g Gap) { lost += g.To - g.From }
	}
	o, broken, err := f.relay(c.events, dsecv1connect.ProcessServiceStartProcedure)
	over, serr := c.sentStdin()
	var re readError
	if over && err != nil && errors.As(serr, &re) {
		return o, re.error
	}
	sent := over && serr == nil
	if broken && sent {
		o, err = f.goOn(c.ctx)
	} else if broken {
		err = f.unfollowed(c.ctx, err)
	}
	if err == nil {
		err = f.whole(lost)
	}
	return o, err
}

// readError is the failure of the caller's own reader.
type readError struct{ error }

// Process is a started command, known by its number.
type Process struct {
	sandbox *Sandbox
	ID      uint64
	PID     int // as seen inside; 0 where not known

	mu sync.Mutex // orders WriteStdin
}

// Process is a command that was started earlier. It makes no call.
func (s *Sandbox) Process(id uint64) *Process { return &Process{sandbox: s, ID: id} }

// Gap is output that is lost, because the spool was full and nobody read it.
type Gap struct{ From, To uint64 }
