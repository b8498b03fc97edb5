package edge_test

import (
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"

	"connectrpc.com/connect"
	"go.uber.org/goleak"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/backend"
	"github.com/opendsec/dsec/internal/backend/fake"
	"github.com/opendsec/dsec/internal/edge"
	"github.com/opendsec/dsec/internal/testutil"
	dsecv1 "github.com/opendsec/dsec/proto/dsec/v1"
)

// TestRandomHistoriesFitTheStateMachine runs random operations on ten request
// ids at once, with creates, destroys, dials, pauses and snapshots that fail now and then
// and PID 1s that die, and checks what each answer may say and that nothing is left.
// The seed is in the name of a failing case.
func TestRandomHistoriesFitTheStateMachine(t *testing.T) {
	defer goleak.VerifyNone(t, goleak.IgnoreCurrent())
	for range 2 {
		seed := rand.Uint64()
		t.Run(fmt.Sprint(seed), func(t *testing.T) { history(t, seed) })
	}
}

func history(t *testing.T, seed uint64) {
	const ids, workers, each = 10, 8, 64
	n := newNode(t, func(c *edge.Config, o *fake.Options) {
		now := faults(seed)
		c.MaxCalls, c.Layers = 6, newLayers()
		o.Groups = 2
		o.OnCreate = func(context.Context, backend.CreateRequest) error {
			return now(10, dsec.Errorf(dsec.CodeUnavailable, "the launcher is gone"))
		}
		o.OnDestroy = func(context.Context, dsec.SandboxID) error { return now(20, fmt.Errorf("busy")) }
		o.OnDial = func(dsec.SandboxID) error { return now(30, fmt.Errorf("refused")) }
		o.OnPause = func(context.Context, dsec.SandboxID) error { return now(10, fmt.Errorf("does not stop")) }
		o.OnResume = func(context.Context, dsec.SandboxID) error { return now(10, fmt.Errorf("does not go on")) }
		o.OnSnapshot = func(context.Context, dsec.SandboxID) error {
			return now(10, dsec.Errorf(dsec.CodeUnavailable, "the disk does not answer"))
		}
	})
	var wg sync.WaitGroup
	for w := range workers {
		wg.Go(func() {
			r := rand.New(rand.NewPCG(seed, uint64(w)))
			for range each {
				n.randomStep(r, fmt.Sprint("request-", r.IntN(ids)))
			}
		})
	}
	wg.Wait()
	seen := make(map[string]string) // request id by sandbox is unique at any time; the final word is the world's
	for i := range ids {
		key := fmt.Sprint("request-", i)
		found, err := n.FindRequest(t.Context(), connect.NewRequest(&dsecv1.FindRequestRequest{RequestId: key}))
		if err != nil {
			t.Fatal(err)
		}
		id := found.Msg.SandboxId
		if id == "" {
			continue
		}
		if other := seen[id]; other != "" {
			t.Errorf("%s is of %s and %s", id, other, key)
		}
		seen[id] = key
		for s := n.kill(id); s == "stopping"; s = n.kill(id) {
			// A destroy failed; another kill tries again.
		}
	}
	if n.edge.Live() != 0 || len(n.opts.World.IDs()) != 0 {
		t.Errorf("%d places held, %v in the world", n.edge.Live(), n.opts.World.IDs())
	}
	if c := n.edge.Calls(); c != 0 {
		t.Errorf("%d calls in progress", c)
	}
	n.close()
}

// faults returns a function that now and then returns the error given.
func faults(seed uint64) func(oneIn int, err error) error {
	var mu sync.Mutex
	r := rand.New(rand.NewPCG(seed, 1<<32))
	return func(oneIn int, err error) error {
		mu.Lock()
		defer mu.Unlock()
		if r.IntN(oneIn) == 0 {
			return err
		}
		return nil
	}
}

// randomStep does one operation on the sandbox of a request id.
func (n *node) randomStep(r *rand.Rand, key string) {
	s, err := n.tryCreate(&dsecv1.CreateRequest{RequestId: key})
	if err != nil {
		// Failed by a fault, or killed by another worker while it was made.
		n.allow("create", err, dsec.CodeUnavailable, dsec.CodeConflict)
		return
	}
	if !dsec.State(s.State).Valid() {
		n.t.Errorf("state %q", s.State)
	}
	switch op := r.IntN(29); {
	case op < 12:
		text := fmt.Sprint(r.Uint64())
		res, err := n.exec(s.Id, "echo", text)
		if err != nil {
			n.allow("exec", err, dsec.CodeUnavailable, dsec.CodeConflict, dsec.CodeLost, dsec.CodeExhausted, dsec.CodeOutcomeUnknown)
		} else if string(res.Stdout) != text+"\n" && res.Outcome.GetSignal() != 9 {
			n.t.Errorf("exec says %q, want %q", res.Stdout, text)
		}
	case op < 15:
		res, err := n.KillSandbox(n.t.Context(), connect.NewRequest(&dsecv1.KillRequest{SandboxId: s.Id}))
		if err != nil {
			n.t.Errorf("kill: %v", err)
		} else if st := dsec.State(res.Msg.State); !st.Terminal() && st != dsec.StateStopping {
			n.t.Errorf("killed and %s", st)
		}
	case op < 16:
		n.opts.World.Kill(dsec.SandboxID(s.Id), "shot")
	case op < 19:
		if s, err := n.pause(s.Id, nil); err != nil {
			n.allow("pause", err, dsec.CodeUnavailable, dsec.CodeConflict, dsec.CodeLost)
		} else if st := dsec.State(s.State); st == dsec.StateStarting || st == dsec.StatePending {
			n.t.Errorf("paused and %s", st)
		}
	case op < 22:
		if _, err := n.resume(s.Id); err != nil {
			n.allow("resume", err, dsec.CodeUnavailable, dsec.CodeConflict, dsec.CodeLost)
		}
	case op < 25:
		n.randomPack(r, s.Id)
	default:
		got, err := n.GetSandbox(n.t.Context(), connect.NewRequest(&dsecv1.GetRequest{SandboxId: s.Id}))
		if err != nil {
			n.t.Errorf("get: %v", err)
			return
		}
		was, is := dsec.State(s.State), dsec.State(got.Msg.Sandbox.State)
		if was.Terminal() && is != was {
			n.t.Errorf("%s became %s", was, is)
		}
	}
}

// randomPack packs a sandbox, and makes one of that, which ends at once.
func (n *node) randomPack(r *rand.Rand, id string) {
	pause := r.IntN(3) == 0
	packed, err := n.pack(&dsecv1.PackSandboxRequest{SandboxId: id, Pause: pause})
	if err != nil {
		n.allow("pack", err, dsec.CodeUnavailable, dsec.CodeConflict, dsec.CodeLost, dsec.CodeExhausted)
		return
	}
	if packed.Layer.GetDigest() == "" || packed.Create.GetRequestId() != "" || !slices.Equal(packed.Create.GetLayers(), []string{packed.Layer.Digest}) {
		n.t.Errorf("packed as %v", packed)
	}
	fork, err := n.tryCreate(packed.Create)
	if err != nil {
		n.allow("create of a pack", err, dsec.CodeUnavailable)
		return
	}
	for s := n.kill(fork.Id); s == "stopping"; s = n.kill(fork.Id) {
		// A destroy failed; another kill tries again.
	}
}

// allow fails the test for an error of any other code.
func (n *node) allow(what string, err error, codes ...dsec.Code) {
	e := typedError(err)
	if slices.Contains(codes, e.Code) {
		return
	}
	n.t.Errorf("%s: %s: %v", what, e.Code, e)
}

// TestTenThousandIdleSandboxes reports what one idle sandbox costs the edge
// and the fake together, and fails where that would matter next to the
// sandbox itself.
func TestTenThousandIdleSandboxes(t *testing.T) {
	count := 10_000
	if testutil.Race {
		count = 1000 // for the races; sizes say nothing then
	}
	n := newNode(t, func(c *edge.Config, o *fake.Options) { c.MaxSandboxes = count })
	before := heap()
	for i := range count / 100 {
		var items []*dsecv1.CreateSandboxesItem
		for j := range 100 {
			items = append(items, &dsecv1.CreateSandboxesItem{Request: &dsecv1.CreateRequest{
				Backend: "fake", RequestId: fmt.Sprint(i, "/", j), Job: "density", Env: map[string]string{"A": "1"}, Labels: map[string]string{"task": fmt.Sprint(i)},
			}, BodyDigest: make([]byte, 32)})
		}
		res, err := n.CreateSandboxes(t.Context(), connect.NewRequest(&dsecv1.CreateSandboxesRequest{Items: items}))
		if err != nil {
			t.Fatal(err)
		}
		for _, item := range res.Msg.Items {
			if item.GetCreated() == nil {
				t.Fatal(item.GetError())
			}
		}
	}
	used := float64(heap()-before) / float64(count) / 1024
	t.Logf("%.1f KiB of heap and stacks for each of %d idle sandboxes", used, count)
	if testutil.Race {
		testutil.Require(t, testutil.Root) // `make root-test` runs it, without the race detector
		t.Skip("the race detector's own memory is counted, too")
	}
	if used > 16 {
		t.Errorf("%.1f KiB for each idle sandbox, want at most 16", used)
	}
}
