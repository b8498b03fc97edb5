package edge_test

import (
	"flag"
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"

	"connectrpc.com/connect"

	"github.com/opendsec/dsec"
	dsecv1 "github.com/opendsec/dsec/proto/dsec/v1"
)

var modelSteps = flag.Int("model.steps", 1500, "of each seed of the model; `make model-test` takes more")

// modelSeeds found faults once.
var modelSeeds = []uint64{1, 2}

// TestStateModel does random things to sandboxes, one after the other, and holds each
// answer against a simple model: what was written, what each action was answered, and
// what is paused. The seed is in the name of a failing case.
func TestStateModel(t *testing.T) {
	for _, seed := range append(modelSeeds, rand.Uint64()) {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			m := &stateModel{node: newNode(t, withLayers(newLayers())), r: rand.New(rand.NewPCG(seed, 0))}
			for range *modelSteps {
				m.step()
				if t.Failed() {
					return
				}
			}
			for _, s := range m.sandboxes {
				m.looks(s)
			}
		})
	}
}

type stateModel struct {
	*node
	r         *rand.Rand
	sandboxes []*modelSandbox
}

type modelSandbox struct {
	id      string
	paused  bool
	ended   bool
	file    string // /tmp/f
	actions []modelAction
}

// modelAction is a command that was run under an ID, and what it answered.
type modelAction struct {
	script, stdout string
	code           int32
}

func (m *stateModel) step() {
	if len(m.sandboxes) < 2 || m.r.IntN(100) == 0 {
		m.sandboxes = append(m.sandboxes, &modelSandbox{id: m.create(&dsecv1.CreateRequest{Job: "model"})})
		return
	}
	s := m.sandboxes[m.r.IntN(len(m.sandboxes))]
	if s.ended {
		m.afterEnd(s)
		return
	}
	switch op := m.r.IntN(100); {
	case op < 25:
		m.acts(s)
	case op < 45 && len(s.actions) > 0:
		m.repeats(s)
	case op < 50 && len(s.actions) > 0:
		_, err := m.process.Exec(m.t.Context(), named(m.request(s, "echo another"), fmt.Sprint(m.r.IntN(len(s.actions)))))
		wantError(m.t, err, dsec.CodeDiverged, "")
		s.paused = false
	case op < 62:
		m.mustPause(s.id, nil)
		s.paused = true
	case op < 70:
		if _, err := m.resume(s.id); err != nil {
			m.t.Errorf("resume: %v", err)
		}
		s.paused = false
	case op < 76:
		m.job(s)
	case op < 80:
		m.restart()
	case op < 82:
		m.kill(s.id)
		s.ended = true
	case op < 90:
		m.looks(s)
	case op < 93: // it stays as it is; what is made of it is another, and has no actions
		packed := m.mustPack(&dsecv1.PackSandboxRequest{SandboxId: s.id})
		if m.sandboxes[0].ended || len(m.sandboxes) < 4 {
			m.sandboxes = append(m.sandboxes, &modelSandbox{id: m.create(packed.Create)})
		}
	default:
		line := fmt.Sprintf("line %d\n", m.r.IntN(1000))
		m.shell(s.id, "echo "+strings.TrimSpace(line)+" >> /tmp/f")
		s.file += line
		s.paused = false
	}
}

func (m *stateModel) request(s *modelSandbox, script string) *dsecv1.ExecRequest {
	return &dsecv1.ExecRequest{SandboxId: s.id, Command: &dsecv1.Command{Shell: script}}
}

// acts runs a command under the next ID.
func (m *stateModel) acts(s *modelSandbox) {
	n := len(s.actions)
	a := modelAction{code: int32(m.r.IntN(200)), stdout: fmt.Sprintf("out %d\n", m.r.Uint32())}
	a.script = fmt.Sprintf("echo action %d >> /tmp/f; echo %s; exit %d", n, strings.TrimSpace(a.stdout), a.code)
	m.asks(s, n, a, false)
	s.actions = append(s.actions, a)
	s.file += fmt.Sprintf("action %d\n", n)
}

// repeats asks for one that was done.
func (m *stateModel) repeats(s *modelSandbox) {
	n := m.r.IntN(len(s.actions))
	m.asks(s, n, s.actions[n], true)
}

func (m *stateModel) asks(s *modelSandbox, n int, a modelAction, replayed bool) {
	res, err := m.process.Exec(m.t.Context(), named(m.request(s, a.script), fmt.Sprint(n)))
	if err != nil {
		m.t.Errorf("action %d: %v", n, err)
		return
	}
	if string(res.Msg.Stdout) != a.stdout || res.Msg.Outcome.GetExitCode() != a.code || wasReplayed(res.Header()) != replayed {
		m.t.Errorf("action %d: %q, %v, replayed %v; want %q, %d, %v", n, res.Msg.Stdout, res.Msg.Outcome, wasReplayed(res.Header()), a.stdout, a.code, replayed)
	}
	s.paused = false
}

// job pauses or resumes all of them at once.
func (m *stateModel) job(*modelSandbox) {
	action, state, paused := "pause", "paused", true
	if m.r.IntN(2) == 0 {
		action, state, paused = "resume", "running", false
	}
	res, err := m.ApplyToJob(m.t.Context(), connect.NewRequest(&dsecv1.ApplyToJobRequest{Job: "model", Action: action}))
	if err != nil {
		m.t.Error(err)
		return
	}
	live := 0
	for _, s := range m.sandboxes {
		if !s.ended {
			live++
			s.paused = paused
		}
	}
	if len(res.Msg.Items) != live {
		m.t.Errorf("%s of %d sandboxes, want %d", action, len(res.Msg.Items), live)
	}
	for _, item := range res.Msg.Items {
		if item.Error != nil || item.State != state {
			m.t.Errorf("%s: %v", action, item)
		}
	}
}

// looks compares the state, which changes nothing, and the file, which resumes it.
func (m *stateModel) looks(s *modelSandbox) {
	want := "running"
	switch {
	case s.ended:
		want = "stopped"
	case s.paused:
		want = "paused"
	}
	if got := m.get(s.id).State; got != want {
		m.t.Errorf("sandbox %s is %s, want %s", s.id, got, want)
	}
	if s.ended || s.file == "" {
		return
	}
	if got := string(m.shell(s.id, "cat /tmp/f").Stdout); got != s.file {
		m.t.Errorf("the file of %s has %q, want %q", s.id, got, s.file)
	}
	s.paused = false
}

// afterEnd: nothing brings it back, and what it did is still told.
func (m *stateModel) afterEnd(s *modelSandbox) {
	if _, err := m.resume(s.id); dsec.CodeOf(typedError(err)) != dsec.CodeConflict {
		m.t.Errorf("resume of an ended sandbox: %v", err)
	}
	done := 0
	for _, e := range m.trajectory(s.id) {
		if e.ActionId != "" {
			done++
		}
	}
	if done != len(s.actions) {
		m.t.Errorf("the trajectory of %s has %d actions, want %d", s.id, done, len(s.actions))
	}
}
