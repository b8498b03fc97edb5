package edge

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"time"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/event"
	"github.com/opendsec/dsec/internal/trajectory"
	dsecv1 "github.com/opendsec/dsec/proto/dsec/v1"
)

// eventLog has the events of all sandboxes of the node, in order, in a log of the kind that
// trajectories are in, which brings durability, bounds, gaps and followers. What is a sandbox
// there is a stretch of events here: one ends after so many, and with the edge, whose end
// may have been that of the host, which forgets the last ones. Its name has the form of a
// sandbox's ID, of this node, and names are in order. An entry has its event in the field
// spec, which is the one that may be long.
type eventLog struct {
	log    *slog.Logger
	events *trajectory.Log
	node   dsec.EdgeID
	most   uint64 // events of a stretch, and half of what is kept

	mu   sync.Mutex
	now  dsec.SandboxID
	lost int // events that could not be written
}

const (
	// eventsPerStretch bounds what is in memory of a stretch that is read: 16 bytes of each.
	eventsPerStretch = 500_000
	maxStretches     = 256
)

func openEventLog(dir string, segment int64, node dsec.EdgeID, most uint64, log *slog.Logger) (*eventLog, error) {
	events, found, err := trajectory.Open(trajectory.Options{Dir: dir, SegmentBytes: segment, MaxBytes: 1 << 30, Logger: log})
	if err != nil {
		return nil, err
	}
	if found.Damaged > 0 || found.Unclaimed > 0 {
		log.Error("the log of events is damaged: watchers are told", "places", found.Damaged+found.Unclaimed)
	}
	l := &eventLog{log: log, events: events, node: node, most: most}
	if err := l.goOn(); err != nil {
		return nil, errors.Join(err, events.Close())
	}
	return l, nil
}

// goOn begins a stretch where an earlier edge has left off, whose last events, and positions behind
// them, may be known to watchers though the log has lost them: no number is used twice.
func (l *eventLog) goOn() error {
	all := l.stretches()
	if len(all) == 0 {
		l.now = stretchName(dsec.NewSandboxID(l.node), 0)
		return l.events.Add(l.now, stretchProject)
	}
	earlier := all[len(all)-1]
	last, err := l.events.Last(earlier)
	if err == nil {
		l.now, err = l.begin(earlier)
	}
	if err == nil && last == 0 && len(all) > 1 { // so that starts without events are no many stretches
		err = l.events.Forget(context.Background(), earlier)
	}
	return errors.Join(err, l.forgetOld())
}

// stretchDigits are those of a stretch's number: what is before it in the name is the log's own, so that
// a cursor of an earlier log is none of this one's.
const stretchDigits = 8

// stretchName is the name of a log's n-th stretch. Letters are digits: an ID has no 0 and no 1.
func stretchName(like dsec.SandboxID, n uint64) dsec.SandboxID {
	digits := []byte(strings.Repeat("a", stretchDigits))
	for i := len(digits) - 1; n > 0; i-- {
		digits[i] = byte('a' + n%26)
		n /= 26
	}
	return like[:len(like)-stretchDigits] + dsec.SandboxID(digits)
}

func stretchNumber(name dsec.SandboxID) (n uint64) {
	for _, c := range []byte(name[len(name)-stretchDigits:]) {
		n = n*26 + uint64(c-'a')
	}
	return n
}

// stretches are those that there are, oldest first.
func (l *eventLog) stretches() []dsec.SandboxID {
	all := l.events.Sandboxes()
	slices.Sort(all)
	return all
}

const stretchProject = "events"

// stretchOver is the state that the last entry of a stretch tells of.
const stretchOver = "over"

// over ends a stretch.
func (l *eventLog) over(name dsec.SandboxID) error {
	_, err := l.events.Append(name, &dsecv1.TrajectoryEntry{Kind: dsecv1.TrajectoryKind_TRAJECTORY_KIND_STATE, State: stretchOver})
	return err
}

// add adds an event. Of those that could not be written watchers are told with the next one
// that can.
func (l *eventLog) add(project string, e *dsecv1.Event) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.lost > 0 {
		gap := &dsecv1.Event{Kind: event.Gap, Reason: fmt.Sprintf("%d events could not be written: the disk was full", l.lost)}
		if l.append("", gap) != nil {
			l.lost++
			return
		}
		l.lost = 0
	}
	if err := l.append(project, e); err != nil {
		l.lost++
		if l.lost == 1 {
			l.log.Error("events are not written, watchers are told once they can be", "err", err)
		}
	}
}

func (l *eventLog) append(project string, e *dsecv1.Event) error {
	e.Node = string(l.node)
	body, err := proto.Marshal(e)
	if err != nil {
		return err
	}
	seq, err := l.events.Append(l.now, &dsecv1.TrajectoryEntry{Kind: dsecv1.TrajectoryKind_TRAJECTORY_KIND_STATE, Caller: project, Spec: body})
	if err != nil || seq < l.most {
		return err
	}
	return l.turn()
}

// turn ends the stretch and begins the next. The caller holds mu.
func (l *eventLog) turn() error {
	next, err := l.begin(l.now)
	if err == nil {
		err = l.over(l.now)
	}
	if err != nil {
		return err
	}
	l.now = next
	return l.forgetOld()
}

// begin begins the stretch behind another. It is on the disk before anybody has a position in it.
func (l *eventLog) begin(behind dsec.SandboxID) (dsec.SandboxID, error) {
	next := stretchName(behind, stretchNumber(behind)+1)
	if err := l.events.Add(next, stretchProject); err != nil {
		return "", err
	}
	return next, l.events.Sync(context.Background())
}

// forgetOld drops the oldest stretches, while there are too many, or too many events without them.
func (l *eventLog) forgetOld() error {
	all, kept := l.stretches(), uint64(0)
	for i, name := range slices.Backward(all) {
		last, err := l.events.Last(name)
		if err != nil {
			return err
		}
		if kept > l.most || len(all)-i > maxStretches {
			if err := l.events.Forget(context.Background(), name); err != nil {
				return err
			}
		}
		kept += last
	}
	return nil
}

// end is where the next event will be.
func (l *eventLog) end() (*dsecv1.NodePosition, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	last, err := l.events.Last(l.now)
	return &dsecv1.NodePosition{Log: string(l.now), Seq: last + 1}, err
}

// errTurned: a stretch is over.
var errTurned = errors.New("the stretch of events is over")

// follow calls f for the events from a position on, and for those that come, until ctx ends; next
// is where the one behind is.
func (l *eventLog) follow(ctx context.Context, from *dsecv1.NodePosition, f func(project string, e *dsecv1.Event, next *dsecv1.NodePosition) error) error {
	name, seq := dsec.SandboxID(from.GetLog()), from.GetSeq()
	for {
		at := l.place(name, seq)
		name, seq = at.name, at.seq
		if at.lost != "" {
			if err := f("", l.gap(at.lost), &dsecv1.NodePosition{Log: string(name), Seq: seq}); err != nil {
				return err
			}
		}
		read := l.events.Entries
		if at.now {
			read = l.events.Follow
		}
		err := read(ctx, name, seq, nil, func(t *dsecv1.TrajectoryEntry) error { return l.tell(name, t, f) })
		switch {
		case err == nil, errors.Is(err, errTurned):
			name, seq = stretchName(name, stretchNumber(name)+1), 1
		case dsec.CodeOf(err) == dsec.CodeNotFound: // it was forgotten meanwhile
		default:
			return err
		}
	}
}

// each calls f for the events that there are now.
func (l *eventLog) each(ctx context.Context, f func(e *dsecv1.Event)) error {
	for _, name := range l.stretches() {
		err := l.events.Entries(ctx, name, 1, nil, func(t *dsecv1.TrajectoryEntry) error {
			return l.tell(name, t, func(_ string, e *dsecv1.Event, _ *dsecv1.NodePosition) error {
				f(e)
				return nil
			})
		})
		if err != nil && !errors.Is(err, errTurned) && dsec.CodeOf(err) != dsec.CodeNotFound { // it was forgotten meanwhile
			return err
		}
	}
	return nil
}

// place is where somebody goes on who comes with a position.
type place struct {
	name dsec.SandboxID
	seq  uint64
	now  bool   // events still come there
	lost string // why some were lost before
}

func (l *eventLog) place(name dsec.SandboxID, seq uint64) place {
	const kept, power = "events are kept no more, or the node was made anew", "the last events before the node lost power are not there"
	l.mu.Lock()
	defer l.mu.Unlock()
	all, at := l.stretches(), place{name: name, seq: seq}
	i, there := slices.BinarySearch(all, name)
	last, err := l.events.Last(name)
	switch {
	case name == "": // the oldest are meant
		at.name, at.seq = all[0], 1
	case there && err == nil:
		if seq > last+1 {
			at.seq, at.lost = last+1, power
		}
	case i == 0 || i == len(all) || !strings.HasPrefix(string(name), string(l.now[:len(l.now)-stretchDigits])):
		at.name, at.seq, at.lost = all[0], 1, kept
	default: // it was without events when it was forgotten
		if at.name, at.seq = all[i], 1; seq > 1 {
			at.lost = power
		}
	}
	at.now = at.name == l.now
	return at
}

func (l *eventLog) gap(why string) *dsecv1.Event {
	now := time.Now()
	return &dsecv1.Event{Kind: event.Gap, Id: fmt.Sprintf("gap-%s-%d", l.node, now.UnixNano()), Time: timestamppb.New(now), Node: string(l.node), Reason: why}
}

// tell passes on one entry of a stretch.
func (l *eventLog) tell(name dsec.SandboxID, t *dsecv1.TrajectoryEntry, f func(string, *dsecv1.Event, *dsecv1.NodePosition) error) error {
	next := &dsecv1.NodePosition{Log: string(name), Seq: t.Seq + 1}
	if t.Phase == dsecv1.TrajectoryPhase_TRAJECTORY_PHASE_GAP {
		next.Seq = t.Gap.GetLastSeq() + 1
		return f("", l.gap(t.Gap.GetReason()), next)
	}
	if t.State == stretchOver {
		return errTurned
	}
	e := new(dsecv1.Event)
	if err := proto.Unmarshal(t.Spec, e); err != nil || len(t.Spec) == 0 {
		return f("", l.gap("an event is damaged"), next)
	}
	e.Time, e.Id = t.Time, fmt.Sprintf("%s-%d", name, t.Seq)
	return f(t.Caller, e, next)
}
