package measure

import (
	"context"
	"fmt"
	"slices"
	"time"

	"golang.org/x/sync/errgroup"
)

// Samples are durations of one thing done by one contestant.
type Samples struct {
	Times []time.Duration
	CPU   time.Duration // of the whole machine meanwhile
}

// Quantile is the sample below which the part q of them is.
func (s *Samples) Quantile(q float64) time.Duration {
	sorted := slices.Sorted(slices.Values(s.Times))
	return sorted[min(int(q*float64(len(sorted))), len(sorted)-1)]
}

// P50 is the median in milliseconds.
func (s *Samples) P50() float64 { return Milliseconds(s.Quantile(0.50)) }

// P99 is the 99th percentile in milliseconds.
func (s *Samples) P99() float64 { return Milliseconds(s.Quantile(0.99)) }

// CPUMS is CPU time for one sample, of all processes of the machine: what the
// server, the kernel and this program spent is in it, for rivals alike.
func (s *Samples) CPUMS() float64 { return Milliseconds(s.CPU) / float64(len(s.Times)) }

// Milliseconds is d as a number.
func Milliseconds(d time.Duration) float64 { return float64(d) / float64(time.Millisecond) }

// Contestant does the thing that is measured.
type Contestant struct {
	Name string
	Per  int // samples a round
	// Once does it and returns how long it took: what is not to be measured,
	// it does outside.
	Once func(ctx context.Context) (time.Duration, error)
}

// Interleave lets the contestants take turns for some rounds. The first
// sample of each is thrown away: it warms caches.
func Interleave(ctx context.Context, rounds int, contestants ...Contestant) (map[string]*Samples, error) {
	out := make(map[string]*Samples)
	for _, c := range contestants {
		out[c.Name] = new(Samples)
		if _, err := c.Once(ctx); err != nil {
			return nil, fmt.Errorf("%s: %w", c.Name, err)
		}
	}
	for range rounds {
		for _, c := range contestants {
			s := out[c.Name]
			before := MachineCPU()
			for range c.Per {
				d, err := c.Once(ctx)
				if err != nil {
					return nil, fmt.Errorf("%s: %w", c.Name, err)
				}
				s.Times = append(s.Times, d)
			}
			s.CPU += MachineCPU() - before
		}
	}
	return out, nil
}

// Timed is how long f took.
func Timed(f func() error) (time.Duration, error) {
	start := time.Now()
	err := f()
	return time.Since(start), err
}

// EachOf calls f for 0 to n-1, some at once, and returns the first error.
func EachOf(n, parallel int, f func(i int) error) error {
	var g errgroup.Group
	g.SetLimit(parallel)
	for i := range n {
		g.Go(func() error { return f(i) })
	}
	return g.Wait()
}
