package store

import (
	"context"

	"go.etcd.io/etcd/client/v3/concurrency"
)

// leaseSeconds is how long a leader that died keeps others from leading.
const leaseSeconds = 10

// Lead runs f while this process is the one that leads in name, of all that share the store,
// and again whenever it is, until ctx ends. f ends with its context, which is over as soon as
// it is not known any more that nobody else leads.
func Lead(ctx context.Context, s *Store, name string, f func(context.Context)) error {
	// Not with ctx: its end is to be told to the others, not waited for by them.
	session, err := concurrency.NewSession(s.client, concurrency.WithTTL(leaseSeconds))
	if err != nil {
		return unreachable(err)
	}
	defer func() { _ = session.Close() }()
	lock := concurrency.NewMutex(session, root+"leaders/"+name)
	if err := lock.Lock(ctx); err != nil {
		return unreachable(err)
	}
	run, cancel := context.WithCancel(ctx)
	defer cancel()
	go func() {
		select {
		case <-session.Done():
			cancel()
		case <-run.Done():
		}
	}()
	f(run)
	return nil
}
