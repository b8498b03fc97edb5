package edge

import (
	"context"
	"errors"
	"net"
	"testing"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/backend"
)

// starving is an instance whose files' process was killed for want of memory at
// some time.
type starving struct {
	backend.Instance
	at time.Time
}

func (s *starving) DialFiles(context.Context) (net.Conn, error) { return nil, net.ErrClosed }
func (s *starving) FilesStarved(since time.Time) bool           { return !s.at.Before(since) }

// A call for files that broke because the sandbox's own processes have taken its
// memory is never told as the platform's fault, and others that broke always are.
func TestFilesThatStarveAreTheSandboxs(t *testing.T) {
	began := time.Now()
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	unavailable, unknown := dsec.Errorf(dsec.CodeUnavailable, "it broke"), dsec.Errorf(dsec.CodeOutcomeUnknown, "it broke")
	for _, tt := range []struct {
		name string
		ctx  context.Context
		inst backend.Instance
		err  error
		want dsec.Code
	}{
		{"a read", t.Context(), &starving{at: began.Add(1)}, unavailable, dsec.CodeExhausted},
		{"a write", t.Context(), &starving{at: began.Add(1)}, unknown, dsec.CodeConflict},
		{"a write before", t.Context(), &starving{at: began.Add(-1)}, unknown, dsec.CodeOutcomeUnknown},
		{"a read before", t.Context(), &starving{at: began.Add(-1)}, unavailable, dsec.CodeUnavailable},
		{"another error", t.Context(), &starving{at: began.Add(1)}, dsec.Invalid("path", "no"), dsec.CodeInvalid},
		{"a backend with one process for all", t.Context(), nil, unavailable, dsec.CodeUnavailable},
		{"a client that has gone", ended, &starving{at: began.Add(1)}, unknown, dsec.CodeOutcomeUnknown},
	} {
		c := &call{ctx: tt.ctx, inst: tt.inst, files: true}
		err := c.starvedFiles(began, tt.err)
		if got := dsec.CodeOf(err); got != tt.want {
			t.Errorf("%s: %v is %s, want %s", tt.name, err, got, tt.want)
		}
		if !errors.Is(err, tt.err) {
			t.Errorf("%s: %v has lost its cause", tt.name, err)
		}
		if tt.want == dsec.CodeExhausted || tt.want == dsec.CodeConflict {
			if dsec.CodeOf(err).Platform() {
				t.Errorf("%s: %s is the platform's", tt.name, dsec.CodeOf(err))
			}
		}
	}
	of := &call{ctx: t.Context(), inst: &starving{at: began.Add(1)}}
	if err := of.starvedFiles(began, unknown); dsec.CodeOf(err) != dsec.CodeOutcomeUnknown {
		t.Errorf("of a call that is not for files it makes %v", err)
	}
	of.files = true
	if err := of.starvedFiles(began, nil); err != nil {
		t.Errorf("of no error it makes %v", err)
	}
}
