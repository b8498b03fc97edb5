package store

import (
	"context"
	"encoding/json"
	"errors"
	"strings"
	"time"

	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"
)

// ErrCompacted says that the changes since a revision are kept no more.
var ErrCompacted = errors.New("the store has forgotten changes since then")

// Change is one of a document. Old is nil where there was none; New where there is none any more.
type Change[T any] struct {
	Key      string // without the prefix
	Revision int64
	Old, New *T
}

// Watch calls f for the changes of documents below prefix from a revision on, in their order, and
// with none now and then, until ctx ends or f fails; next is the revision behind those that
// it was called with.
func Watch[T any](ctx context.Context, s *Store, prefix string, from int64, f func(changes []Change[T], next int64) error) error {
	ctx, cancel := context.WithCancel(clientv3.WithRequireLeader(ctx))
	defer cancel()
	// From the revision before, which is there: see Cache.
	events := s.client.Watch(ctx, root+prefix, clientv3.WithPrefix(), clientv3.WithPrevKV(), clientv3.WithRev(max(1, from-1)), clientv3.WithProgressNotify())
	tick := time.NewTicker(progressEvery)
	defer tick.Stop()
	for {
		select {
		case res, ok := <-events:
			switch {
			case !ok && ctx.Err() != nil:
				return ctx.Err()
			case !ok:
				return unreachable(errors.New("the watch ended"))
			case errors.Is(res.Err(), rpctypes.ErrCompacted) || res.CompactRevision > 0:
				return ErrCompacted
			case res.Err() != nil:
				return unreachable(res.Err())
			}
			changes, next := changesOf[T](s, prefix, from, res)
			if err := f(changes, next); err != nil {
				return err
			}
		case <-tick.C:
			if err := s.client.RequestProgress(ctx); err != nil {
				return unreachable(err)
			}
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

func changesOf[T any](s *Store, prefix string, from int64, res clientv3.WatchResponse) (changes []Change[T], next int64) {
	next = from
	for _, ev := range res.Events {
		if ev.Kv.ModRevision < from {
			continue
		}
		c := Change[T]{Key: strings.TrimPrefix(string(ev.Kv.Key), root+prefix), Revision: ev.Kv.ModRevision}
		if ev.Type == clientv3.EventTypePut {
			c.New = decode[T](s, ev.Kv.Key, ev.Kv.Value)
		}
		if ev.PrevKv != nil {
			c.Old = decode[T](s, ev.Kv.Key, ev.PrevKv.Value)
		}
		changes, next = append(changes, c), max(next, ev.Kv.ModRevision+1)
	}
	if len(res.Events) == 0 { // nothing happened up to there
		next = max(next, res.Header.Revision+1)
	}
	return changes, next
}

func decode[T any](s *Store, key, value []byte) *T {
	v := new(T)
	if err := json.Unmarshal(value, v); err != nil {
		s.log.Error("damaged document left out", "key", string(key), "err", err)
		return nil
	}
	return v
}
