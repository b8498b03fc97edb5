package test

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"testing"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/client"
)

func importOne(t testing.TB, c *client.Client, name, content string) client.Layer {
	t.Helper()
	l, _, err := c.ImportLayer(t.Context(), name, client.ImportOptions{}, bytes.NewReader(tarOfOne(t, "file", content)))
	check(t, err)
	return l
}

// What a sandbox or a name refers to stays; what nothing refers to goes.
func TestCollectLayers(t *testing.T) {
	s := up(t)
	c := s.client(t)
	used, named := importOne(t, c, "used", "1"), importOne(t, c, "named", "2")
	sb, err := c.CreateSandbox(t.Context(), client.SandboxOptions{Backend: "fake", Layers: []string{"used"}})
	check(t, err)
	check(t, c.RemoveLayer(t.Context(), "used"))
	collect := func(what string, dry bool, want ...string) {
		t.Helper()
		removed, kept, err := c.CollectLayers(t.Context(), 0, dry)
		check(t, err)
		var got []string
		for _, l := range removed {
			if got = append(got, l.Digest); l.Size <= 0 || l.Created.IsZero() {
				t.Errorf("%s: %+v", what, l)
			}
		}
		if fmt.Sprint(got) != fmt.Sprint(want) || kept != int64(2-len(want)) {
			t.Errorf("%s: removed %v and kept %d, want %v", what, got, kept, want)
		}
	}
	collect("while a sandbox uses it", false)
	check(t, sb.Kill(t.Context()))
	if removed, _, err := c.CollectLayers(t.Context(), client.DefaultCollectAge, false); err != nil || len(removed) > 0 {
		t.Errorf("a layer that was just stored is removed: %v, %v", removed, err)
	}
	collect("dry run", true, used.Digest)
	collect("afterwards", false, used.Digest)
	left, err := os.ReadDir(filepath.Join(s.dir, "data", "layers", "blobs", "layers"))
	check(t, err)
	if len(left) != 1 || "sha256:"+left[0].Name() != named.Digest {
		t.Errorf("in the store are %v, want %s", left, named.Digest)
	}
	if _, err := c.CreateSandbox(t.Context(), client.SandboxOptions{Backend: "fake", Layers: []string{"named"}}); err != nil {
		t.Error(err)
	}
	p, _ := s.project(t, "other")
	if _, _, err := p.CollectLayers(t.Context(), 0, true); dsec.CodeOf(err) != dsec.CodeDenied {
		t.Errorf("a project's key: %v", err)
	}
	if _, _, err := c.CollectLayers(t.Context(), -1, true); dsec.CodeOf(err) != dsec.CodeInvalid {
		t.Errorf("a negative age: %v", err)
	}
}

// The command line says what there is to say of a collection, and of a name that is taken.
func TestCollectAndTagSayWhatIsTrue(t *testing.T) {
	s := up(t)
	c := s.client(t)
	said := func(want string, args ...string) {
		t.Helper()
		stdout, stderr, _ := s.cli(t.TempDir(), args...)
		if stdout+stderr != want {
			t.Errorf("%q says %q, want %q", args, stdout+stderr, want)
		}
	}
	said("nothing to remove: the store has no layers\n", "layer", "gc")
	importOne(t, c, "one", "1")
	importOne(t, c, "two", "2")
	said("nothing to remove: 2 stay, each of which has a name, is in use, or was stored less than 1h0m0s ago\n", "layer", "gc")
	said("{\n  \"removed\": [],\n  \"freed_bytes\": 0,\n  \"kept\": 2\n}\n", "layer", "gc", "-o", "json")
	said("dsec: NEW-NAME: two names another layer; --replace takes it from there (conflict)\n", "layer", "tag", "one", "two")
}

// Whatever imports, removals and collections of the same layer do at once: an
// import that succeeded has a layer behind its name.
func TestCollectBesideImports(t *testing.T) {
	s := up(t)
	c := s.client(t)
	ctx, stop := context.WithCancel(t.Context())
	var collector, importers sync.WaitGroup
	collector.Go(func() {
		for ctx.Err() == nil {
			if _, _, err := c.CollectLayers(ctx, 0, false); err != nil && ctx.Err() == nil {
				t.Error(err)
			}
		}
	})
	for i := range 3 {
		importers.Go(func() {
			name := fmt.Sprint("layer-", i)
			for n := range 15 {
				_, _, err := c.ImportLayer(t.Context(), name, client.ImportOptions{}, bytes.NewReader(tarOfOne(t, "file", fmt.Sprint(n/5))))
				if err != nil && dsec.CodeOf(err) == dsec.CodeUnavailable {
					continue // it was being removed
				} else if err != nil {
					t.Errorf("import: %v", err)
					return
				}
				sb, err := c.CreateSandbox(t.Context(), client.SandboxOptions{Backend: "fake", Layers: []string{name}})
				if err != nil {
					t.Errorf("%s was imported, and a create: %v", name, err)
					return
				}
				if err := sb.Kill(t.Context()); err != nil {
					t.Error(err)
				}
				if err := c.RemoveLayer(t.Context(), name); err != nil {
					t.Error(err)
				}
			}
		})
	}
	importers.Wait()
	stop()
	collector.Wait()
}
