package edge

import (
	"net/http"
	"testing"

	"connectrpc.com/connect"

	"github.com/opendsec/dsec/internal/backend"
	"github.com/opendsec/dsec/internal/backend/fake"
	"github.com/opendsec/dsec/internal/testutil"
	dsecv1 "github.com/opendsec/dsec/proto/dsec/v1"
)

// An ended sandbox gives up what nobody asks of it any more. A call that came
// in before does ask.
func TestACallKeepsTheSpecThatItBeganWith(t *testing.T) {
	e, err := New(Config{
		StateDir: t.TempDir(), RunDir: t.TempDir(), MinFreeBytes: 1, MinFreeInodes: 1, Logger: testutil.Logger(t),
		Backends: []backend.Backend{fake.New(fake.Options{})},
	})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = e.Close() }()
	if err := e.Recover(t.Context()); err != nil {
		t.Fatal(err)
	}
	req := connect.NewRequest(&dsecv1.CreateSandboxesRequest{Items: []*dsecv1.CreateSandboxesItem{
		{Request: &dsecv1.CreateRequest{Backend: "fake", Env: map[string]string{"A": "1"}}},
	}})
	req.Header().Set(projectHeader, "p")
	res, err := service{e}.CreateSandboxes(t.Context(), req)
	if err != nil {
		t.Fatal(err)
	}
	id := res.Msg.Items[0].GetCreated().GetSandbox().GetId()
	c, err := e.enter(t.Context(), http.Header{projectHeader: {"p"}}, id)
	if err != nil {
		t.Fatal(err)
	}
	defer c.end()
	if err := e.stop(c.s, reasonKilled, ""); err != nil {
		t.Fatal(err)
	}
	cmd, err := command(c.spec, &dsecv1.Command{Argv: []string{"true"}}, 0, maxStartOutput)
	if err != nil || len(cmd.Env) != 1 {
		t.Errorf("command of a sandbox that ended: env %v, %v; want that of its create", cmd.Env, err)
	}
}
