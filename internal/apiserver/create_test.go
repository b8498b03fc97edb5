package apiserver

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strings"
	"testing"

	"connectrpc.com/connect"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/client"
	dsecv1 "github.com/opendsec/dsec/proto/dsec/v1"
	"github.com/opendsec/dsec/proto/dsec/v1/dsecv1connect"
)

func options() client.SandboxOptions { return client.SandboxOptions{Backend: "fake"} }

func keyed(id string) client.SandboxOptions {
	o := options()
	o.RequestID = id
	return o
}

func stubs(n int) []*stubEdge {
	var out []*stubEdge
	for range n {
		out = append(out, newStub("fake"))
	}
	return out
}

func TestRequestIDs(t *testing.T) {
	edges := stubs(5)
	r := newRig(t, edges...)
	a, b := r.client(r.secret), r.client(r.other)
	for _, id := range []string{"one", "two", "three", "four", strings.Repeat("é", 128)} {
		first, err := a.CreateSandbox(t.Context(), keyed(id))
		check(t, err)
		again, err := a.CreateSandbox(t.Context(), keyed(id))
		check(t, err)
		if first.ID() != again.ID() {
			t.Errorf("%s: two sandboxes, %s and %s", id, first.ID(), again.ID())
		}
		other := keyed(id)
		other.User = "nobody"
		if _, err := a.CreateSandbox(t.Context(), other); codeOf(err) != dsec.CodeConflict {
			t.Errorf("%s: other body: %v", id, err)
		}
		theirs, err := b.CreateSandbox(t.Context(), keyed(id))
		check(t, err)
		if theirs.ID() == first.ID() {
			t.Errorf("%s: project b got a's sandbox", id)
		}
	}
	if _, err := a.CreateSandbox(t.Context(), keyed(strings.Repeat("x", 129))); codeOf(err) != dsec.CodeInvalid {
		t.Errorf("long id: %v", err)
	}
	if _, err := a.CreateSandbox(t.Context(), keyed("a\x00b")); codeOf(err) != dsec.CodeInvalid {
		t.Errorf("NUL in id: %v", err)
	}
}

// TestUnreachableHolderIsNeverCreatedTwice takes down the edge that holds a key.
func TestUnreachableHolderIsNeverCreatedTwice(t *testing.T) {
	edges := stubs(3)
	r := newRig(t, edges...)
	c := r.client(r.secret)
	sb, err := c.CreateSandbox(t.Context(), keyed("k"))
	check(t, err)
	made := func() (n int) {
		for _, e := range edges {
			e.set(func() { n += len(e.creates) })
		}
		return n
	}
	before := made()
	holder := edges[slices.IndexFunc(edges, func(e *stubEdge) bool { return e.id == sb.ID().Edge() })]
	holder.set(func() { holder.refuse = dsec.Errorf(dsec.CodeUnavailable, "draining") })
	if _, err := c.CreateSandbox(t.Context(), keyed("k")); codeOf(err) != dsec.CodeUnavailable || made() != before {
		t.Errorf("%v; %d creates, %d before", err, made(), before)
	}
}

func TestRefusedCreateGoesToTheNextEdge(t *testing.T) {
	edges := stubs(3)
	r := newRig(t, edges...)
	c := r.client(r.secret)
	for _, e := range edges[1:] {
		e.set(func() { e.refuse = dsec.Errorf(dsec.CodeExhausted, "full") })
	}
	for range 10 {
		sb, err := c.CreateSandbox(t.Context(), options())
		check(t, err)
		if sb.ID().Edge() != edges[0].id {
			t.Fatalf("made by %s", sb.ID().Edge())
		}
	}
	edges[0].set(func() { edges[0].refuse = dsec.Invalid("user", "want a name") })
	edges[1].set(func() { edges[1].refuse = nil })
	// An edge that refuses for good ends the create; those that refuse for now do not.
	if _, err := c.CreateSandbox(t.Context(), options()); err != nil && codeOf(err) != dsec.CodeInvalid {
		t.Errorf("%v", err)
	}
	for _, e := range edges {
		e.set(func() { e.refuse = dsec.Errorf(dsec.CodeExhausted, "full") })
	}
	if _, err := c.CreateSandbox(t.Context(), options()); codeOf(err) != dsec.CodeExhausted {
		t.Errorf("all full: %v", err)
	}
}

func TestBatchAndList(t *testing.T) {
	edges := stubs(3)
	r := newRig(t, edges...)
	c := r.client(r.secret)
	made, err := c.CreateSandboxes(t.Context(), 100, keyed("batch"))
	check(t, err)
	again, err := c.CreateSandboxes(t.Context(), 100, keyed("batch"))
	check(t, err)
	var ids []string
	for i := range made {
		check(t, made[i].Err)
		check(t, again[i].Err)
		if made[i].Sandbox.ID() != again[i].Sandbox.ID() {
			t.Fatalf("item %d changed", i)
		}
		ids = append(ids, string(made[i].Sandbox.ID()))
	}
	_, err = r.client(r.other).CreateSandbox(t.Context(), options())
	check(t, err)
	for _, size := range []int{1, 7, 100, 1000} {
		var listed []string
		for s, err := range c.Sandboxes(t.Context(), client.ListOptions{PageSize: size}) {
			check(t, err)
			listed = append(listed, string(s.ID))
		}
		slices.Sort(ids)
		if !slices.Equal(listed, ids) {
			t.Errorf("pages of %d: %d sandboxes, want %d in order", size, len(listed), len(ids))
		}
	}
	for _, n := range []int{0, -1, 1001} {
		if _, err := c.CreateSandboxes(t.Context(), n, options()); codeOf(err) != dsec.CodeInvalid {
			t.Errorf("batch of %d: %v", n, err)
		}
	}
	for _, size := range []int{-1, 1001} {
		for _, err := range c.Sandboxes(t.Context(), client.ListOptions{PageSize: size}) {
			if codeOf(err) != dsec.CodeInvalid {
				t.Errorf("page of %d: %v", size, err)
			}
		}
	}
}

// TestBatchOfLongRequests: a batch that is more than one message to an edge takes.
func TestBatchOfLongRequests(t *testing.T) {
	r := newRig(t, newStub("fake"))
	long := options()
	long.Env = map[string]string{}
	for i := range 4 {
		long.Env[fmt.Sprintf("K%d", i)] = strings.Repeat("x", 60_000)
	}
	made, err := r.client(r.secret).CreateSandboxes(t.Context(), 100, long)
	check(t, err)
	ids := map[dsec.SandboxID]bool{}
	for i := range made {
		check(t, made[i].Err)
		ids[made[i].Sandbox.ID()] = true
	}
	if len(ids) != 100 {
		t.Errorf("%d sandboxes, want 100", len(ids))
	}
}

// TestLongestOutput: as much output as an Exec may ask for passes.
func TestLongestOutput(t *testing.T) {
	stub := newStub("fake")
	stub.output = make([]byte, 64<<20)
	r := newRig(t, stub)
	calls := dsecv1connect.NewProcessServiceClient(http.DefaultClient, r.url, connect.WithAcceptCompression("gzip", nil, nil))
	req := connect.NewRequest(&dsecv1.ExecRequest{SandboxId: string(dsec.NewSandboxID(stub.id)), Command: &dsecv1.Command{Argv: []string{"x"}}})
	req.Header().Set("Authorization", "Bearer "+r.secret)
	res, err := calls.Exec(t.Context(), req)
	check(t, err)
	if len(res.Msg.Stdout) != len(stub.output) {
		t.Errorf("%d bytes, want %d", len(res.Msg.Stdout), len(stub.output))
	}
}

func TestNetworkRules(t *testing.T) {
	r := newRig(t, newStub("fake"))
	for body, want := range map[string]dsec.Code{
		`{"backend":"fake","networkRules":{"pypi":false,"apt":false}}`: "",
		`{"backend":"fake","networkRules":{"pypi":false,"apt":true}}`:  dsec.CodeUnsupported,
		`{"backend":"fake","networkRules":{}}`:                         "",
	} {
		_, e := r.post(createPath, jsonType, r.secret, strings.NewReader(body))
		if got := dsec.Code(""); e != nil {
			if got = e.Code; got != want || e.Field != "network_rules" {
				t.Errorf("%s: %+v", body, e)
			}
		} else if want != "" {
			t.Errorf("%s: accepted", body)
		}
	}
}

// TestNothingOfTheCallersHeaderReachesAnEdge has a caller claim another project.
func TestNothingOfTheCallersHeaderReachesAnEdge(t *testing.T) {
	stub := newStub("fake")
	r := newRig(t, stub)
	_, err := r.client(r.secret).CreateSandbox(t.Context(), options())
	check(t, err)
	stub.set(func() {
		h := stub.headers[0]
		if h.Get(projectHeader) != "a" || h.Get("Authorization") != "" || h.Get("X-Api-Key") != "" {
			t.Errorf("edge got %v", h)
		}
	})
}

func TestBrokenUploadNeverLooksComplete(t *testing.T) {
	stub := newStub("fake")
	r := newRig(t, stub)
	sb, err := r.client(r.secret).CreateSandbox(t.Context(), options())
	check(t, err)
	broken := errors.New("disk on fire")
	reader := io.MultiReader(bytes.NewReader(make([]byte, 1<<20)), errReader{broken})
	if _, err := sb.Write(t.Context(), "/x", reader, client.WriteOptions{}); !errors.Is(err, broken) {
		t.Errorf("Write: %v", err)
	}
	<-stub.wrote
	stub.set(func() {
		if stub.broken == nil {
			t.Error("the edge saw a complete file")
		}
	})
	n, err := sb.Write(t.Context(), "/x", bytes.NewReader(make([]byte, 1<<20)), client.WriteOptions{})
	if err != nil || n != 1<<20 {
		t.Errorf("control: %d, %v", n, err)
	}
}

type errReader struct{ error }

func (r errReader) Read([]byte) (int, error) { return 0, r.error }

func TestLayersBelongToTheirProject(t *testing.T) {
	stub := newStub("fake")
	stub.digest = "sha256:" + strings.Repeat("a", 64)
	r := newRig(t, stub)
	a, b := r.client(r.secret), r.client(r.other)
	l, _, err := a.ImportLayer(t.Context(), "base", client.ImportOptions{}, strings.NewReader("tar"))
	check(t, err)
	if l.Name != "base:latest" || l.Digest != stub.digest {
		t.Errorf("%+v", l)
	}
	for _, ref := range []string{"base", "base:latest", stub.digest} {
		o := options()
		o.Layers = []string{ref}
		if _, err := a.CreateSandbox(t.Context(), o); err != nil {
			t.Errorf("a, %s: %v", ref, err)
		}
		if _, err := b.CreateSandbox(t.Context(), o); codeOf(err) != dsec.CodeNotFound {
			t.Errorf("b, %s: %v", ref, err)
		}
		if err := b.RemoveLayer(t.Context(), ref); codeOf(err) != dsec.CodeNotFound {
			t.Errorf("b removes %s: %v", ref, err)
		}
	}
	stub.set(func() {
		for _, item := range stub.creates {
			if !slices.Equal(item.Request.Layers, []string{stub.digest}) {
				t.Errorf("edge was asked for %v", item.Request.Layers)
			}
		}
	})
	// b names the same layer: a's removal keeps it, b's drops it.
	_, _, err = b.ImportLayer(t.Context(), "mine", client.ImportOptions{}, strings.NewReader("tar"))
	check(t, err)
	check(t, a.RemoveLayer(t.Context(), "base"))
	stub.set(func() {
		if len(stub.dropped) != 0 {
			t.Error("a layer with a name was dropped")
		}
	})
	check(t, b.RemoveLayer(t.Context(), stub.digest))
	stub.set(func() {
		if !slices.Equal(stub.dropped, []string{stub.digest}) {
			t.Errorf("dropped %v", stub.dropped)
		}
	})
}

// A name keeps the layers that its layer goes on, and the last one that does takes
// them along.
func TestNamesKeepWhatALayerGoesOn(t *testing.T) {
	digest := func(c string) string { return "sha256:" + strings.Repeat(c, 64) }
	stub := newStub("fake")
	r := newRig(t, stub)
	a, b := r.client(r.secret), r.client(r.other)
	bring := func(c *client.Client, name, top string, parents ...string) {
		t.Helper()
		stub.set(func() { stub.digest, stub.parents = top, parents })
		l, _, err := c.ImportLayer(t.Context(), name, client.ImportOptions{}, strings.NewReader("tar"))
		check(t, err)
		again, _, _, err := c.InspectLayer(t.Context(), name)
		check(t, err)
		if !slices.Equal(l.Parents, parents) || !slices.Equal(again.Parents, parents) {
			t.Errorf("%s goes on %v and %v, want %v", name, l.Parents, again.Parents, parents)
		}
	}
	dropped := func(want ...string) {
		t.Helper()
		stub.set(func() {
			if !slices.Equal(stub.dropped, want) {
				t.Errorf("dropped %v, want %v", stub.dropped, want)
			}
			stub.dropped = nil
		})
	}
	bring(a, "one", digest("c"), digest("a"), digest("b"))
	bring(b, "two", digest("d"), digest("a"))
	_, err := a.TagLayer(t.Context(), "one", "again", false)
	check(t, err)
	check(t, a.RemoveLayer(t.Context(), "one"))
	dropped()
	for _, d := range []string{digest("a"), digest("b"), digest("c"), digest("d")} {
		if !r.server.layers.referred()[d] {
			t.Errorf("a collection would take %s", d)
		}
		if unnamed, _, err := r.server.layers.dropping(t.Context(), newRemoval(d)); err != nil || unnamed {
			t.Errorf("%s has no name: %v, %v", d, unnamed, err)
		}
	}
	// To know the digest of one below opens nothing.
	if _, _, _, err := a.InspectLayer(t.Context(), digest("b")); codeOf(err) != dsec.CodeNotFound {
		t.Errorf("inspect of one below: %v", err)
	}
	// What stays, because a sandbox has it, needs all that it goes on.
	stub.set(func() { stub.inUse = digest("c") })
	check(t, a.RemoveLayer(t.Context(), "again"))
	dropped()
	stub.set(func() { stub.inUse = "" })
	bring(a, "again", digest("c"), digest("a"), digest("b"))
	check(t, a.RemoveLayer(t.Context(), "again"))
	dropped(digest("c"), digest("b"))
	// A name that gets another layer lets go of what the old one went on.
	bring(b, "two", digest("e"), digest("f"))
	dropped(digest("d"), digest("a"))
	// What a layer goes on was dropped while it was imported: it may not be there.
	began, err := r.server.layers.store.Revision(t.Context())
	check(t, err)
	unnamed, done, err := r.server.layers.dropping(t.Context(), newRemoval(digest("a")))
	if check(t, err); !unnamed {
		t.Error("a name is left")
	}
	done()
	late := tag{Digest: digest("c"), Parents: []string{digest("a"), digest("b")}}
	if err := r.server.layers.set(t.Context(), "a", "late:latest", late, began); codeOf(err) != dsec.CodeUnavailable {
		t.Errorf("named on what was dropped: %v", err)
	}
}

func TestLayerNames(t *testing.T) {
	for name, want := range map[string]string{
		"base": "base:latest", "base:1.0": "base:1.0", "org/app": "org/app:latest", "a.b-c_d/e:X": "a.b-c_d/e:X",
		"": "", "Base": "", "../x": "", "/x": "", "x/": "", "x:": "", "x:-a": "", "x y": "", "x\x00": "", "é": "", "x//y": "",
		"sha256:" + strings.Repeat("a", 64): "", strings.Repeat("a", 256): "",
	} {
		got, err := canonicalName("name", name)
		if got != want || (err == nil) != (want != "") {
			t.Errorf("%q: %q, %v", name, got, err)
		}
	}
}

func TestCanceledContextIsTheCallers(t *testing.T) {
	r := newRig(t, newStub("fake"))
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := r.client(r.secret).CreateSandbox(ctx, options()); !errors.Is(err, context.Canceled) {
		t.Errorf("%v", err)
	}
}

func FuzzLayerName(f *testing.F) {
	for _, s := range []string{"base", "a/b:c", "sha256:x", "", "x:y:z", "a--b"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		name, err := canonicalName("name", s)
		if err != nil {
			return
		}
		if strings.Contains("/"+name, "/.") || strings.ContainsAny(name, "\x00\n ") || strings.Count(name, ":") != 1 {
			t.Errorf("%q became %q", s, name)
		}
		if again, err := canonicalName("name", name); err != nil || again != name {
			t.Errorf("%q is not stable: %q, %v", name, again, err)
		}
	})
}
