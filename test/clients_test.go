package test

import (
	"bufio"
	"bytes"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/client"
	"github.com/opendsec/dsec/internal/testutil"
	"github.com/opendsec/dsec/proto/dsec/v1/dsecv1connect"
)

// TestSecretsStayInside is S48: of requests and failures with secrets in them,
// nothing is in answers, in the log at its most talkative, or in the metrics;
// no answer tells of the host's paths or of another's sandbox.
func TestSecretsStayInside(t *testing.T) {
	s := up(t, "--log-level", "debug")
	owner, ownerKey := s.project(t, "owner")
	other, _ := s.project(t, "other")
	secret := "s3cr3t-" + rand.Text()
	sb, err := owner.CreateSandbox(t.Context(), client.SandboxOptions{Backend: "fake", Env: map[string]string{"TOKEN": secret}, Job: "job-" + secret, Labels: map[string]string{"l": secret}})
	check(t, err)
	var said []string
	note := func(what string, err error) {
		t.Helper()
		if err == nil {
			t.Errorf("%s: no error", what)
			return
		}
		said = append(said, what+": "+err.Error())
	}
	run := func(cmd *client.Cmd) error {
		_, _, err := cmd.Output(t.Context())
		return err
	}
	if out, o, err := sb.Shell("echo $TOKEN").Output(t.Context()); err != nil || string(out) != secret+"\n" || !o.OK() {
		t.Errorf("control: %q, %v", out, err)
	}
	cmd := sb.Command("no-such-program", secret)
	cmd.Env = map[string]string{"PASSWORD": secret}
	note("program", run(cmd))
	cmd = sb.Command("true")
	cmd.Env = map[string]string{"A=": secret}
	note("env name", run(cmd))
	cmd = sb.Command("true")
	cmd.Env = map[string]string{"A": secret + "\x00"}
	note("env value", run(cmd))
	cmd = sb.Command("true")
	cmd.Dir = "/none"
	cmd.Env = map[string]string{"A": secret}
	note("dir", run(cmd))
	cmd = sb.Command("true")
	cmd.User, cmd.Env = "mallory", map[string]string{"A": secret}
	note("user", run(cmd))
	_, err = owner.CreateSandbox(t.Context(), client.SandboxOptions{Backend: "fake", Env: map[string]string{"B": secret}, Workdir: "relative"})
	note("create", err)
	_, err = owner.CreateSandbox(t.Context(), client.SandboxOptions{Backend: "fake", Env: map[string]string{"B": secret}, Layers: []string{"none"}})
	note("layer", err)
	_, err = owner.CreateSandbox(t.Context(), client.SandboxOptions{Backend: "fake", Env: map[string]string{"B": strings.Repeat(secret, 100_000)}})
	note("huge", err)
	check(t, sb.WriteFile(t.Context(), "/file", []byte(secret), 0))
	note("into a file", sb.WriteFile(t.Context(), "/file/"+"x", []byte(secret), 0))
	note("foreign", run(other.Sandbox(string(sb.ID())).Command("echo", secret)))
	_, _, err = owner.ImportLayer(t.Context(), "bad", client.ImportOptions{}, strings.NewReader(strings.Repeat(secret, 1000)))
	note("import", err)
	for _, body := range []string{`{"backend":"fake","env":{"X":"` + secret + `"},"bogus":1}`, `{"backend":"fake","env":{"X":"` + secret + `","X":1}}`, `{"env":"` + secret + `"}`, secret} {
		res := post(t, s, dsecv1connect.SandboxServiceCreateProcedure, ownerKey, body)
		said = append(said, "raw: "+res)
	}
	check(t, sb.Kill(t.Context()))
	note("ended", run(sb.Command("echo", secret)))
	res, err := http.Get(s.url + "/metrics")
	check(t, err)
	metrics, err := io.ReadAll(res.Body)
	check(t, err)
	_ = res.Body.Close()
	if !bytes.Contains(metrics, []byte("dsec_")) {
		t.Errorf("no metrics: %.200q", metrics)
	}
	s.stop() // the log is whole
	admin := readKey(t, s.keyFile)
	for what, text := range map[string]string{"the answers": strings.Join(said, "\n"), "the log": s.stderr.String(), "the metrics": string(metrics)} {
		for name, word := range map[string]string{"the secret": secret, "a key": ownerKey, "the admin's key": admin} {
			if i := strings.Index(text, word); i >= 0 {
				t.Errorf("%s holds %s: %.300q", what, name, text[max(i-200, 0):])
			}
		}
		if what == "the answers" {
			for _, word := range []string{s.dir, "goroutine", ".go:", "/var/lib", "/run/dsec"} {
				if strings.Contains(text, word) {
					t.Errorf("an answer tells of the host, %q: %s", word, text)
				}
			}
		}
	}
	if !strings.Contains(s.stderr.String(), "project=owner") {
		t.Errorf("control: the log does not tell of the keys that were made: %.500q", s.stderr.String())
	}
}

// post makes a raw call and returns what was answered.
func post(t testing.TB, s *server, route, key, body string) string {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, s.url+route, strings.NewReader(body))
	check(t, err)
	req.Header.Set("Content-Type", "application/json")
	req.Header.Set("Authorization", "Bearer "+key)
	res, err := http.DefaultClient.Do(req)
	check(t, err)
	defer func() { _ = res.Body.Close() }()
	answer, err := io.ReadAll(res.Body)
	check(t, err)
	if res.StatusCode == http.StatusOK {
		t.Errorf("%.60q was accepted: %s", body, answer)
	}
	return string(answer)
}

// TestSlowClients is S88: callers that send next to nothing, half of a request
// or none at all hold no memory to speak of, and others are served meanwhile.
func TestSlowClients(t *testing.T) {
	s := up(t)
	c := s.client(t)
	sb, err := c.CreateSandbox(t.Context(), client.SandboxOptions{Backend: "fake"})
	check(t, err)
	key := readKey(t, s.keyFile)
	addr := strings.TrimPrefix(s.url, "http://")
	before := memory(t, s.process, "VmRSS")
	const each = 60
	var conns []net.Conn
	for _, start := range []string{
		"", // says nothing
		"POST /dsec.v1.SandboxService/Create HTTP/1.1\r\nHost: x\r\nX-A: ",
		"POST " + dsecv1connect.SandboxServiceCreateProcedure + " HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nAuthorization: Bearer " + key + "\r\nContent-Length: 4000000\r\n\r\n{\"user\": \"",
		"POST " + dsecv1connect.FileServiceWriteProcedure + " HTTP/1.1\r\nHost: x\r\nContent-Type: application/connect+json\r\nAuthorization: Bearer " + key + "\r\nTransfer-Encoding: chunked\r\n\r\n" + chunk(envelope(fmt.Sprintf(`{"open":{"sandboxId":"%s","path":{"path":"/half"}}}`, sb.ID()))),
		"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00",
	} {
		for range each {
			conn, err := net.Dial("tcp", addr)
			check(t, err)
			defer conn.Close()
			_, err = io.WriteString(conn, start)
			check(t, err)
			conns = append(conns, conn)
		}
	}
	for range 20 { // the others are served
		if out, o, err := sb.Command("echo", "served").Output(t.Context()); err != nil || string(out) != "served\n" || !o.OK() {
			t.Fatalf("%q, %v", out, err)
		}
		for _, conn := range conns { // a byte now and then
			_, _ = conn.Write([]byte("a"))
		}
	}
	if grown := memory(t, s.process, "VmRSS") - before; grown > 64<<20 {
		t.Errorf("%d slow clients hold %d MiB", len(conns), grown>>20)
	}
	if _, err := sb.Stat(t.Context(), "/half"); err == nil || dsec.CodeOf(err) != dsec.CodeNotFound {
		t.Errorf("a file of half a request: %v", err)
	}
	for _, conn := range conns {
		_ = conn.Close()
	}
	testutil.WaitFor(t, time.Minute, "the connections are gone", func() error {
		fds, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", s.cmd.Process.Pid))
		if err == nil && len(fds) > 100 {
			err = fmt.Errorf("%d descriptors", len(fds))
		}
		return err
	})
}

func envelope(body string) string {
	n := len(body)
	return string([]byte{0, byte(n >> 24), byte(n >> 16), byte(n >> 8), byte(n)}) + body
}

func chunk(s string) string { return fmt.Sprintf("%x\r\n%s\r\n", len(s), s) }

// TestSilentClientsAreCutOff: who sends no request in time, or stops amid one,
// is not kept for ever.
func TestSilentClientsAreCutOff(t *testing.T) {
	s := up(t)
	conn, err := net.Dial("tcp", strings.TrimPrefix(s.url, "http://"))
	check(t, err)
	defer conn.Close()
	_, err = io.WriteString(conn, "POST /x HTTP/1.1\r\nHost: x\r\nX-A: ")
	check(t, err)
	check(t, conn.SetReadDeadline(time.Now().Add(2*time.Minute)))
	_, err = bufio.NewReader(conn).ReadString(0)
	if errors.Is(err, os.ErrDeadlineExceeded) {
		t.Error("a header without an end is waited for without an end")
	}
}

// TestCreatesAtTheQuota is S88: of 200 creates at once on a node that takes 50,
// 50 are made and 150 refused as exhausted, and an end makes room for one more.
func TestCreatesAtTheQuota(t *testing.T) {
	const most, creates = 50, 200
	dir := testutil.Dir(t)
	p := startEnv(t, []string{fmt.Sprint("DSEC_EDGE_MAX_SANDBOXES=", most)}, "up", "--backend", "fake", "--listen", "127.0.0.1:0", "--data-dir", dir+"/data", "--run-dir", dir+"/run")
	s := &server{p, p.ready, dir + "/data/admin.key", dir}
	c, err := client.New(client.Options{URL: s.url, KeyFile: s.keyFile, Attempts: 1})
	check(t, err)
	defer c.Close()
	var made, refused atomic.Int32
	var wg sync.WaitGroup
	for range creates {
		wg.Go(func() {
			_, err := c.CreateSandbox(t.Context(), client.SandboxOptions{Backend: "fake"})
			switch {
			case err == nil:
				made.Add(1)
			case dsec.CodeOf(err) == dsec.CodeExhausted:
				refused.Add(1)
			default:
				t.Error(err)
			}
		})
	}
	wg.Wait()
	if made.Load() != most || refused.Load() != creates-most || count(t, c) != most {
		t.Errorf("%d made, %d refused, %d listed; want %d, %d", made.Load(), refused.Load(), count(t, c), most, creates-most)
	}
	for sb, err := range c.Sandboxes(t.Context(), client.ListOptions{}) {
		check(t, err)
		check(t, c.Sandbox(string(sb.ID)).Kill(t.Context()))
		break
	}
	testutil.WaitFor(t, time.Minute, "placement hears of the room", func() error { // the edge tells it each second
		_, err := c.CreateSandbox(t.Context(), client.SandboxOptions{Backend: "fake"})
		if err != nil && dsec.CodeOf(err) != dsec.CodeExhausted {
			t.Fatal(err)
		}
		return err
	})
	if _, err = c.CreateSandbox(t.Context(), client.SandboxOptions{Backend: "fake"}); err == nil || dsec.CodeOf(err) != dsec.CodeExhausted {
		t.Errorf("one more: %v, want exhausted", err)
	}
}

// TestKeysOfOneProjectActForNoOther is S37: the request id of one project is
// nothing to another, and what is ended is ended for all.
func TestKeysOfOneProjectActForNoOther(t *testing.T) {
	s := up(t)
	a, aKey := s.project(t, "a")
	b, _ := s.project(t, "b")
	o := client.SandboxOptions{Backend: "fake", RequestID: "same"}
	one, err := a.CreateSandbox(t.Context(), o)
	check(t, err)
	two, err := b.CreateSandbox(t.Context(), o)
	check(t, err)
	if one.ID() == two.ID() {
		t.Error("one request id of two projects made one sandbox")
	}
	o.User = "nobody"
	if _, err := b.CreateSandbox(t.Context(), o); err == nil || dsec.CodeOf(err) != dsec.CodeConflict || strings.Contains(err.Error(), string(one.ID())) {
		t.Errorf("%v, want a conflict that tells of nobody else's", err)
	}
	check(t, one.Kill(t.Context()))
	for name, call := range map[string]func(*client.Sandbox) error{
		"exec":  func(sb *client.Sandbox) error { _, _, err := sb.Command("true").Output(t.Context()); return err },
		"read":  func(sb *client.Sandbox) error { _, err := sb.ReadFile(t.Context(), "/etc/passwd"); return err },
		"write": func(sb *client.Sandbox) error { return sb.WriteFile(t.Context(), "/x", nil, 0) },
		"session": func(sb *client.Sandbox) error {
			_, err := sb.OpenSession(t.Context(), client.SessionOptions{})
			return err
		},
		"extend": func(sb *client.Sandbox) error { _, err := sb.Extend(t.Context(), time.Hour, 0); return err },
	} {
		if err := call(a.Sandbox(string(one.ID()))); err == nil || dsec.CodeOf(err) != dsec.CodeConflict {
			t.Errorf("%s after the end: %v, want conflict", name, err)
		}
		if err := call(b.Sandbox(string(one.ID()))); err == nil || dsec.CodeOf(err) != dsec.CodeNotFound {
			t.Errorf("%s by another after the end: %v, want not_found", name, err)
		}
	}
	// A key that is revoked acts for nobody from then on.
	keys, err := s.client(t).Keys(t.Context())
	check(t, err)
	for _, k := range keys {
		if k.Project == "a" {
			check(t, s.client(t).RevokeKey(t.Context(), k.ID))
		}
	}
	testutil.WaitFor(t, 20*time.Second, "the key is refused", func() error {
		c, err := client.New(client.Options{URL: s.url, APIKey: aKey})
		check(t, err)
		defer c.Close()
		if _, err := c.Sandbox(string(one.ID())).Info(context.WithoutCancel(t.Context())); err == nil || dsec.CodeOf(err) != dsec.CodeUnauthenticated {
			return fmt.Errorf("%w, want unauthenticated", err)
		}
		return nil
	})
}
