package apiserver

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"
	"unicode/utf8"

	"connectrpc.com/connect"
	"golang.org/x/sync/errgroup"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/opendsec/dsec"
	dsecv1 "github.com/opendsec/dsec/proto/dsec/v1"
	"github.com/opendsec/dsec/proto/dsec/v1/dsecv1connect"
)

// Bounds of a job.
const (
	maxJobName      = 256 // characters
	maxJobLabels    = 64
	maxLabel        = 256 // characters
	maxJobLabelsLen = 4 << 10
	maxJobs         = 10_000 // of a project, those of jobRetention too
	leastLease      = 5 * time.Second
	mostLease       = 24 * time.Hour
	mostGrace       = 366 * 24 * time.Hour
	defaultGrace    = 24 * time.Hour
)

type jobService struct{ s *Server }

// CreateJob makes a job, or finds the same one.
func (v jobService) CreateJob(ctx context.Context, req *connect.Request[dsecv1.CreateJobRequest]) (*connect.Response[dsecv1.CreateJobResponse], error) {
	m := req.Msg
	j := job{Labels: m.Labels, State: jobActive, OnExpiry: m.OnExpiry}
	if err := checkJob(m.Name, m.Labels); err != nil {
		return nil, err
	}
	switch m.OnExpiry {
	case "":
		j.OnExpiry = jobPause
	case jobPause, jobKill:
	default:
		return nil, dsec.Invalid("on_expiry", "want pause or kill, got %.32q", m.OnExpiry)
	}
	var err error
	if j.Lease, err = span("lease", m.Lease, 0, leastLease, mostLease); err != nil {
		return nil, err
	}
	if j.Grace, err = span("grace", m.Grace, defaultGrace, 0, mostGrace); err != nil {
		return nil, err
	}
	made, err := v.s.jobs.create(ctx, principal(ctx).Project, m.Name, j)
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(&dsecv1.CreateJobResponse{Job: made.message(m.Name)}), nil
}

// span reads a duration within bounds; unset is def.
func span(field string, d *durationpb.Duration, def, least, most time.Duration) (time.Duration, error) {
	if d == nil {
		return def, nil
	}
	if t := d.AsDuration(); d.CheckValid() == nil && t >= least && t <= most {
		return t, nil
	}
	return 0, dsec.Invalid(field, "want %s to %s", least, most)
}

func checkJob(name string, labels map[string]string) error {
	control := func(r rune) bool { return r < ' ' || r == 0x7f }
	if name == "" || utf8.RuneCountInString(name) > maxJobName || strings.ContainsFunc(name, control) {
		return dsec.Invalid("name", "want 1 to %d characters, and no control characters", maxJobName)
	}
	if len(labels) > maxJobLabels {
		return dsec.Invalid("labels", "want at most %d, got %d", maxJobLabels, len(labels))
	}
	size := 0
	for k, v := range labels {
		if k == "" || utf8.RuneCountInString(k) > maxLabel || utf8.RuneCountInString(v) > maxLabel {
			return dsec.Invalid("labels", "want names of 1 to %d characters and values of at most as many", maxLabel)
		}
		size += len(k) + len(v)
	}
	if size > maxJobLabelsLen {
		return dsec.Invalid("labels", "want at most %d bytes in all, got %d", maxJobLabelsLen, size)
	}
	return nil
}

// GetJob tells the state of a job.
func (v jobService) GetJob(ctx context.Context, req *connect.Request[dsecv1.GetJobRequest]) (*connect.Response[dsecv1.GetJobResponse], error) {
	j, _, err := v.s.jobs.get(ctx, principal(ctx).Project, req.Msg.Name)
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(&dsecv1.GetJobResponse{Job: j.message(req.Msg.Name)}), nil
}

// ListJobs lists the project's jobs by name.
func (v jobService) ListJobs(ctx context.Context, req *connect.Request[dsecv1.ListJobsRequest]) (*connect.Response[dsecv1.ListJobsResponse], error) {
	m, size := req.Msg, int(req.Msg.PageSize)
	switch {
	case size < 0 || size > maxPage:
		return nil, dsec.Invalid("page_size", "want 1 to %d, or 0 for %d", maxPage, defaultPage)
	case size == 0:
		size = defaultPage
	}
	for i, st := range m.States {
		if st != jobActive && st != jobExpired && st != jobEnded {
			return nil, dsec.Invalid(fmt.Sprintf("states[%d]", i), "want active, expired or ended, got %.32q", st)
		}
	}
	found := v.s.jobs.list(principal(ctx).Project, func(j job) bool {
		for k, want := range m.Labels {
			if got, ok := j.Labels[k]; !ok || got != want {
				return false
			}
		}
		return len(m.States) == 0 && j.State != jobEnded || slices.Contains(m.States, j.State)
	})
	out := new(dsecv1.ListJobsResponse)
	for _, name := range slices.Sorted(maps.Keys(found)) {
		if name <= m.PageToken {
			continue
		}
		if len(out.Jobs) == size {
			out.NextPageToken = out.Jobs[size-1].Name
			break
		}
		out.Jobs = append(out.Jobs, found[name].message(name))
	}
	return connect.NewResponse(out), nil
}

// Heartbeat keeps the lease of a job.
func (v jobService) Heartbeat(ctx context.Context, req *connect.Request[dsecv1.HeartbeatRequest]) (*connect.Response[dsecv1.HeartbeatResponse], error) {
	j, err := v.s.jobs.heartbeat(ctx, principal(ctx).Project, req.Msg.Name)
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(&dsecv1.HeartbeatResponse{Job: j.message(req.Msg.Name)}), nil
}

// PauseJob pauses every sandbox of a job.
func (v jobService) PauseJob(ctx context.Context, req *connect.Request[dsecv1.PauseJobRequest]) (*connect.Response[dsecv1.PauseJobResponse], error) {
	items, err := v.s.applyToJob(ctx, &dsecv1.ApplyToJobRequest{Job: req.Msg.Name, Action: jobPause, Pause: req.Msg.Options})
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(&dsecv1.PauseJobResponse{Items: items}), nil
}

// ResumeJob resumes every sandbox of a job.
func (v jobService) ResumeJob(ctx context.Context, req *connect.Request[dsecv1.ResumeJobRequest]) (*connect.Response[dsecv1.ResumeJobResponse], error) {
	items, err := v.s.applyToJob(ctx, &dsecv1.ApplyToJobRequest{Job: req.Msg.Name, Action: "resume"})
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(&dsecv1.ResumeJobResponse{Items: items}), nil
}

// KillJob kills every sandbox of a job.
func (v jobService) KillJob(ctx context.Context, req *connect.Request[dsecv1.KillJobRequest]) (*connect.Response[dsecv1.KillJobResponse], error) {
	items, err := v.s.applyToJob(ctx, &dsecv1.ApplyToJobRequest{Job: req.Msg.Name, Action: jobKill})
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(&dsecv1.KillJobResponse{Items: items}), nil
}

// EndJob ends a job and kills its sandboxes.
func (v jobService) EndJob(ctx context.Context, req *connect.Request[dsecv1.EndJobRequest]) (*connect.Response[dsecv1.EndJobResponse], error) {
	name := req.Msg.Name
	j, err := v.s.jobs.end(ctx, principal(ctx).Project, name)
	if err != nil {
		return nil, err
	}
	items, err := v.s.applyToJob(ctx, &dsecv1.ApplyToJobRequest{Job: name, Action: jobKill})
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(&dsecv1.EndJobResponse{Job: j.message(name), Items: items}), nil
}

// applyToJob does the same to all sandboxes of a job, on all edges. An edge that does
// not answer fails the call once the others have done it: a part of the items would
// look like the whole, and the call can be repeated.
func (s *Server) applyToJob(ctx context.Context, m *dsecv1.ApplyToJobRequest) ([]*dsecv1.JobItem, error) {
	if err := checkJob(m.Job, nil); err != nil {
		return nil, err
	}
	edges := s.edges.Edges()
	parts := make([][]*dsecv1.JobItem, len(edges))
	var g errgroup.Group // without a context: the first error leaves the other edges alone
	for i, edge := range edges {
		g.Go(func() error {
			res, err := forward(ctx, edgeClient(edge), dsecv1connect.EdgeServiceClient.ApplyToJob, m)
			if err == nil {
				parts[i] = res.Msg.Items
			}
			return err
		})
	}
	if err := g.Wait(); err != nil {
		return nil, err
	}
	return slices.Concat(parts...), nil
}

// message is what a caller sees of a job.
func (j job) message(name string) *dsecv1.Job {
	out := &dsecv1.Job{
		Name: name, Labels: j.Labels, State: j.State, Created: timestamppb.New(j.Created),
		OnExpiry: j.OnExpiry, Grace: durationpb.New(j.Grace), Changed: timestamppb.New(j.Changed),
	}
	if j.Lease > 0 {
		out.Lease = durationpb.New(j.Lease)
	}
	return out
}
