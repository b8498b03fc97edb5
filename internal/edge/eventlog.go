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

// goOn begins a stretch where an earlier edge has left off.
func (l *eventLog) goOn() error {
	all := l.stretches()
	if len(all) == 0 {
		l.now = stretchName(dsec.NewSandboxID(l.node), 0)
		return l.events.Add(l.now, stretchProject)
	}
	l.now = all[len(all)-1]
	if last, err := l.events.Last(l.now); err != nil || last > 0 || len(all) == 1 {
		return errors.Join(err, l.turn())
	}
	// It may have died before it ended the one before.
	return l.over(all[len(all)-2])
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

// turn ends the stretch, if there is something in it, and begins the next, which is there
// before who follows comes to that end. The caller holds mu, or is alone.
func (l *eventLog) turn() error {
	if last, err := l.events.Last(l.now); err != nil || last == 0 {
		return err
	}
	next := stretchName(l.now, stretchNumber(l.now)+1)
	if err := l.events.Add(next, stretchProject); err != nil {
		return err
	}
	if err := l.over(l.now); err != nil {
		return err
	}
	l.now = next
	return l.forgetOld()
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
		lost := ""
		last, err := l.events.Last(name)
		switch {
		case name == "": // the oldest are meant
			name, seq = l.stretches()[0], 1
		case err != nil:
			lost, name, seq = "events are kept no more, or the node was made anew", l.stretches()[0], 1
		case l.isOver(name) && seq > last: // its end is where they were
			lost, name, seq = lostByPower, stretchName(name, stretchNumber(name)+1), 1
		case seq > last+1:
			lost, seq = lostByPower, last+1
		}
		if lost != "" {
			if err := f("", l.gap(lost), &dsecv1.NodePosition{Log: string(name), Seq: seq}); err != nil {
				return err
			}
		}
		err = l.events.Follow(ctx, name, seq, nil, func(t *dsecv1.TrajectoryEntry) error { return l.tell(name, t, f) })
		switch {
		case errors.Is(err, errTurned):
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

const lostByPower = "the last events before the node lost power are not there"

// isOver reports whether nothing is added to a stretch any more.
func (l *eventLog) isOver(name dsec.SandboxID) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return name != l.now
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
