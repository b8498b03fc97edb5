package store

import (
	"context"
	"encoding/json"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/opendsec/dsec"
)

// Times of a cache. A revoked key may be accepted for at most staleAfter by an
// apiserver that is cut off from etcd; then it refuses all.
const (
	progressEvery = 5 * time.Second
	staleAfter    = 30 * time.Second
	retryAfter    = 200 * time.Millisecond
)

// Cache is a copy of the documents below a prefix, kept current by a watch.
// Keys are without the prefix.
type Cache[T any] struct {
	store  *Store
	prefix string
	index  func(key string, v T) string

	cancel context.CancelFunc
	done   chan struct{}

	mu      sync.RWMutex
	docs    map[string]T
	byIndex map[string]map[string]struct{}
	rev     int64
	fresh   time.Time
	moved   chan struct{} // closed and replaced whenever rev grows
}

// NewCache loads the documents below prefix and follows their changes until
// Close. index, where not nil, gives a second name to look documents up by.
func NewCache[T any](ctx context.Context, s *Store, prefix string, index func(key string, v T) string) (*Cache[T], error) {
	c := &Cache[T]{store: s, prefix: prefix, index: index, done: make(chan struct{}), moved: make(chan struct{})}
	if err := c.load(ctx); err != nil {
		return nil, err
	}
	run, cancel := context.WithCancel(context.WithoutCancel(ctx))
	c.cancel = cancel
	go c.run(run)
	return c, nil
}

// Close ends the watch and waits for it.
func (c *Cache[T]) Close() {
	c.cancel()
	<-c.done
}

// Get returns the document under key. It fails as unavailable where the cache
// has not heard from the store for so long that the answer may be wrong.
func (c *Cache[T]) Get(key string) (v T, ok bool, err error) {
	c.mu.RLock()
	defer c.mu.RUnlock()
	if time.Since(c.fresh) > staleAfter {
		return v, false, dsec.Errorf(dsec.CodeUnavailable, "the store does not answer")
	}
	v, ok = c.docs[key]
	return v, ok, nil
}

// Keys returns the keys of the documents that index names, sorted.
func (c *Cache[T]) Keys(index string) []string {
	c.mu.RLock()
	defer c.mu.RUnlock()
	return slices.Sorted(maps.Keys(c.byIndex[index]))
}

// Range calls f for each document whose key starts with prefix, by key, until
// it returns false. It works on a copy.
func (c *Cache[T]) Range(prefix string, f func(key string, v T) bool) {
	c.mu.RLock()
	docs := make(map[string]T)
	for k, v := range c.docs {
		if strings.HasPrefix(k, prefix) {
			docs[k] = v
		}
	}
	c.mu.RUnlock()
	for _, k := range slices.Sorted(maps.Keys(docs)) {
		if !f(k, docs[k]) {
			return
		}
	}
}

// Revision is the store's up to which the cache has seen all that is written: what it
// shows is that, or later.
func (c *Cache[T]) Revision() int64 {
	c.mu.RLock()
	defer c.mu.RUnlock()
	return c.rev
}

// Wait returns once the cache has seen revision rev, so that who wrote it
// reads it.
func (c *Cache[T]) Wait(ctx context.Context, rev int64) error {
	for {
		c.mu.RLock()
		now, moved := c.rev, c.moved
		c.mu.RUnlock()
		if now >= rev {
			return nil
		}
		select {
		case <-moved:
		case <-ctx.Done():
			return unknown(ctx.Err())
		}
	}
}

func (c *Cache[T]) load(ctx context.Context) error {
	docs, rev, err := list[T](ctx, c.store, c.prefix)
	if err != nil {
		return err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.docs, c.byIndex = make(map[string]T, len(docs)), make(map[string]map[string]struct{})
	for k, v := range docs {
		c.put(k, v)
	}
	c.advance(rev)
	return nil
}

func (c *Cache[T]) run(ctx context.Context) {
	defer close(c.done)
	for ctx.Err() == nil {
		if err := c.follow(ctx); err != nil && ctx.Err() == nil {
			c.store.log.Warn("watch ended; loading again", "prefix", c.prefix, "err", err)
		}
		for ctx.Err() == nil {
			if c.load(ctx) == nil {
				break
			}
			select {
			case <-time.After(retryAfter):
			case <-ctx.Done():
			}
		}
	}
}

// follow applies the watch's events until it breaks. A watch that is only
// quiet is told from one that is cut off by asking for its progress.
func (c *Cache[T]) follow(ctx context.Context) error {
	ctx, cancel := context.WithCancel(clientv3.WithRequireLeader(ctx))
	defer cancel()
	// From the revision that is known and not from the one after it: etcd tells
	// no progress to a watch whose first revision is not there yet, and where
	// nobody writes it never comes. Applying a change twice does no harm.
	c.mu.RLock()
	known := c.rev
	c.mu.RUnlock()
	events := c.store.client.Watch(ctx, root+c.prefix, clientv3.WithPrefix(), clientv3.WithRev(known), clientv3.WithProgressNotify())
	tick := time.NewTicker(progressEvery)
	defer tick.Stop()
	for {
		select {
		case res, ok := <-events:
			if !ok {
				return ctx.Err()
			}
			if err := res.Err(); err != nil {
				return err
			}
			c.apply(res)
		case <-tick.C:
			if err := c.store.client.RequestProgress(ctx); err != nil {
				return err
			}
		}
	}
}

func (c *Cache[T]) apply(res clientv3.WatchResponse) {
	c.mu.Lock()
	defer c.mu.Unlock()
	// The header may be ahead of the events of a watch that is catching up.
	rev := res.Header.Revision
	for _, ev := range res.Events {
		rev = ev.Kv.ModRevision
		key := string(ev.Kv.Key[len(root)+len(c.prefix):])
		c.drop(key)
		if ev.Type != clientv3.EventTypePut {
			continue
		}
		var v T
		if err := json.Unmarshal(ev.Kv.Value, &v); err != nil {
			c.store.log.Error("damaged document left out", "key", string(ev.Kv.Key), "err", err)
			continue
		}
		c.put(key, v)
	}
	c.advance(rev)
}

// put, drop and advance are called with mu held.
func (c *Cache[T]) put(key string, v T) {
	c.docs[key] = v
	if c.index == nil {
		return
	}
	name := c.index(key, v)
	if c.byIndex[name] == nil {
		c.byIndex[name] = make(map[string]struct{})
	}
	c.byIndex[name][key] = struct{}{}
}

func (c *Cache[T]) drop(key string) {
	old, ok := c.docs[key]
	if !ok {
		return
	}
	delete(c.docs, key)
	if c.index == nil {
		return
	}
	name := c.index(key, old)
	delete(c.byIndex[name], key)
	if len(c.byIndex[name]) == 0 {
		delete(c.byIndex, name)
	}
}

func (c *Cache[T]) advance(rev int64) {
	c.fresh = time.Now()
	if rev > c.rev {
		c.rev = rev
		close(c.moved)
		c.moved = make(chan struct{})
	}
}
