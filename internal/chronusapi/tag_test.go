package chronusapi

import (
	"context"
	"errors"
	"testing"

	"github.com/opendsec/dsec"
)

// tagHandler has started one command, with tag 7.
type tagHandler struct {
	*stub
	forgotten []uint64
}

func (h *tagHandler) FindTag(_ context.Context, tag uint64) (uint64, error) {
	switch tag {
	case 7:
		return 1 << 60, nil
	case 8:
		return 0, &dsec.Error{Code: dsec.CodeOutcomeUnknown, Field: "tag", Message: "dropped"}
	}
	return 0, nil
}

func (h *tagHandler) ForgetTag(_ context.Context, tag uint64) error {
	h.forgotten = append(h.forgotten, tag)
	return nil
}

// Calls with tags come whole, and those of both versions, in sequence, take one
// connection once one speaks the newer.
func TestTagsAreCarried(t *testing.T) {
	var got []StartRequest
	h := &tagHandler{stub: &stub{start: func(_ context.Context, req StartRequest, sink Sink) error {
		got = append(got, req)
		return errors.Join(sink(Event{Kind: EventStarted, Process: 1, PID: 1}), sink(exited(0)))
	}}}
	c, dials := serve(t, h)
	for _, tag := range []uint64{1<<64 - 1, 0, 7} {
		s, err := c.Start(t.Context(), StartRequest{Command: Command{Argv: []string{"true"}}, Orphan: true, Tag: tag})
		for err == nil {
			_, err = s.Next()
		}
		if len(got) == 0 || got[len(got)-1].Tag != tag || !got[len(got)-1].Orphan {
			t.Fatalf("tag %d came as %+v, %v", tag, got, err)
		}
	}
	for tag, want := range map[uint64]uint64{7: 1 << 60, 9: 0} {
		if process, err := c.FindTag(t.Context(), tag); process != want || err != nil {
			t.Errorf("tag %d: process %d, %v; want %d", tag, process, err, want)
		}
	}
	if _, err := c.FindTag(t.Context(), 8); err == nil || dsec.CodeOf(err) != dsec.CodeOutcomeUnknown {
		t.Errorf("a dropped tag: %v, want outcome_unknown", err)
	}
	if err := c.ForgetTag(t.Context(), 7); err != nil || len(h.forgotten) != 1 || h.forgotten[0] != 7 {
		t.Errorf("forgotten %v, %v; want 7", h.forgotten, err)
	}
	if n := dials.Load(); n != 1 {
		t.Errorf("%d connections for calls in sequence, want 1", n)
	}
}
