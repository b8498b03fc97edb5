//go:build race

package testutil

// Race reports whether this was built with the race detector, whose own memory
// fits no limit and makes sizes meaningless.
const Race = true
