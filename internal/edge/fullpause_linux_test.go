package edge_test

import (
	"os"
	"testing"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/backend/fake"
	"github.com/opendsec/dsec/internal/edge"
	"github.com/opendsec/dsec/internal/testutil"
	dsecv1 "github.com/opendsec/dsec/proto/dsec/v1"
)

// TestChangesOnAFullDisk is S69 for what changes a sandbox that lives: pauses, resumes and extensions
// are refused once they would take the room that is kept for ends, and leave it as it was.
func TestChangesOnAFullDisk(t *testing.T) {
	testutil.Require(t, testutil.Root)
	dir := testutil.SmallDisk(t, "size=16m,nr_inodes=64")
	n := newNode(t, func(c *edge.Config, _ *fake.Options) {
		c.StateDir, c.RunDir = dir, ""
		c.MinFreeBytes, c.MinFreeInodes = 1<<20, 8
	})
	t.Cleanup(n.close) // before the unmount
	var ids []string
	for range 20 {
		ids = append(ids, n.create(&dsecv1.CreateRequest{}))
	}
	fill := testutil.Fill(t, dir)
	extend := func(id string) error {
		_, err := n.ExtendSandbox(t.Context(), connect.NewRequest(&dsecv1.ExtendRequest{SandboxId: id, IdleTimeout: durationpb.New(time.Hour)}))
		return err
	}
	const most = 20_000
	first, rounds := ids[0], 0
	var err error
	for ; err == nil && rounds < most; rounds++ {
		if _, err = n.pause(first, nil); err == nil {
			_, err = n.resume(first)
		}
	}
	if rounds == most {
		t.Fatalf("%d pauses on a full disk", rounds)
	}
	wantError(t, err, dsec.CodeExhausted, "")
	if paused := n.opts.World.Paused(dsec.SandboxID(first)); paused != (n.get(first).State == "paused") {
		t.Errorf("it is %s, and paused: %v", n.get(first).State, paused)
	}
	other := ids[1]
	before := n.get(other)
	_, err = n.pause(other, nil)
	wantError(t, err, dsec.CodeExhausted, "")
	wantError(t, extend(other), dsec.CodeExhausted, "")
	if s := n.get(other); s.State != "running" || s.Pause != nil || s.IdleTimeout.AsDuration() != before.IdleTimeout.AsDuration() || n.opts.World.Paused(dsec.SandboxID(other)) {
		t.Errorf("what was refused has changed it: %v", s)
	}
	for _, id := range ids[:15] {
		if got := n.kill(id); got != "stopped" {
			t.Errorf("killed on a full disk: %s", got)
		}
	}
	if err := os.Remove(fill); err != nil {
		t.Fatal(err)
	}
	n.mustPause(ids[15], nil)
	check := extend(ids[16])
	n.restart()
	for i, id := range ids {
		want := "running"
		switch {
		case i < 15:
			want = "stopped"
		case i == 15:
			want = "paused"
		}
		if s := n.get(id); s.State != want {
			t.Errorf("after the restart sandbox %d is %s, want %s", i, s.State, want)
		}
	}
	if got := n.get(ids[16]).IdleTimeout.AsDuration(); check != nil || got != time.Hour {
		t.Errorf("with room: %v, %v", got, check)
	}
}
