package apiserver

import (
	"errors"
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/iam"
	"github.com/opendsec/dsec/internal/store"
	"github.com/opendsec/dsec/internal/testutil"
	"github.com/opendsec/dsec/internal/watcher"
)

// An apiserver does not start on the store of layers of another control plane.
func TestStoreOfAnotherControlPlane(t *testing.T) {
	e := newStub("fncall")
	e.owner = "theirs"
	log := testutil.Logger(t)
	s, err := store.Open(t.Context(), store.Config{Dir: t.TempDir(), Log: log})
	check(t, err)
	t.Cleanup(func() { _ = s.Close() })
	keys, err := iam.Open(t.Context(), s, log)
	check(t, err)
	t.Cleanup(keys.Close)
	w, err := watcher.New(t.Context(), s, []watcher.Endpoint{e.endpoint(t)}, log)
	check(t, err)
	t.Cleanup(w.Close)
	start := func() error {
		srv, err := New(t.Context(), Config{Store: s, IAM: keys, Edges: w, Log: log, Metrics: prometheus.NewRegistry()})
		if err == nil {
			srv.Close()
		}
		return err
	}
	unit, err := s.Unit(t.Context())
	check(t, err)
	err = start()
	if d, ok := errors.AsType[*dsec.Error](err); !ok || d.Code != dsec.CodeConflict || d.Field != "layers.store" || !strings.Contains(d.Message, "theirs") || !strings.Contains(d.Message, unit) {
		t.Errorf("%v, want a conflict of layers.store that names theirs and %s", err, unit)
	}
	e.set(func() { e.owner = "" })
	for range 2 { // the same etcd is the same unit
		check(t, start())
	}
	if e.set(func() {}); e.claimed != unit {
		t.Errorf("the store was claimed for %q, want %q", e.claimed, unit)
	}
}

// A collection that nobody asked for is done as one that somebody did, and leaves a
// store alone that has become another's.
func TestCollectByItself(t *testing.T) {
	e := newStub("fncall")
	e.digest = "sha256:" + strings.Repeat("a", 64)
	r := newRig(t, e)
	res, err := r.server.collect(r.server.stopping, collectAge, false)
	check(t, err)
	if len(res.Removed) != 1 || len(e.dropped) != 1 {
		t.Errorf("removed %v, dropped %v; want one", res.Removed, e.dropped)
	}
	e.set(func() { e.owner = "theirs" })
	_, err = r.server.collect(r.server.stopping, collectAge, false)
	if dsec.CodeOf(err) != dsec.CodeConflict || len(e.dropped) != 1 {
		t.Errorf("of another's store: %v, dropped %v", err, e.dropped)
	}
}
