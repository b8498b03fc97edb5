package lazy

import (
	"context"
	"errors"

	"github.com/opendsec/dsec"
)

// prefetchRuns is how many calls to the store a prefetch has under way.
const prefetchRuns = 3

// prefetch brings the chunks that ranges touch to the cache, in that order.
func (c *cache) prefetch(ctx context.Context, im *image, ranges []Range, progress func(Progress)) error {
	var p Progress
	for _, r := range ranges {
		first, end := im.span(r)
		for i := first; i < end; i++ {
			p.Total += im.chunk(i).Length
		}
	}
	progress(p)
	perRun := max(1, fetchRun/im.ChunkSize)
	var queue [][]*flight // of runs that were started
	var sizes []int64
	finish := func() error {
		err := landed(ctx, queue[0])
		p.Done += sizes[0]
		queue, sizes = queue[1:], sizes[1:]
		if err == nil {
			progress(p)
		}
		return err
	}
	for _, r := range ranges {
		first, end := im.span(r)
		for i := first; i < end; i += perRun {
			if len(queue) == prefetchRuns {
				if err := finish(); err != nil {
					return err
				}
			}
			to := min(i+perRun, end)
			queue = append(queue, c.start(im, i, to, c.background))
			last := im.chunk(to - 1)
			sizes = append(sizes, last.Offset+last.Length-im.chunk(i).Offset)
		}
	}
	for len(queue) > 0 {
		if err := finish(); err != nil {
			return err
		}
	}
	return nil
}

// landed waits for flights. The error is unavailable or exhausted.
func landed(ctx context.Context, flights []*flight) error {
	for _, fl := range flights {
		select {
		case <-fl.done:
		case <-ctx.Done():
			return ctx.Err()
		}
		switch _, typed := errors.AsType[*dsec.Error](fl.err); {
		case typed:
			return fl.err
		case fl.err != nil:
			return dsec.Errorf(dsec.CodeUnavailable, "fetch: %w", fl.err)
		case fl.data != nil:
			return &dsec.Error{Code: dsec.CodeExhausted, Message: "the cache's disk is full"}
		}
	}
	return nil
}
