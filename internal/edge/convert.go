package edge

import (
	"cmp"
	"context"
	"time"
	"unicode/utf8"

	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/chronusapi"
	"github.com/opendsec/dsec/internal/layer"
	dsecv1 "github.com/opendsec/dsec/proto/dsec/v1"
)

func limitsOf(l *dsecv1.Limits) dsec.Limits {
	return dsec.Limits{
		MilliCPU: l.GetMilliCpu(), MemoryBytes: l.GetMemoryBytes(),
		DiskBytes: l.GetDiskBytes(), DiskInodes: l.GetDiskInodes(), Pids: l.GetPids(),
	}
}

func limitsProto(l dsec.Limits) *dsecv1.Limits {
	return &dsecv1.Limits{
		MilliCpu: l.MilliCPU, MemoryBytes: l.MemoryBytes,
		DiskBytes: l.DiskBytes, DiskInodes: l.DiskInodes, Pids: l.Pids,
	}
}

// proto is what a caller sees of s now.
func (e *Edge) proto(s *sandbox) *dsecv1.Sandbox {
	s.mu.Lock()
	defer s.mu.Unlock()
	now, wall := e.clock(), time.Now()
	out := &dsecv1.Sandbox{
		Id: string(s.id), Backend: string(s.spec.Kind), State: string(s.state), Reason: s.reason,
		Layers: s.spec.Layers, LayerNames: s.layerNames, Limits: limitsProto(s.spec.Limits),
		Labels: s.spec.Labels, Job: s.spec.Job, User: s.spec.User, Workdir: s.spec.Workdir,
		Created: timestamppb.New(s.created), IdleTimeout: durationpb.New(s.idle),
		Active: timestamppb.New(wall.Add(s.active - now)), Conditions: s.conditions,
	}
	if s.deadline > 0 {
		left := s.deadline - now
		if s.paused != nil && !s.paused.countLifetime {
			left += now - s.paused.at
		}
		out.Deadline = timestamppb.New(wall.Add(left))
	}
	out.Pause, out.IdleAction = e.pauseProto(s, now, wall), string(cmp.Or(s.spec.IdleAction, dsec.IdleKill))
	return out
}

func outcomeProto(o *dsec.Outcome) *dsecv1.Outcome {
	if o == nil {
		return nil
	}
	out := &dsecv1.Outcome{
		Oom: o.OOM, TimedOut: o.TimedOut, OutputLimit: o.OutputLimit, Claimed: o.Claimed,
		Started: timestamppb.New(o.Started), Duration: durationpb.New(o.Duration),
		Cpu: durationpb.New(o.CPU), MaxRssBytes: o.MaxRSS,
	}
	if o.Signal != 0 {
		out.End = &dsecv1.Outcome_Signal{Signal: int32(o.Signal)}
	} else {
		out.End = &dsecv1.Outcome_ExitCode{ExitCode: int32(o.Code)}
	}
	return out
}

func usageProto(u dsec.Usage, spec *dsec.Spec) *dsecv1.Usage {
	out := &dsecv1.Usage{
		Cpu: durationpb.New(u.CPU), CpuThrottled: durationpb.New(u.CPUThrottled),
		MemoryBytes: u.MemoryBytes, MemoryPeakBytes: u.MemoryPeak, DiskBytes: u.DiskBytes,
		Pids: u.Pids, OomKills: u.OOMKills, Limits: limitsProto(spec.Limits),
	}
	if u.DiskInodes != dsec.NotCounted {
		out.DiskInodes = &u.DiskInodes
	}
	return out
}

func processProto(p *chronusapi.Process) *dsecv1.Process {
	argv := make([]string, len(p.Argv))
	for i, a := range p.Argv {
		argv[i] = toText(a)
	}
	return &dsecv1.Process{
		ProcessId: p.ID, Pid: int32(p.PID), Argv: argv, Started: timestamppb.New(p.Started), Outcome: outcomeProto(p.Outcome),
		NextSeq: p.NextSeq, FirstSeq: p.FirstSeq, Pty: p.PTY, Lingering: p.Lingering, SessionId: toText(p.Session),
	}
}

func entryProto(f *chronusapi.FileInfo) *dsecv1.Entry {
	out := &dsecv1.Entry{
		Type: toText(f.Type), Size: f.Size, Mode: f.Mode, Uid: f.UID, Gid: f.GID, Modified: timestamppb.New(f.Modified),
	}
	if utf8.ValidString(f.Name) {
		out.Name = f.Name
	} else {
		out.RawName = []byte(f.Name)
	}
	if f.Target != "" {
		out.LinkTarget = []byte(f.Target)
	}
	return out
}

// layerProto is what a caller sees of a layer, which those that it goes on are part of.
func (e *Edge) layerProto(ctx context.Context, m layer.Meta) (*dsecv1.Layer, error) {
	size, files := m.Size, m.Files
	for _, digest := range m.Parents {
		below, err := e.cfg.Layers.Get(ctx, digest)
		if err != nil && dsec.CodeOf(err) == dsec.CodeNotFound { // who imports m found it there
			return nil, dsec.Errorf(dsec.CodeUnavailable, "layer %s, which it goes on, was being removed; import it again", digest)
		} else if err != nil {
			return nil, err
		}
		size, files = size+below.Size, files+below.Files
	}
	return &dsecv1.Layer{
		Parents: m.Parents,
		Digest:  m.Digest, Kind: string(m.Kind), Size: size, Files: files, Created: timestamppb.New(m.Created),
		Source: m.Source, SourceDigest: m.SourceDigest, Origin: originProto(m.Origin),
		Config: &dsecv1.LayerConfig{Env: m.Config.Env, User: m.Config.User, Workdir: m.Config.Workdir, Entrypoint: m.Config.Entrypoint, Cmd: m.Config.Cmd},
	}, nil
}

func originProto(o *layer.Origin) *dsecv1.LayerOrigin {
	if o == nil {
		return nil
	}
	return &dsecv1.LayerOrigin{Type: o.Type, Location: o.Location, Revision: o.Revision, Entry: o.Entry}
}

// toText makes bytes of a sandbox fit a field that must be UTF-8.
func toText(s string) string {
	if utf8.ValidString(s) {
		return s
	}
	return string([]rune(s)) // each bad byte becomes U+FFFD
}
