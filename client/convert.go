package client

import (
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/opendsec/dsec"
	dsecv1 "github.com/opendsec/dsec/proto/dsec/v1"
)

func limitsMessage(l dsec.Limits) *dsecv1.Limits {
	return &dsecv1.Limits{MilliCpu: l.MilliCPU, MemoryBytes: l.MemoryBytes, DiskBytes: l.DiskBytes, DiskInodes: l.DiskInodes, Pids: l.Pids}
}

func limitsOf(l *dsecv1.Limits) dsec.Limits {
	return dsec.Limits{
		MilliCPU: l.GetMilliCpu(), MemoryBytes: l.GetMemoryBytes(), DiskBytes: l.GetDiskBytes(), DiskInodes: l.GetDiskInodes(), Pids: l.GetPids(),
	}
}

func timeOf(t *timestamppb.Timestamp) time.Time {
	if t == nil {
		return time.Time{}
	}
	return t.AsTime()
}

func sandboxOf(m *dsecv1.Sandbox) *dsec.Sandbox {
	layers := m.GetLayerNames()
	if len(layers) == 0 {
		layers = m.GetLayers()
	}
	return &dsec.Sandbox{
		ID: dsec.SandboxID(m.GetId()),
		Spec: dsec.Spec{
			Kind: dsec.Kind(m.GetBackend()), Layers: layers, Limits: limitsOf(m.GetLimits()),
			User: m.GetUser(), Workdir: m.GetWorkdir(), Labels: m.GetLabels(), Job: m.GetJob(),
			IdleTimeout: m.GetIdleTimeout().AsDuration(), IdleAction: dsec.IdleAction(m.GetIdleAction()),
		},
		State: dsec.State(m.GetState()), Reason: m.GetReason(),
		Created: timeOf(m.GetCreated()), Deadline: timeOf(m.GetDeadline()), Active: timeOf(m.GetActive()),
		Conditions: m.GetConditions(), Pause: pauseOf(m.GetPause()),
	}
}

func pauseOf(m *dsecv1.Pause) *dsec.Pause {
	if m == nil {
		return nil
	}
	return &dsec.Pause{
		Since: timeOf(m.Since), Until: timeOf(m.Until), Note: m.Note,
		MovedOut: m.MemoryBytes != nil, MemoryBefore: m.GetMemoryBeforeBytes(), Memory: m.GetMemoryBytes(),
	}
}

func usageOf(u *dsecv1.Usage) dsec.Usage {
	l := limitsOf(u.GetLimits())
	inodes := int64(dsec.NotCounted)
	if u != nil && u.DiskInodes != nil {
		inodes = *u.DiskInodes
	}
	return dsec.Usage{
		CPU: u.GetCpu().AsDuration(), CPUThrottled: u.GetCpuThrottled().AsDuration(),
		MemoryBytes: u.GetMemoryBytes(), MemoryPeak: u.GetMemoryPeakBytes(),
		DiskBytes: u.GetDiskBytes(), DiskInodes: inodes, Pids: u.GetPids(), OOMKills: u.GetOomKills(),
		MemoryLimit: l.MemoryBytes, DiskLimit: l.DiskBytes, PidsLimit: l.Pids, MilliCPU: l.MilliCPU,
	}
}

// outcomeOf is false where o tells no end: that is no outcome at all.
func outcomeOf(o *dsecv1.Outcome) (dsec.Outcome, bool) {
	out := dsec.Outcome{
		OOM: o.GetOom(), TimedOut: o.GetTimedOut(), OutputLimit: o.GetOutputLimit(), Claimed: o.GetClaimed(),
		Started: timeOf(o.GetStarted()), Duration: o.GetDuration().AsDuration(), CPU: o.GetCpu().AsDuration(), MaxRSS: o.GetMaxRssBytes(),
	}
	switch end := o.GetEnd().(type) {
	case *dsecv1.Outcome_ExitCode:
		out.Code = int(end.ExitCode)
	case *dsecv1.Outcome_Signal:
		out.Signal = int(end.Signal)
	default:
		return dsec.Outcome{}, false
	}
	return out, true
}
