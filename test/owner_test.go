package test

import (
	"bytes"
	"context"
	"encoding/binary"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/client"
	"github.com/opendsec/dsec/internal/testutil"
	"github.com/opendsec/dsec/proto/dsec/v1/dsecv1connect"
)

// A store of layers belongs to one control plane: another does not start on it, and
// one whose store has become another's removes nothing from it.
func TestStoreOfLayersHasOneOwner(t *testing.T) {
	dir, shared := testutil.Dir(t), filepath.Join(testutil.Dir(t), "store")
	env := []string{"DSEC_LAYERS_STORE=dir:" + shared}
	args := func(name string) []string {
		return []string{
			"--backend", "fake", "--listen", "127.0.0.1:0", "--data-dir", filepath.Join(dir, name, "data"), "--run-dir", filepath.Join(dir, name, "run"),
		}
	}
	begin := func(name string) *server {
		p := startEnv(t, env, "up", args(name)...)
		return &server{p, p.ready, filepath.Join(dir, name, "data", "admin.key"), dir}
	}
	a := begin("a")
	l := importOne(t, a.client(t), "base", "content")
	mark, err := os.ReadFile(filepath.Join(shared, "owner"))
	check(t, err)
	owner := strings.TrimSpace(string(mark))

	refused := func(name, owner string) {
		t.Helper()
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		cmd := exec.CommandContext(ctx, dsecBinary, append([]string{"up"}, args(name)...)...)
		cmd.Env = append(environ(), env...)
		out, err := cmd.CombinedOutput()
		if err == nil || ctx.Err() != nil || !bytes.Contains(out, []byte("layers.store")) || !bytes.Contains(out, []byte(owner)) {
			t.Fatalf("server %s: %v\n%s", name, err, out)
		}
	}
	refused("b", owner)
	if made, err := os.ReadDir(dir); err != nil || len(made) != 1 {
		t.Errorf("a server that did not start made %v, %v", made, err)
	}
	a.stop()
	a = begin("a") // its own it is

	// The store is taken over by hand; the server that had it leaves it alone.
	check(t, os.Remove(filepath.Join(shared, "owner")))
	if _, _, err := a.client(t).CollectLayers(t.Context(), 0, false); dsec.CodeOf(err) != dsec.CodeConflict {
		t.Errorf("a collection of a store without a mark: %v", err)
	}
	b := begin("b")
	check(t, a.client(t).RemoveLayer(t.Context(), "base"))
	for what, err := range map[string]error{
		"collection": func() error { _, _, err := a.client(t).CollectLayers(t.Context(), 0, false); return err }(),
		"import": func() error {
			_, _, err := a.client(t).ImportLayer(t.Context(), "other", client.ImportOptions{}, bytes.NewReader(tarOfOne(t, "file", "other")))
			return err
		}(),
	} {
		if err == nil || dsec.CodeOf(err) != dsec.CodeConflict || !strings.Contains(err.Error(), owner) {
			t.Errorf("%s of a store that was taken over: %v, want a conflict that names %s", what, err, owner)
		}
	}
	if _, err := os.Stat(filepath.Join(shared, "layers", strings.TrimPrefix(l.Digest, "sha256:"), "manifest")); err != nil {
		t.Errorf("a layer of a store that was taken over: %v", err)
	}
	if removed, _, err := b.client(t).CollectLayers(t.Context(), 0, false); err != nil || len(removed) != 1 {
		t.Errorf("the new owner removes %v, %v", removed, err)
	}
	a.stop()
	refused("a", owner) // it tells of both
}

// An upload that failed is answered while its client says nothing more, by both ways
// that an apiserver has to an edge.
func TestFailedUploadIsAnswered(t *testing.T) {
	_, api, _ := halves(t)
	for name, s := range map[string]*server{"up": up(t), "halves": api} {
		c, secret := s.project(t, "p")
		sandbox, err := c.CreateSandbox(t.Context(), client.SandboxOptions{Backend: dsec.KindFake})
		check(t, err)
		id := sandbox.ID()
		for _, tc := range []struct {
			procedure, want string
			messages        []string
		}{
			{dsecv1connect.LayerServiceImportLayerProcedure, "not a tar archive",
				[]string{`{"open":{"name":"base"}}`, fmt.Sprintf(`{"data":"%s"}`, strings.Repeat("QUJD", 100_000))}},
			{dsecv1connect.FileServiceUploadProcedure, "open.path", []string{fmt.Sprintf(`{"open":{"sandbox_id":"%s","path":"a\u0000b"}}`, id)}},
			{dsecv1connect.FileServiceWriteProcedure, "open.path", []string{fmt.Sprintf(`{"open":{"sandbox_id":"%s","path":"a\u0000b"}}`, id)}},
			{dsecv1connect.ProcessServiceStreamStdinProcedure, "no process", []string{fmt.Sprintf(`{"sandbox_id":"%s","process_id":77,"data":"QUJD"}`, id)}},
		} {
			t.Run(name+tc.procedure, func(t *testing.T) {
				ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
				defer cancel()
				body, say := io.Pipe()
				defer say.Close()
				req, err := http.NewRequestWithContext(ctx, http.MethodPost, s.url+tc.procedure, body)
				check(t, err)
				req.Header.Set("Content-Type", "application/connect+json")
				req.Header.Set("Authorization", "Bearer "+secret)
				go func() {
					for _, msg := range tc.messages {
						_, _ = say.Write(binary.BigEndian.AppendUint32([]byte{0}, uint32(len(msg))))
						_, _ = say.Write([]byte(msg))
					}
				}()
				res, err := (&http.Transport{}).RoundTrip(req)
				check(t, err)
				defer func() { _ = res.Body.Close() }()
				head := make([]byte, 5)
				_, err = io.ReadFull(res.Body, head)
				check(t, err)
				end := make([]byte, binary.BigEndian.Uint32(head[1:]))
				_, err = io.ReadFull(res.Body, end)
				check(t, err)
				if head[0]&2 == 0 || !strings.Contains(string(end), tc.want) {
					t.Errorf("%q", end)
				}
			})
		}
	}
}
