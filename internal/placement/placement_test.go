package placement

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"

	"pgregory.net/rapid"

	"github.com/opendsec/dsec"
)

func node(id string, held, limit int64) Node {
	return Node{ID: dsec.EdgeID(id), Healthy: true, Kinds: map[dsec.Kind]bool{dsec.KindFake: true}, Sandboxes: held, Max: limit}
}

func rng(seed uint64) *rand.Rand { return rand.New(rand.NewPCG(seed, seed)) }

func TestPickTellsWhyThereIsNoNode(t *testing.T) {
	sick, draining := node("sick", 0, 10), node("drain", 0, 10)
	sick.Healthy, draining.Draining = false, true
	for _, tc := range []struct {
		name string
		view []Node
		kind dsec.Kind
		want dsec.Code
	}{
		{"none", nil, dsec.KindFake, dsec.CodeUnavailable},
		{"none ready", []Node{sick, draining}, dsec.KindFake, dsec.CodeUnavailable},
		{"other backend", []Node{node("a", 0, 1), sick}, dsec.KindVM, dsec.CodeUnsupported},
		{"full", []Node{node("a", 1, 1), sick}, dsec.KindFake, dsec.CodeExhausted},
	} {
		if ids, err := Pick(tc.view, tc.kind, rng(1)); err == nil || dsec.CodeOf(err) != tc.want {
			t.Errorf("%s: %v, %v; want %s", tc.name, ids, err, tc.want)
		}
	}
	// Where the only node is being restarted, who asks waits for it.
	for name, view := range map[string][]Node{"restarting": {sick, draining}, "": {sick}, "none": nil} {
		_, err := Pick(view, dsec.KindFake, rng(1))
		if e, ok := errors.AsType[*dsec.Error](err); !ok || e.Restarting != (name == "restarting") {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestPickTakesTheLeastLoadedOfFew(t *testing.T) {
	view := []Node{node("aaaaa", 9, 10), node("bbbbb", 1, 10), node("ccccc", 60, 1000)}
	for seed := range uint64(20) {
		ids, err := Pick(view, dsec.KindFake, rng(seed))
		if err != nil || !slices.Equal(ids, []dsec.EdgeID{"ccccc", "bbbbb", "aaaaa"}) {
			t.Fatalf("%v, %v", ids, err)
		}
	}
}

// TestPickSpreads places 10,000 sandboxes on 160 nodes that all know of each other's load.
func TestPickSpreads(t *testing.T) {
	view := make([]Node, 160)
	for i := range view {
		view[i] = node(fmt.Sprintf("n%04d", i), 0, 100)
	}
	at := map[dsec.EdgeID]int{}
	for i, n := range view {
		at[n.ID] = i
	}
	r := rng(7)
	for range 10_000 {
		ids, err := Pick(view, dsec.KindFake, r)
		if err != nil {
			t.Fatal(err)
		}
		view[at[ids[0]]].Sandboxes++
	}
	for _, n := range view {
		if n.Sandboxes < 55 || n.Sandboxes > 70 { // 62.5 each
			t.Errorf("%s holds %d", n.ID, n.Sandboxes)
		}
	}
}

func TestRendezvous(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		edges := rapid.SliceOfNDistinct(rapid.StringMatching("[a-z2-7]{5}"), 2, 20, rapid.ID).Draw(t, "edges")
		ids := make([]dsec.EdgeID, len(edges))
		for i, e := range edges {
			ids[i] = dsec.EdgeID(e)
		}
		project, key := rapid.String().Draw(t, "project"), rapid.String().Draw(t, "key")
		order := Rendezvous(project, key, ids)
		shuffled := slices.Clone(ids)
		rng(rapid.Uint64().Draw(t, "seed")).Shuffle(len(ids), func(i, j int) { shuffled[i], shuffled[j] = shuffled[j], shuffled[i] })
		if again := Rendezvous(project, key, shuffled); !slices.Equal(order, again) {
			t.Fatalf("order depends on the order of the edges: %v, %v", order, again)
		}
		gone := order[rapid.IntRange(0, len(order)-1).Draw(t, "gone")]
		without := func(s []dsec.EdgeID) []dsec.EdgeID {
			return slices.DeleteFunc(slices.Clone(s), func(id dsec.EdgeID) bool { return id == gone })
		}
		if left := Rendezvous(project, key, without(ids)); !slices.Equal(left, without(order)) {
			t.Fatalf("an edge that left moved others: %v, %v", left, order)
		}
	})
}
