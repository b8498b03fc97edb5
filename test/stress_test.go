package test

import (
	"bytes"
	"context"
	"flag"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"net/http/httptest"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/client"
	"github.com/opendsec/dsec/internal/apiserver"
	"github.com/opendsec/dsec/internal/backend"
	"github.com/opendsec/dsec/internal/backend/fake"
	"github.com/opendsec/dsec/internal/daemon"
	"github.com/opendsec/dsec/internal/edge"
	"github.com/opendsec/dsec/internal/iam"
	"github.com/opendsec/dsec/internal/layer"
	"github.com/opendsec/dsec/internal/layer/blob"
	"github.com/opendsec/dsec/internal/layer/blob/dirblob"
	"github.com/opendsec/dsec/internal/store"
	"github.com/opendsec/dsec/internal/testutil"
	"github.com/opendsec/dsec/internal/watcher"
)

var stressSteps = flag.Int("steps", 250, "of each of the four of TestLayersUnderStress")

// inside is a server of this process, so that the race detector sees all of it.
type inside struct {
	client *client.Client // with an admin key
	layers *layer.Store
	blobs  blob.Store
}

func startInside(t *testing.T) *inside {
	t.Helper()
	dir, log := testutil.Dir(t), testutil.Logger(t)
	blobs, err := dirblob.Open(filepath.Join(dir, "store"))
	check(t, err)
	t.Cleanup(func() { _ = blobs.Close() })
	layers, err := layer.Open(filepath.Join(dir, "layers"), layer.Options{
		Blobs: blobs, CollapseBytes: 1, HelperCommand: []string{dsecBinary, layer.HelperVerb}, Logger: log,
	})
	check(t, err)
	t.Cleanup(func() { _ = layers.Close() })
	node, err := edge.New(edge.Config{
		StateDir: filepath.Join(dir, "edge"), Backends: []backend.Backend{fake.New(fake.Options{})}, Layers: layers, Logger: log, Metrics: prometheus.NewRegistry(),
	})
	check(t, err)
	t.Cleanup(func() { _ = node.Close() })
	check(t, node.Recover(t.Context()))
	st, err := store.Open(t.Context(), store.Config{Dir: filepath.Join(dir, "etcd"), Log: log})
	check(t, err)
	t.Cleanup(func() { _ = st.Close() })
	keys, err := iam.Open(t.Context(), st, log)
	check(t, err)
	t.Cleanup(keys.Close)
	keyFile := filepath.Join(dir, "admin.key")
	check(t, keys.EnsureAdmin(t.Context(), keyFile))
	edges, err := watcher.New(t.Context(), st, []watcher.Endpoint{{Name: "memory", Transport: &daemon.Local{Handler: node.Handler()}}}, log)
	check(t, err)
	t.Cleanup(edges.Close)
	api, err := apiserver.New(t.Context(), apiserver.Config{Store: st, IAM: keys, Edges: edges, Log: log, Metrics: prometheus.NewRegistry()})
	check(t, err)
	t.Cleanup(api.Close)
	srv := httptest.NewServer(api.Handler())
	t.Cleanup(srv.Close)
	c, err := client.New(client.Options{URL: srv.URL, KeyFile: keyFile})
	check(t, err)
	t.Cleanup(c.Close)
	return &inside{c, layers, blobs}
}

// user does anything with names of its own, and knows what each names. The contents
// are those of all.
type user struct {
	*inside
	t     *testing.T
	id    int
	names map[string]client.Layer
	rng   *rand.Rand
}

const (
	stressContents = 5
	stressNames    = 3
)

func contentOf(n int) string { return strings.Repeat(fmt.Sprint("content ", n, " "), 3000) }

func (u *user) name() string { return fmt.Sprintf("user-%d:name-%d", u.id, u.rng.IntN(stressNames)) }

// archive is that of one layer, or of an image that becomes two: any two have the lower
// one in common, which may have a name of its own.
func (u *user) archive() *bytes.Reader {
	layers := make([][]byte, 1+u.rng.IntN(2))
	for i := range layers {
		layers[i] = tarOfOne(u.t, "file", contentOf(u.rng.IntN(stressContents)))
	}
	if len(layers) == 1 {
		return bytes.NewReader(layers[0])
	}
	return bytes.NewReader(ociLayoutOf(u.t, "{}", layers...))
}

// givenUp is the name of what may or may not have been imported.
func (u *user) givenUp() string { return fmt.Sprintf("user-%d:given-up", u.id) }

func (u *user) step() error {
	ctx := u.t.Context()
	name := u.name()
	old, had := u.names[name]
	switch p := u.rng.IntN(100); {
	case p < 6: // given up in the middle, if it does not come to its end
		ctx, cancel := context.WithTimeout(ctx, time.Duration(u.rng.IntN(int(30*time.Millisecond))))
		defer cancel()
		_, _, _ = u.client.ImportLayer(ctx, u.givenUp(), client.ImportOptions{}, u.archive())
	case p < 35:
		l, _, err := u.client.ImportLayer(ctx, name, client.ImportOptions{}, u.archive())
		if err == nil {
			u.names[name] = l
		} else if dsec.CodeOf(err) != dsec.CodeUnavailable { // else it was being removed
			return fmt.Errorf("import: %w", err)
		}
	case p < 55:
		from := u.name()
		if _, ok := u.names[from]; !ok {
			return nil
		}
		l, err := u.client.TagLayer(ctx, from, name, true)
		if err != nil && dsec.CodeOf(err) != dsec.CodeUnavailable {
			return fmt.Errorf("tag: %w", err)
		} else if err == nil {
			u.names[name] = l
		}
	case p < 75:
		if !had {
			return nil
		}
		delete(u.names, name)
		if err := u.client.RemoveLayer(ctx, name); err != nil {
			return fmt.Errorf("remove: %w", err)
		}
	case p < 80:
		if _, _, err := u.client.CollectLayers(ctx, 0, false); err != nil {
			return fmt.Errorf("collect: %w", err)
		}
	case had:
		return u.whole(name, old)
	}
	return nil
}

// chainOf are the layers that a name keeps.
func chainOf(l client.Layer) []string { return append(slices.Clone(l.Parents), l.Digest) }

// whole wants all of a layer that has a name.
func (u *user) whole(name string, want client.Layer) error {
	l, _, _, err := u.client.InspectLayer(u.t.Context(), name)
	if err != nil || !slices.Equal(chainOf(l), chainOf(want)) {
		return fmt.Errorf("%s is %s, want %s: %w", name, chainOf(l), chainOf(want), err)
	}
	for _, digest := range chainOf(l) {
		if err := u.readable(digest); err != nil {
			return fmt.Errorf("%s, of %s: %w", digest, name, err)
		}
	}
	return nil
}

// readable wants all of one layer.
func (u *user) readable(digest string) error {
	ctx := u.t.Context()
	release, err := u.layers.Hold(ctx, digest)
	if err != nil {
		return err
	}
	defer release()
	files, closer, err := u.layers.OpenFS(ctx, digest)
	if err != nil {
		return err
	}
	defer closer.Close()
	b, err := fs.ReadFile(files, "file")
	if err == nil && (!strings.HasPrefix(string(b), "content ") || len(b) != len(contentOf(0))) {
		err = fmt.Errorf("its file has %d bytes", len(b))
	}
	return err
}

// Whatever imports, names, removals and collections do at once: what has a name is
// whole, and what has none is gone in the end.
func TestLayersUnderStress(t *testing.T) {
	s := startInside(t)
	users := make([]*user, 4)
	var all sync.WaitGroup
	for i := range users {
		u := &user{inside: s, t: t, id: i, names: map[string]client.Layer{}, rng: rand.New(rand.NewPCG(uint64(i), 1))}
		users[i] = u
		all.Go(func() {
			for n := range *stressSteps {
				if err := u.step(); err != nil {
					t.Errorf("user %d, step %d: %v", i, n, err)
					return
				}
			}
		})
	}
	all.Wait()
	if t.Failed() {
		return
	}
	var want []string
	for _, u := range users {
		for name, l := range u.names {
			check(t, u.whole(name, l))
			want = append(want, chainOf(l)...)
		}
	}
	slices.Sort(want)
	want = slices.Compact(want)
	// An import that was given up may get to its end a little later.
	testutil.WaitFor(t, 10*time.Second, "nothing but what has a name is left", func() error { return s.only(t, users, want) })
	for _, u := range users {
		for name, l := range u.names {
			check(t, u.whole(name, l))
		}
	}
}

// only removes what nothing refers to, and is an error where the store then has other
// layers than these, or parts of others.
func (s *inside) only(t *testing.T, users []*user, want []string) error {
	for _, u := range users {
		if err := s.client.RemoveLayer(t.Context(), u.givenUp()); err != nil && dsec.CodeOf(err) != dsec.CodeNotFound {
			return err
		}
	}
	if _, kept, err := s.client.CollectLayers(t.Context(), 0, false); err != nil || kept != int64(len(want)) {
		return fmt.Errorf("%d layers are kept, want %d: %w", kept, len(want), err)
	}
	// What an import that was given up left has no manifest, and goes by its age.
	stored, err := s.layers.Sweep(t.Context(), 0)
	if err != nil {
		return err
	}
	var got []string
	for _, l := range stored {
		got = append(got, l.Digest)
	}
	if slices.Sort(got); !slices.Equal(got, want) {
		return fmt.Errorf("the store has %v, want %v", got, want)
	}
	parts := map[string]int{}
	err = s.blobs.List(t.Context(), "layers/", func(b blob.Info) error {
		parts["sha256:"+path.Base(path.Dir(b.Key))]++
		return nil
	})
	for digest, n := range parts {
		if n != 5 || !slices.Contains(want, digest) {
			return fmt.Errorf("%s has %d parts", digest, n)
		}
	}
	return err
}
