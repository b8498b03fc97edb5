package edge_test

import (
	"context"
	"errors"
	"fmt"
	"math"
	"strings"
	"sync"
	"testing"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/backend/fake"
	"github.com/opendsec/dsec/internal/edge"
	"github.com/opendsec/dsec/internal/testutil"
	dsecv1 "github.com/opendsec/dsec/proto/dsec/v1"
)

func TestCommandValidation(t *testing.T) {
	n := newNode(t, nil)
	id := n.create(&dsecv1.CreateRequest{})
	for what, c := range map[string]struct {
		cmd   *dsecv1.Command
		code  dsec.Code
		field string
	}{
		"no command":         {nil, dsec.CodeInvalid, "command"},
		"nothing to run":     {&dsecv1.Command{}, dsec.CodeInvalid, "command.argv"},
		"argv and shell":     {&dsecv1.Command{Argv: []string{"true"}, Shell: "true"}, dsec.CodeInvalid, "command.argv"},
		"argv and raw_argv":  {&dsecv1.Command{Argv: []string{"true"}, RawArgv: [][]byte{[]byte("true")}}, dsec.CodeInvalid, "command.raw_argv"},
		"NUL in raw_argv":    {&dsecv1.Command{RawArgv: [][]byte{[]byte("a\x00")}}, dsec.CodeInvalid, "command.argv"},
		"3 MB argv":          {&dsecv1.Command{Argv: []string{"echo", strings.Repeat("x", 3<<20)}}, dsec.CodeInvalid, "command.argv"},
		"env name with NUL":  {&dsecv1.Command{Argv: []string{"true"}, Env: map[string]string{"A\x00": "b"}}, dsec.CodeInvalid, "command.env"},
		"env name with =":    {&dsecv1.Command{Argv: []string{"true"}, Env: map[string]string{"A=": "b"}}, dsec.CodeInvalid, "command.env"},
		"env value with NUL": {&dsecv1.Command{Argv: []string{"true"}, Env: map[string]string{"A": "\x00"}}, dsec.CodeInvalid, "command.env"},
		"unknown user":       {&dsecv1.Command{Argv: []string{"true"}, User: "mallory"}, dsec.CodeNotFound, "command.user"},
		"missing cwd":        {&dsecv1.Command{Argv: []string{"true"}, Cwd: "/none"}, dsec.CodeNotFound, "command.cwd"},
		"unknown program":    {&dsecv1.Command{Argv: []string{"none"}}, dsec.CodeNotFound, "command.argv"},
		"zero timeout":       {&dsecv1.Command{Argv: []string{"true"}, Timeout: durationpb.New(0)}, dsec.CodeInvalid, "command.timeout"},
		"negative timeout":   {&dsecv1.Command{Argv: []string{"true"}, Timeout: durationpb.New(-1)}, dsec.CodeInvalid, "command.timeout"},
		"huge timeout":       {&dsecv1.Command{Argv: []string{"true"}, Timeout: &durationpb.Duration{Seconds: math.MaxInt64}}, dsec.CodeInvalid, "command.timeout"},
		"31 days":            {&dsecv1.Command{Argv: []string{"true"}, Timeout: durationpb.New(31 * 24 * time.Hour)}, dsec.CodeInvalid, "command.timeout"},
		"negative output":    {&dsecv1.Command{Argv: []string{"true"}, OutputLimitBytes: -1}, dsec.CodeInvalid, "command.output_limit_bytes"},
		"output beyond Exec": {&dsecv1.Command{Argv: []string{"true"}, OutputLimitBytes: 1 << 30}, dsec.CodeInvalid, "command.output_limit_bytes"},
	} {
		_, err := n.process.Exec(t.Context(), connect.NewRequest(&dsecv1.ExecRequest{SandboxId: id, Command: c.cmd}))
		t.Run(what, func(t *testing.T) { wantError(t, err, c.code, c.field) })
	}
	_, err := n.process.Exec(t.Context(), connect.NewRequest(&dsecv1.ExecRequest{SandboxId: id, Command: &dsecv1.Command{Argv: []string{"cat"}}, Stdin: make([]byte, 1<<20+1)}))
	wantError(t, err, dsec.CodeInvalid, "stdin")
	for _, size := range []*dsecv1.TerminalSize{{}, {Rows: 24}, {Rows: 24, Cols: 1 << 16}} {
		stream, err := n.process.Start(t.Context(), connect.NewRequest(&dsecv1.StartRequest{SandboxId: id, Command: &dsecv1.Command{Argv: []string{"cat"}}, Pty: size}))
		if err == nil {
			_, err = readAll(stream)
		}
		wantError(t, err, dsec.CodeInvalid, "pty")
	}
	_, err = n.process.Signal(t.Context(), connect.NewRequest(&dsecv1.SignalRequest{SandboxId: id, ProcessId: 1, Signal: 999}))
	wantError(t, err, dsec.CodeInvalid, "signal")
	list, err := n.process.ListProcesses(t.Context(), connect.NewRequest(&dsecv1.ListProcessesRequest{SandboxId: id}))
	if err != nil || len(list.Msg.Processes) != 0 {
		t.Errorf("refused commands left %d processes, %v", len(list.Msg.GetProcesses()), err)
	}
}

// said is what a stream of events told.
type said struct {
	process        uint64
	stdout, stderr string
	outcome        *dsecv1.Outcome // nil: the stream told no exit
}

func readAll(stream *connect.ServerStreamForClient[dsecv1.ProcessEvent]) (s said, err error) {
	defer func() { _ = stream.Close() }()
	for stream.Receive() {
		s.add(stream.Msg())
	}
	return s, stream.Err()
}

func (s *said) add(m *dsecv1.ProcessEvent) {
	switch e := m.Event.(type) {
	case *dsecv1.ProcessEvent_Started:
		s.process = e.Started.ProcessId
	case *dsecv1.ProcessEvent_Output:
		if e.Output.Stream == dsecv1.Stream_STREAM_STDERR {
			s.stderr += string(e.Output.Data)
		} else {
			s.stdout += string(e.Output.Data)
		}
	case *dsecv1.ProcessEvent_Exited:
		s.outcome = e.Exited.Outcome
	}
}

func (n *node) startCommand(ctx context.Context, req *dsecv1.StartRequest) *connect.ServerStreamForClient[dsecv1.ProcessEvent] {
	n.t.Helper()
	stream, err := n.process.Start(ctx, connect.NewRequest(req))
	if err != nil {
		n.t.Fatal(err)
	}
	if !stream.Receive() {
		n.t.Fatal(stream.Err())
	}
	return stream
}

func (n *node) attach(id string, process, from uint64) said {
	n.t.Helper()
	stream, err := n.process.Attach(n.t.Context(), connect.NewRequest(&dsecv1.AttachRequest{SandboxId: id, ProcessId: process, FromSeq: from}))
	if err != nil {
		n.t.Fatal(err)
	}
	s, err := readAll(stream)
	if err != nil {
		n.t.Fatal(err)
	}
	return s
}

func TestStartStreamsAndDetach(t *testing.T) {
	n := newNode(t, nil)
	id := n.create(&dsecv1.CreateRequest{})
	stream := n.startCommand(t.Context(), &dsecv1.StartRequest{SandboxId: id, Command: &dsecv1.Command{Argv: []string{"cat"}}, OpenStdin: true})
	p := stream.Msg().GetStarted().ProcessId
	in := n.process.StreamStdin(t.Context())
	for i := range 20 {
		m := &dsecv1.WriteStdinRequest{Data: fmt.Appendf(nil, "%d,", i), Eof: i == 19}
		if i == 0 {
			m.SandboxId, m.ProcessId = id, p
		}
		if err := in.Send(m); err != nil {
			t.Fatal(err)
		}
	}
	if res, err := in.CloseAndReceive(); err != nil || res.Msg.Written != 50 {
		t.Errorf("written %d, %v; want 50", res.Msg.GetWritten(), err)
	}
	got, err := readAll(stream)
	if err != nil || !strings.HasSuffix(got.stdout, "18,19,") || got.outcome.GetEnd() == nil {
		t.Errorf("%+v, %v", got, err)
	}
	stream = n.startCommand(t.Context(), &dsecv1.StartRequest{SandboxId: id, Command: &dsecv1.Command{Shell: "echo hi; exit 3"}, Detach: true})
	p = stream.Msg().GetStarted().ProcessId
	if got, err := readAll(stream); err != nil || got.outcome != nil {
		t.Errorf("detached: %+v, %v; want the end after started", got, err)
	}
	if got := n.attach(id, p, 0); got.stdout != "hi\n" || got.outcome.GetExitCode() != 3 {
		t.Errorf("attached: %+v", got)
	}
	_, err = n.process.WriteStdin(t.Context(), connect.NewRequest(&dsecv1.WriteStdinRequest{SandboxId: id, ProcessId: p, Data: []byte("x")}))
	wantError(t, err, dsec.CodeConflict, "stdin")
	s, err := n.process.Attach(t.Context(), connect.NewRequest(&dsecv1.AttachRequest{SandboxId: id, ProcessId: 999}))
	if err == nil {
		_, err = readAll(s)
	}
	wantError(t, err, dsec.CodeNotFound, "process_id")
}

// ends waits until a process has ended and returns how.
func (n *node) ends(id string, process uint64) *dsecv1.Outcome {
	n.t.Helper()
	return n.attach(id, process, 0).outcome
}

func TestClientGoneKillsItsCommand(t *testing.T) {
	n := newNode(t, nil)
	id := n.create(&dsecv1.CreateRequest{})
	ctx, cancel := context.WithCancel(t.Context())
	stream := n.startCommand(ctx, &dsecv1.StartRequest{SandboxId: id, Command: &dsecv1.Command{Shell: "sleep 1000 & sleep 1000"}})
	p := stream.Msg().GetStarted().ProcessId
	cancel()
	n.cutOff(id, p)
	// Whoever is attached owns nothing.
	stream = n.startCommand(t.Context(), &dsecv1.StartRequest{SandboxId: id, Command: &dsecv1.Command{Shell: "echo up; sleep 1000"}, Detach: true})
	p = stream.Msg().GetStarted().ProcessId
	ctx, cancel = context.WithCancel(t.Context())
	watch, err := n.process.Attach(ctx, connect.NewRequest(&dsecv1.AttachRequest{SandboxId: id, ProcessId: p}))
	if err != nil || !watch.Receive() {
		t.Fatal(err, watch.Err())
	}
	cancel()
	n.quiet()
	if _, err := n.process.Signal(t.Context(), connect.NewRequest(&dsecv1.SignalRequest{SandboxId: id, ProcessId: p, Signal: 15, Tree: true})); err != nil {
		t.Fatal(err)
	}
	if o := n.ends(id, p); o.GetSignal() != 15 {
		t.Errorf("outcome %v, want signal 15", o)
	}
	// The same for Exec.
	ctx, cancel = context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() {
		_, err := n.process.Exec(ctx, connect.NewRequest(&dsecv1.ExecRequest{SandboxId: id, Command: &dsecv1.Command{Argv: []string{"sleep", "1000"}}}))
		done <- err
	}()
	p = n.running(id)
	cancel()
	<-done
	n.cutOff(id, p)
}

// cutOff waits for the end of a process that the platform killed, which is told
// as no outcome.
func (n *node) cutOff(id string, process uint64) {
	n.t.Helper()
	s, err := n.process.Attach(n.t.Context(), connect.NewRequest(&dsecv1.AttachRequest{SandboxId: id, ProcessId: process}))
	if err != nil {
		n.t.Fatal(err)
	}
	for s.Receive() {
		if s.Msg().GetExited() != nil {
			n.t.Error("the platform's kill is told as the command's outcome")
		}
	}
	wantError(n.t, s.Err(), dsec.CodeOutcomeUnknown, "")
}

// TestTagTellsTheNumber: who makes an Exec call can ask for the number of its
// command, by a name that lasts no longer than the call.
func TestTagTellsTheNumber(t *testing.T) {
	n := newNode(t, nil)
	id := n.create(&dsecv1.CreateRequest{})
	list := func() (processes map[string]uint64) {
		res, err := n.process.ListProcesses(t.Context(), connect.NewRequest(&dsecv1.ListProcessesRequest{SandboxId: id}))
		if err != nil {
			t.Fatal(err)
		}
		processes = make(map[string]uint64)
		for _, p := range res.Msg.Processes {
			processes[p.Tag] = p.ProcessId
		}
		return processes
	}
	var calls sync.WaitGroup
	for _, tag := range []string{"mine", "other"} {
		calls.Go(func() {
			res, err := n.process.Exec(t.Context(), connect.NewRequest(&dsecv1.ExecRequest{SandboxId: id, Command: &dsecv1.Command{Argv: []string{"sleep", "1000"}}, Tag: tag}))
			if want := map[string]int32{"mine": 15, "other": 10}[tag]; err != nil || res.Msg.Outcome.GetSignal() != want {
				t.Errorf("%s: %v, %v, want signal %d", tag, res, err, want)
			}
		})
	}
	var tagged map[string]uint64
	testutil.WaitFor(t, 20*time.Second, "both are listed", func() error {
		if tagged = list(); tagged["mine"] == 0 || tagged["other"] == 0 {
			return fmt.Errorf("%v", tagged)
		}
		return nil
	})
	for tag, signal := range map[string]int32{"mine": 15, "other": 10} {
		if _, err := n.process.Signal(t.Context(), connect.NewRequest(&dsecv1.SignalRequest{SandboxId: id, ProcessId: tagged[tag], Signal: signal})); err != nil {
			t.Fatal(err)
		}
	}
	calls.Wait()
	if tagged = list(); len(tagged) != 1 || tagged[""] == 0 {
		t.Errorf("after the calls: %v", tagged)
	}
	_, err := n.process.Exec(t.Context(), connect.NewRequest(&dsecv1.ExecRequest{SandboxId: id, Command: &dsecv1.Command{Argv: []string{"true"}}, Tag: strings.Repeat("x", 65)}))
	wantError(t, err, dsec.CodeInvalid, "tag")
}

// running waits until one process of the sandbox runs, and returns it.
func (n *node) running(id string) (process uint64) {
	n.t.Helper()
	testutil.WaitFor(n.t, 20*time.Second, "a process runs", func() error {
		list, err := n.process.ListProcesses(n.t.Context(), connect.NewRequest(&dsecv1.ListProcessesRequest{SandboxId: id}))
		if err != nil {
			return err
		}
		for _, p := range list.Msg.Processes {
			if p.Outcome == nil && p.Fault == "" {
				process = p.ProcessId
				return nil
			}
		}
		return errors.New("none does")
	})
	return process
}

func TestGroupsAreAddedAsNeeded(t *testing.T) {
	n := newNode(t, func(c *edge.Config, o *fake.Options) { o.Groups = 1 })
	id := n.create(&dsecv1.CreateRequest{})
	var wg sync.WaitGroup
	for i := range 10 {
		wg.Go(func() {
			res, err := n.exec(id, "sh", "-c", fmt.Sprintf("sleep 0.05; exit %d", i))
			if err != nil || res.Outcome.GetExitCode() != int32(i) {
				t.Errorf("exec %d: %v, %v", i, res, err)
			}
		})
	}
	wg.Wait()
}

func TestTooManyCallsAreRefused(t *testing.T) {
	n := newNode(t, func(c *edge.Config, o *fake.Options) { c.MaxCalls = 4 })
	id := n.create(&dsecv1.CreateRequest{})
	var streams []*connect.ServerStreamForClient[dsecv1.ProcessEvent]
	for range 4 {
		streams = append(streams, n.startCommand(t.Context(), &dsecv1.StartRequest{SandboxId: id, Command: &dsecv1.Command{Argv: []string{"cat"}}, OpenStdin: true}))
	}
	_, err := n.exec(id, "true")
	wantError(t, err, dsec.CodeExhausted, "")
	n.kill(id) // is no call in the sandbox
	for _, s := range streams {
		// chronus may still have told that the command was killed.
		if got, err := readAll(s); err == nil && got.outcome.GetSignal() != 9 {
			t.Errorf("stream of a killed sandbox: %+v, no error and no kill", got)
		}
	}
}

func TestBrokenConnectionNeverMakesUpAnExit(t *testing.T) {
	var n *node
	fail := false
	n = newNode(t, func(c *edge.Config, o *fake.Options) {
		o.OnDial = func(dsec.SandboxID) error {
			if fail {
				return errors.New("no way in")
			}
			return nil
		}
	})
	id := n.create(&dsecv1.CreateRequest{})
	stream := n.startCommand(t.Context(), &dsecv1.StartRequest{SandboxId: id, Command: &dsecv1.Command{Shell: "echo partial; sleep 1000"}})
	var got said
	for got.stdout != "partial\n" {
		if !stream.Receive() {
			t.Fatal(stream.Err())
		}
		got.add(stream.Msg())
	}
	fail = true
	n.opts.World.Kill(dsec.SandboxID(id), "shot")
	rest, err := readAll(stream)
	if e := wantError(t, err, dsec.CodeLost, ""); !strings.Contains(e.Message, id) || !strings.Contains(e.Message, "shot") {
		t.Errorf("message %q, want the sandbox and the reason", e.Message)
	}
	if rest.outcome != nil {
		t.Errorf("outcome %v of a process that nobody waited for", rest.outcome)
	}
	s := n.waitState(id, "failed")
	if !strings.Contains(s.Reason, "shot") {
		t.Errorf("reason %q", s.Reason)
	}
	_, err = n.exec(id, "true")
	if e := wantError(t, err, dsec.CodeLost, ""); !strings.Contains(e.Message, id) {
		t.Errorf("message %q, want the sandbox's name", e.Message)
	}
}

func TestSlowReaderHoldsNoMemory(t *testing.T) {
	n := newNode(t, nil)
	id := n.create(&dsecv1.CreateRequest{})
	stream := n.startCommand(t.Context(), &dsecv1.StartRequest{SandboxId: id, Command: &dsecv1.Command{Argv: []string{"yes"}, OutputLimitBytes: 1 << 40}})
	// Nobody reads: the command is held at the spool and the flow control
	// window of the stream.
	p := stream.Msg().GetStarted().ProcessId
	var before uint64
	same := 0
	testutil.WaitFor(t, time.Minute, "the command is held", func() error {
		list, err := n.process.ListProcesses(t.Context(), connect.NewRequest(&dsecv1.ListProcessesRequest{SandboxId: id}))
		if err != nil {
			return err
		}
		next := list.Msg.Processes[0].NextSeq
		if same++; next != before || next == 0 {
			before, same = next, 0
		}
		if same < 6 { // looks, further and further apart: as long as it writes, the count moves
			return fmt.Errorf("it has written %d bytes", next)
		}
		return nil
	})
	if before > 16<<20 {
		t.Errorf("%d bytes went out without a reader", before)
	}
	if _, err := n.process.Signal(t.Context(), connect.NewRequest(&dsecv1.SignalRequest{SandboxId: id, ProcessId: p, Signal: 9, Tree: true})); err != nil {
		t.Fatal(err)
	}
	got, err := readAll(stream)
	if err != nil || got.outcome.GetSignal() != 9 {
		t.Errorf("outcome %v, %v", got.outcome, err)
	}
}

func TestSessionsOverTheAPI(t *testing.T) {
	n := newNode(t, func(_ *edge.Config, o *fake.Options) { o.Groups = 1 })
	id := n.create(&dsecv1.CreateRequest{Env: map[string]string{"FROM": "create"}})
	open, err := n.session.OpenSession(t.Context(), connect.NewRequest(&dsecv1.OpenSessionRequest{SandboxId: id, Cwd: "/tmp", Env: map[string]string{"ALSO": "open"}}))
	if err != nil {
		t.Fatal(err)
	}
	sid := open.Msg.SessionId
	if _, err := n.session.OpenSession(t.Context(), connect.NewRequest(&dsecv1.OpenSessionRequest{SandboxId: id})); err != nil {
		t.Fatalf("a second session, which needs another group: %v", err)
	}
	for _, c := range []struct {
		command, stdout string
		code            int32
	}{{"pwd; echo $FROM $ALSO; cd /", "/tmp\ncreate open\n", 0}, {"pwd; false", "/\n", 1}} {
		got := n.in(id, sid, c.command)
		if got.stdout != c.stdout || got.outcome.GetExitCode() != c.code || !got.outcome.Claimed {
			t.Errorf("%q: %+v", c.command, got)
		}
	}
	stream, err := n.session.RunCommand(t.Context(), connect.NewRequest(&dsecv1.RunCommandRequest{SandboxId: id, SessionId: "none", Command: "true"}))
	if err == nil {
		_, err = readAll(stream)
	}
	wantError(t, err, dsec.CodeNotFound, "session_id")
	if _, err := n.session.CloseSession(t.Context(), connect.NewRequest(&dsecv1.CloseSessionRequest{SandboxId: id, SessionId: sid})); err != nil {
		t.Error(err)
	}
}

func TestFilesOverTheAPI(t *testing.T) {
	n := newNode(t, nil)
	id := n.create(&dsecv1.CreateRequest{Workdir: "/tmp"})
	up := n.file.Write(t.Context())
	if err := up.Send(&dsecv1.WriteRequest{Message: &dsecv1.WriteRequest_Open{Open: &dsecv1.WriteOpen{SandboxId: id, Path: &dsecv1.Path{Path: "new/dir/big"}}}}); err != nil {
		t.Fatal(err)
	}
	const chunk, chunks = 100_000, 50
	for range chunks {
		if err := up.Send(&dsecv1.WriteRequest{Message: &dsecv1.WriteRequest_Data{Data: make([]byte, chunk)}}); err != nil {
			t.Fatal(err)
		}
	}
	if res, err := up.CloseAndReceive(); err != nil || res.Msg.Size != chunk*chunks {
		t.Fatalf("written %d, %v", res.Msg.GetSize(), err)
	}
	down, err := n.file.Read(t.Context(), connect.NewRequest(&dsecv1.ReadRequest{SandboxId: id, Path: &dsecv1.Path{Raw: []byte("/tmp/new/dir/big")}, Offset: 1}))
	if err != nil {
		t.Fatal(err)
	}
	size := 0
	for down.Receive() {
		size += len(down.Msg().Data)
	}
	if err := down.Err(); err != nil || size != chunk*chunks-1 {
		t.Errorf("%d bytes read, %v", size, err)
	}
	for what, f := range map[string]func() error{
		"path of nothing": func() error {
			_, err := n.file.Stat(t.Context(), connect.NewRequest(&dsecv1.StatRequest{SandboxId: id}))
			return err
		},
		"path and raw": func() error {
			_, err := n.file.Stat(t.Context(), connect.NewRequest(&dsecv1.StatRequest{SandboxId: id, Path: &dsecv1.Path{Path: "a", Raw: []byte("b")}}))
			return err
		},
		"NUL": func() error {
			_, err := n.file.Mkdir(t.Context(), connect.NewRequest(&dsecv1.MkdirRequest{SandboxId: id, Path: &dsecv1.Path{Path: "a\x00b"}}))
			return err
		},
		"mode": func() error {
			_, err := n.file.Mkdir(t.Context(), connect.NewRequest(&dsecv1.MkdirRequest{SandboxId: id, Path: &dsecv1.Path{Path: "a"}, Mode: 0o100000}))
			if e := typedError(err); e.Field == "mode" && e.Code == dsec.CodeInvalid {
				return dsec.Invalid("path", "as it should be")
			}
			return err
		},
	} {
		err := f()
		t.Run(what, func(t *testing.T) { wantError(t, err, dsec.CodeInvalid, "path") })
	}
	up = n.file.Write(t.Context())
	_ = up.Send(&dsecv1.WriteRequest{Message: &dsecv1.WriteRequest_Data{Data: []byte("x")}})
	_, err = up.CloseAndReceive()
	wantError(t, err, dsec.CodeInvalid, "open")
	res, err := n.file.ListDir(t.Context(), connect.NewRequest(&dsecv1.ListDirRequest{SandboxId: id, Path: &dsecv1.Path{Path: "new/dir"}}))
	if err != nil || len(res.Msg.Entries) != 1 || res.Msg.Entries[0].Name != "big" {
		t.Errorf("list: %v, %v", res, err)
	}
}
