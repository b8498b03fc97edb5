package apiserver

import (
	"strings"
	"testing"

	"github.com/opendsec/dsec"
)

// A server is ready where one edge takes creates; else it says of each why not.
func TestReady(t *testing.T) {
	able := func() *stubEdge { return newStub("fake") }
	draining, unable := able(), able()
	draining.draining, unable.unable = true, "no user namespaces"
	if err := newRig(t, draining, unable, able()).server.Ready(); err != nil {
		t.Errorf("with an edge that works: %v", err)
	}
	err := newRig(t, draining, unable).server.Ready()
	if err == nil || dsec.CodeOf(err) != dsec.CodeUnavailable || !strings.Contains(err.Error(), "shuts down") || !strings.Contains(err.Error(), "fake: no user namespaces") {
		t.Errorf("without: %v, want unavailable, and why", err)
	}
}
