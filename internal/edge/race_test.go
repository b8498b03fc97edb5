//go:build race

package edge_test

// raceEnabled: the race detector's shadow memory makes sizes meaningless.
const raceEnabled = true
