package main

import (
	"bufio"
	"context"
	"encoding/hex"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"google.golang.org/protobuf/encoding/protojson"

	"github.com/opendsec/dsec/client"
	"github.com/opendsec/dsec/internal/units"
	dsecv1 "github.com/opendsec/dsec/proto/dsec/v1"
)

const kindPrefix = "TRAJECTORY_KIND_"

func runLog(ctx context.Context, e *env, args []string) error {
	f := clientFlags(e, "log")
	var o client.TrajectoryOptions
	f.BoolVar(&o.Follow, "f", false, "go on with each entry that comes, until the sandbox has ended")
	f.Uint64Var(&o.From, "from", 0, "`number` of the first entry; default 1")
	f.Func("kind", "only entries of that `kind`, for example exec; may be repeated", func(s string) error {
		kind, ok := dsecv1.TrajectoryKind_value[kindPrefix+strings.ToUpper(s)]
		if !ok || kind == 0 {
			return fmt.Errorf("want one of %s", strings.Join(kindNames(), ", "))
		}
		o.Kinds = append(o.Kinds, dsecv1.TrajectoryKind(kind))
		return nil
	})
	c, ids, err := f.connect(args, 1, 1, 0)
	if err != nil {
		return err
	}
	defer c.Close()
	out := bufio.NewWriter(e.stdout)
	for entry, err := range c.Sandbox(ids[0]).Trajectory(ctx, o) {
		if err != nil {
			return err
		}
		line := entryText(entry)
		if f.output == "json" {
			b, err := protojson.Marshal(entry)
			if err != nil {
				return err
			}
			line = string(b)
		}
		if _, err := out.WriteString(line + "\n"); err != nil {
			return err
		}
		if o.Follow {
			if err := out.Flush(); err != nil {
				return err
			}
		}
	}
	return out.Flush()
}

func kindNames() []string {
	var names []string
	for n, name := range dsecv1.TrajectoryKind_name {
		if n != 0 {
			names = append(names, kindName(name))
		}
	}
	slices.Sort(names)
	return names
}

func kindName(name string) string { return strings.ToLower(strings.TrimPrefix(name, kindPrefix)) }

// entryText is an entry in one line.
func entryText(e *dsecv1.TrajectoryEntry) string {
	if e.Phase == dsecv1.TrajectoryPhase_TRAJECTORY_PHASE_GAP {
		return fmt.Sprintf("%-5d to %d are gone: %s", e.Seq, e.Gap.GetLastSeq(), e.Gap.GetReason())
	}
	phase := strings.ToLower(strings.TrimPrefix(e.Phase.String(), "TRAJECTORY_PHASE_"))
	words := []string{fmt.Sprintf("%-5d", e.Seq), e.Time.AsTime().Format("2006-01-02T15:04:05.000Z"), fmt.Sprintf("%-16s %-6s", kindName(e.Kind.String()), phase)}
	add := func(format string, a ...any) { words = append(words, fmt.Sprintf(format, a...)) }
	if e.BegunSeq > 0 {
		add("of %d", e.BegunSeq)
	}
	if e.ActionId != "" {
		add("action %q", e.ActionId)
	}
	if r := e.Request; r != nil {
		add("%s", requestText(r))
	}
	if e.Outcome != nil {
		add("%s", outcomeText(e.Outcome))
	}
	if e.Error != nil {
		add("error %s (%s)", e.Error.Message, e.Error.Detail.GetCode())
	}
	if o := e.Output; o != nil && o.TotalBytes > 0 {
		add("%s of output", units.Bytes(o.TotalBytes))
		if o.KeptBytes < o.TotalBytes {
			add("(%s kept: %s)", units.Bytes(o.KeptBytes), o.GapReason)
		}
		if len(o.Digest) > 0 {
			add("sha256:%s", hex.EncodeToString(o.Digest[:6]))
		}
	}
	if e.State != "" {
		add("%s", e.State)
	}
	if o := e.Origin; o != nil {
		add("of sandbox %s, packed by its entry %d", o.SandboxId, o.Seq)
	}
	if e.Reason != "" {
		add("%s", e.Reason)
	}
	if e.Duration != nil {
		add("%s", e.Duration.AsDuration().Round(time.Microsecond))
	}
	return strings.TrimRight(strings.Join(words, " "), " ")
}

func requestText(r *dsecv1.TrajectoryRequest) string {
	var words []string
	if r == nil {
		return ""
	}
	for _, a := range r.Argv {
		words = append(words, strconv.Quote(string(a)))
	}
	if r.Shell != "" {
		words = append(words, strconv.Quote(r.Shell))
	}
	if len(r.Path) > 0 {
		words = append(words, strconv.Quote(string(r.Path)))
	}
	if len(r.NewPath) > 0 {
		words = append(words, "to", strconv.Quote(string(r.NewPath)))
	}
	if r.SessionId != "" {
		words = append(words, "session", r.SessionId)
	}
	if r.ProcessId > 0 {
		words = append(words, fmt.Sprintf("process %d", r.ProcessId))
	}
	if r.Signal > 0 {
		words = append(words, fmt.Sprintf("signal %d", r.Signal))
	}
	if r.InputBytes > 0 {
		words = append(words, units.Bytes(r.InputBytes)+" of input")
	}
	if r.Note != "" {
		words = append(words, r.Note)
	}
	return strings.Join(words, " ")
}

func outcomeText(o *dsecv1.Outcome) string {
	text := fmt.Sprintf("exit code %d", o.GetExitCode())
	if s, ok := o.End.(*dsecv1.Outcome_Signal); ok {
		text = fmt.Sprintf("signal %d", s.Signal)
	}
	for _, why := range []struct {
		is   bool
		text string
	}{{o.Oom, "out of memory"}, {o.TimedOut, "timed out"}, {o.OutputLimit, "output limit"}} {
		if why.is {
			text += ", " + why.text
		}
	}
	return text
}
