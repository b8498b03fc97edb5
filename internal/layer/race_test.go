//go:build race

package layer

// raceEnabled: the race detector's own memory does not fit a helper's limit.
const raceEnabled = true
