package apiserver

import (
	"context"
	"crypto/rand"
	"encoding/base64"
	"encoding/hex"
	"errors"
	"net/netip"
	"net/url"
	"slices"
	"strings"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/store"
	dsecv1 "github.com/opendsec/dsec/proto/dsec/v1"
)

const (
	hookPrefix      = "webhooks/"     // <project>/<id>
	hookStatePrefix = "webhookstate/" // <project>/<id>
	maxHooks        = 32              // of a project
	maxHookURL      = 2048
	hookSecret      = "whsec_"
	cursorTimeout   = 10 * time.Second
)

// hook is the document of a webhook.
type hook struct {
	URL     string    `json:"url"`
	Filter  string    `json:"filter,omitempty"` // as JSON
	Secret  []byte    `json:"secret"`
	Created time.Time `json:"created"`
}

// hookState is how far it is. Who delivers for it writes it.
type hookState struct {
	Cursor        string    `json:"cursor"`
	Delivered     int64     `json:"delivered,omitempty"`
	GivenUp       int64     `json:"given_up,omitempty"`
	LastDelivered time.Time `json:"last_delivered,omitzero"`
	FailingSince  time.Time `json:"failing_since,omitzero"`
	Error         string    `json:"error,omitempty"`
	Disabled      bool      `json:"disabled,omitempty"`
}

func (h hook) filter() (*dsecv1.EventFilter, error) {
	f := new(dsecv1.EventFilter)
	if h.Filter == "" {
		return f, nil
	}
	return f, protojson.Unmarshal([]byte(h.Filter), f)
}

// message is the webhook as callers see it.
func (h hook) message(id string, st hookState) *dsecv1.Webhook {
	out := &dsecv1.Webhook{Id: id, Url: h.URL, Created: timestamppb.New(h.Created), State: "ok", Delivered: st.Delivered, GivenUp: st.GivenUp, Error: st.Error}
	out.Filter, _ = h.filter()
	if !st.LastDelivered.IsZero() {
		out.LastDelivered = timestamppb.New(st.LastDelivered)
	}
	if !st.FailingSince.IsZero() {
		out.State, out.FailingSince = "failing", timestamppb.New(st.FailingSince)
	}
	if st.Disabled {
		out.State = "disabled"
	}
	return out
}

type webhookService struct{ s *Server }

// CreateWebhook makes a webhook that begins with what happens from now on.
func (v webhookService) CreateWebhook(ctx context.Context, req *connect.Request[dsecv1.CreateWebhookRequest]) (*connect.Response[dsecv1.CreateWebhookResponse], error) {
	m, project := req.Msg, principal(ctx).Project
	if err := v.s.checkHookURL(m.Url); err != nil {
		return nil, err
	}
	if err := checkFilter("filter.", m.Filter); err != nil {
		return nil, err
	}
	secret, err := hookKey(m.Secret)
	if err != nil {
		return nil, err
	}
	if n := len(v.s.hooks.of(project)); n >= maxHooks {
		return nil, dsec.Errorf(dsec.CodeExhausted, "the project has %d webhooks, at most %d", n, maxHooks)
	}
	h := hook{URL: m.Url, Secret: secret, Created: time.Now().UTC()}
	if m.Filter != nil {
		text, err := protojson.Marshal(m.Filter)
		if err != nil {
			return nil, err
		}
		h.Filter = string(text)
	}
	cursor, err := v.s.cursorNow(ctx)
	if err != nil {
		return nil, err
	}
	id := "wh-" + hex.EncodeToString(randomBytes(8))
	key := project + "/" + id
	if _, err := store.Put(ctx, v.s.hooks.store, hookStatePrefix+key, hookState{Cursor: cursor}); err != nil {
		return nil, err
	}
	rev, err := store.Put(ctx, v.s.hooks.store, hookPrefix+key, h)
	if err == nil {
		err = v.s.hooks.docs.Wait(ctx, rev)
	}
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(&dsecv1.CreateWebhookResponse{Webhook: h.message(id, hookState{}), Secret: hookSecret + base64.StdEncoding.EncodeToString(secret)}), nil
}

// cursorNow is where the events of ctx's project are now.
func (s *Server) cursorNow(ctx context.Context) (cursor string, err error) {
	ctx, cancel := context.WithTimeoutCause(ctx, cursorTimeout, dsec.Errorf(dsec.CodeUnavailable, "not all nodes tell where their events are"))
	defer cancel()
	known := errors.New("known")
	err = s.watchEvents(ctx, nil, false, nil, func(e *dsecv1.Event, at *dsecv1.EventCursor) error {
		if e != nil {
			return nil // it is not known of all nodes yet
		}
		if cursor, err = encodeCursor(at); err != nil {
			return err
		}
		return known
	})
	if errors.Is(err, known) {
		return cursor, nil
	}
	return "", err
}

func randomBytes(n int) []byte {
	b := make([]byte, n)
	_, _ = rand.Read(b) // never fails: crypto/rand panics instead
	return b
}

// hookKey is what deliveries are signed with.
func hookKey(secret string) ([]byte, error) {
	if secret == "" {
		return randomBytes(32), nil
	}
	text, ok := strings.CutPrefix(secret, hookSecret)
	key, err := base64.StdEncoding.DecodeString(text)
	if !ok || err != nil || len(key) < 24 || len(key) > 64 {
		return nil, dsec.Invalid("secret", "want %s and base64 of 24 to 64 bytes, or nothing", hookSecret)
	}
	return key, nil
}

func (s *Server) checkHookURL(text string) error {
	u, err := url.Parse(text)
	switch {
	case len(text) > maxHookURL:
		return dsec.Invalid("url", "want at most %d bytes, got %d", maxHookURL, len(text))
	case err != nil || u.Scheme != "https" && u.Scheme != "http" || u.Hostname() == "" || u.Fragment != "":
		return dsec.Invalid("url", "want https://host/path, or http, without a fragment")
	case u.User != nil:
		return dsec.Invalid("url", "want no user or password in it: whoever lists webhooks sees it")
	}
	if ip, err := netip.ParseAddr(u.Hostname()); err == nil && !s.hooks.guard.allows(ip) {
		return dsec.Invalid("url", "%s is no public address; the operator may allow it (api.webhook_allow)", ip)
	}
	return nil
}

// GetWebhook tells of one.
func (v webhookService) GetWebhook(ctx context.Context, req *connect.Request[dsecv1.GetWebhookRequest]) (*connect.Response[dsecv1.GetWebhookResponse], error) {
	project := principal(ctx).Project
	h, ok := v.s.hooks.of(project)[req.Msg.Id]
	if !ok {
		return nil, &dsec.Error{Code: dsec.CodeNotFound, Field: "id", Message: "no such webhook"}
	}
	out, err := v.s.hooks.tell(ctx, project, req.Msg.Id, h)
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(&dsecv1.GetWebhookResponse{Webhook: out}), nil
}

// ListWebhooks tells of all of a project, oldest first.
func (v webhookService) ListWebhooks(ctx context.Context, _ *connect.Request[dsecv1.ListWebhooksRequest]) (*connect.Response[dsecv1.ListWebhooksResponse], error) {
	project := principal(ctx).Project
	out := new(dsecv1.ListWebhooksResponse)
	for id, h := range v.s.hooks.of(project) {
		one, err := v.s.hooks.tell(ctx, project, id, h)
		if err != nil {
			return nil, err
		}
		out.Webhooks = append(out.Webhooks, one)
	}
	slices.SortFunc(out.Webhooks, func(a, b *dsecv1.Webhook) int {
		if c := a.Created.AsTime().Compare(b.Created.AsTime()); c != 0 {
			return c
		}
		return strings.Compare(a.Id, b.Id)
	})
	return connect.NewResponse(out), nil
}

// DeleteWebhook ends one. A delivery that is under way may still arrive.
func (v webhookService) DeleteWebhook(ctx context.Context, req *connect.Request[dsecv1.DeleteWebhookRequest]) (*connect.Response[dsecv1.DeleteWebhookResponse], error) {
	key := principal(ctx).Project + "/" + req.Msg.Id
	if strings.ContainsAny(req.Msg.Id, "/\x00") || req.Msg.Id == "" {
		return nil, dsec.Invalid("id", "want that of a webhook")
	}
	rev, err := v.s.hooks.store.Delete(ctx, hookPrefix+key)
	if err == nil {
		err = v.s.hooks.docs.Wait(ctx, rev)
	}
	if err == nil {
		_, err = v.s.hooks.store.Delete(ctx, hookStatePrefix+key)
	}
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(new(dsecv1.DeleteWebhookResponse)), nil
}

// hooks are the webhooks of all projects.
type hooks struct {
	store  *store.Store
	docs   *store.Cache[hook]
	guard  guard
	giveUp time.Duration // after which an event is not sent any more
	pause  time.Duration // after a first attempt that failed
}

func openHooks(ctx context.Context, cfg Config) (*hooks, error) {
	docs, err := store.NewCache(ctx, cfg.Store, hookPrefix, func(key string, _ hook) string { p, _, _ := strings.Cut(key, "/"); return p })
	if err != nil {
		return nil, err
	}
	giveUp := cfg.WebhookGiveUp
	if giveUp == 0 {
		giveUp = 24 * time.Hour
	}
	return &hooks{store: cfg.Store, docs: docs, guard: guard{cfg.WebhookAllow}, giveUp: giveUp, pause: time.Second}, nil
}

// of are those of a project, by ID.
func (b *hooks) of(project string) map[string]hook {
	found := map[string]hook{}
	b.docs.Range(project+"/", func(key string, h hook) bool {
		found[strings.TrimPrefix(key, project+"/")] = h
		return true
	})
	return found
}

func (b *hooks) tell(ctx context.Context, project, id string, h hook) (*dsecv1.Webhook, error) {
	st, _, _, err := store.Get[hookState](ctx, b.store, hookStatePrefix+project+"/"+id)
	return h.message(id, st), err
}
