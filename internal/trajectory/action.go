package trajectory

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"hash/crc32"
	"sync"
	"time"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/opendsec/dsec"
	dsecv1 "github.com/opendsec/dsec/proto/dsec/v1"
)

// MaxActionID bounds the ID that a caller gives to an action.
const MaxActionID = 128

// Action is one that has begun and not ended.
type Action struct {
	// Seq is of the entry with which it began.
	Seq uint64

	log     *Log
	sb      *sandbox
	kind    dsecv1.TrajectoryKind
	started time.Time // zero: before this process
	spool   spool     // what it writes
	given   spool     // what is streamed to it
	done    chan struct{}
	end     sync.Once
}

// Earlier is what the log has of an action ID.
type Earlier struct {
	Begun *dsecv1.TrajectoryEntry
	// Ended is nil while the action is under way.
	Ended *dsecv1.TrajectoryEntry
	// Action is the one under way, nil where it has ended.
	Action *Action
}

// Begin notes that an action begins, and is to be called before it has any
// effect. The log takes e over. Where e has an action ID that the sandbox's log
// knows, nothing is noted, and what it knows comes back instead of an Action.
// Errors beside those of Append: diverged where that ID is of another request;
// outcome_unknown where how it ended is not known, and where a part of the log
// is gone that may have had it; exhausted where there is no store and the sandbox has
// its share of the log. An ID whose action provably had no effect is free.
// The whole of the request is in e.Input, all of it in its head.
func (l *Log) Begin(ctx context.Context, id dsec.SandboxID, e *dsecv1.TrajectoryEntry) (*Action, *Earlier, error) {
	if len(e.ActionId) > MaxActionID {
		return nil, nil, dsec.Invalid("action_id", "want at most %d bytes, got %d", MaxActionID, len(e.ActionId))
	}
	now := time.Now()
	e.Phase, e.Time = dsecv1.TrajectoryPhase_TRAJECTORY_PHASE_BEGUN, timestamppb.New(now)
	boundRequest(e.Request)
	boundTexts(e)
	h := header{typ: typeBegun, kind: uint8(e.Kind)}
	if e.ActionId != "" {
		h.flags |= flagAction
	}
	long, err := l.boundInput(id, e, &h)
	if err != nil {
		return nil, nil, err
	}
	if long != nil {
		defer long.close()
	}
	d, err := l.draft(e)
	if err != nil {
		return nil, nil, err
	}
	defer d.free()
	l.mu.Lock()
	defer l.mu.Unlock()
	sb, err := l.find(id)
	if err != nil {
		return nil, nil, err
	}
	if e.ActionId != "" {
		earlier, err := l.earlier(ctx, sb, e.ActionId) // lets go of mu and takes it again
		if err == nil && earlier != nil {
			err = earlier.check(e)
		}
		if earlier != nil || err != nil {
			return nil, earlier, err
		}
	}
	if l.opts.Store == nil && sb.entries > l.opts.MaxBytes/entryShare {
		return nil, nil, dsec.Errorf(dsec.CodeExhausted, "the trajectory of sandbox %s has all that one may have of this node's log, which is sealed to no store", id)
	}
	if err := l.roomFor(int64(len(d.record)), endRoom+l.slack()); err != nil {
		return nil, nil, err
	}
	if len(e.Input.GetDigest()) > 0 {
		// The entry that names an object is never there without it.
		if err := long.keep(sb.seq+1, e.Input.Digest); err != nil {
			return nil, nil, l.failed(err)
		}
	}
	if err := l.putEntry(sb, h, d, e.ActionId); err != nil {
		return nil, nil, err
	}
	sb.begin(sb.seq, h.kind)
	l.reserved += endRoom
	a := l.newAction(sb, sb.seq, h.kind)
	a.started = now
	return a, nil, nil
}

// entryShare is what part of MaxBytes the entries of one sandbox may have where they are
// sealed nowhere: the oldest of all others would go for them.
const entryShare = 16

// freeInput is the most bytes of a request that are always kept, as part of their entry.
const freeInput = 4 << 10

// boundInput has the input of an entry that begins be what is kept of it: where that
// counts it comes from a spool, which is to be closed.
func (l *Log) boundInput(id dsec.SandboxID, e *dsecv1.TrajectoryEntry, h *header) (*spool, error) {
	n := length(e.Input.GetHead())
	if n == 0 {
		e.Input = nil
		return nil, nil
	}
	if n <= freeInput {
		e.Input.TotalBytes, e.Input.KeptBytes = n, n
		return nil, nil
	}
	l.mu.Lock()
	sb, err := l.find(id)
	l.mu.Unlock()
	if err != nil {
		return nil, err
	}
	s := &spool{log: l, sb: sb, of: flowIn}
	for _, p := range e.Input.Head {
		s.write(p.Stream, p.Data)
	}
	var kept uint32
	e.Input, kept = s.finish()
	h.count(e.Input, kept)
	return s, nil
}

// count has a header tell that so much input is kept.
func (h *header) count(in *dsecv1.TrajectoryOutput, kept uint32) {
	if h.given = int64(kept); kept > 0 {
		h.flags |= flagInput
	}
	if len(in.GetDigest()) > 0 {
		h.flags |= flagObject
	}
}

// newAction is of an entry that is in the log. The caller holds mu.
func (l *Log) newAction(sb *sandbox, seq uint64, kind uint8) *Action {
	a := &Action{Seq: seq, log: l, sb: sb, kind: dsecv1.TrajectoryKind(kind), done: make(chan struct{}),
		spool: spool{log: l, sb: sb, seq: seq}, given: spool{log: l, sb: sb, seq: seq, of: flowIn}}
	if sb.actions == nil {
		sb.actions = make(map[uint64]*Action)
	}
	sb.actions[seq] = a
	return a
}

// check reports why a request cannot have the outcome of an earlier one.
func (x *Earlier) check(e *dsecv1.TrajectoryEntry) error {
	if string(x.Begun.RequestDigest) != string(e.RequestDigest) {
		return dsec.Errorf(dsec.CodeDiverged, "action %q is of another request: entry %d has digest %s, this one %s",
			e.ActionId, x.Begun.Seq, hex.EncodeToString(x.Begun.RequestDigest), hex.EncodeToString(e.RequestDigest))
	}
	if x.Ended == nil && x.Action == nil {
		return dsec.Errorf(dsec.CodeOutcomeUnknown, "action %q was begun (entry %d), and how it ended is not known", e.ActionId, x.Begun.Seq)
	}
	return nil
}

// Unfinished are the seqs of the entries of actions that began and did not end,
// in no order: after Open, those whose end this process is to note.
func (l *Log) Unfinished(id dsec.SandboxID) ([]uint64, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	sb, err := l.find(id)
	if err != nil {
		return nil, err
	}
	seqs := make([]uint64, 0, len(sb.unfinished))
	for seq := range sb.unfinished {
		seqs = append(seqs, seq)
	}
	return seqs, nil
}

// Resume gives the action back that an earlier process began, and the entry with
// which it did: nil where that cannot be read.
func (l *Log) Resume(ctx context.Context, id dsec.SandboxID, seq uint64) (*Action, *dsecv1.TrajectoryEntry, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	sb, err := l.find(id)
	if err != nil {
		return nil, nil, err
	}
	kind, ok := sb.unfinished[seq]
	if !ok {
		return nil, nil, dsec.Errorf(dsec.CodeNotFound, "sandbox %s has no action under way that began with entry %d", id, seq)
	}
	if sb.actions[seq] != nil {
		return nil, nil, dsec.Errorf(dsec.CodeConflict, "the action that began with entry %d is in hand already", seq)
	}
	a := l.newAction(sb, seq, kind)
	l.mu.Unlock()
	defer l.mu.Lock()
	begun, err := l.one(ctx, sb, seq)
	if err != nil {
		begun = nil
	}
	return a, begun, nil
}

// Output takes what the action writes, in order.
func (a *Action) Output(stream dsecv1.Stream, data []byte) { a.spool.write(stream, data) }

// Input takes what is streamed to the action, in order.
func (a *Action) Input(data []byte) { a.given.write(dsecv1.Stream_STREAM_UNSPECIFIED, data) }

// InputDigest is the SHA-256 of all that was streamed to the action.
func (a *Action) InputDigest() []byte {
	a.given.mu.Lock()
	defer a.given.mu.Unlock()
	if a.given.sum == nil {
		return sha256.New().Sum(nil)
	}
	return a.given.sum.Sum(nil)
}

// Gap notes that the next n bytes that the action wrote are not known any more.
func (a *Action) Gap(n int64, reason string) { a.spool.miss(n, cutString(reason, maxText/2)) }

// Done is closed when the action has ended, whatever came of noting that.
func (a *Action) Done() <-chan struct{} { return a.done }

// End notes how the action ended, before its answer leaves. The log takes e
// over. Where there is no room, it does without the output. Errors: unavailable
// where the log cannot be written any more, not_found where it has forgotten the
// sandbox meanwhile.
func (a *Action) End(e *dsecv1.TrajectoryEntry) (err error) {
	ended := false
	a.end.Do(func() { ended, err = true, a.note(e) })
	if !ended {
		return dsec.Errorf(dsec.CodeConflict, "the action that began with entry %d has ended already", a.Seq)
	}
	return err
}

func (a *Action) note(e *dsecv1.TrajectoryEntry) error {
	defer close(a.done)
	defer a.spool.close()
	defer a.given.close()
	l := a.log
	e.Phase, e.Kind, e.BegunSeq, e.Time = dsecv1.TrajectoryPhase_TRAJECTORY_PHASE_ENDED, a.kind, a.Seq, timestamppb.Now()
	if e.Duration == nil && !a.started.IsZero() {
		e.Duration = durationpb.New(time.Since(a.started))
	}
	boundTexts(e)
	h := header{typ: typeEnded, kind: uint8(a.kind), begun: a.Seq, flags: endFlags(e)}
	e.Output, h.kept = a.spool.finish()
	var given uint32
	e.Input, given = a.given.finish()
	h.count(e.Input, given)
	d, err := l.draft(e)
	l.mu.Lock()
	defer l.mu.Unlock()
	delete(a.sb.actions, a.Seq)
	if err != nil {
		return err
	}
	defer func() { d.free() }()
	if a.sb.forgotten {
		return errors.Join(notFound(a.sb.id), l.outputs.drop(a.sb.id, all))
	}
	l.reserved -= endRoom // this is what it was for
	if len(d.record) > endRoom && l.roomFor(int64(len(d.record)), 0) != nil {
		e.Output, e.Input, e.Marks = withoutEnds(e.Output), withoutEnds(e.Input), nil
		h.kept = uint32(e.Output.GetKeptBytes())
		h.count(e.Input, uint32(e.Input.GetKeptBytes()))
		d.free()
		if d, err = l.draft(e); err != nil {
			return a.lost(err)
		}
	}
	if len(e.Output.GetDigest()) > 0 {
		h.flags |= flagObject
	}
	if err := l.putEntry(a.sb, h, d, ""); err != nil {
		return a.lost(err)
	}
	delete(a.sb.unfinished, a.Seq)
	return nil
}

// endFlags are of an entry that tells of an end, but for its output.
func endFlags(e *dsecv1.TrajectoryEntry) uint8 {
	if dsec.Codes[dsec.Code(e.GetError().GetDetail().GetCode())].Retry {
		return flagNotDone
	}
	return 0
}

// lost leaves the action unfinished: its end is not in the log. The caller holds mu.
func (a *Action) lost(err error) error {
	a.log.reserved += endRoom
	return err
}

// Append notes what has no end of its own: one entry. The log takes e over.
// Errors: not_found where the log has no such sandbox, exhausted where there is
// no room on the disk, unavailable where it cannot be written.
func (l *Log) Append(id dsec.SandboxID, e *dsecv1.TrajectoryEntry) (seq uint64, err error) {
	e.Phase, e.Time = dsecv1.TrajectoryPhase_TRAJECTORY_PHASE_EVENT, timestamppb.Now()
	if len(e.Response) > maxResponse {
		return 0, dsec.Errorf(dsec.CodeInternal, "the response of an entry of the trajectory log has %d bytes, at most %d", len(e.Response), maxResponse)
	}
	boundRequest(e.Request)
	boundTexts(e)
	d, err := l.draft(e)
	if err != nil {
		return 0, err
	}
	defer d.free()
	l.mu.Lock()
	defer l.mu.Unlock()
	sb, err := l.find(id)
	if err != nil {
		return 0, err
	}
	if err := l.roomFor(int64(len(d.record)), 0); err != nil {
		return 0, err
	}
	if err := l.putEntry(sb, header{typ: typeEvent, kind: uint8(e.Kind)}, d, ""); err != nil {
		return 0, err
	}
	return sb.seq, nil
}

// putEntry writes the next entry of a sandbox. The caller holds mu.
func (l *Log) putEntry(sb *sandbox, h header, d *draft, actionID string) error {
	h.seq = sb.seq + 1
	at, err := l.put(sb, h, d)
	if err != nil {
		return err
	}
	sb.entered(&h, len(d.record))
	if h.flags&flagObject != 0 {
		l.cur.objects += int64(h.kept) + h.given
	}
	if sb.index != nil {
		sb.index.add(&h, at, func() string { return actionID })
		l.indexes.grow(1)
	}
	if sb.changed != nil {
		close(sb.changed)
		sb.changed = nil
	}
	return nil
}

// draft is a record in the making: room for its header, and its payload.
type draft struct {
	record []byte
	sum    uint32 // of salt and payload
}

var drafts = sync.Pool{New: func() any { return &draft{record: make([]byte, headerLen, 1024)} }}

func newDraft() *draft {
	d := drafts.Get().(*draft)
	d.record = d.record[:headerLen]
	return d
}

func (d *draft) free() {
	if cap(d.record) <= 128<<10 {
		drafts.Put(d)
	}
}

func (l *Log) draft(e *dsecv1.TrajectoryEntry) (*draft, error) {
	d := newDraft()
	e.Seq, e.SandboxId = 0, "" // the record's header says so
	var err error
	if d.record, err = (proto.MarshalOptions{}).MarshalAppend(d.record, e); err != nil {
		return nil, &dsec.Error{Code: dsec.CodeInternal, Message: "the entry for the trajectory log cannot be encoded", Err: err}
	}
	if n := len(d.record) - headerLen; n > maxPayload {
		return nil, dsec.Errorf(dsec.CodeInternal, "an entry for the trajectory log has %d bytes, at most %d", n, maxPayload)
	}
	d.sum = crc32.Update(l.seed, castagnoli, d.record[headerLen:])
	return d, nil
}
