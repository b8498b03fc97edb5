package test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"go.etcd.io/etcd/server/v3/embed"
	"go.uber.org/zap"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/client"
	"github.com/opendsec/dsec/internal/testutil"
	"github.com/opendsec/dsec/proto/dsec/v1/dsecv1connect"
)

// eater is a transport that loses the answer of a call that was made: of those
// whose route it has a count for, so many.
type eater struct {
	next http.RoundTripper
	mu   sync.Mutex
	eat  map[string]int
}

var errEaten = errors.New("connection reset by peer")

func (e *eater) RoundTrip(req *http.Request) (*http.Response, error) {
	res, err := e.next.RoundTrip(req)
	if err != nil {
		return nil, err
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.eat[req.URL.Path] > 0 {
		e.eat[req.URL.Path]--
		_, _ = io.Copy(io.Discard, res.Body) // the server has done it all
		_ = res.Body.Close()
		return nil, errEaten
	}
	return res, nil
}

// TestLostAnswers is S68: the answers to a create, a command and a kill are
// lost on the way. A create with a request id and a kill are sent again and
// done once; a command is not sent again, and its error says that it may have run.
func TestLostAnswers(t *testing.T) {
	s := up(t)
	e := &eater{next: http.DefaultTransport, eat: map[string]int{
		dsecv1connect.SandboxServiceCreateProcedure: 2, dsecv1connect.SandboxServiceKillProcedure: 2, dsecv1connect.ProcessServiceExecProcedure: 1,
	}}
	c, err := client.New(client.Options{URL: s.url, KeyFile: s.keyFile, Transport: e})
	check(t, err)
	sb, err := c.CreateSandbox(t.Context(), client.SandboxOptions{Backend: "fake", RequestID: "once"})
	check(t, err)
	if n := count(t, s.client(t)); n != 1 {
		t.Errorf("%d sandboxes, want 1", n)
	}
	if _, _, err := sb.Shell("echo ran >> /tmp/log").Output(t.Context()); err == nil || dsec.CodeOf(err) != dsec.CodeOutcomeUnknown {
		t.Errorf("exec whose answer was lost: %v, want outcome_unknown", err)
	}
	log, err := sb.ReadFile(t.Context(), "/tmp/log")
	if err != nil || string(log) != "ran\n" {
		t.Errorf("the command has run: %q, %v; want once", log, err)
	}
	// A create without a request id is not sent again.
	e.mu.Lock()
	e.eat[dsecv1connect.SandboxServiceCreateProcedure] = 1
	e.mu.Unlock()
	if _, err := c.CreateSandbox(t.Context(), client.SandboxOptions{Backend: "fake"}); err == nil || dsec.CodeOf(err) != dsec.CodeOutcomeUnknown {
		t.Errorf("create without a request id: %v, want outcome_unknown", err)
	}
	if n := count(t, s.client(t)); n != 2 {
		t.Errorf("%d sandboxes, want 2", n)
	}
	check(t, sb.Kill(t.Context()))
	info, err := sb.Info(t.Context())
	if err != nil || info.State != dsec.StateStopped {
		t.Errorf("killed: %+v, %v", info, err)
	}
}

func count(t testing.TB, c *client.Client) (n int) {
	t.Helper()
	for _, err := range c.Sandboxes(t.Context(), client.ListOptions{}) {
		check(t, err)
		n++
	}
	return n
}

// TestApiserverDiesAmidCreates is S66: of 500 creates with request ids, sent
// until each is answered while the apiserver is killed again and again, each
// makes one sandbox.
func TestApiserverDiesAmidCreates(t *testing.T) {
	const creates, kills = 500, 3
	_, api, again := halves(t)
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
	defer cancel()
	// A client waits a minute for a server to come back to its address; this one
	// comes back to another, and who still waits for it then is told.
	type serving struct {
		*server
		ctx  context.Context
		gone context.CancelFunc
	}
	var at atomic.Pointer[serving]
	serve := func(s *server) {
		ctx, gone := context.WithCancel(ctx)
		if before := at.Swap(&serving{s, ctx, gone}); before != nil {
			before.gone()
		}
	}
	serve(api)
	defer func() { at.Load().gone() }()
	next := make(chan int)
	var done atomic.Int32
	var wg sync.WaitGroup
	ids := make([]dsec.SandboxID, creates)
	for range 16 {
		wg.Go(func() {
			for n := range next {
				for ids[n] == "" && ctx.Err() == nil {
					now := at.Load()
					c, err := client.New(client.Options{URL: now.url, KeyFile: now.keyFile, Attempts: 2})
					if err != nil {
						t.Error(err)
						return
					}
					sb, err := c.CreateSandbox(now.ctx, client.SandboxOptions{Backend: "fake", RequestID: fmt.Sprint("create-", n), Job: "s66", Labels: map[string]string{"n": fmt.Sprint(n)}})
					c.Close()
					if err == nil {
						ids[n] = sb.ID()
						done.Add(1)
					} else if code := dsec.CodeOf(err); !errors.Is(err, context.Canceled) && code != dsec.CodeUnavailable && code != dsec.CodeOutcomeUnknown && code != dsec.CodeExhausted {
						t.Errorf("create %d: %v", n, err)
						return
					}
				}
			}
		})
	}
	for n := range creates {
		if n%(creates/(kills+1)) == creates/(kills+1)-1 && n < creates-1 {
			// Amid: some that were sent have no answer yet.
			at.Load().kill()
			serve(again())
		}
		next <- n
	}
	close(next)
	wg.Wait()
	if int(done.Load()) != creates {
		t.Fatalf("%d of %d creates were answered", done.Load(), creates)
	}
	byLabel := map[string][]dsec.SandboxID{}
	for sb, err := range at.Load().client(t).Sandboxes(t.Context(), client.ListOptions{Job: "s66"}) {
		check(t, err)
		byLabel[sb.Spec.Labels["n"]] = append(byLabel[sb.Spec.Labels["n"]], sb.ID)
	}
	for n, id := range ids {
		if have := byLabel[fmt.Sprint(n)]; len(have) != 1 || have[0] != id {
			t.Errorf("create %d was answered with %s, the node has %v", n, id, have)
		}
	}
}

// TestApiserverSleeps is S67 for a control plane without a leader: one of two
// apiservers is stopped with calls under way, the other works on, and what the
// first does when it wakes changes nothing that was done meanwhile.
func TestApiserverSleeps(t *testing.T) {
	endpoint := etcd(t)
	dir := testutil.Dir(t)
	dirs := func(name string) []string {
		return []string{"--data-dir", filepath.Join(dir, name), "--run-dir", filepath.Join(dir, name+"-run")}
	}
	edge := startEnv(t, []string{"DSEC_EDGE_METRICS_LISTEN=127.0.0.1:0"}, "edge", append(dirs("edge"), "--backend", "fake")...)
	env := []string{"DSEC_API_EDGES=" + edge.ready, "DSEC_ETCD_ENDPOINTS=" + endpoint}
	apiserver := func(name string) *server {
		p := startEnv(t, env, "apiserver", append(dirs(name), "--listen", "127.0.0.1:0")...)
		return &server{p, p.ready, filepath.Join(dir, name, "admin.key"), dir}
	}
	one, two := apiserver("one"), apiserver("two")
	a, b := one.client(t), two.client(t)
	first, err := a.CreateSandbox(t.Context(), client.SandboxOptions{Backend: "fake", RequestID: "first"})
	check(t, err)
	if got, err := b.Sandbox(string(first.ID())).Info(t.Context()); err != nil || got.State != dsec.StateRunning {
		t.Fatalf("the other apiserver sees %+v, %v", got, err)
	}

	check(t, one.cmd.Process.Signal(syscall.SIGSTOP))
	awaitStopped(t, one.cmd.Process.Pid)
	woken := false
	wake := func() {
		if !woken {
			woken = true
			check(t, one.cmd.Process.Signal(syscall.SIGCONT))
		}
	}
	defer wake()
	answers := make(chan error, 3)
	ids := make(chan dsec.SandboxID, 1)
	go func() { // the same create by both
		sb, err := a.CreateSandbox(t.Context(), client.SandboxOptions{Backend: "fake", RequestID: "second"})
		if err == nil {
			ids <- sb.ID()
		}
		answers <- err
	}()
	go func() { // a command for a sandbox that will be gone
		_, _, err := first.Command("true").Output(t.Context())
		answers <- err
	}()
	second, err := b.CreateSandbox(t.Context(), client.SandboxOptions{Backend: "fake", RequestID: "second"})
	check(t, err)
	check(t, b.Sandbox(string(first.ID())).Kill(t.Context()))
	_, secret, err := b.CreateKey(t.Context(), "meanwhile", time.Time{})
	check(t, err)
	wake()
	failed := 0
	for range 2 {
		if err := <-answers; err != nil {
			if code := dsec.CodeOf(err); code != dsec.CodeConflict {
				t.Errorf("after it woke: %v, want conflict", err)
			}
			failed++
		}
	}
	if failed != 1 {
		t.Errorf("%d calls failed, want the command alone", failed)
	}
	if id := <-ids; id != second.ID() {
		t.Errorf("one request id made %s and %s", id, second.ID())
	}
	if n := count(t, a); n != 1 {
		t.Errorf("%d sandboxes run, want 1", n)
	}
	if got, err := a.Sandbox(string(first.ID())).Info(t.Context()); err != nil || got.State != dsec.StateStopped {
		t.Errorf("the killed one: %+v, %v", got, err)
	}
	// What it knows is what the other wrote.
	c, err := client.New(client.Options{URL: one.url, APIKey: secret})
	check(t, err)
	defer c.Close()
	if n := count(t, c); n != 0 {
		t.Errorf("the new project has %d sandboxes", n)
	}
	// The first is killed for good; the second goes on.
	one.kill()
	if _, o, err := b.Sandbox(string(second.ID())).Command("true").Output(t.Context()); err != nil || !o.OK() {
		t.Errorf("%+v, %v", o, err)
	}
}

// etcd starts one apart from dsec, and returns its address.
func etcd(t testing.TB) string {
	t.Helper()
	cfg := embed.NewConfig()
	cfg.Dir = filepath.Join(testutil.Dir(t), "etcd")
	cfg.ZapLoggerBuilder = embed.NewZapLoggerBuilder(zap.NewNop())
	cfg.UnsafeNoFsync = true
	addr := func() url.URL {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		check(t, err)
		defer l.Close()
		return url.URL{Scheme: "http", Host: l.Addr().String()}
	}
	at, peer := addr(), addr()
	cfg.ListenClientUrls, cfg.AdvertiseClientUrls = []url.URL{at}, []url.URL{at}
	cfg.ListenPeerUrls, cfg.AdvertisePeerUrls = []url.URL{peer}, []url.URL{peer}
	cfg.InitialCluster = cfg.InitialClusterFromName(cfg.Name)
	e, err := embed.StartEtcd(cfg)
	check(t, err)
	t.Cleanup(e.Close)
	<-e.Server.ReadyNotify()
	return at.String()
}

// awaitStopped waits until no thread of a process runs any more: a signal is
// sent before it is obeyed.
func awaitStopped(t *testing.T, pid int) {
	t.Helper()
	testutil.WaitFor(t, time.Minute, "the stop", func() error {
		tasks, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/stat", pid))
		check(t, err)
		for _, task := range tasks {
			text, err := os.ReadFile(task)
			if err == nil && !strings.Contains(string(text), ") T ") {
				return fmt.Errorf("%s: %.40s", task, text)
			}
		}
		return nil
	})
}
