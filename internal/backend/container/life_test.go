package container

import (
	"testing"
)

func TestSandboxRunsCommands(t *testing.T) {
	h := newHost(t, nil)
	s := h.create()
	o := s.sh("echo hello; exit 3")
	if o.out != "hello\n" || o.Code != 3 {
		t.Errorf("have %q, %+v", o.out, o.Outcome)
	}
}
