package chronus_test

import (
	"testing"
	"time"

	"github.com/opendsec/dsec/internal/chronusapi"
)

// Time in which chronus is held counts for no timeout and no duration, and what has
// nothing to do with time is answered as ever.
func TestHeldTimeDoesNotCount(t *testing.T) {
	each(t, func(t *testing.T, f *fixture) {
		check := func(err error) {
			t.Helper()
			if err != nil {
				t.Fatal(err)
			}
		}
		check(f.Release(t.Context())) // of what was not held
		const timeout = 300 * time.Millisecond
		session := f.session(t)
		check(f.Hold(t.Context()))
		begun := time.Now()
		req := shell("echo begun; exec sleep 1000")
		req.Command.Timeout = timeout
		command, err := f.Start(t.Context(), req)
		reaches(t, command, err)
		inSession, err := f.RunCommand(t.Context(), chronusapi.SessionCommand{Session: session, Command: "echo begun; sleep 1000", Timeout: timeout})
		reaches(t, inSession, err)
		check(f.Hold(t.Context())) // again
		eventually(t, "the time is over", func() bool { return time.Since(begun) > 2*timeout })
		if r := f.run(t, shell("echo alive")); r.stdout != "alive\n" || r.outcome.Duration != 0 {
			t.Errorf("a command while time stands still: %+v", r)
		}
		list, err := f.Processes(t.Context())
		check(err)
		for _, p := range list[:2] {
			if p.Outcome != nil {
				t.Errorf("while time stands still %v ended with %+v", p.Argv, p.Outcome)
			}
		}
		held := time.Since(begun)
		check(f.Release(t.Context()))
		for what, s := range map[string]*chronusapi.Events{"command": command, "session": inSession} {
			o, err := drainRest(s)
			if took := time.Since(begun); err != nil || !o.TimedOut || took < timeout+held || o.Duration < timeout || o.Duration > took-held {
				t.Errorf("%s: %+v, %v after %v, of which time stood still for %v", what, o, err, took, held)
			}
		}
	})
}
