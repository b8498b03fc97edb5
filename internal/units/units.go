// Package units writes amounts for people, in one way wherever they are shown.
package units

import (
	"strconv"
	"strings"
)

// sizes are the units of bytes, the largest first.
var sizes = []struct {
	name string
	n    int64
}{{"TiB", 1 << 40}, {"GiB", 1 << 30}, {"MiB", 1 << 20}, {"KiB", 1 << 10}}

// Bytes writes a number of bytes with one digit behind the point, and none where
// that is 0: 8 MiB, 1.5 GiB, 100 bytes.
func Bytes(n int64) string {
	for _, u := range sizes {
		if n >= u.n {
			return strings.TrimSuffix(strconv.FormatFloat(float64(n)/float64(u.n), 'f', 1, 64), ".0") + " " + u.name
		}
	}
	return strconv.FormatInt(n, 10) + " bytes"
}
