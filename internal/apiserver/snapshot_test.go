package apiserver

import (
	"context"
	"strings"
	"testing"

	"connectrpc.com/connect"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/client"
	dsecv1 "github.com/opendsec/dsec/proto/dsec/v1"
)

// packingEdge packs a sandbox of a job.
type packingEdge struct {
	*stubEdge
	job     string
	replays bool // a pack is answered from the log, and its layer is gone
}

func newPacking() *packingEdge {
	e := &packingEdge{stubEdge: newStub("fake")}
	e.instead = e
	return e
}

func (e *packingEdge) PackSandbox(context.Context, *connect.Request[dsecv1.PackSandboxRequest]) (*connect.Response[dsecv1.PackSandboxResponse], error) {
	out := connect.NewResponse(&dsecv1.PackSandboxResponse{
		Layer: &dsecv1.Layer{Digest: "sha256:" + strings.Repeat("c", 64)}, Create: &dsecv1.CreateRequest{Backend: "fake", Job: e.job},
	})
	if e.replays {
		out.Header().Set(replayedHeader, "1")
	}
	return out, nil
}

func (e *packingEdge) CheckLayers(context.Context, *connect.Request[dsecv1.CheckLayersRequest]) (*connect.Response[dsecv1.CheckLayersResponse], error) {
	return connect.NewResponse(&dsecv1.CheckLayersResponse{Damage: "it is not there"}), nil
}

// TestForkInAJobThatIsOver: a fork is made in its sandbox's job, and so not in one that takes none any more.
func TestForkInAJobThatIsOver(t *testing.T) {
	e := newPacking()
	e.job = "train"
	r := newRig(t, e.stubEdge)
	sb := r.client(r.secret).Sandbox(string(dsec.NewSandboxID(e.id)))
	fork := func() error {
		t.Helper()
		made, _, err := sb.Fork(t.Context(), 2, client.ForkOptions{})
		for _, m := range made {
			check(t, m.Err)
		}
		return err
	}
	check(t, fork()) // a name alone
	_, err := r.server.jobs.create(t.Context(), "a", "train", job{State: jobActive, OnExpiry: jobPause})
	check(t, err)
	check(t, fork())
	_, err = r.server.jobs.end(t.Context(), "a", "train")
	check(t, err)
	if err := fork(); codeOf(err) != dsec.CodeConflict || len(e.creates) != 4 {
		t.Errorf("in a job that has ended: %v, %d were made", err, len(e.creates))
	}
	other := ""
	if _, _, err := sb.Fork(t.Context(), 1, client.ForkOptions{Job: &other}); err != nil {
		t.Errorf("out of it: %v", err)
	}
}

// TestPackOfTheLogWhoseLayerIsGone: a rollout that is started again packs as it did; where the layer was
// removed since, nothing gets its name.
func TestPackOfTheLogWhoseLayerIsGone(t *testing.T) {
	e := newPacking()
	r := newRig(t, e.stubEdge)
	c := r.client(r.secret)
	pack := func(name string) error {
		_, _, err := c.Sandbox(string(dsec.NewSandboxID(e.id))).Pack(t.Context(), name, nil)
		return err
	}
	check(t, pack("one"))
	e.replays = true
	if err := pack("two"); codeOf(err) != dsec.CodeNotFound {
		t.Errorf("packed as what is gone: %v", err)
	}
	names, err := c.Layers(t.Context())
	if err != nil || len(names) != 1 || names[0].Name != "one:latest" {
		t.Errorf("names %+v, %v", names, err)
	}
}
