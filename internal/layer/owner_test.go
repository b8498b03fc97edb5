package layer

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/layer/blob/dirblob"
)

// wantOwned fails the test unless err refuses unit for the store's owner.
func wantOwned(t testing.TB, what string, err error, owner, unit string) {
	t.Helper()
	e, ok := errors.AsType[*dsec.Error](err)
	if !ok || e.Code != dsec.CodeConflict || e.Field != "layers.store" || !strings.Contains(e.Message, owner) || !strings.Contains(e.Message, unit) {
		t.Errorf("%s: %v, want a conflict of layers.store that names %s and %s", what, err, owner, unit)
	}
}

// A store belongs to the first control plane that claims it, until its mark is
// removed.
func TestOwner(t *testing.T) {
	eachPlace(t, func(t *testing.T, p place) {
		a, b := p.node(t), p.node(t)
		ctx := t.Context()
		wantOwned(t, "check of a store without a mark", a.CheckOwner(ctx, "unit-a"), "no mark", "unit-a")
		for _, err := range []error{a.Claim(ctx, ""), a.CheckOwner(ctx, "")} {
			wantCode(t, err, dsec.CodeInvalid)
		}
		if err := CheckUnowned(ctx, a.blobs); err != nil {
			t.Errorf("a store without a mark: %v", err)
		}
		for range 2 {
			if err := errors.Join(a.Claim(ctx, "unit-a"), b.Claim(ctx, "unit-a"), a.CheckOwner(ctx, "unit-a"), b.CheckOwner(ctx, "unit-a")); err != nil {
				t.Fatal(err)
			}
		}
		wantOwned(t, "a new one", CheckUnowned(ctx, b.blobs), "unit-a", "this one is new")
		for _, other := range []string{"unit-b", "of another length"} {
			wantOwned(t, "claim", b.Claim(ctx, other), "unit-a", other)
			wantOwned(t, "check", b.CheckOwner(ctx, other), "unit-a", other)
		}
		if layers, err := a.Sweep(ctx, 0); err != nil || len(layers) > 0 {
			t.Errorf("the mark is taken for %v, %v", layers, err)
		}
		// The other one takes it over, and this one sees that at once.
		if err := errors.Join(b.blobs.Delete(ctx, ownerKey), b.Claim(ctx, "unit-b"), b.CheckOwner(ctx, "unit-b")); err != nil {
			t.Fatal(err)
		}
		wantOwned(t, "check", a.CheckOwner(ctx, "unit-a"), "unit-b", "unit-a")
		wantOwned(t, "claim", a.Claim(ctx, "unit-a"), "unit-b", "unit-a")
	})
}

// A directory in the place of the mark is none, and no store without one either.
func TestOwnerIsADirectory(t *testing.T) {
	dir := t.TempDir()
	blobs, err := dirblob.Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	defer blobs.Close()
	s := openStore(t, Options{Blobs: blobs})
	if err := os.MkdirAll(filepath.Join(dir, ownerKey, "x"), 0o700); err != nil {
		t.Fatal(err)
	}
	wantOwned(t, "claim", s.Claim(t.Context(), "unit-a"), "directory", ownerKey)
	wantOwned(t, "check", s.CheckOwner(t.Context(), "unit-a"), "directory", ownerKey)
}

// Of control planes that claim a store at once it belongs to one.
func TestOwnerRace(t *testing.T) {
	eachPlace(t, func(t *testing.T, p place) {
		nodes := []*Store{p.node(t), p.node(t), p.node(t)}
		for round := range 10 {
			errs := make([]error, 4*len(nodes))
			var all sync.WaitGroup
			start := make(chan struct{})
			for i := range errs {
				all.Go(func() {
					<-start
					n := i % len(nodes)
					errs[i] = nodes[n].Claim(t.Context(), fmt.Sprint("unit-", n))
				})
			}
			close(start)
			all.Wait()
			owner, err := ownerOf(t.Context(), nodes[0].blobs)
			if err != nil {
				t.Fatal(err)
			}
			for i, err := range errs {
				if unit := fmt.Sprint("unit-", i%len(nodes)); unit != owner {
					wantOwned(t, fmt.Sprint("round ", round), err, owner, unit)
				} else if err != nil {
					t.Errorf("the owner's own claim: %v", err)
				}
			}
			if err := nodes[0].blobs.Delete(t.Context(), ownerKey); err != nil {
				t.Fatal(err)
			}
		}
	})
}
