package test

import (
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/client"
	"github.com/opendsec/dsec/internal/testutil"
)

// postbox takes deliveries, or does what a test wants of it.
type postbox struct {
	t      *testing.T
	mu     sync.Mutex
	secret string
	taken  []string // type and sandbox of each, once for each ID
	ids    map[string]int
	answer func(w http.ResponseWriter, n int) // of the n-th request; nil: take it
	n      int
	forged int
}

func (r *postbox) ServeHTTP(w http.ResponseWriter, req *http.Request) {
	body, err := io.ReadAll(req.Body)
	if err != nil {
		return
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.n++
	if client.VerifyWebhook(r.secret, req.Header, body) != nil {
		r.forged++
		w.WriteHeader(http.StatusUnauthorized)
		return
	}
	if r.answer != nil {
		rec := httptest.NewRecorder()
		r.answer(rec, r.n)
		if rec.Code != http.StatusOK {
			w.Header().Set("Location", rec.Header().Get("Location"))
			w.WriteHeader(rec.Code)
			return
		}
	}
	var m struct {
		Type string
		Data struct {
			ID        string `json:"id"`
			SandboxID string `json:"sandbox_id"`
		}
	}
	if err := json.Unmarshal(body, &m); err != nil || m.Data.ID != req.Header.Get("Webhook-Id") {
		r.t.Errorf("a delivery of %s: %v", body, err)
	}
	if r.ids[m.Data.ID]++; r.ids[m.Data.ID] == 1 {
		r.taken = append(r.taken, m.Type+" "+m.Data.SandboxID)
	}
}

func (r *postbox) want(lines ...string) {
	r.t.Helper()
	testutil.WaitFor(r.t, 40*time.Second, "deliveries", func() error {
		r.mu.Lock()
		defer r.mu.Unlock()
		if !slices.Equal(r.taken, lines) {
			return fmt.Errorf("it got %q, want %q", r.taken, lines)
		}
		return nil
	})
}

func (r *postbox) answers(f func(w http.ResponseWriter, n int)) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.answer, r.n = f, 0
}

func lifeOf(sb *client.Sandbox) []string {
	id := string(sb.ID())
	return []string{"sandbox.running " + id, "sandbox.stopping " + id, "sandbox.stopped " + id}
}

// TestWebhooks: each event comes at least once, in order and signed, to a receiver that fails, over a
// server that is killed, and to nobody else.
func TestWebhooks(t *testing.T) {
	dir := testutil.Dir(t)
	args := []string{"--backend", "fake", "--data-dir", dir + "/data", "--run-dir", dir + "/run"}
	begin := func(listen string) *server {
		p := startEnv(t, []string{"DSEC_API_WEBHOOK_ALLOW=127.0.0.0/8"}, "up", append(args, "--listen", listen)...)
		return &server{p, p.ready, dir + "/data/admin.key", dir}
	}
	s := begin("127.0.0.1:0")
	r := &postbox{t: t, ids: map[string]int{}}
	to := httptest.NewServer(r)
	defer to.Close()
	cl := s.client(t)
	life := func() *client.Sandbox {
		t.Helper()
		sb, err := cl.CreateSandbox(t.Context(), client.SandboxOptions{Backend: "fake", Job: "hooked"})
		check(t, err)
		check(t, sb.Kill(t.Context()))
		return sb
	}
	life() // before it is made
	h, secret, err := cl.CreateWebhook(t.Context(), to.URL+"/hook", client.EventFilter{Job: "hooked"}, "")
	check(t, err)
	r.secret = secret
	other, err := cl.CreateSandbox(t.Context(), client.SandboxOptions{Backend: "fake"})
	check(t, err)
	defer func() { _ = other.Kill(t.Context()) }()
	want := lifeOf(life())
	r.want(want...)

	r.answers(func(w http.ResponseWriter, n int) {
		switch n {
		case 1:
			w.WriteHeader(http.StatusInternalServerError)
		case 2:
			w.Header().Set("Location", "http://127.0.0.1:1/")
			w.WriteHeader(http.StatusFound)
		}
	})
	want = append(want, lifeOf(life())...)
	testutil.WaitFor(t, 20*time.Second, "it is told that it fails", func() error {
		got, err := cl.Webhook(t.Context(), h.ID)
		if err != nil || got.State != "failing" || !strings.Contains(got.Error, "it answered") || got.FailingSince.IsZero() {
			return fmt.Errorf("%+v, %w", got, err)
		}
		return nil
	})
	r.want(want...)
	r.answers(nil)

	want = append(want, lifeOf(life())...)
	s.kill()
	url := strings.TrimPrefix(s.url, "http://")
	_ = begin(url)
	want = append(want, lifeOf(life())...)
	r.want(want...)
	got, err := cl.Webhook(t.Context(), h.ID)
	check(t, err)
	if got.State != "ok" || got.Delivered == 0 || r.forged != 0 {
		t.Errorf("%+v, %d were forged", got, r.forged)
	}

	r.answers(func(w http.ResponseWriter, _ int) { w.WriteHeader(http.StatusGone) })
	life()
	testutil.WaitFor(t, 20*time.Second, "it is disabled", func() error {
		all, err := cl.Webhooks(t.Context())
		if err != nil || len(all) != 1 || all[0].State != "disabled" {
			return fmt.Errorf("%+v, %w", all, err)
		}
		return nil
	})
	check(t, cl.DeleteWebhook(t.Context(), h.ID))
	if _, err := cl.Webhook(t.Context(), h.ID); dsec.CodeOf(err) != dsec.CodeNotFound {
		t.Errorf("after its end: %v", err)
	}
}

// TestWebhooksLeadNowhereInside: neither by an address nor by a name.
func TestWebhooksLeadNowhereInside(t *testing.T) {
	s := up(t)
	cl := s.client(t)
	for _, url := range []string{
		"http://127.0.0.1:1/", "http://[::1]/", "http://10.1.2.3/", "http://169.254.169.254/latest", "http://[::ffff:127.0.0.1]/", "http://100.64.0.1/", "http://0.0.0.0/",
		"http://[fd00::1]/", "http://[64:ff9b::7f00:1]/", "ftp://example.com/", "https://user:pw@example.com/", "example.com", "https:///x", "https://example.com/#x",
	} {
		if _, _, err := cl.CreateWebhook(t.Context(), url, client.EventFilter{}, ""); err == nil || typed(t, err).Field != "url" {
			t.Errorf("%s: %v", url, err)
		}
	}
	if _, _, err := cl.CreateWebhook(t.Context(), "https://example.com", client.EventFilter{}, "whsec_short"); err == nil || typed(t, err).Field != "secret" {
		t.Errorf("a short secret: %v", err)
	}
	to := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { t.Error("it was reached") }))
	defer to.Close()
	_, port, _ := strings.Cut(strings.TrimPrefix(to.URL, "http://"), ":")
	h, _, err := cl.CreateWebhook(t.Context(), "http://localhost:"+port+"/", client.EventFilter{}, "")
	check(t, err)
	sb, err := cl.CreateSandbox(t.Context(), client.SandboxOptions{Backend: "fake"})
	check(t, err)
	defer func() { _ = sb.Kill(t.Context()) }()
	testutil.WaitFor(t, 20*time.Second, "it is told why", func() error {
		got, err := cl.Webhook(t.Context(), h.ID)
		if err != nil || !strings.Contains(got.Error, "not public") {
			return fmt.Errorf("%+v, %w", got, err)
		}
		return nil
	})
	// Another project neither sees nor ends it.
	b, _ := s.project(t, "b")
	if all, err := b.Webhooks(t.Context()); err != nil || len(all) != 0 {
		t.Errorf("another project sees %v, %v", all, err)
	}
	check(t, b.DeleteWebhook(t.Context(), h.ID))
	if all, err := cl.Webhooks(t.Context()); err != nil || len(all) != 1 {
		t.Errorf("another project ended it: %v, %v", all, err)
	}
}

// TestVerifyWebhook: only what was signed with the secret, and lately.
func TestVerifyWebhook(t *testing.T) {
	secret := "whsec_" + strings.Repeat("a2tr", 8)
	if err := client.VerifyWebhook(secret, http.Header{}, nil); dsec.CodeOf(err) != dsec.CodeDenied {
		t.Error(err)
	}
	old := http.Header{"Webhook-Id": {"x"}, "Webhook-Timestamp": {"1"}, "Webhook-Signature": {"v1,AAAA"}}
	if err := client.VerifyWebhook(secret, old, nil); dsec.CodeOf(err) != dsec.CodeDenied || !strings.Contains(err.Error(), "off") {
		t.Error(err)
	}
	forged := http.Header{"Webhook-Id": {"x"}, "Webhook-Timestamp": {strconv.FormatInt(time.Now().Unix(), 10)}, "Webhook-Signature": {"v1,AAAA"}}
	if err := client.VerifyWebhook(secret, forged, nil); dsec.CodeOf(err) != dsec.CodeDenied || !strings.Contains(err.Error(), "signature") {
		t.Error(err)
	}
}
