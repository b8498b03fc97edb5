package journal

import (
	"bytes"
	"maps"
	"slices"
)

// longKey is how long a key is that is told from other text by its length.
const longKey = 16

// claimants finds whose a damaged record was.
type claimants[V any] struct {
	keys    map[string]V
	lengths []int
	long    []string
}

func newClaimants[V any](keys map[string]V) claimants[V] {
	c, lengths := claimants[V]{keys: keys}, map[int]bool{}
	for k := range keys {
		lengths[len(k)] = true
		if len(k) >= longKey {
			c.long = append(c.long, k)
		}
	}
	c.lengths = slices.Sorted(maps.Keys(lengths))
	return c
}

// of are the keys of which damaged bytes hold the whole, or, in a key's place, a copy
// with at most three bytes changed; unclaimed counts the records that nobody's is found in.
func (c claimants[V]) of(bad []byte) (found []string, unclaimed int) {
	for len(bad) > 0 {
		n := recordLength(bad)
		keys := c.exact(bad[:n])
		if len(keys) == 0 {
			keys = c.near(bad[:n])
		}
		if len(keys) == 0 {
			unclaimed++
		}
		found, bad = append(found, keys...), bad[n:]
	}
	return found, unclaimed
}

// recordLength is where the damaged record at the start of b ends: the next one may be
// damaged too, and begins with a header, of which the last byte can be told from JSON.
func recordLength(b []byte) int {
	at := min(headerLen, len(b))
	if i := bytes.Index(b[at:], []byte("\x01"+bodyStart)); i >= 0 {
		return i + 1 // at + i is the last byte of the next header
	}
	return len(b)
}

func (c claimants[V]) exact(record []byte) (found []string) {
	for i := range record {
		for _, n := range c.lengths {
			if i+n > len(record) {
				break
			}
			if n < longKey && i != headerLen+len(bodyStart) {
				continue
			}
			if _, ok := c.keys[string(record[i:i+n])]; ok {
				found = append(found, string(record[i:i+n]))
			}
		}
	}
	return found
}

func (c claimants[V]) near(record []byte) (found []string) {
	if len(record) <= headerLen+len(bodyStart) {
		return nil
	}
	at := record[headerLen+len(bodyStart):]
	for _, k := range c.long {
		if len(k) <= len(at) && distance(at[:len(k)], k, 3) <= 3 {
			found = append(found, k)
		}
	}
	return found
}

// distance counts the bytes in which a and k differ, up to most+1.
func distance(a []byte, k string, most int) int {
	d := 0
	for i := range a {
		if a[i] != k[i] {
			if d++; d > most {
				break
			}
		}
	}
	return d
}
