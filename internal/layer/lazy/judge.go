package lazy

import (
	"context"
	"errors"
	"time"
)

// probeEvery is how often it is tried to fetch what could not be: nobody may read of an
// image for long after its store is back.
const probeEvery = 10 * time.Second

// judge keeps the image's condition after a fetch.
func (c *cache) judge(im *image, i int64, err error) {
	if errors.Is(err, context.Canceled) && c.life.Err() != nil {
		return
	}
	im.mu.Lock()
	was := im.stats.Degraded
	im.stats.Degraded = ""
	if err != nil {
		im.stats.Degraded, im.failed = err.Error(), i
	}
	probe := err != nil && !errors.Is(err, errNoRoom) && !im.probed
	im.probed = im.probed || probe
	im.mu.Unlock()
	if probe {
		c.probing.Go(func() { c.probe(im) })
	}
	switch {
	case err != nil && was == "":
		c.notify(Event{Kind: EventDegraded, Key: im.Key, Chunk: i, Reason: err.Error()})
	case err == nil && was != "":
		c.notify(Event{Kind: EventRecovered, Key: im.Key, Chunk: i})
	}
}

// probe fetches the chunk of an image that could not be fetched last, again and again, as
// long as the image is in use, until one can be: that is judged as any other.
func (c *cache) probe(im *image) {
	every := time.NewTicker(c.probeEvery)
	defer every.Stop()
	for {
		select {
		case <-every.C:
		case <-c.life.Done():
		}
		im.mu.Lock()
		i := im.failed
		if im.probed = c.life.Err() == nil && im.stats.Degraded != "" && (im.inUse || im.left); !im.probed {
			im.mu.Unlock()
			return
		}
		im.mu.Unlock()
		for _, fl := range c.start(im, i, i+1, c.background) {
			<-fl.done
		}
	}
}
