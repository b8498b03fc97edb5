package main

import (
	"bytes"
	"cmp"
	"context"
	"encoding/base64"
	"errors"
	"flag"
	"fmt"
	"io"
	"strconv"
	"syscall"
	"time"
	"unicode/utf8"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/client"
)

// exitPlatform is the exit code of `dsec exec` where the platform failed: how
// the command ended is not known.
const exitPlatform = 125

// execFlags are the flags of exec and shell.
type execFlags struct {
	*flags
	tty, detach, noStdin bool
	env                  pairs
	dir, user            string
	timeout              time.Duration
}

func newExecFlags(e *env, name string) *execFlags {
	f := &execFlags{flags: clientFlags(e, name)}
	f.Var(&f.env, "e", "`KEY=VALUE` for the command; may be repeated")
	f.StringVar(&f.dir, "w", "", "working `directory`")
	f.StringVar(&f.user, "u", "", "`user`: name, uid, name:group or uid:gid")
	f.Var(span{&f.timeout}, "timeout", "kill the command and all its processes after that `duration`")
	return f
}

func (f *execFlags) apply(cmd *client.Cmd) {
	cmd.Env, cmd.Dir, cmd.User, cmd.Timeout = f.env.m, f.dir, f.user, f.timeout
}

func runExec(ctx context.Context, e *env, args []string) error {
	f := newExecFlags(e, "exec")
	f.BoolVar(&f.tty, "t", false, "run on a terminal")
	f.BoolVar(&f.tty, "tty", false, "run on a terminal")
	f.BoolVar(&f.detach, "d", false, "leave the command running and print its number, for 'dsec logs'")
	f.BoolVar(&f.detach, "detach", false, "leave the command running and print its number")
	f.BoolVar(&f.noStdin, "n", false, "do not read standard input")
	limit := f.Int64("output-limit", 0, "kill the command at more `bytes` of output")
	args, err := f.parse(args, 2, -1, 1)
	if err == nil {
		err = f.check()
	}
	if err != nil {
		return calledWrong("exec", err)
	}
	c, err := f.client()
	if err != nil {
		return platformFailed(err)
	}
	defer c.Close()
	cmd := c.Sandbox(args[0]).Command(args[1:]...)
	f.apply(cmd)
	cmd.OutputLimit = *limit
	switch {
	case f.detach:
		p, err := cmd.Detach(ctx)
		if err != nil {
			return platformFailed(err)
		}
		return f.print(map[string]any{"process": p.ID, "pid": p.PID}, "", [][]string{{fmt.Sprint(p.ID)}})
	case f.tty:
		return onTerminal(ctx, e, cmd)
	case f.output == "json":
		return execJSON(ctx, f, cmd)
	}
	if !f.noStdin {
		cmd.Stdin = e.stdin
	}
	cmd.Stdout, cmd.Stderr = e.stdout, e.stderr
	o, err := cmd.Run(ctx)
	return ended(ctx, o, err)
}

// check refuses what cannot be meant together.
func (f *execFlags) check() error {
	switch {
	case f.detach:
		return f.without("with -d: nobody is at its terminal", "t", "tty")
	case f.tty && f.output == "json":
		return dsec.Invalid("-o", "means nothing with -t: a terminal shows what the command writes")
	case f.tty:
		return f.without("with -t: the command's standard input is the terminal", "n")
	}
	return nil
}

// calledWrong is the end of a verb that ends with the code of a command where it
// was not called well: any code but 125 could be the command's own.
func calledWrong(verb string, err error) error {
	switch {
	case errors.Is(err, flag.ErrHelp):
		return err
	case errors.Is(err, errUsage):
		return exitError{exitPlatform, verb + ": flags or arguments are wrong, see above; nothing was run"}
	}
	return platformFailed(err)
}

// commandCode is the command's own code, or 128 and the signal that ended it. What is
// killed for its output or its time is no success where it was quicker to end.
func commandCode(o dsec.Outcome) int {
	if code := o.ShellStatus(); code != 0 || !o.OutputLimit && !o.TimedOut {
		return code
	}
	return 128 + int(syscall.SIGKILL)
}

// ended turns the end of a command into the end of dsec.
func ended(ctx context.Context, o dsec.Outcome, err error) error {
	if err != nil {
		if ctx.Err() != nil {
			return exitError{code: 130} // as a shell shows an interrupted command
		}
		return platformFailed(err)
	}
	e := exitError{code: commandCode(o)}
	switch {
	case o.TimedOut:
		e.line = fmt.Sprintf("the command timed out after %v and was killed", o.Duration.Round(time.Millisecond))
	case o.OOM:
		e.line = "a process of the command was killed: the sandbox had no memory left"
	case o.OutputLimit:
		e.line = "the command's output reached its limit; what it wrote past that is lost"
	}
	if e.code == 0 && e.line == "" {
		return nil
	}
	return e
}

func platformFailed(err error) error { return exitError{exitPlatform, line(err)} }

// outcomeView is how a command ended, as the CLI shows it.
type outcomeView struct {
	ExitCode     *int      `json:"exit_code,omitempty"`
	Signal       int       `json:"signal,omitempty"`
	OOM          bool      `json:"oom,omitempty"`
	TimedOut     bool      `json:"timed_out,omitempty"`
	OutputLimit  bool      `json:"output_limit,omitempty"`
	Claimed      bool      `json:"claimed,omitempty"`
	Started      time.Time `json:"started"`
	Seconds      float64   `json:"seconds"`
	CPUSeconds   float64   `json:"cpu_seconds"`
	MaxRSS       int64     `json:"max_rss_bytes"`
	Stdout       string    `json:"stdout"`
	Stderr       string    `json:"stderr"`
	StdoutBase64 string    `json:"stdout_base64,omitempty"` // where stdout is not UTF-8
	StderrBase64 string    `json:"stderr_base64,omitempty"`
}

func outcome(o dsec.Outcome) outcomeView {
	v := outcomeView{
		Signal: o.Signal, OOM: o.OOM, TimedOut: o.TimedOut, OutputLimit: o.OutputLimit, Claimed: o.Claimed,
		Started: o.Started, Seconds: o.Duration.Seconds(), CPUSeconds: o.CPU.Seconds(), MaxRSS: o.MaxRSS,
	}
	if o.Signal == 0 {
		v.ExitCode = &o.Code
	}
	return v
}

func execJSON(ctx context.Context, f *execFlags, cmd *client.Cmd) error {
	var stdout, stderr bytes.Buffer
	if !f.noStdin {
		cmd.Stdin = f.flags.env.stdin
	}
	cmd.Stdout, cmd.Stderr, cmd.OutputLimit = &stdout, &stderr, cmp.Or(cmd.OutputLimit, client.MaxOutput)
	o, err := cmd.Run(ctx)
	if err != nil {
		return ended(ctx, o, err)
	}
	v := outcome(o)
	v.Stdout, v.StdoutBase64 = textOrBase64(stdout.Bytes())
	v.Stderr, v.StderrBase64 = textOrBase64(stderr.Bytes())
	if err := f.print(v, "", nil); err != nil {
		return err
	}
	return exitError{code: commandCode(o)}
}

func textOrBase64(b []byte) (text, coded string) {
	if utf8.Valid(b) {
		return string(b), ""
	}
	return "", base64.StdEncoding.EncodeToString(b)
}

// countedWriter cancels once n bytes went through or were told to be lost.
type countedWriter struct {
	w    io.Writer
	left *int64
	done func()
}

func (c countedWriter) Write(b []byte) (int, error) {
	n := min(int64(len(b)), *c.left)
	if _, err := c.w.Write(b[:n]); err != nil {
		return 0, err
	}
	c.count(int64(len(b)))
	return len(b), nil
}

func (c countedWriter) count(n int64) {
	if *c.left -= n; *c.left <= 0 {
		*c.left = 0
		c.done()
	}
}

func runLogs(ctx context.Context, e *env, args []string) error {
	f := clientFlags(e, "logs")
	follow := f.Bool("f", false, "go on until the command ends")
	from := f.Uint64("from", 0, "first `byte` wanted, counted over both streams")
	args, err := f.parse(args, 2, 2, 0)
	if err != nil {
		if *follow {
			return calledWrong("logs", err)
		}
		return err
	}
	if *follow {
		return followLogs(ctx, e, f, args, *from)
	}
	c, number, err := f.process(args)
	if err != nil {
		return err
	}
	defer c.Close()
	sb := c.Sandbox(args[0])
	left, err := have(ctx, sb, number, *from)
	if err != nil || left == 0 {
		return err
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	out, errw := countedWriter{e.stdout, &left, cancel}, countedWriter{e.stderr, &left, cancel}
	_, err = sb.Process(number).Attach(ctx, *from, out, errw, func(g client.Gap) {
		e.lost(g)
		out.count(int64(g.To - g.From))
	})
	if err != nil && left == 0 && errors.Is(err, context.Canceled) {
		return nil // all that was there is printed
	}
	return err
}

// followLogs ends as `dsec exec` does: with the command's own code, of which no
// other is to be taken for one.
func followLogs(ctx context.Context, e *env, f *flags, args []string, from uint64) error {
	c, number, err := f.process(args)
	if err != nil {
		return platformFailed(err)
	}
	defer c.Close()
	o, err := c.Sandbox(args[0]).Process(number).Attach(ctx, from, e.stdout, e.stderr, e.lost)
	return ended(ctx, o, err)
}

// lost tells of output that is gone.
func (e *env) lost(g client.Gap) {
	_, _ = fmt.Fprintf(e.stderr, "dsec: bytes %d to %d are lost\n", g.From, g.To)
}

// process reads the arguments ID and PROCESS; the caller closes the client.
func (f *flags) process(args []string) (c *client.Client, number uint64, err error) {
	if number, err = strconv.ParseUint(args[1], 10, 64); err != nil {
		return nil, 0, dsec.Invalid("PROCESS", "want the number that `dsec exec -d` or `dsec ps` shows")
	}
	c, err = f.client()
	return c, number, err
}

// have is how many bytes of output there are from byte `from` on.
func have(ctx context.Context, sb *client.Sandbox, number, from uint64) (int64, error) {
	ps, err := sb.Processes(ctx)
	if err != nil {
		return 0, err
	}
	for _, p := range ps {
		if p.ID == number {
			return max(0, int64(p.NextSeq)-int64(from)), nil
		}
	}
	return 0, &dsec.Error{Code: dsec.CodeNotFound, Field: "PROCESS", Message: "no such command; see `dsec ps`"}
}

func runPs(ctx context.Context, e *env, args []string) error {
	f := clientFlags(e, "ps")
	c, ids, err := f.connect(args, 1, 1, 0)
	if err != nil {
		return err
	}
	defer c.Close()
	ps, err := c.Sandbox(ids[0]).Processes(ctx)
	if err != nil {
		return err
	}
	views, rows := []processView{}, [][]string{}
	for _, p := range ps {
		v, state := viewProcess(p)
		views = append(views, v)
		rows = append(rows, []string{fmt.Sprint(p.ID), fmt.Sprint(p.PID), state, age(p.Started), fmt.Sprint(p.NextSeq), fmt.Sprintf("%q", p.Args)})
	}
	if err := f.print(views, "PROCESS PID STATE AGE OUTPUT COMMAND", rows); err != nil || f.output == "json" {
		return err
	}
	for _, v := range views {
		if v.Fault != "" { // too long for the table
			_, _ = fmt.Fprintln(e.stderr, "dsec: "+v.Fault)
		}
	}
	return nil
}

// processView is a command of a sandbox, as the CLI shows it.
type processView struct {
	Process   uint64       `json:"process"`
	PID       int          `json:"pid"`
	Args      []string     `json:"args"`
	State     string       `json:"state"` // running, exited or unknown
	Started   time.Time    `json:"started"`
	Outcome   *outcomeView `json:"outcome,omitempty"`
	Fault     string       `json:"fault,omitempty"` // why one that ended has no outcome
	FirstSeq  uint64       `json:"first_seq"`
	NextSeq   uint64       `json:"next_seq"`
	PTY       bool         `json:"pty,omitempty"`
	Lingering bool         `json:"lingering,omitempty"`
	Session   string       `json:"session,omitempty"`
}

// viewProcess is p as JSON shows it, and its state as the table does.
func viewProcess(p client.ProcessInfo) (v processView, state string) {
	v = processView{
		Process: p.ID, PID: p.PID, Args: p.Args, State: "running", Started: p.Started, Fault: p.Fault,
		FirstSeq: p.FirstSeq, NextSeq: p.NextSeq, PTY: p.PTY, Lingering: p.Lingering, Session: p.Session,
	}
	switch {
	case p.Fault != "":
		v.State = "unknown"
	case p.Outcome != nil:
		o := outcome(*p.Outcome)
		v.State, v.Outcome = "exited", &o
		if p.Outcome.Signal != 0 {
			return v, fmt.Sprintf("signal %d", p.Outcome.Signal)
		}
		return v, fmt.Sprintf("exit %d", p.Outcome.Code)
	}
	return v, v.State
}
