package edge

import (
	"encoding/json"
	"log/slog"
	"testing"
	"unicode/utf8"

	"google.golang.org/protobuf/proto"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/backend"
	dsecv1 "github.com/opendsec/dsec/proto/dsec/v1"
)

// bareEdge is enough of an edge to check requests and records.
func bareEdge() *Edge {
	cfg := Config{StateDir: "unused", Logger: slog.New(slog.DiscardHandler)}.withDefaults()
	o := new(offer)
	o.info.Store(&backend.Info{Kind: dsec.KindFake, Available: true})
	return &Edge{
		cfg: cfg, log: cfg.Logger, clock: cfg.clock,
		backends: map[dsec.Kind]*offer{dsec.KindFake: o},
		kinds:    []dsec.Kind{dsec.KindFake},
	}
}

// FuzzCreateRequest: whatever a request says, it is refused with a typed error
// that names a field, or leads to a spec within the node's limits.
func FuzzCreateRequest(f *testing.F) {
	for _, req := range []*dsecv1.CreateRequest{
		{Backend: "fake"},
		{Backend: "fake", Limits: &dsecv1.Limits{MilliCpu: -1, Pids: 1 << 62}, Env: map[string]string{"A": "b"}, Workdir: "/x"},
		{Backend: "fake", User: "a:b", Labels: map[string]string{"k": "v"}, RequestId: "r", NetworkRules: map[string]bool{"pypi": false}},
	} {
		b, err := proto.Marshal(&dsecv1.CreateSandboxesItem{Request: req})
		if err != nil {
			f.Fatal(err)
		}
		f.Add(b)
	}
	e := bareEdge()
	f.Fuzz(func(t *testing.T, b []byte) {
		var item dsecv1.CreateSandboxesItem
		if proto.Unmarshal(b, &item) != nil {
			return
		}
		c, err := e.parseCreate(t.Context(), "p", &item)
		if err != nil {
			if de := asError(err); de == nil || de.Field == "" || de.Code == dsec.CodeInternal {
				t.Errorf("error without a field or a code: %v", err)
			}
			return
		}
		for _, l := range limitFields {
			if got := *l.of(&c.spec.Limits); got < l.min || got > *l.of(&e.cfg.MaxLimits) {
				t.Errorf("limit %s is %d", l.name, got)
			}
		}
		if c.idle < 0 || c.lifetime < 0 || utf8.RuneCountInString(c.requestID) > maxRequestID {
			t.Errorf("accepted %+v", c)
		}
	})
}

// FuzzCommand: a command is refused with a typed error that names a field, or
// is one that chronus accepts.
func FuzzCommand(f *testing.F) {
	for _, c := range []*dsecv1.Command{
		{Argv: []string{"true"}}, {Shell: "x", Cwd: "rel\x00"}, {RawArgv: [][]byte{{0xff}}, Env: map[string]string{"A": "1"}, OutputLimitBytes: -5},
	} {
		b, err := proto.Marshal(c)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(b, "/work")
	}
	f.Fuzz(func(t *testing.T, b []byte, workdir string) {
		var c dsecv1.Command
		if proto.Unmarshal(b, &c) != nil || checkWorkdir("workdir", workdir) != nil {
			return
		}
		out, err := command(&dsec.Spec{Workdir: workdir, Env: []string{"A=0"}}, &c, defaultExecOutput, maxExecOutput)
		if err != nil {
			if de := asError(err); de == nil || de.Field == "" || de.Code != dsec.CodeInvalid {
				t.Errorf("error without a field: %v", err)
			}
			return
		}
		if out.OutputLimit < 1 || out.OutputLimit > maxExecOutput || out.Timeout < 0 || out.Validate() != nil {
			t.Errorf("accepted %+v", out)
		}
	})
}

// FuzzRecord: a record that a journal holds is refused or makes a sandbox that
// can be recovered, whatever it says.
func FuzzRecord(f *testing.F) {
	f.Add([]byte(`{"v":1,"state":"running","spec":{"backend":"fake"},"handle":{"id":1}}`))
	f.Add([]byte(`{"v":1,"state":"stopped","spec":{},"ended":"2026-01-01T00:00:00Z","deadline":-5,"boot":"x"}`))
	f.Add([]byte(`{"v":2}`))
	e := bareEdge()
	f.Fuzz(func(t *testing.T, b []byte) {
		s, err := e.sandboxOf("aaaaaaaaaaaaaaaaaaaaaaaaa", b)
		if err != nil {
			return
		}
		if s.spec == nil || !s.state.Valid() || s.deadline < 0 && json.Valid(b) && s.state == "" {
			t.Errorf("made of %q: %+v", b, s)
		}
		e.proto(s)
	})
}
