package test

import (
	"context"
	"fmt"
	"net"
	"net/http"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"connectrpc.com/connect"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/client"
	"github.com/opendsec/dsec/internal/iam"
	"github.com/opendsec/dsec/internal/placement"
	"github.com/opendsec/dsec/internal/testutil"
	dsecv1 "github.com/opendsec/dsec/proto/dsec/v1"
	"github.com/opendsec/dsec/proto/dsec/v1/dsecv1connect"
)

// nodes are two edges of containers, with data of their own and one store of layers, and
// an apiserver before both.
type nodes struct {
	t     *testing.T
	dir   string
	edges map[dsec.EdgeID]*containerServer
	api   *server
	once  sync.Once
}

// twoNodes starts them, with a layer named base. A client of them tries each call once.
func twoNodes(t *testing.T) (*nodes, *client.Client) {
	testutil.Require(t, testutil.Root, testutil.EROFS, testutil.Overlay, testutil.Program("busybox"))
	n := &nodes{t: t, dir: testutil.Dir(t), edges: map[dsec.EdgeID]*containerServer{}}
	name := testutil.Name(t)
	testutil.Ledger(t, name, filepath.Base(n.dir))
	for _, letter := range []string{"a", "b"} {
		c := &containerServer{name: name + letter, dir: filepath.Join(n.dir, letter)}
		t.Cleanup(func() { c.destroy(t) })
		n.start(c)
		n.edges[c.edgeID()] = c
	}
	n.startAPI()
	cl := n.client()
	importOf(t, cl, "base", client.ImportOptions{}, busyboxTar(t))
	return n, cl
}

// edgeID asks the edge itself.
func (c *containerServer) edgeID() dsec.EdgeID {
	direct := &http.Transport{DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return new(net.Dialer).DialContext(ctx, "unix", c.ready)
	}}
	defer direct.CloseIdleConnections()
	res, err := dsecv1connect.NewEdgeServiceClient(&http.Client{Transport: direct}, "http://edge").Info(c.t.Context(), connect.NewRequest(new(dsecv1.InfoRequest)))
	check(c.t, err)
	return dsec.EdgeID(res.Msg.EdgeId)
}

// start starts an edge, which dies at a step of DSEC_CRASH where env says so.
func (n *nodes) start(c *containerServer, env ...string) {
	n.t.Helper()
	p := startEnv(n.t, append(append(c.environ(), "DSEC_EDGE_METRICS_LISTEN=", "DSEC_LAYERS_STORE=dir:"+filepath.Join(n.dir, "store")), env...), "edge", c.args()...)
	c.server = &server{process: p, dir: c.dir}
	n.t.Cleanup(n.killAll)
}

func (n *nodes) startAPI() {
	n.t.Helper()
	var sockets []string
	for _, letter := range []string{"a", "b"} {
		sockets = append(sockets, filepath.Join(n.dir, letter, "run", "edge.sock"))
	}
	dir := filepath.Join(n.dir, "api")
	p := startEnv(n.t, []string{"DSEC_API_EDGES=" + strings.Join(sockets, ",")}, "apiserver", "--listen", "127.0.0.1:0",
		"--data-dir", filepath.Join(dir, "data"), "--run-dir", filepath.Join(dir, "run"))
	n.api = &server{p, p.ready, filepath.Join(dir, "data", "admin.key"), dir}
	n.t.Cleanup(n.killAll)
}

// restartAPI has one that remembers nothing of where sandboxes were moved.
func (n *nodes) restartAPI() *client.Client {
	n.t.Helper()
	n.api.kill()
	n.startAPI()
	return n.client()
}

func (n *nodes) client() *client.Client {
	n.t.Helper()
	cl, err := client.New(client.Options{URL: n.api.url, KeyFile: n.api.keyFile, Attempts: 1})
	check(n.t, err)
	n.t.Cleanup(cl.Close)
	return cl
}

// killAll kills all sandboxes once, as long as there is somebody to do it.
func (n *nodes) killAll() {
	n.once.Do(func() {
		cl, err := client.New(client.Options{URL: n.api.url, KeyFile: n.api.keyFile})
		check(n.t, err)
		defer cl.Close()
		live, err := n.live(cl)
		check(n.t, err)
		for _, id := range live {
			if err := cl.Sandbox(string(id)).Kill(context.Background()); err != nil {
				n.t.Error(err)
			}
		}
	})
}

// live are the sandboxes that have not ended, on both nodes.
func (n *nodes) live(cl *client.Client) (ids []dsec.SandboxID, err error) {
	for s, err := range cl.Sandboxes(context.WithoutCancel(n.t.Context()), client.ListOptions{}) {
		if err != nil {
			return nil, err
		}
		if s.State == dsec.StateRunning || s.State == dsec.StatePaused {
			ids = append(ids, s.ID)
		}
	}
	return ids, nil
}

// other is the node that is not one's.
func (n *nodes) other(id dsec.EdgeID) dsec.EdgeID {
	for other := range n.edges {
		if other != id {
			return other
		}
	}
	n.t.Fatal("there is one node")
	return ""
}

// spread is a request ID of which some of a number of sandboxes go to each node.
func (n *nodes) spread(count int) (id string, at []dsec.EdgeID) {
	var all []dsec.EdgeID
	for id := range n.edges {
		all = append(all, id)
	}
	for try := 0; ; try++ {
		id, at = fmt.Sprint("r", try), nil
		seen := map[dsec.EdgeID]int{}
		for i := range count {
			first := placement.Rendezvous(iam.AdminProject, fmt.Sprintf("%s/%d", id, i), all)[0]
			at = append(at, first)
			seen[first]++
		}
		if len(seen) > 1 {
			return id, at
		}
	}
}

// written writes what a pack may get wrong over the layer base, and returns the script
// that tells all of it.
func written(t *testing.T, sb *client.Sandbox) (look string) {
	t.Helper()
	says(t, sb, `cd /root; head -c 3000000 /dev/urandom > bytes; echo text > file; ln -s file link; ln file again; ln file name
mkdir -p deep/er; echo two > deep/er/f; chmod 2750 deep; chown 7:8 deep/er/f; : > empty; echo x > "a name
of two lines"; rm /bin/ls; rm -r /tmp; mkdir /tmp; echo new > /tmp/new; echo root:x:0:0::/root:/bin/sh > /etc/passwd`)
	return `cd /root; sha256sum bytes file again name deep/er/f empty a*lines /tmp/* /etc/passwd; readlink link; test ! -e /bin/ls
busybox stat -c '%n %a %u %g %Y' bytes file deep deep/er/f /tmp; busybox stat -c '%n %h' bytes file; echo /tmp/* /root/*; echo $KEPT`
}

// TestPackForkAndMigrateOverNodes: what a sandbox of one node has written is there to the
// byte in those that are made of it on another, and its ID leads to the one that takes its
// place, whatever is restarted.
func TestPackForkAndMigrateOverNodes(t *testing.T) {
	n, cl := twoNodes(t)
	sb, err := cl.CreateSandbox(t.Context(), client.SandboxOptions{Layers: []string{"base"}, Env: map[string]string{"KEPT": "yes"}})
	check(t, err)
	home := sb.ID().Edge()
	away := n.other(home)
	look := written(t, sb)
	want := says(t, sb, look)
	same := func(what string, sb *client.Sandbox) {
		t.Helper()
		if got := says(t, sb, look); got != want {
			t.Errorf("%s has\n%swant\n%s", what, got, want)
		}
	}

	const count = 6
	request, at := n.spread(count)
	fork := func() []client.Created {
		t.Helper()
		made, _, err := sb.Fork(t.Context(), count, client.ForkOptions{RequestID: request})
		check(t, err)
		return made
	}
	made := fork()
	for i, m := range made {
		check(t, m.Err)
		if m.Sandbox.ID().Edge() != at[i] {
			t.Errorf("fork %d is on node %s, want %s", i, m.Sandbox.ID().Edge(), at[i])
		}
		same(fmt.Sprint("fork ", i), m.Sandbox)
		says(t, m.Sandbox, "echo of its own > /root/file")
	}
	same("the first, after its forks have written,", sb)
	for i, m := range fork() {
		if m.Err != nil || m.Sandbox.ID() != made[i].Sandbox.ID() {
			t.Errorf("fork %d again: %v, %v, want %s", i, m.Sandbox, m.Err, made[i].Sandbox.ID())
		}
	}

	// By its name, on the node that has not packed it: until both have one.
	_, _, err = sb.Pack(t.Context(), "packed", nil)
	check(t, err)
	seen := map[dsec.EdgeID]bool{}
	for len(seen) < 2 {
		of, err := cl.CreateSandbox(t.Context(), client.SandboxOptions{Layers: []string{"packed"}, Env: map[string]string{"KEPT": "yes"}})
		check(t, err)
		same("one of the layer", of)
		seen[of.ID().Edge()] = true
	}

	moved, _, err := sb.Migrate(t.Context(), client.MigrateOptions{LoseMemory: true})
	check(t, err)
	if moved.ID().Edge() != away {
		t.Errorf("moved to node %s, want %s", moved.ID().Edge(), away)
	}
	p, err := sb.Shell("until [ -e /tmp/go ]; do sleep 0.05; done; exit 7").Detach(t.Context())
	check(t, err)
	for _, again := range []func(){
		func() {}, func() { n.edges[home].kill(); n.start(n.edges[home]) }, func() { n.edges[away].kill(); n.start(n.edges[away]) },
		func() { cl = n.restartAPI(); sb = cl.Sandbox(string(sb.ID())) }, func() { n.edges[home].kill() }, // it is known here where it went
	} {
		again()
		if info, err := sb.Info(t.Context()); err != nil || info.ID != moved.ID() || info.State != dsec.StateRunning {
			t.Fatalf("by its old ID: %+v, %v", info, err)
		}
		same("by its old ID it", sb)
	}
	n.start(n.edges[home])
	says(t, sb, "echo > /tmp/go")
	if o, err := sb.Process(p.ID).Attach(t.Context(), 0, nil, nil, nil); err != nil || o.Code != 7 {
		t.Errorf("a command that ran all the time: %+v, %v", o, err)
	}
}

// TestLayersOfOtherNodesStay: what has no name, as the layer of a fork, stays as long as a
// sandbox of any node is made of it.
func TestLayersOfOtherNodesStay(t *testing.T) {
	n, cl := twoNodes(t)
	sb, err := cl.CreateSandbox(t.Context(), client.SandboxOptions{Layers: []string{"base"}})
	check(t, err)
	look := written(t, sb)
	want := says(t, sb, look)
	request, at := n.spread(4)
	made, _, err := sb.Fork(t.Context(), 4, client.ForkOptions{RequestID: request})
	check(t, err)
	check(t, sb.Kill(t.Context()))
	left := map[dsec.EdgeID]*client.Sandbox{}
	for i, m := range made {
		check(t, m.Err)
		if left[at[i]] != nil {
			check(t, m.Sandbox.Kill(t.Context()))
			continue
		}
		left[at[i]] = m.Sandbox
	}
	for id, c := range n.edges { // at last one node has the only one
		removed, _, err := cl.CollectLayers(t.Context(), 0, false)
		if err != nil || len(removed) > 0 {
			t.Fatalf("with one on node %s: removed %v, %v", id, removed, err)
		}
		c.kill()
		n.start(c)
		if got := says(t, left[id], look); got != want {
			t.Errorf("on node %s it has\n%swant\n%s", id, got, want)
		}
		check(t, left[id].Kill(t.Context()))
	}
	if removed, _, err := cl.CollectLayers(t.Context(), 0, false); err != nil || len(removed) != 1 {
		t.Errorf("when they have ended: removed %v, %v; want the fork's", removed, err)
	}
}

// TestNodeThatIsDeadInAFork: each sandbox that cannot be made tells so, none is made twice,
// and the same request makes those that were not.
func TestNodeThatIsDeadInAFork(t *testing.T) {
	n, cl := twoNodes(t)
	sb, err := cl.CreateSandbox(t.Context(), client.SandboxOptions{Layers: []string{"base"}})
	check(t, err)
	look := written(t, sb)
	want := says(t, sb, look)
	home := sb.ID().Edge()
	away := n.other(home)
	const count = 6
	request, at := n.spread(count)
	fork := func() ([]client.Created, error) {
		made, _, err := sb.Fork(t.Context(), count, client.ForkOptions{RequestID: request})
		return made, err
	}

	// The other node is dead: it may hold the request.
	n.edges[away].kill()
	made, err := fork()
	check(t, err)
	for i, m := range made {
		wantCodeOf(t, fmt.Sprint("fork ", i), m.Err, dsec.CodeUnavailable)
	}
	// Without a request nothing is held, and the node that is there makes all.
	free, _, err := sb.Fork(t.Context(), 2, client.ForkOptions{})
	check(t, err)
	for _, m := range free {
		check(t, m.Err)
		check(t, m.Sandbox.Kill(t.Context()))
	}

	// It dies when it has made one, before it tells anybody.
	n.start(n.edges[away], "DSEC_CRASH=create.publish")
	made, err = fork()
	check(t, err)
	for i, m := range made {
		if at[i] == away {
			wantCodeOf(t, fmt.Sprint("fork ", i), m.Err, dsec.CodeOutcomeUnknown)
		} else if m.Err != nil {
			t.Errorf("fork %d, of the node that lives: %v", i, m.Err)
		}
	}
	n.edges[away].gone()
	n.start(n.edges[away])

	// The sandbox's own node dies while it is packed, and nothing else has happened.
	n.edges[home].kill()
	n.start(n.edges[home], "DSEC_CRASH=pack.copied")
	_, err = fork()
	wantCodeOf(t, "a pack that its node does not survive", err, dsec.CodeOutcomeUnknown)
	n.edges[home].gone()
	_, err = fork()
	wantCodeOf(t, "a fork on a dead node", err, dsec.CodeUnavailable)
	n.start(n.edges[home])

	before := made
	made, err = fork()
	check(t, err)
	ids := map[dsec.SandboxID]bool{sb.ID(): true}
	for i, m := range made {
		check(t, m.Err)
		if before[i].Err == nil && before[i].Sandbox.ID() != m.Sandbox.ID() {
			t.Errorf("fork %d was made twice", i)
		}
		if got := says(t, m.Sandbox, look); got != want {
			t.Errorf("fork %d has\n%swant\n%s", i, got, want)
		}
		ids[m.Sandbox.ID()] = true
	}
	if live, err := n.live(cl); err != nil || len(live) != count+1 || len(ids) != count+1 {
		t.Errorf("%d live, of which %d are known, %v; want %d", len(live), len(ids), err, count+1)
	}
}

// TestNodeThatDiesInAMigration: there is one sandbox in the end, by the old ID.
func TestNodeThatDiesInAMigration(t *testing.T) {
	n, _ := twoNodes(t)
	for name, tc := range map[string]struct {
		home  bool // that node dies; else the one that is moved to
		api   bool // the apiserver dies after it
		step  string
		code  dsec.Code
		moved bool
	}{
		"while it is packed":     {home: true, step: "pack.copied", code: dsec.CodeOutcomeUnknown},
		"when it was told":       {home: true, step: "redirect.intent", code: dsec.CodeOutcomeUnknown, moved: true},
		"before the new one":     {step: "create.backend", code: dsec.CodeOutcomeUnknown},
		"when the new one is up": {step: "create.publish", code: dsec.CodeOutcomeUnknown},
		"and the apiserver, too": {api: true, step: "create.publish", code: dsec.CodeOutcomeUnknown},
	} {
		t.Run(name, func(t *testing.T) {
			sb, err := n.client().CreateSandbox(t.Context(), client.SandboxOptions{Layers: []string{"base"}})
			check(t, err)
			look := written(t, sb)
			want := says(t, sb, look)
			dies := sb.ID().Edge()
			if !tc.home {
				dies = n.other(dies)
			}
			c := n.edges[dies]
			c.kill()
			n.start(c, "DSEC_CRASH="+tc.step)
			sb = n.restartAPI().Sandbox(string(sb.ID())) // which has just asked both nodes
			_, _, err = sb.Migrate(t.Context(), client.MigrateOptions{LoseMemory: true})
			wantCodeOf(t, "the migration", err, tc.code)
			c.gone()
			if tc.api {
				sb = n.restartAPI().Sandbox(string(sb.ID()))
			}
			if tc.home {
				_, _, err = sb.Migrate(t.Context(), client.MigrateOptions{LoseMemory: true})
				wantCodeOf(t, "a migration of a dead node", err, dsec.CodeUnavailable)
			} else if got := says(t, sb, look); got != want {
				t.Errorf("while the other node is dead it has\n%swant\n%s", got, want)
			}
			n.start(c)
			testutil.WaitFor(t, time.Minute, "one sandbox", func() error {
				live, err := n.live(n.client())
				if err != nil {
					return err
				}
				if len(live) != 1 || tc.moved == (live[0] == sb.ID()) {
					return fmt.Errorf("there are %v, of %s", live, sb.ID())
				}
				return nil
			})
			if got := says(t, sb, look); got != want {
				t.Errorf("it has\n%swant\n%s", got, want)
			}
			moved, _, err := sb.Migrate(t.Context(), client.MigrateOptions{LoseMemory: true}) // it can be
			check(t, err)
			if got := says(t, moved, look); got != want {
				t.Errorf("moved it has\n%swant\n%s", got, want)
			}
			check(t, moved.Kill(t.Context()))
		})
	}
}

// gone waits for the end of a server that dies by itself.
func (c *containerServer) gone() { c.t.Helper(); <-c.done }
