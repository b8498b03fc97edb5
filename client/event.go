package client

import (
	"context"
	"iter"
	"time"

	"connectrpc.com/connect"

	"github.com/opendsec/dsec"
	dsecv1 "github.com/opendsec/dsec/proto/dsec/v1"
	"github.com/opendsec/dsec/proto/dsec/v1/dsecv1connect"
)

// Kinds of events.
const (
	EventSandbox     = "sandbox"     // a sandbox's state or conditions changed
	EventJob         = "job"         // a job's state changed
	EventGap         = "gap"         // events were lost, or are kept no more
	EventUnreachable = "unreachable" // nothing is heard of a node; no event is lost by that
	EventReachable   = "reachable"   // it is heard of again
)

// Event is a change of a sandbox or of a job.
type Event struct {
	ID         string            `json:"id,omitempty"` // the same each time that it is told
	Kind       string            `json:"kind"`
	Time       time.Time         `json:"time"`
	SandboxID  dsec.SandboxID    `json:"sandbox_id,omitempty"`
	Job        string            `json:"job,omitempty"`
	Labels     map[string]string `json:"labels,omitempty"`
	State      string            `json:"state,omitempty"`
	Reason     string            `json:"reason,omitempty"`
	Conditions []string          `json:"conditions,omitempty"`
	Node       string            `json:"node,omitempty"`
	// Repeated: it may have been told before.
	Repeated bool `json:"repeated,omitempty"`
	// MovedTo is the sandbox that has taken the place of this one.
	MovedTo dsec.SandboxID `json:"moved_to,omitempty"`
	// Cursor goes on behind the event.
	Cursor string `json:"cursor,omitempty"`
}

// EventFilter picks events. What is empty picks all.
type EventFilter struct {
	Kinds      []string // EventSandbox or EventJob; the others always come
	SandboxIDs []dsec.SandboxID
	Job        string
	Labels     map[string]string // all of them
	States     []string
}

func (f EventFilter) message() *dsecv1.EventFilter {
	out := &dsecv1.EventFilter{Kinds: f.Kinds, Job: f.Job, Labels: f.Labels, States: f.States}
	for _, id := range f.SandboxIDs {
		out.SandboxIds = append(out.SandboxIds, string(id))
	}
	return out
}

// EventOptions say which events are wanted.
type EventOptions struct {
	EventFilter
	// Cursor is that of the last event that was seen. Empty: what happens from now on.
	Cursor string
	// FromStart is, without a cursor, from the oldest event that is kept.
	FromStart bool
}

func eventOf(m *dsecv1.Event, cursor string) *Event {
	return &Event{
		ID: m.Id, Kind: m.Kind, Time: timeOf(m.Time), SandboxID: dsec.SandboxID(m.SandboxId), Job: m.Job, Labels: m.Labels, State: m.State, Reason: m.Reason,
		Conditions: m.Conditions, Node: m.Node, Repeated: m.Repeated, MovedTo: dsec.SandboxID(m.MovedTo), Cursor: cursor,
	}
}

// Events yields what happens to the project's sandboxes and jobs, until ctx ends. Where the
// connection breaks it goes on behind the last event, for a minute; nothing is missed by
// that. An error ends it; Cursor of the last event goes on behind that.
func (c *Client) Events(ctx context.Context, o EventOptions) iter.Seq2[*Event, error] {
	return func(yield func(*Event, error) bool) {
		req := &dsecv1.WatchEventsRequest{Cursor: o.Cursor, FromStart: o.FromStart, Filter: o.message()}
		end := time.Now().Add(goOnFor)
		for attempt := 1; ; attempt++ {
			stream, err := c.event.WatchEvents(ctx, connect.NewRequest(req))
			for err == nil && stream.Receive() {
				m := stream.Msg()
				attempt, end = 1, time.Now().Add(goOnFor)
				req.Cursor, req.FromStart = m.Cursor, false
				if m.Event != nil && !yield(eventOf(m.Event, m.Cursor), nil) {
					_ = stream.Close()
					return
				}
			}
			if err == nil {
				err = stream.Err()
				_ = stream.Close()
			}
			if err != nil {
				err = c.typed(err, dsecv1connect.EventServiceWatchEventsProcedure)
			}
			again := err == nil || brokeOff(err) && time.Now().Before(end)
			if ctx.Err() != nil || !again || pause(ctx, attempt) != nil {
				yield(nil, err)
				return
			}
		}
	}
}
