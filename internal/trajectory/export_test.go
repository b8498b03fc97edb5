package trajectory

import (
	"bytes"
	"encoding/hex"
	"testing"

	"google.golang.org/protobuf/encoding/protojson"
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
	h, err := NewDigest(a)
	if err != nil {
		t.Fatal(err)
	}
	h.Write([]byte("data"))
	if hex.EncodeToString(h.Sum(nil)) == digestOf(t, a) {
		t.Error("data make no difference")
	}
}

func TestAnEntryIsOneLineOfJSON(t *testing.T) {
	e := exited(3)
	e.Request = &dsecv1.TrajectoryRequest{Shell: "a\nb"}
	e.Output = &dsecv1.TrajectoryOutput{Head: []*dsecv1.TrajectoryOutputPiece{{Data: []byte("\x00\n")}}}
	line, err := JSONLine(e)
	if err != nil || bytes.Count(line, []byte("\n")) != 1 || line[len(line)-1] != '\n' {
		t.Fatalf("%s, %v", line, err)
	}
	back := new(dsecv1.TrajectoryEntry)
	if err := protojson.Unmarshal(line, back); err != nil || !proto.Equal(e, back) {
		t.Errorf("%s reads as %v, %v", line, back, err)
	}
}
