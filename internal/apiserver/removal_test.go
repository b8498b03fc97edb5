package apiserver

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/client"
	"github.com/opendsec/dsec/internal/store"
	"github.com/opendsec/dsec/internal/testutil"
)

// TestImportThatRacesARemovalFails: the import found the layer there, and the
// removal then dropped it before it had its new name.
func TestImportThatRacesARemovalFails(t *testing.T) {
	s, err := store.Open(t.Context(), store.Config{Dir: t.TempDir(), Log: testutil.Logger(t)})
	check(t, err)
	defer func() { _ = s.Close() }()
	names, err := openLayerNames(t.Context(), s)
	check(t, err)
	defer names.close()
	layer := tag{Digest: "sha256:" + strings.Repeat("b", 64)}
	began, err := s.Revision(t.Context())
	check(t, err)
	unnamed, done, err := names.dropping(t.Context(), newRemoval(layer.Digest))
	if err != nil || !unnamed {
		t.Fatalf("%v, %v", unnamed, err)
	}
	if err := names.set(t.Context(), "a", "x:latest", layer, began); codeOf(err) != dsec.CodeUnavailable {
		t.Errorf("set: %v", err)
	}
	// One that began meanwhile may have found what is half removed.
	began, err = s.Revision(t.Context())
	check(t, err)
	if err := names.set(t.Context(), "a", "x:latest", layer, began); codeOf(err) != dsec.CodeUnavailable {
		t.Errorf("set while it is dropped: %v", err)
	}
	done()
	if err := names.set(t.Context(), "a", "x:latest", layer, began); codeOf(err) != dsec.CodeUnavailable {
		t.Errorf("set after it was dropped: %v", err)
	}
	began, err = s.Revision(t.Context())
	check(t, err)
	check(t, names.set(t.Context(), "a", "x:latest", layer, began))
	unnamed, _, err = names.dropping(t.Context(), newRemoval(layer.Digest))
	if err != nil || unnamed {
		t.Errorf("after set: %v, %v", unnamed, err)
	}
	// Nothing was dropped, so an import that was under way gets its name, also at once.
	if err := names.set(t.Context(), "a", "y:latest", layer, began); err != nil {
		t.Errorf("set while another name is taken away: %v", err)
	}
}

// Of two removals of a layer the end of the first lets no name be given to what the
// other may still remove.
func TestTwoRemovalsAtOnce(t *testing.T) {
	names := newRig(t, newStub("fake")).server.layers
	layer := tag{Digest: "sha256:" + strings.Repeat("b", 64)}
	var ends []func()
	for range 2 {
		unnamed, done, err := names.dropping(t.Context(), newRemoval(layer.Digest))
		if err != nil || !unnamed {
			t.Fatalf("%v, %v", unnamed, err)
		}
		ends = append(ends, done)
	}
	for i, want := range []dsec.Code{dsec.CodeUnavailable, ""} {
		ends[i]()
		began, err := names.store.Revision(t.Context())
		check(t, err)
		if err := names.set(t.Context(), "a", "x:latest", layer, began); codeOf(err) != want {
			t.Errorf("after %d: %v, want %s", i+1, err, want)
		}
	}
}

// A layer of whose removal nobody knows what came of it gets no name: what the edge
// began it may still do.
func TestRemovalWithoutAnOutcome(t *testing.T) {
	for name, lost := range map[string]error{
		"unavailable": dsec.Errorf(dsec.CodeUnavailable, "the store does not answer"),
		"internal":    errors.New("input/output error"),
	} {
		t.Run(name, func(t *testing.T) {
			stub := newStub("fake")
			stub.digest = "sha256:" + strings.Repeat("b", 64)
			r := newRig(t, stub)
			r.server.dropPause = time.Millisecond
			c := r.client(r.secret)
			bring := func() error {
				_, _, err := c.ImportLayer(t.Context(), "x", client.ImportOptions{}, strings.NewReader("tar"))
				return err
			}
			check(t, bring())
			stub.set(func() { stub.badDrop = lost })
			check(t, c.RemoveLayer(t.Context(), "x"))
			if err := bring(); codeOf(err) != dsec.CodeUnavailable {
				t.Errorf("named while it may be removed: %v", err)
			}
			stub.set(func() { stub.badDrop = nil })
			testutil.WaitFor(t, time.Minute, "the layer gets a name once its removal has an end", bring)
			stub.set(func() {
				if len(stub.dropped) != 1 {
					t.Errorf("dropped %v, want one", stub.dropped)
				}
			})
		})
	}
}

// What an apiserver decides by a cache that lags is not done against what was written
// since.
func TestNamesThatChangedMeanwhile(t *testing.T) {
	one, two, three := "sha256:"+strings.Repeat("1", 64), "sha256:"+strings.Repeat("2", 64), "sha256:"+strings.Repeat("3", 64)
	stub := newStub("fake")
	r := newRig(t, stub)
	c, names := r.client(r.secret), r.server.layers
	for name, digest := range map[string]string{"gone": one, "moved": two, "stays": three} {
		stub.set(func() { stub.digest = digest })
		_, _, err := c.ImportLayer(t.Context(), name, client.ImportOptions{}, strings.NewReader("tar"))
		check(t, err)
	}
	names.tags.Close() // what follows it does not learn
	_, err := names.store.Delete(t.Context(), tagPrefix+"a/gone:latest")
	check(t, err)
	_, done, err := names.dropping(t.Context(), newRemoval(one))
	check(t, err)
	done()
	for name, digest := range map[string]string{"moved": one, "taken": one} {
		_, err := store.Put(t.Context(), names.store, tagPrefix+"a/"+name+":latest", tag{Digest: digest})
		check(t, err)
	}
	// A write that is done waits for the cache, which does not come.
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
	defer cancel()
	if _, err := c.TagLayer(ctx, "gone", "again", false); codeOf(err) != dsec.CodeUnavailable {
		t.Errorf("a name for what was removed: %v", err)
	}
	if _, err := c.TagLayer(ctx, "stays", "taken", false); codeOf(err) != dsec.CodeUnavailable {
		t.Errorf("a name that another layer got: %v", err)
	}
	check(t, c.RemoveLayer(ctx, two))
	tags, err := store.List[tag](t.Context(), names.store, tagPrefix+"a/")
	if err != nil || tags["again:latest"].Digest != "" || tags["taken:latest"].Digest != one || tags["moved:latest"].Digest != one {
		t.Errorf("%v, %v", tags, err)
	}
}
