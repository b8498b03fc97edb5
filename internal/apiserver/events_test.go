package apiserver

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/client"
	"github.com/opendsec/dsec/internal/iam"
	dsecv1 "github.com/opendsec/dsec/proto/dsec/v1"
)

func FuzzCursor(f *testing.F) {
	good, err := encodeCursor(&dsecv1.EventCursor{Jobs: 7, Nodes: map[string]*dsecv1.NodePosition{"aaaaa": {Log: string(dsec.NewSandboxID("aaaaa")), Seq: 3}}})
	if err != nil {
		f.Fatal(err)
	}
	for _, text := range []string{good, good[:len(good)-2], "", "x", "AAAA", good + good} {
		f.Add(text)
	}
	f.Fuzz(func(t *testing.T, text string) {
		c, err := parseCursor(text)
		if err != nil {
			if e := dsec.CodeOf(err); e != dsec.CodeInvalid || c != nil {
				t.Errorf("%q: %v, %v", text, c, err)
			}
			return
		}
		if c == nil {
			return // none was given
		}
		again, err := encodeCursor(c)
		if err != nil {
			t.Fatal(err)
		}
		if same, err := parseCursor(again); err != nil || !proto.Equal(c, same) && again != "" {
			t.Errorf("%q became %q: %v, %v", text, again, same, err)
		}
	})
}

// TestGuard: what only the server can reach is refused, in whatever form it is written.
func TestGuard(t *testing.T) {
	for _, ip := range []string{"8.8.8.8", "2606:4700::1", "::ffff:8.8.8.8"} {
		if !(guard{}).allows(netip.MustParseAddr(ip)) {
			t.Errorf("%s is refused", ip)
		}
	}
	inside := guard{[]netip.Prefix{netip.MustParsePrefix("10.0.0.0/8")}}
	for _, ip := range []string{
		"127.0.0.1", "::1", "0.0.0.0", "::", "10.0.0.1", "172.16.3.4", "192.168.1.1", "169.254.169.254", "100.64.0.1", "fe80::1%eth0", "fd00::1", "224.0.0.1", "ff02::1",
		"255.255.255.255", "240.0.0.1", "198.18.0.1", "192.0.2.1", "::ffff:127.0.0.1", "::ffff:10.0.0.1", "64:ff9b::a00:1", "2002:a00:1::", "2001::1", "fec0::1",
	} {
		if (guard{}).allows(netip.MustParseAddr(ip)) {
			t.Errorf("%s is allowed", ip)
		}
		if got := inside.allows(netip.MustParseAddr(ip)); got != (ip == "10.0.0.1" || ip == "::ffff:10.0.0.1") {
			t.Errorf("%s where 10.0.0.0/8 is allowed: %v", ip, got)
		}
	}
}

// TestJobEventsGoOnBehindEach: whoever goes on behind the first of many that are caught up with hears of the rest.
func TestJobEventsGoOnBehindEach(t *testing.T) {
	r := newRig(t)
	cl := r.client(r.secret)
	cursor, err := r.server.cursorNow(context.WithValue(t.Context(), principalKey{}, iam.Principal{Project: "a"}))
	check(t, err)
	var names []string
	for i := range 5 {
		names = append(names, fmt.Sprint("job", i))
		_, err := cl.CreateJob(t.Context(), names[i], client.JobOptions{})
		check(t, err)
	}
	for _, name := range names {
		e := nextEvent(t, cl, client.EventOptions{Cursor: cursor})
		if e.Job != name {
			t.Errorf("an event of %q, want %q", e.Job, name)
		}
		cursor = e.Cursor
	}
}

// TestIDsOfJobEvents: each state that a job enters has its own, which is the same when it is told again.
func TestIDsOfJobEvents(t *testing.T) {
	r := newRig(t)
	cl := r.client(r.secret)
	cursor, err := r.server.cursorNow(context.WithValue(t.Context(), principalKey{}, iam.Principal{Project: "a"}))
	check(t, err)
	job, err := cl.CreateJob(t.Context(), "j", client.JobOptions{})
	check(t, err)
	look := func() (state, id string) {
		t.Helper()
		e, again := nextEvent(t, cl, client.EventOptions{Cursor: cursor}), nextEvent(t, cl, client.EventOptions{FromStart: true})
		if !again.Repeated || again.State != e.State || again.ID != e.ID {
			t.Errorf("event %+v, and from the start %+v", e, again)
		}
		cursor = e.Cursor
		return e.State, e.ID
	}
	active, first := look()
	_, err = job.End(t.Context())
	check(t, err)
	if ended, second := look(); active != jobActive || ended != jobEnded || first == second {
		t.Errorf("%s has ID %q, %s %q", active, first, ended, second)
	}
}

// TestCursorOfAQuietNode: whoever watched a node from the start that has told nothing goes on there.
func TestCursorOfAQuietNode(t *testing.T) {
	edge := newStub("fake")
	r := newRig(t, edge)
	ctx, cancel := context.WithTimeout(context.WithValue(t.Context(), principalKey{}, iam.Principal{Project: "a"}), time.Minute)
	defer cancel()
	known := errors.New("known")
	var cursor *dsecv1.EventCursor
	for range 2 {
		err := r.server.watchEvents(ctx, cursor, cursor == nil, nil, func(e *dsecv1.Event, at *dsecv1.EventCursor) error {
			if e != nil {
				return nil
			}
			text, err := encodeCursor(at) // of all nodes
			check(t, err)
			cursor, err = parseCursor(text)
			check(t, err)
			return known
		})
		if !errors.Is(err, known) {
			t.Fatal(err)
		}
	}
	edge.set(func() {
		for _, req := range edge.watched {
			if !req.FromStart || req.From != nil {
				t.Errorf("it was asked for %v", req)
			}
		}
	})
}

func nextEvent(t *testing.T, cl *client.Client, o client.EventOptions) *client.Event {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	for e, err := range cl.Events(ctx, o) {
		check(t, err)
		return e
	}
	t.Fatal("no event")
	return nil
}
