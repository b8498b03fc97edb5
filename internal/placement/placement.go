// Package placement decides which edge makes a sandbox. Deciding is pure: the
// view, the request and the randomness come in, an order of edges goes out.
package placement

import (
	"cmp"
	"crypto/sha256"
	"encoding/binary"
	"math/rand/v2"
	"slices"

	"github.com/opendsec/dsec"
)

// Node is what is known of one edge.
type Node struct {
	ID       dsec.EdgeID
	Healthy  bool // answered lately
	Draining bool
	Kinds    map[dsec.Kind]bool // backends that it can run
	// Sandboxes that it holds, with those placed there since it was last asked.
	Sandboxes int64
	Max       int64 // 0: not known
}

// KeyEdges is how many edges, in rendezvous order, may hold a request id.
const KeyEdges = 3

// sample is how many nodes are compared for one create: enough that load
// evens out, few enough that apiservers with the same view do not all pick
// the same one.
const sample = 3

func (n Node) load() float64 {
	if n.Max == 0 {
		return float64(n.Sandboxes)
	}
	return float64(n.Sandboxes) / float64(n.Max)
}

func (n Node) full() bool { return n.Max > 0 && n.Sandboxes >= n.Max }

// Pick returns the edges to try for a sandbox of kind, best first. Its error
// tells why there is none: unsupported, exhausted or unavailable.
func Pick(view []Node, kind dsec.Kind, rng *rand.Rand) ([]dsec.EdgeID, error) {
	var ready, offer int
	var nodes []Node
	for _, n := range view {
		if !n.Healthy || n.Draining {
			continue
		}
		ready++
		if !n.Kinds[kind] {
			continue
		}
		offer++
		if !n.full() {
			nodes = append(nodes, n)
		}
	}
	switch {
	case ready == 0 && slices.ContainsFunc(view, func(n Node) bool { return n.Draining }):
		return nil, dsec.Restarting("no node is ready: one is being restarted")
	case ready == 0:
		return nil, dsec.Errorf(dsec.CodeUnavailable, "no node is ready")
	case offer == 0:
		return nil, &dsec.Error{Code: dsec.CodeUnsupported, Field: "backend", Message: "no node offers it"}
	case len(nodes) == 0:
		return nil, dsec.Errorf(dsec.CodeExhausted, "every node is full")
	}
	rng.Shuffle(len(nodes), func(i, j int) { nodes[i], nodes[j] = nodes[j], nodes[i] })
	slices.SortStableFunc(nodes[:min(sample, len(nodes))], func(a, b Node) int { return cmp.Compare(a.load(), b.load()) })
	ids := make([]dsec.EdgeID, len(nodes))
	for i, n := range nodes {
		ids[i] = n.ID
	}
	return ids, nil
}

// Rendezvous orders edges for a request id: everybody who knows the same edges
// gets the same order, and an edge that comes or goes moves only the keys that
// are its own.
func Rendezvous(project, requestID string, edges []dsec.EdgeID) []dsec.EdgeID {
	weight := func(id dsec.EdgeID) uint64 {
		sum := sha256.Sum256([]byte(project + "\x00" + requestID + "\x00" + string(id)))
		return binary.BigEndian.Uint64(sum[:])
	}
	out := slices.Clone(edges)
	slices.SortFunc(out, func(a, b dsec.EdgeID) int {
		return cmp.Or(cmp.Compare(weight(b), weight(a)), cmp.Compare(a, b))
	})
	return out
}
