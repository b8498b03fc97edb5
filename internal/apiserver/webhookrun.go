package apiserver

import (
	"bytes"
	"context"
	"crypto/hmac"
	"crypto/sha256"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"net/url"
	"os"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/protobuf/encoding/protojson"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/event"
	"github.com/opendsec/dsec/internal/iam"
	"github.com/opendsec/dsec/internal/publicip"
	"github.com/opendsec/dsec/internal/store"
	dsecv1 "github.com/opendsec/dsec/proto/dsec/v1"
)

const (
	// hookTimeout bounds one attempt to deliver, and hookPauses the pauses between them.
	hookTimeout   = 10 * time.Second
	longestPause  = 5 * time.Minute
	hooksEvery    = time.Second     // how often it is looked which webhooks there are
	hookSaveEvery = 5 * time.Second // and how far each is written down: the store keeps each version for a while
	givenUpPause  = time.Minute     // between events that are given up one after the other
)

// keepHooks delivers for all webhooks while no other server does.
func (s *Server) keepHooks(ctx context.Context) {
	for ctx.Err() == nil {
		if err := store.Lead(ctx, s.hooks.store, "webhooks", s.runHooks); err != nil && ctx.Err() == nil {
			s.log.Warn("webhooks wait", "err", err)
		}
		select {
		case <-time.After(hooksEvery):
		case <-ctx.Done():
		}
	}
}

// runHooks runs what there is of webhooks, until ctx ends.
func (s *Server) runHooks(ctx context.Context) {
	var work sync.WaitGroup
	defer work.Wait()
	running := map[string]context.CancelFunc{}
	look := time.NewTicker(hooksEvery)
	defer look.Stop()
	for ctx.Err() == nil {
		there := map[string]bool{}
		s.hooks.docs.Range("", func(key string, h hook) bool {
			there[key] = true
			if running[key] == nil {
				run, cancel := context.WithCancel(ctx)
				running[key] = cancel
				work.Go(func() { s.runHook(run, key, h) })
			}
			return true
		})
		for key, cancel := range running {
			if !there[key] {
				cancel()
				delete(running, key)
			}
		}
		select {
		case <-look.C:
		case <-ctx.Done():
		}
	}
	for _, cancel := range running {
		cancel()
	}
}

// delivery is one webhook that is served.
type delivery struct {
	s      *Server
	key    string
	hook   hook
	client *http.Client

	mu    sync.Mutex
	state hookState
	later bool // it will be saved

	saving   sync.Mutex
	rev      int64       // of the state as this server wrote it last
	outdated atomic.Bool // what is written down is another's
}

// runHook delivers for one webhook until ctx ends.
func (s *Server) runHook(ctx context.Context, key string, h hook) {
	project, _, _ := strings.Cut(key, "/")
	ctx = context.WithValue(ctx, principalKey{}, iam.Principal{Project: project})
	d := &delivery{s: s, key: key, hook: h, client: s.hooks.guard.client(hookTimeout)}
	defer d.client.CloseIdleConnections()
	for ctx.Err() == nil {
		if err := d.run(ctx); err != nil && ctx.Err() == nil {
			s.log.Warn("a webhook waits", "webhook", key, "err", err)
		}
		select {
		case <-time.After(watchAgain):
		case <-ctx.Done():
		}
	}
}

// run goes on where the webhook was.
func (d *delivery) run(ctx context.Context) error {
	st, ok, err := d.take(ctx)
	if err != nil {
		return err
	}
	if !ok || st.Disabled {
		<-ctx.Done()
		return nil
	}
	cursor, err := parseCursor(st.Cursor)
	if err != nil {
		return err
	}
	filter, err := d.hook.filter()
	if err != nil {
		return err
	}
	d.change(func(now *hookState) { *now = st })
	defer d.save(context.WithoutCancel(ctx))
	return d.s.watchEvents(ctx, cursor, false, filter, func(e *dsecv1.Event, at *dsecv1.EventCursor) error {
		// That a node cannot be reached now is not the receiver's business.
		if e != nil && e.Kind != event.Unreachable && e.Kind != event.Reachable {
			if err := d.deliver(ctx, e); err != nil {
				return err
			}
		}
		text, err := encodeCursor(at)
		if err != nil {
			return err
		}
		if d.change(func(st *hookState) { st.Cursor = text }).Disabled {
			return errDisabled
		}
		if d.outdated.Load() {
			return errOutdated
		}
		d.saveLater(ctx)
		return nil
	})
}

// take reads how far the webhook is, and writes it: what a server that led before, and does not know
// yet that it does not, has to write then comes too late.
func (d *delivery) take(ctx context.Context) (st hookState, ok bool, err error) {
	d.saving.Lock()
	defer d.saving.Unlock()
	key := hookStatePrefix + d.key
	st, rev, ok, err := store.Get[hookState](ctx, d.s.hooks.store, key)
	if err == nil && ok {
		d.rev, err = store.PutIf(ctx, d.s.hooks.store, key, st, store.UnchangedSince(key, rev))
	}
	d.outdated.Store(err != nil)
	return st, ok, err
}

// change changes the state, and returns it.
func (d *delivery) change(f func(*hookState)) hookState {
	d.mu.Lock()
	defer d.mu.Unlock()
	f(&d.state)
	return d.state
}

// saveLater saves the state after a while, together with what it is by then.
func (d *delivery) saveLater(ctx context.Context) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.later {
		return
	}
	d.later = true
	time.AfterFunc(hookSaveEvery, func() {
		d.change(func(*hookState) { d.later = false })
		if ctx.Err() == nil { // else it was
			d.save(ctx)
		}
	})
}

var (
	errDisabled = errors.New("the receiver wants no more")
	// errOutdated: another server leads, or did what this one asked for without an answer.
	errOutdated = errors.New("how far it is was written down by another")
)

// save writes down how far the webhook is, which after a crash is sent again from there. One that is
// gone meanwhile is not brought back, and what another server wrote meanwhile stays.
func (d *delivery) save(ctx context.Context) {
	d.saving.Lock()
	defer d.saving.Unlock()
	st := d.change(func(*hookState) {})
	ctx, cancel := context.WithTimeout(ctx, hookTimeout)
	defer cancel()
	_, rev, ok, err := store.Get[hook](ctx, d.s.hooks.store, hookPrefix+d.key)
	if err == nil && ok {
		key := hookStatePrefix + d.key
		if rev, err = store.PutIf(ctx, d.s.hooks.store, key, st, store.UnchangedSince(hookPrefix+d.key, rev), store.UnchangedSince(key, d.rev)); err == nil {
			d.rev = rev
		}
	}
	switch {
	case isCode(err, dsec.CodeConflict):
		d.outdated.Store(true)
	case err != nil:
		d.s.log.Warn("how far a webhook is cannot be written down", "webhook", d.key, "err", err)
	}
}

// deliver sends an event until it is taken, or given up. Its error is that ctx ended.
func (d *delivery) deliver(ctx context.Context, e *dsecv1.Event) error {
	body, err := hookBody(e)
	if err != nil {
		return err
	}
	for pause := d.s.hooks.pause; ; pause = min(2*pause, longestPause) {
		gone, err := d.post(ctx, e.Id, body)
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		failed := false
		st := d.change(func(st *hookState) {
			failed = !st.FailingSince.IsZero()
			st.note(err, gone, time.Now().UTC(), d.s.hooks.giveUp)
		})
		if err == nil && !failed {
			return nil
		}
		d.save(ctx)
		if err == nil {
			return nil
		}
		over := time.Since(st.FailingSince) > d.s.hooks.giveUp
		if gone {
			return nil
		}
		if over {
			pause = min(pause, givenUpPause)
		}
		select {
		case <-time.After(pause/2 + rand.N(pause)):
		case <-ctx.Done():
			return context.Cause(ctx)
		}
		if over {
			return nil
		}
	}
}

// note notes an attempt. Once none was taken for giveUp, each failed attempt gives an event up,
// over restarts too.
func (st *hookState) note(err error, gone bool, now time.Time, giveUp time.Duration) {
	if err == nil {
		st.Delivered++
		st.LastDelivered, st.FailingSince, st.Error = now, time.Time{}, ""
		return
	}
	if st.FailingSince.IsZero() {
		st.FailingSince = now
	}
	st.Error, st.Disabled = err.Error(), gone
	if !gone && now.Sub(st.FailingSince) > giveUp {
		st.GivenUp++
	}
}

// hookBody is what is posted of an event.
func hookBody(e *dsecv1.Event) ([]byte, error) {
	kind := "node." + e.Kind
	if e.Kind == event.Sandbox || e.Kind == event.Job {
		kind = e.Kind + "." + e.State
	}
	data, err := protojson.MarshalOptions{UseProtoNames: true}.Marshal(e)
	if err != nil {
		return nil, err
	}
	return json.Marshal(struct {
		Type      string          `json:"type"`
		Timestamp time.Time       `json:"timestamp"`
		Data      json.RawMessage `json:"data"`
	}{kind, e.Time.AsTime(), data})
}

// post makes one attempt. gone is true where the receiver wants no more.
func (d *delivery) post(ctx context.Context, id string, body []byte) (gone bool, err error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, d.hook.URL, bytes.NewReader(body))
	if err != nil {
		return false, err
	}
	stamp := strconv.FormatInt(time.Now().Unix(), 10)
	req.Header.Set("Content-Type", "application/json")
	req.Header.Set("User-Agent", "dsec-webhook")
	req.Header.Set("Webhook-Id", id)
	req.Header.Set("Webhook-Timestamp", stamp)
	req.Header.Set("Webhook-Signature", "v1,"+signature(d.hook.Secret, id, stamp, body))
	res, err := d.client.Do(req)
	if err != nil {
		return false, unsent(err)
	}
	defer func() { _ = res.Body.Close() }()
	_, _ = io.Copy(io.Discard, io.LimitReader(res.Body, 64<<10)) // so that the connection is used again
	switch {
	case res.StatusCode >= 200 && res.StatusCode < 300:
		return false, nil
	case res.StatusCode >= 300 && res.StatusCode < 400:
		err = fmt.Errorf("it answered %d: redirects are not followed", res.StatusCode)
	default:
		err = fmt.Errorf("it answered %d", res.StatusCode)
	}
	return res.StatusCode == http.StatusGone, err
}

// signature is that of Standard Webhooks.
func signature(secret []byte, id, stamp string, body []byte) string {
	mac := hmac.New(sha256.New, secret)
	_, _ = fmt.Fprintf(mac, "%s.%s.", id, stamp)
	mac.Write(body)
	return base64.StdEncoding.EncodeToString(mac.Sum(nil))
}

// unsent tells why a request got no answer, and nothing of the server's own network.
func unsent(err error) error {
	var u *url.Error
	switch {
	case errors.Is(err, publicip.ErrNotPublic):
		return publicip.ErrNotPublic
	case errors.Is(err, context.DeadlineExceeded), errors.Is(err, os.ErrDeadlineExceeded), errors.As(err, &u) && u.Timeout():
		return fmt.Errorf("it did not answer within %s", hookTimeout)
	}
	return errors.New("it cannot be reached, or broke the connection")
}
