package client

import (
	"context"
	"iter"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/apierr"
	dsecv1 "github.com/opendsec/dsec/proto/dsec/v1"
)

// JobOptions describe a job to make. Zero values are the server's defaults.
type JobOptions struct {
	Labels map[string]string
	// Lease is how long a heartbeat keeps the job, 5 s to 24 h; 0: it never expires.
	Lease time.Duration
	// KillOnExpiry kills its sandboxes once the lease ran out. Else they are paused,
	// and killed after Grace.
	KillOnExpiry bool
	// Grace is 0 for the default of 24 hours, or Never for none at all: it is killed
	// as soon as it was paused.
	Grace time.Duration
}

// Job is all sandboxes of one training or evaluation run, known by its name.
type Job struct {
	c    *Client
	name string
}

// JobResult is what became of one sandbox of a job.
type JobResult struct {
	ID    dsec.SandboxID
	State dsec.State // that it is in now
	Err   error      // nil where what was asked for is done
}

// Job is a job that is there already. It makes no call.
func (c *Client) Job(name string) *Job { return &Job{c: c, name: name} }

// CreateJob makes a job. One that is there with the same options is kept as by a
// heartbeat.
func (c *Client) CreateJob(ctx context.Context, name string, o JobOptions) (*Job, error) {
	m := &dsecv1.CreateJobRequest{Name: name, Labels: o.Labels, Grace: timeout(o.Grace)}
	if o.Lease != 0 {
		m.Lease = timeout(o.Lease)
	}
	if o.KillOnExpiry {
		m.OnExpiry = "kill"
	}
	if _, err := call(ctx, c, c.job.CreateJob, m, dsec.Retryable); err != nil {
		return nil, err
	}
	return c.Job(name), nil
}

// Name is the job's.
func (j *Job) Name() string { return j.name }

// Info asks what state the job is in.
func (j *Job) Info(ctx context.Context) (*dsec.Job, error) {
	res, err := call(ctx, j.c, j.c.job.GetJob, &dsecv1.GetJobRequest{Name: j.name}, dsec.Retryable)
	if err != nil {
		return nil, err
	}
	return jobOf(res.Job), nil
}

// Heartbeat has the lease of the job begin anew. One that had expired is active again;
// of one that has ended it is a conflict.
func (j *Job) Heartbeat(ctx context.Context) (*dsec.Job, error) {
	res, err := call(ctx, j.c, j.c.job.Heartbeat, &dsecv1.HeartbeatRequest{Name: j.name}, dsec.Retryable)
	if err != nil {
		return nil, err
	}
	return jobOf(res.Job), nil
}

// Pause pauses every sandbox of the job.
func (j *Job) Pause(ctx context.Context, o PauseOptions) ([]JobResult, error) {
	res, err := call(ctx, j.c, j.c.job.PauseJob, &dsecv1.PauseJobRequest{Name: j.name, Options: o.message()}, dsec.Retryable)
	return jobResults(res.GetItems()), err
}

// Resume resumes every sandbox of the job.
func (j *Job) Resume(ctx context.Context) ([]JobResult, error) {
	res, err := call(ctx, j.c, j.c.job.ResumeJob, &dsecv1.ResumeJobRequest{Name: j.name}, dsec.Retryable)
	return jobResults(res.GetItems()), err
}

// Kill kills every sandbox of the job, which stays as it is.
func (j *Job) Kill(ctx context.Context) ([]JobResult, error) {
	res, err := call(ctx, j.c, j.c.job.KillJob, &dsecv1.KillJobRequest{Name: j.name}, dsec.Retryable)
	return jobResults(res.GetItems()), err
}

// End ends the job and kills its sandboxes.
func (j *Job) End(ctx context.Context) ([]JobResult, error) {
	res, err := call(ctx, j.c, j.c.job.EndJob, &dsecv1.EndJobRequest{Name: j.name}, dsec.Retryable)
	return jobResults(res.GetItems()), err
}

func jobResults(items []*dsecv1.JobItem) []JobResult {
	out := make([]JobResult, len(items))
	for i, item := range items {
		out[i] = JobResult{ID: dsec.SandboxID(item.SandboxId), State: dsec.State(item.State)}
		if e := item.Error; e != nil {
			out[i].Err = apierr.FromDetail(e.GetDetail(), e.GetMessage())
		}
	}
	return out
}

// JobListOptions filter a list of jobs. Zero values do not filter, but States: none is
// all that have not ended.
type JobListOptions struct {
	Labels map[string]string
	States []dsec.JobState
}

// Jobs lists the project's jobs, by name. An error ends the list.
func (c *Client) Jobs(ctx context.Context, o JobListOptions) iter.Seq2[*dsec.Job, error] {
	return func(yield func(*dsec.Job, error) bool) {
		req := &dsecv1.ListJobsRequest{Labels: o.Labels, PageSize: 1000}
		for _, s := range o.States {
			req.States = append(req.States, string(s))
		}
		for {
			res, err := call(ctx, c, c.job.ListJobs, req, dsec.Retryable)
			if err != nil {
				yield(nil, err)
				return
			}
			for _, j := range res.Jobs {
				if !yield(jobOf(j), nil) {
					return
				}
			}
			if res.NextPageToken == "" {
				return
			}
			req.PageToken = res.NextPageToken
		}
	}
}

func jobOf(m *dsecv1.Job) *dsec.Job {
	return &dsec.Job{
		Name: m.GetName(), Labels: m.GetLabels(), State: dsec.JobState(m.GetState()), Created: m.GetCreated().AsTime(),
		Lease: m.GetLease().AsDuration(), OnExpiry: m.GetOnExpiry(), Grace: m.GetGrace().AsDuration(), Changed: m.GetChanged().AsTime(),
	}
}
