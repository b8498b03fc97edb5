package apiserver

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/iam"
	"github.com/opendsec/dsec/internal/store"
	dsecv1 "github.com/opendsec/dsec/proto/dsec/v1"
)

// The states of a job, and what is done to its sandboxes.
const (
	jobActive  = "active"
	jobExpired = "expired"
	jobEnded   = "ended"

	jobPause = "pause"
	jobKill  = "kill"
)

const (
	jobPrefix   = "jobs/"   // <project>/<name>
	leasePrefix = "leases/" // <project>/<name>, for as long as the last heartbeat keeps it

	// jobsEvery is how often jobs are looked at, and jobTimeout bounds what is done
	// for one then.
	jobsEvery  = time.Second
	jobTimeout = time.Minute
	// jobSettled is how long a create that was admitted before a job ended may take:
	// for so long its sandboxes are looked for again.
	jobSettled = 2 * time.Minute
	// jobsAgain is how often that is done.
	jobsAgain = 10 * time.Second
	// jobRetention is how long it is known that a job has ended.
	jobRetention = 24 * time.Hour
	// jobsAtOnce is of how many jobs the sandboxes are asked for at once.
	jobsAtOnce = 64
	// jobTries bounds the attempts to change a document that others change too.
	jobTries = 8
)

// job is the document of one job.
type job struct {
	Labels   map[string]string `json:"labels,omitempty"`
	State    string            `json:"state"`
	Created  time.Time         `json:"created"`
	Lease    time.Duration     `json:"lease,omitempty"`
	OnExpiry string            `json:"on_expiry"`
	Grace    time.Duration     `json:"grace"`
	Changed  time.Time         `json:"changed"`
	// Settled: nothing is left to be done for the state.
	Settled bool `json:"settled,omitempty"`
}

// same reports whether a repeated create asks for what j is.
func (j job) same(o job) bool {
	return maps.Equal(j.Labels, o.Labels) && j.Lease == o.Lease && j.OnExpiry == o.OnExpiry && j.Grace == o.Grace
}

// next is the job in another state.
func (j job) next(state string) job {
	j.State, j.Changed, j.Settled = state, time.Now().UTC(), false
	return j
}

// jobs is the index of jobs. A lease is a document of its own, which the store itself
// removes when its time is over: no clock of an apiserver is asked.
type jobs struct {
	store  *store.Store
	docs   *store.Cache[job]
	leases *store.Cache[time.Time]
	most   int // of a project
}

func openJobs(ctx context.Context, s *store.Store) (*jobs, error) {
	leases, err := store.NewCache(ctx, s, leasePrefix, func(string, time.Time) string { return "" })
	if err != nil {
		return nil, err
	}
	docs, err := store.NewCache(ctx, s, jobPrefix, func(_ string, j job) string { return j.State })
	if err != nil {
		leases.Close()
		return nil, err
	}
	return &jobs{store: s, docs: docs, leases: leases, most: maxJobs}, nil
}

func (b *jobs) close() {
	b.docs.Close()
	b.leases.Close()
}

func noJob(name string) error {
	return &dsec.Error{Code: dsec.CodeNotFound, Field: "name", Message: fmt.Sprintf("no job %.300q", name)}
}

// get reads a job from the store itself, with the revision that a change of it goes by.
func (b *jobs) get(ctx context.Context, project, name string) (job, int64, error) {
	j, rev, ok, err := store.Get[job](ctx, b.store, jobPrefix+project+"/"+name)
	if err == nil && !ok {
		err = noJob(name)
	}
	return j, rev, err
}

// list are the jobs of a project that match, by name.
func (b *jobs) list(project string, match func(job) bool) map[string]job {
	found := map[string]job{}
	b.docs.Range(project+"/", func(key string, j job) bool {
		if match(j) {
			found[strings.TrimPrefix(key, project+"/")] = j
		}
		return true
	})
	return found
}

// create makes a job. One that is there already is kept by it as by a heartbeat.
func (b *jobs) create(ctx context.Context, project, name string, j job) (job, error) {
	j.Created = time.Now().UTC()
	j.Changed = j.Created
	for try := 1; ; try++ {
		there, _, err := b.get(ctx, project, name)
		if err == nil && !there.same(j) {
			err = &dsec.Error{Code: dsec.CodeConflict, Field: "name", Message: fmt.Sprintf("job %.300q is there, with other labels, lease, on_expiry or grace", name)}
		}
		if err == nil {
			return b.heartbeat(ctx, project, name)
		}
		if !isCode(err, dsec.CodeNotFound) {
			return job{}, err
		}
		if n := len(b.list(project, func(job) bool { return true })); n >= b.most {
			return job{}, dsec.Errorf(dsec.CodeExhausted, "the project has %d jobs, with those that ended within %s, at most %d", n, jobRetention, b.most)
		}
		// The lease first: a job without one has expired.
		if err := b.renew(ctx, project, name, j); err != nil {
			return job{}, err
		}
		rev, err := store.Create(ctx, b.store, jobPrefix+project+"/"+name, j)
		if isCode(err, dsec.CodeConflict) && try < jobTries {
			continue
		}
		if err != nil {
			return job{}, err
		}
		return j, b.docs.Wait(ctx, rev)
	}
}

// renew has the lease of a job begin anew.
func (b *jobs) renew(ctx context.Context, project, name string, j job) error {
	if j.Lease == 0 {
		return nil
	}
	rev, err := store.PutFor(ctx, b.store, leasePrefix+project+"/"+name, time.Now().UTC(), j.Lease)
	if err != nil {
		return err
	}
	return b.leases.Wait(ctx, rev)
}

// change writes what f makes of a job; f is called again where somebody else was
// faster, and says by ok that there is something to change. It is a conflict where conds do
// not hold.
func (b *jobs) change(ctx context.Context, project, name string, f func(job) (next job, ok bool, err error), conds ...store.Cond) (job, error) {
	key := jobPrefix + project + "/" + name
	for try := 1; ; try++ {
		j, rev, err := b.get(ctx, project, name)
		if err != nil {
			return job{}, err
		}
		next, ok, err := f(j)
		if err != nil || !ok {
			return j, err
		}
		rev, err = store.PutIf(ctx, b.store, key, next, append(slices.Clone(conds), store.UnchangedSince(key, rev))...)
		if isCode(err, dsec.CodeConflict) && try < jobTries {
			continue
		}
		if err != nil {
			return job{}, err
		}
		return next, b.docs.Wait(ctx, rev)
	}
}

func isCode(err error, code dsec.Code) bool { return err != nil && dsec.CodeOf(err) == code }

func (b *jobs) heartbeat(ctx context.Context, project, name string) (job, error) {
	j, _, err := b.get(ctx, project, name)
	if err != nil {
		return job{}, err
	}
	if j.State != jobEnded {
		if err := b.renew(ctx, project, name, j); err != nil {
			return job{}, err
		}
	}
	return b.change(ctx, project, name, func(j job) (job, bool, error) {
		if j.State == jobEnded {
			return j, false, &dsec.Error{Code: dsec.CodeConflict, Field: "name", Message: fmt.Sprintf("job %.300q has ended", name)}
		}
		return j.next(jobActive), j.State != jobActive, nil
	})
}

func (b *jobs) end(ctx context.Context, project, name string) (job, error) {
	return b.change(ctx, project, name, func(j job) (job, bool, error) { return j.next(jobEnded), j.State != jobEnded, nil })
}

// admit refuses creates of a job that is not active. One that nobody made is a name.
func (b *jobs) admit(project, field, name string) error {
	if name == "" {
		return nil
	}
	j, ok, err := b.docs.Get(project + "/" + name)
	if err != nil {
		return err
	}
	if ok && j.State != jobActive {
		return &dsec.Error{Code: dsec.CodeConflict, Field: field, Message: fmt.Sprintf("job %.300q is %s", name, j.State)}
	}
	return nil
}

// keepJobs does what the states of jobs ask for, until ctx ends. Each apiserver does:
// all of it can be done twice.
func (s *Server) keepJobs(ctx context.Context) {
	every := time.NewTicker(jobsEvery)
	defer every.Stop()
	again := map[string]time.Time{} // when to look again at a job whose sandboxes were asked for
	nodes := jobsAtNodes{busy: map[string]bool{}}
	defer nodes.work.Wait()
	for {
		select {
		case <-every.C:
		case <-ctx.Done():
			return
		}
		due := map[string]job{}
		maps.DeleteFunc(again, func(_ string, at time.Time) bool { return time.Since(at) > jobsAgain })
		s.jobs.docs.Range("", func(key string, j job) bool {
			if s.jobs.due(key, j) {
				due[key] = j
			}
			return true
		})
		for key, j := range due {
			if j.State != jobActive && !j.Settled && time.Now().Before(again[key]) && time.Since(j.Changed) > jobsAgain {
				continue
			}
			keep := func() {
				project, name, _ := strings.Cut(key, "/")
				if err := s.keepJob(ctx, project, name, j); err != nil && ctx.Err() == nil {
					s.log.Info("a job is not settled yet", "project", project, "job", name, "state", j.State, "err", err)
				}
			}
			if !j.isForNodes() {
				keep()
			} else if nodes.begin(key, keep) {
				again[key] = time.Now().Add(jobsAgain)
			}
		}
	}
}

// jobsAtNodes are the jobs whose sandboxes are asked for, aside: a node that does not answer keeps the
// leases of other jobs from nothing.
type jobsAtNodes struct {
	work sync.WaitGroup
	mu   sync.Mutex
	busy map[string]bool
}

// begin does something for a job, unless that is under way, or too much is.
func (a *jobsAtNodes) begin(key string, f func()) bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.busy[key] || len(a.busy) >= jobsAtOnce {
		return false
	}
	a.busy[key] = true
	a.work.Go(func() {
		defer func() {
			a.mu.Lock()
			defer a.mu.Unlock()
			delete(a.busy, key)
		}()
		f()
	})
	return true
}

// due reports whether there is something to do for a job.
func (b *jobs) due(key string, j job) bool {
	switch j.State {
	case jobActive:
		_, kept, err := b.leases.Get(key)
		return j.Lease > 0 && !kept && err == nil
	case jobExpired:
		return !j.Settled || j.graceOver()
	}
	return !j.Settled || time.Since(j.Changed) > jobRetention
}

// isForNodes reports whether what is to be done for a job is done at nodes.
func (j job) isForNodes() bool {
	return j.State != jobActive && !j.Settled && (j.State == jobEnded || !j.graceOver())
}

func (j job) graceOver() bool { return j.OnExpiry == jobKill || time.Since(j.Changed) > j.Grace }

// keepJob does what one job's state asks for.
func (s *Server) keepJob(ctx context.Context, project, name string, j job) error {
	ctx, cancel := context.WithTimeout(context.WithValue(ctx, principalKey{}, iam.Principal{Project: project}), jobTimeout)
	defer cancel()
	from := j.State
	to := func(next job, conds ...store.Cond) error {
		_, err := s.jobs.change(ctx, project, name, func(now job) (job, bool, error) {
			return next, now.State == from && now.Changed.Equal(j.Changed), nil
		}, conds...)
		return err
	}
	switch {
	case j.State == jobActive:
		// A heartbeat that came since it was looked at has been answered: it counts.
		err := to(j.next(jobExpired), store.Absent(leasePrefix+project+"/"+name))
		if isCode(err, dsec.CodeConflict) {
			return nil
		}
		if err == nil {
			s.log.Info("the lease of a job ran out", "project", project, "job", name)
		}
		return err
	case j.State == jobExpired && j.graceOver():
		return to(j.next(jobEnded))
	case j.State == jobEnded && j.Settled:
		_, err := s.jobs.store.Delete(ctx, jobPrefix+project+"/"+name)
		return err
	}
	act := &dsecv1.ApplyToJobRequest{Job: name, Action: jobKill}
	if j.State == jobExpired { // as long as the grace says, whatever a node does with others
		act.Action, act.Pause = jobPause, &dsecv1.PauseOptions{MaxPaused: durationpb.New(0)}
	}
	items, err := s.applyToJob(ctx, act)
	if err != nil {
		return err
	}
	for _, item := range items {
		if d := item.GetError().GetDetail(); d != nil && d.Code != string(dsec.CodeUnsupported) {
			return fmt.Errorf("sandbox %s: %s", item.SandboxId, item.Error.Message)
		}
	}
	if time.Since(j.Changed) < jobSettled {
		return nil
	}
	j.Settled = true
	return to(j)
}
