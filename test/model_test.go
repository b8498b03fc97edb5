package test

import (
	"flag"
	"fmt"
	"maps"
	"math/rand/v2"
	"strings"
	"testing"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/client"
)

var modelSteps = flag.Int("model.steps", 300, "of each seed of the model; `make model-test` takes more")

// worldSeeds found faults once.
var worldSeeds = []uint64{1}

// TestStateOfContainersFitsAModel does random things to containers: commands, actions that are
// asked for again, pauses, packs, forks, migrations and restarts of the server, and holds
// what is in them against a simple model. The seed is in the name of a failing case.
func TestStateOfContainersFitsAModel(t *testing.T) {
	for _, seed := range append(worldSeeds, rand.Uint64()) {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			c := new(containerServer)
			w := &world{T: t, c: c, cl: kept(t, c), r: rand.New(rand.NewPCG(seed, 0))}
			defer func() {
				for _, s := range w.all {
					_ = s.sb.Kill(t.Context())
				}
			}()
			for i := range *modelSteps {
				what := w.step()
				if t.Failed() {
					t.Fatalf("in step %d, %s", i, what)
				}
			}
			for _, s := range w.all {
				w.look(s)
			}
		})
	}
}

// world is the server with what its sandboxes should be like.
type world struct {
	*testing.T
	c    *containerServer
	cl   *client.Client
	r    *rand.Rand
	all  []*being
	pack int // so far
}

// being is one sandbox.
type being struct {
	sb      *client.Sandbox // by the ID that it was made with
	now     *client.Sandbox // by the one that it has
	paused  bool
	files   map[string]string // of /root, by name; d/ is a directory
	actions map[string]string // what was said, by action ID
	acted   int
}

const maxBeings = 5

func (w *world) step() (what string) {
	if len(w.all) == 0 {
		sb, err := w.cl.CreateSandbox(w.Context(), client.SandboxOptions{Layers: []string{"base"}, Job: "model"})
		w.must("create", err)
		w.all = append(w.all, &being{sb: sb, now: sb, files: map[string]string{}, actions: map[string]string{}})
		return "create"
	}
	at := w.r.IntN(len(w.all))
	s := w.all[at]
	type op struct {
		name   string
		weight int
		do     func()
	}
	ops := []op{
		{"change", 40, func() { w.change(s) }}, {"act", 15, func() { w.act(s) }}, {"repeat", 10, func() { w.repeat(s) }},
		{"pause", 10, func() {
			_, err := s.sb.Pause(w.Context(), client.PauseOptions{Wait: w.r.IntN(2) == 0})
			w.must("pause", err)
			s.paused = true
		}},
		{"resume", 5, func() { _, err := s.sb.Resume(w.Context()); w.must("resume", err); s.paused = false }},
		{"look", 10, func() { w.look(s) }}, {"pack", 5, func() { w.packs(s) }}, {"fork", 6, func() { w.fork(s) }},
		{"migrate", 3, func() { w.migrate(s) }}, {"restart", 2, func() { restart(w.T, w.c) }},
		{"kill", 3, func() { w.must("kill", s.sb.Kill(w.Context())); w.all = append(w.all[:at], w.all[at+1:]...) }},
	}
	total := 0
	for _, o := range ops {
		total += o.weight
	}
	n := w.r.IntN(total)
	for _, o := range ops {
		if n -= o.weight; n < 0 {
			o.do()
			return o.name
		}
	}
	return ""
}

func (w *world) must(what string, err error) {
	w.Helper()
	if err != nil {
		w.Fatalf("%s: %v", what, err)
	}
}

func (w *world) run(s *being, script string) string {
	w.Helper()
	out := says(w.T, s.sb, script)
	s.paused = false
	return out
}

// change does something to a file of /root.
func (w *world) change(s *being) {
	name := string(rune('a' + w.r.IntN(4)))
	switch w.r.IntN(4) {
	case 0:
		w.run(s, "rm -rf /root/"+name)
		delete(s.files, name)
	case 1: // a directory with a file, in place of whatever there was
		w.run(s, fmt.Sprintf("cd /root; rm -rf %s; mkdir %s; echo d > %s/f", name, name, name))
		s.files[name] = "d/"
	case 2:
		if s.files[name] != "d/" {
			line := fmt.Sprint(w.r.IntN(1000))
			w.run(s, fmt.Sprintf("echo %s >> /root/%s", line, name))
			s.files[name] += line + "\n"
		}
	case 3:
		text := fmt.Sprint(w.r.Uint64())
		w.run(s, fmt.Sprintf("cd /root; rm -rf %s; echo %s > %s", name, text, name))
		s.files[name] = text + "\n"
	}
}

// look compares all of /root, and the state before that resumes it.
func (w *world) look(s *being) {
	w.Helper()
	info, err := s.sb.Info(w.Context())
	w.must("info", err)
	want := dsec.StateRunning
	if s.paused {
		want = dsec.StatePaused
	}
	if info.State != want {
		w.Errorf("%s is %s, want %s", s.sb.ID(), info.State, want)
	}
	var have strings.Builder
	for _, name := range []string{"a", "b", "c", "d"} {
		switch text, ok := s.files[name]; {
		case text == "d/":
			fmt.Fprintf(&have, "%s: d\n", name)
		case ok:
			fmt.Fprintf(&have, "%s: %s", name, text)
		}
	}
	script := `cd /root; for n in a b c d; do if [ -d $n ]; then echo "$n: $(cat $n/f)"; elif [ -e $n ]; then echo "$n: $(cat $n)"; fi; done`
	if got := w.run(s, script); got != have.String() {
		w.Errorf("%s has\n%swant\n%s", s.sb.ID(), got, have.String())
	}
}

func (w *world) act(s *being) {
	id, text := fmt.Sprint("a", s.acted), fmt.Sprintln(w.r.Uint64())
	s.acted++
	s.actions[id] = text
	w.asks(s, id, false)
}

func (w *world) repeat(s *being) {
	if s.acted > 0 {
		w.asks(s, fmt.Sprint("a", w.r.IntN(s.acted)), true)
	}
}

func (w *world) asks(s *being, id string, replayed bool) {
	text := s.actions[id]
	cmd := s.sb.Shell("echo " + strings.TrimSpace(text))
	cmd.ActionID = id
	out, _, err := cmd.Output(w.Context())
	w.must("action", err)
	if string(out) != text || cmd.Replayed != replayed {
		w.Errorf("action %s says %q, replayed %v; want %q, %v", id, out, cmd.Replayed, text, replayed)
	}
	s.paused = false
}

// packs makes a layer, which changes nothing, and sometimes a sandbox of it.
func (w *world) packs(s *being) {
	w.pack++
	name := fmt.Sprintf("packed:%d", w.pack%3)
	_, _, err := s.sb.Pack(w.Context(), name, nil)
	w.must("pack", err)
	if len(w.all) < maxBeings {
		sb, err := w.cl.CreateSandbox(w.Context(), client.SandboxOptions{Layers: []string{name}, Job: "model"})
		w.must("create", err)
		w.add(s, sb)
	}
}

// add adds a sandbox that has the files of another.
func (w *world) add(like *being, sb *client.Sandbox) {
	w.all = append(w.all, &being{sb: sb, now: sb, files: maps.Clone(like.files), actions: map[string]string{}})
}

func (w *world) fork(s *being) {
	n := 1 + w.r.IntN(3)
	if len(w.all)+n > maxBeings {
		return
	}
	made, _, err := s.sb.Fork(w.Context(), n, client.ForkOptions{})
	w.must("fork", err)
	for _, m := range made {
		w.must("fork", m.Err)
		w.add(s, m.Sandbox)
	}
}

// migrate ends the trajectory: the one that takes its place has one of its own.
func (w *world) migrate(s *being) {
	o := client.MigrateOptions{LoseMemory: true}
	if s.acted > 0 {
		_, _, err := s.now.Migrate(w.Context(), o)
		wantCodeOf(w.T, "a migration that would lose actions", err, dsec.CodeConflict)
		o.LoseActions = true
	}
	moved, _, err := s.now.Migrate(w.Context(), o)
	w.must("migrate", err)
	if again, _, err := s.sb.Migrate(w.Context(), o); err != nil || again.ID() != moved.ID() {
		w.Errorf("by an earlier ID it is not what it was moved to, %s: %v", moved.ID(), err)
	}
	s.now, s.paused, s.acted, s.actions = moved, false, 0, map[string]string{}
}
