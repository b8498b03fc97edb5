package client

import (
	"bytes"
	"fmt"
	"slices"
	"strings"

	"google.golang.org/protobuf/proto"

	"github.com/opendsec/dsec"
	dsecv1 "github.com/opendsec/dsec/proto/dsec/v1"
)

// compare compares the end of an action with what it came to in the fresh sandbox.
// nil is none of a difference.
func (r *replayer) compare(st *step, e *dsecv1.TrajectoryEntry) (*ReplayDifference, error) {
	if st.late {
		return &ReplayDifference{What: "end", Expected: endText(e), Got: "it goes on"}, nil
	}
	mine := st.ended
	if st.failed != nil {
		if dsec.CodeOf(st.failed).Platform() || dsec.Retryable(st.failed) {
			return nil, st.failed // it says nothing of the action
		}
		mine = &dsecv1.TrajectoryEntry{Error: &dsecv1.TrajectoryError{Detail: &dsecv1.ErrorDetail{Code: string(dsec.CodeOf(st.failed))}, Message: st.failed.Error()}}
	}
	if code := dsec.Code(mine.GetError().GetDetail().GetCode()); code != "" && (code.Platform() || dsec.Codes[code].Retry) {
		return nil, &dsec.Error{Code: code, Message: fmt.Sprintf("the replay of entry %d: %s", st.begun.Seq, mine.Error.Message)}
	}
	switch e.Kind {
	case dsecv1.TrajectoryKind_TRAJECTORY_KIND_STDIN, dsecv1.TrajectoryKind_TRAJECTORY_KIND_SIGNAL, dsecv1.TrajectoryKind_TRAJECTORY_KIND_RESIZE, dsecv1.TrajectoryKind_TRAJECTORY_KIND_SESSION_INTERRUPT:
		// Whether these come before the end of the command is chance: it shows in what
		// the command does, if at all.
		return nil, nil
	case dsecv1.TrajectoryKind_TRAJECTORY_KIND_SESSION_OPEN:
		r.learnSession(e, mine)
	}
	if e.Error.GetDetail().GetCode() != mine.Error.GetDetail().GetCode() {
		return &ReplayDifference{What: "error", Expected: endText(e), Got: endText(mine)}, nil
	}
	if want, got := outcomeKey(e.Outcome), outcomeKey(mine.Outcome); want != got {
		return &ReplayDifference{What: "outcome", Expected: want, Got: got}, nil
	}
	if r.o.IgnoreOutput || e.Error != nil {
		return nil, nil
	}
	return r.compareOutput(e, mine)
}

// learnSession has the session of the original lead to the fresh sandbox's.
func (r *replayer) learnSession(e, mine *dsecv1.TrajectoryEntry) {
	var then, now dsecv1.OpenSessionResponse
	if proto.Unmarshal(e.Response, &then) == nil && proto.Unmarshal(mine.Response, &now) == nil && then.SessionId != "" && now.SessionId != "" {
		r.sessions[then.SessionId] = now.SessionId
	}
}

// endText tells how an action ended.
func endText(e *dsecv1.TrajectoryEntry) string {
	if e.GetError() != nil {
		return fmt.Sprintf("%s: %s", e.Error.Detail.GetCode(), e.Error.Message)
	}
	if e.GetOutcome() != nil {
		return outcomeKey(e.Outcome)
	}
	return "success"
}

// outcomeKey is what of an outcome is compared.
func outcomeKey(o *dsecv1.Outcome) string {
	if o == nil {
		return ""
	}
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

// compareOutput compares what an action wrote, or was answered.
func (r *replayer) compareOutput(e, mine *dsecv1.TrajectoryEntry) (*ReplayDifference, error) {
	switch e.Kind {
	case dsecv1.TrajectoryKind_TRAJECTORY_KIND_EXEC, dsecv1.TrajectoryKind_TRAJECTORY_KIND_START, dsecv1.TrajectoryKind_TRAJECTORY_KIND_SESSION_COMMAND:
		return r.compareStreams(e, mine)
	case dsecv1.TrajectoryKind_TRAJECTORY_KIND_FILE_READ, dsecv1.TrajectoryKind_TRAJECTORY_KIND_FILE_WRITE, dsecv1.TrajectoryKind_TRAJECTORY_KIND_FILE_UPLOAD:
		// They say how much it was, and its digest. What was read once, under an action
		// ID, is here itself.
		if e.Output != nil && mine.Output != nil {
			return r.compareStreams(e, mine)
		}
		if e.Reason != mine.Reason {
			return &ReplayDifference{What: "output", Expected: e.Reason, Got: mine.Reason}, nil
		}
	case dsecv1.TrajectoryKind_TRAJECTORY_KIND_FILE_STAT:
		return compareAnswers(r, e, mine, func(m *dsecv1.StatResponse) []*dsecv1.Entry { return []*dsecv1.Entry{m.Entry} })
	case dsecv1.TrajectoryKind_TRAJECTORY_KIND_FILE_LIST:
		return compareAnswers(r, e, mine, (*dsecv1.ListDirResponse).GetEntries)
	}
	return nil, nil // a tar has times in it, and the others have no answer
}

var streamNames = map[dsecv1.Stream]string{
	dsecv1.Stream_STREAM_UNSPECIFIED: "output", dsecv1.Stream_STREAM_STDOUT: "stdout", dsecv1.Stream_STREAM_STDERR: "stderr", dsecv1.Stream_STREAM_PTY: "output",
}

// compareStreams compares the bytes of each stream: in which order those of several came
// is chance.
func (r *replayer) compareStreams(e, mine *dsecv1.TrajectoryEntry) (*ReplayDifference, error) {
	then, missing, err := r.of.outputOf(r, e)
	if err != nil {
		return nil, err
	}
	now, missingNow, err := r.to.outputOf(r, mine)
	if err != nil {
		return nil, err
	}
	for _, stream := range []dsecv1.Stream{dsecv1.Stream_STREAM_UNSPECIFIED, dsecv1.Stream_STREAM_STDOUT, dsecv1.Stream_STREAM_STDERR, dsecv1.Stream_STREAM_PTY} {
		want, got := r.masked(then[stream]), r.masked(now[stream])
		if missing > 0 || missingNow > 0 { // what is there may differ all the same
			n := min(len(want), len(got))
			want, got = want[:n], got[:n]
		}
		if !bytes.Equal(want, got) {
			a, b := firstDifference(want, got)
			return &ReplayDifference{What: streamNames[stream], Expected: a, Got: b}, nil
		}
	}
	if missing > 0 || missingNow > 0 {
		of, n, reason := r.of.id, missing, e.Output.GetGapReason()
		if missing == 0 {
			of, n, reason = r.to.id, missingNow, mine.Output.GetGapReason()
		}
		return nil, dsec.Errorf(dsec.CodeOutcomeUnknown, "%d bytes of the output of entry %d were not kept of sandbox %s (%s): it cannot be compared, but without its output", n, e.BegunSeq, of, reason)
	}
	return nil, nil
}

// outputOf is what an action wrote, and how much of it is not kept.
func (s *Sandbox) outputOf(r *replayer, e *dsecv1.TrajectoryEntry) (streams map[dsecv1.Stream][]byte, missing int64, err error) {
	streams = make(map[dsecv1.Stream][]byte)
	add := func(p *dsecv1.TrajectoryOutputPiece) error {
		streams[p.Stream] = append(streams[p.Stream], p.Data...)
		return nil
	}
	if len(e.Output.GetDigest()) > 0 {
		if err := s.eachPiece(r.context, e.Seq, false, add); err != nil {
			return nil, 0, dsec.Errorf(dsec.CodeOutcomeUnknown, "the output of entry %d of sandbox %s cannot be read: %v", e.Seq, s.id, err)
		}
	} else {
		for _, p := range e.Output.GetHead() {
			_ = add(p)
		}
	}
	return streams, e.Output.GetTotalBytes() - e.Output.GetKeptBytes(), nil
}

// masked is output without what is taken for equal.
func (r *replayer) masked(b []byte) []byte {
	for _, re := range r.o.Mask {
		b = re.ReplaceAll(b, []byte("…"))
	}
	return b
}

// maxDifference is how much is shown of a line that differs.
const maxDifference = 200

// firstDifference are the first lines that differ.
func firstDifference(want, got []byte) (string, string) {
	a, b := bytes.Split(want, []byte("\n")), bytes.Split(got, []byte("\n"))
	n := 0
	for n < len(a)-1 && n < len(b)-1 && bytes.Equal(a[n], b[n]) {
		n++
	}
	from := 0 // what differs is to be in what is shown
	for from < len(a[n]) && from < len(b[n]) && a[n][from] == b[n][from] {
		from++
	}
	from = max(0, from-maxDifference/2)
	show := func(lines [][]byte) string {
		line := lines[n]
		if n < len(lines)-1 {
			line = append(slices.Clone(line), '\n')
		}
		text := fmt.Sprintf("line %d: ", n+1)
		if from > 0 {
			text += "…"
		}
		line = line[min(from, len(line)):]
		text += strings.ToValidUTF8(fmt.Sprintf("%q", line[:min(len(line), maxDifference)]), "")
		if len(line) > maxDifference {
			text += "…"
		}
		return text
	}
	return show(a), show(b)
}

// compareAnswers compares what was told of files, but for their times, and for the sizes
// of directories, which are the file system's.
func compareAnswers[T any, M interface {
	*T
	proto.Message
}](r *replayer, e, mine *dsecv1.TrajectoryEntry, files func(M) []*dsecv1.Entry) (*ReplayDifference, error) {
	read := func(s *Sandbox, e *dsecv1.TrajectoryEntry) (M, error) {
		data, m := e.Response, M(new(T))
		if e.Output.GetTotalBytes() > 0 {
			streams, missing, err := s.outputOf(r, e)
			if err == nil && missing > 0 {
				err = dsec.Errorf(dsec.CodeOutcomeUnknown, "%d bytes of the answer of entry %d were not kept: it cannot be compared", missing, e.BegunSeq)
			}
			if err != nil {
				return nil, err
			}
			data = streams[dsecv1.Stream_STREAM_UNSPECIFIED]
		}
		if err := proto.Unmarshal(data, m); err != nil {
			return nil, dsec.Errorf(dsec.CodeOutcomeUnknown, "the answer of entry %d is damaged: it cannot be compared", e.BegunSeq)
		}
		for _, f := range files(m) {
			if f == nil {
				continue
			}
			if f.Modified = nil; f.Type == "dir" {
				f.Size = 0
			}
		}
		return m, nil
	}
	then, err := read(r.of, e)
	if err != nil {
		return nil, err
	}
	now, err := read(r.to, mine)
	if err != nil || proto.Equal(then, now) {
		return nil, err
	}
	a, b := firstDifference([]byte(entriesText(files(then))), []byte(entriesText(files(now))))
	return &ReplayDifference{What: "answer", Expected: a, Got: b}, nil
}

// entriesText are files, one a line.
func entriesText(files []*dsecv1.Entry) string {
	var b strings.Builder
	for _, f := range files {
		name := f.GetName()
		if len(f.GetRawName()) > 0 {
			name = fmt.Sprintf("%q", f.RawName)
		}
		fmt.Fprintf(&b, "%s %s %o %d:%d %d", name, f.GetType(), f.GetMode(), f.GetUid(), f.GetGid(), f.GetSize())
		if len(f.GetLinkTarget()) > 0 {
			fmt.Fprintf(&b, " -> %s", f.LinkTarget)
		}
		b.WriteByte('\n')
	}
	return b.String()
}
