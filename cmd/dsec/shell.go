package main

import (
	"context"
	"maps"
	"os"
	"os/signal"
	"syscall"

	"golang.org/x/term"

	"github.com/opendsec/dsec/client"
)

func runShell(ctx context.Context, e *env, args []string) error {
	f := newExecFlags(e, "shell")
	args, err := f.parse(args, 1, -1, 1)
	if err != nil {
		return calledWrong("shell", err)
	}
	c, err := f.client()
	if err != nil {
		return platformFailed(err)
	}
	defer c.Close()
	sb := c.Sandbox(args[0])
	cmd := sb.Command(args[1:]...)
	if len(args) == 1 {
		// Where nobody types, the end of the input can come before readline has the
		// terminal, which then forgets it.
		edit := ""
		if in, ok := e.stdin.(*os.File); !ok || !term.IsTerminal(int(in.Fd())) {
			edit = "--noediting "
		}
		cmd = sb.Command("sh", "-c", "if command -v bash >/dev/null; then exec bash "+edit+"-i; fi; exec sh -i")
	}
	f.apply(cmd)
	return onTerminal(ctx, e, cmd)
}

// onTerminal runs cmd on a terminal of its own that shows on this one.
func onTerminal(ctx context.Context, e *env, cmd *client.Cmd) error {
	cmd.PTY = &client.WindowSize{Rows: 24, Cols: 80}
	cmd.Stdin, cmd.Stdout = e.stdin, e.stdout
	if name := os.Getenv("TERM"); name != "" {
		env := map[string]string{"TERM": name}
		maps.Copy(env, cmd.Env)
		cmd.Env = env
	}
	in, local := e.stdin.(*os.File)
	if local = local && term.IsTerminal(int(in.Fd())); local {
		*cmd.PTY = windowSize(in)
		old, err := term.MakeRaw(int(in.Fd()))
		if err != nil {
			return err
		}
		defer func() { _ = term.Restore(int(in.Fd()), old) }()
	}
	if err := cmd.Start(ctx); err != nil {
		return platformFailed(err)
	}
	if local {
		defer followSize(ctx, in, cmd.Process())()
	}
	o, err := cmd.Wait()
	return ended(ctx, o, err)
}

func windowSize(f *os.File) client.WindowSize {
	cols, rows, err := term.GetSize(int(f.Fd()))
	if err != nil || cols <= 0 || rows <= 0 {
		return client.WindowSize{Rows: 24, Cols: 80}
	}
	return client.WindowSize{Rows: rows, Cols: cols}
}

// followSize tells the process of every change of the terminal's size until stop.
func followSize(ctx context.Context, f *os.File, p *client.Process) (stop func()) {
	changed := make(chan os.Signal, 1)
	signal.Notify(changed, syscall.SIGWINCH)
	ctx, cancel := context.WithCancel(ctx)
	done := make(chan struct{})
	go func() {
		defer close(done)
		for {
			select {
			case <-changed:
				// A size that did not arrive is put right by the next one.
				_ = p.Resize(ctx, windowSize(f))
			case <-ctx.Done():
				return
			}
		}
	}()
	return func() {
		signal.Stop(changed)
		cancel()
		<-done
	}
}
