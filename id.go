package dsec

import (
	"crypto/rand"
	"encoding/base32"
)

// SandboxID is `<edge><random>` in lower-case base32: a valid DNS label
// without a dash, whose first EdgeIDLen characters name the edge.
type SandboxID string

// EdgeID names one edge; it is the first part of the ID of its sandboxes.
type EdgeID string

// Lengths of the two parts of a SandboxID, in characters of 5 bits.
const (
	EdgeIDLen   = 5  // 33 million edges
	randomIDLen = 20 // 100 bits: never reused, never guessed
	idLen       = EdgeIDLen + randomIDLen
)

var idEncoding = base32.NewEncoding("abcdefghijklmnopqrstuvwxyz234567").WithPadding(base32.NoPadding)

// NewSandboxID makes an ID that no other sandbox has.
func NewSandboxID(edge EdgeID) SandboxID {
	return SandboxID(string(edge) + randomID(randomIDLen))
}

// NewEdgeID makes a random edge ID, for a node that has none yet.
func NewEdgeID() EdgeID { return EdgeID(randomID(EdgeIDLen)) }

func randomID(n int) string {
	b := make([]byte, (n*5+7)/8)
	_, _ = rand.Read(b) // never fails: crypto/rand panics instead
	return idEncoding.EncodeToString(b)[:n]
}

// ParseSandboxID checks the form of an ID that came from a caller.
func ParseSandboxID(s string) (SandboxID, error) {
	if len(s) != idLen || !validID(s) {
		return "", Invalid("sandbox_id", "want %d characters of a-z and 2-7", idLen)
	}
	return SandboxID(s), nil
}

// ParseEdgeID checks the form of an edge ID.
func ParseEdgeID(s string) (EdgeID, error) {
	if len(s) != EdgeIDLen || !validID(s) {
		return "", Invalid("edge_id", "want %d characters of a-z and 2-7", EdgeIDLen)
	}
	return EdgeID(s), nil
}

// Edge is the edge that owns the sandbox.
func (id SandboxID) Edge() EdgeID { return EdgeID(id[:EdgeIDLen]) }

func validID(s string) bool {
	for _, c := range []byte(s) {
		if !('a' <= c && c <= 'z' || '2' <= c && c <= '7') {
			return false
		}
	}
	return true
}
