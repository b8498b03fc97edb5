package edge_test

import (
	"fmt"
	"sync/atomic"
	"testing"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/backend/fake"
	"github.com/opendsec/dsec/internal/edge"
	"github.com/opendsec/dsec/internal/testutil"
	dsecv1 "github.com/opendsec/dsec/proto/dsec/v1"
)

// TestCrashBetweenTheLogAndTheSandbox: an edge dies when an action is in the log, and nothing of it has
// come to the sandbox. The next one finds out that a command was not started, and its ID is free: it runs
// once, also where what the dead edge has sent comes late. Of what is no command it cannot find out.
func TestCrashBetweenTheLogAndTheSandbox(t *testing.T) {
	for name, tt := range map[string]struct {
		act  func(n *node, id string) error
		want dsec.Code
	}{
		"command": {act: func(n *node, id string) error {
			res, err := n.process.Exec(t.Context(), named(&dsecv1.ExecRequest{SandboxId: id, Command: &dsecv1.Command{Shell: "mkdir /tmp/d; echo ran >> /tmp/d/ran; exit 3"}}, "a"))
			if err == nil && res.Msg.Outcome.GetExitCode() != 3 {
				err = fmt.Errorf("exit code %d", res.Msg.Outcome.GetExitCode())
			}
			return err
		}},
		"directory": {act: func(n *node, id string) error {
			return second(n.file.Mkdir(t.Context(), named(&dsecv1.MkdirRequest{SandboxId: id, Path: &dsecv1.Path{Path: "/tmp/d"}}, "a")))
		}, want: dsec.CodeOutcomeUnknown},
	} {
		t.Run(name, func(t *testing.T) {
			var dies atomic.Bool
			var k *crash
			n := newNode(t, func(c *edge.Config, o *fake.Options) {
				k = arm(t, c, "dial")
				crash := c.Crash
				o.OnDial = func(dsec.SandboxID) error {
					if dies.Load() {
						crash("dial")
					}
					return nil
				}
			})
			id := n.create(&dsecv1.CreateRequest{})
			dies.Store(true)
			late := make(chan struct{})
			if !k.until(func() { _ = tt.act(n, id); close(late) }) {
				t.Fatal("it did not die")
			}
			m := newNode(t, func(c *edge.Config, o *fake.Options) { *c, o.World = k.after(n.cfg), n.opts.World })
			var err error
			testutil.WaitFor(t, 20*time.Second, "what came of it", func() error {
				if err = tt.act(m, id); err != nil && typedError(err).Code == dsec.CodeUnavailable {
					return err // it is being found out
				}
				return nil
			})
			if tt.want == "" && err != nil || tt.want != "" && (err == nil || typedError(err).Code != tt.want) {
				t.Fatalf("on the next edge: %v, want %q", err, tt.want)
			}
			k.release <- struct{}{}
			<-late
			if tt.want != "" {
				return
			}
			if got := string(m.shell(id, "cat /tmp/d/ran").Stdout); got != "ran\n" {
				t.Errorf("it ran %q, want once", got)
			}
		})
	}
}
