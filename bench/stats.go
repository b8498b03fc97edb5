package main

import (
	"context"
	"fmt"
	"slices"
	"time"
)

// samples are durations of one thing done by one contestant.
type samples struct {
	times []time.Duration
	cpu   time.Duration // of the whole machine meanwhile
}

func (s *samples) quantile(q float64) time.Duration {
	sorted := slices.Sorted(slices.Values(s.times))
	return sorted[min(int(q*float64(len(sorted))), len(sorted)-1)]
}

func (s *samples) p50() float64 { return milliseconds(s.quantile(0.50)) }
func (s *samples) p99() float64 { return milliseconds(s.quantile(0.99)) }

// cpuMS is CPU time for one sample, of all processes of the machine: what the
// server, the kernel and this program spent is in it, for rivals alike.
func (s *samples) cpuMS() float64 { return milliseconds(s.cpu) / float64(len(s.times)) }

func milliseconds(d time.Duration) float64 { return float64(d) / float64(time.Millisecond) }

// contestant does the thing that is measured.
type contestant struct {
	name string
	per  int // samples a round
	// once does it and returns how long it took: what is not to be measured,
	// it does outside.
	once func(ctx context.Context) (time.Duration, error)
}

// interleave lets the contestants take turns for some rounds. The first
// sample of each is thrown away: it warms caches.
func interleave(ctx context.Context, rounds int, contestants ...contestant) (map[string]*samples, error) {
	out := make(map[string]*samples)
	for _, c := range contestants {
		out[c.name] = new(samples)
		if _, err := c.once(ctx); err != nil {
			return nil, fmt.Errorf("%s: %w", c.name, err)
		}
	}
	for range rounds {
		for _, c := range contestants {
			s := out[c.name]
			before := machineCPU()
			for range c.per {
				d, err := c.once(ctx)
				if err != nil {
					return nil, fmt.Errorf("%s: %w", c.name, err)
				}
				s.times = append(s.times, d)
			}
			s.cpu += machineCPU() - before
		}
	}
	return out, nil
}

// timed is how long f took.
func timed(f func() error) (time.Duration, error) {
	start := time.Now()
	err := f()
	return time.Since(start), err
}
