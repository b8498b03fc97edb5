package trajectory

import (
	"encoding/hex"
	"testing"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"

	dsecv1 "github.com/opendsec/dsec/proto/dsec/v1"
)

func digestOf(t *testing.T, m proto.Message) string {
	t.Helper()
	d, err := RequestDigest(m)
	if err != nil {
		t.Fatal(err)
	}
	return hex.EncodeToString(d)
}

func TestRequestsForTheSameHaveTheSameDigest(t *testing.T) {
	exec := func(change func(*dsecv1.ExecRequest)) *dsecv1.ExecRequest {
		r := &dsecv1.ExecRequest{SandboxId: "one", Tag: "tag", Stdin: []byte("in"), Command: &dsecv1.Command{
			Argv: []string{"make", "test"}, Env: map[string]string{"A": "1", "B": "2", "C": "3"}, Timeout: durationpb.New(5e9),
		}}
		change(r)
		return r
	}
	first := digestOf(t, exec(func(*dsecv1.ExecRequest) {}))
	// Digests are kept for as long as trajectories: this one never changes.
	if want := "71dc4f1665304baf7ffa907ca366e254f72d24e2212eb4007b862b0768881593"; first != want {
		t.Errorf("digest %s, want %s", first, want)
	}
	for range 20 { // maps come in any order
		if got := digestOf(t, exec(func(r *dsecv1.ExecRequest) { r.SandboxId, r.Tag = "two", "" })); got != first {
			t.Fatalf("digest %s of the same request, want %s", got, first)
		}
	}
	for name, change := range map[string]func(*dsecv1.ExecRequest){
		"argv":    func(r *dsecv1.ExecRequest) { r.Command.Argv[1] = "tests" },
		"env":     func(r *dsecv1.ExecRequest) { r.Command.Env["A"] = "2" },
		"stdin":   func(r *dsecv1.ExecRequest) { r.Stdin = nil },
		"timeout": func(r *dsecv1.ExecRequest) { r.Command.Timeout = nil },
	} {
		if digestOf(t, exec(change)) == first {
			t.Errorf("another %s, and the same digest", name)
		}
	}
	if digestOf(t, &dsecv1.KillRequest{}) == digestOf(t, &dsecv1.UsageRequest{}) {
		t.Error("two empty requests of different calls have the same digest")
	}
	open := func(id string) *dsecv1.WriteRequest {
		return &dsecv1.WriteRequest{Message: &dsecv1.WriteRequest_Open{Open: &dsecv1.WriteOpen{SandboxId: id, Path: &dsecv1.Path{Path: "/f"}}}}
	}
	a, b := open("one"), open("two")
	if digestOf(t, a) != digestOf(t, b) {
		t.Error("the same stream to two sandboxes has two digests")
	}
	if a.GetOpen().SandboxId != "one" {
		t.Error("the request was changed")
	}
}
