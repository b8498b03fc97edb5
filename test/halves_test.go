package test

import (
	"context"
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"hash"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"connectrpc.com/connect"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/client"
	"github.com/opendsec/dsec/internal/testutil"
	dsecv1 "github.com/opendsec/dsec/proto/dsec/v1"
	"github.com/opendsec/dsec/proto/dsec/v1/dsecv1connect"
)

// halves starts edge and apiserver as two processes.
func halves(t testing.TB) (edge *process, api *server, again func() *server) {
	t.Helper()
	dir := testutil.Dir(t)
	dirs := []string{"--data-dir", filepath.Join(dir, "data"), "--run-dir", filepath.Join(dir, "run")}
	edge = startEnv(t, []string{"DSEC_EDGE_METRICS_LISTEN=127.0.0.1:0"}, "edge", append(dirs, "--backend", "fake")...)
	again = func() *server {
		p := start(t, "apiserver", append(dirs, "--listen", "127.0.0.1:0")...)
		return &server{p, p.ready, filepath.Join(dir, "data", "admin.key"), dir}
	}
	return edge, again(), again
}

func TestHalvesAsTwoProcesses(t *testing.T) {
	edge, api, again := halves(t)
	if info, err := os.Stat(edge.ready); err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("socket %s: %v, %v", edge.ready, info.Mode(), err)
	}
	c := api.client(t)
	sb, err := c.CreateSandbox(t.Context(), client.SandboxOptions{Backend: "fake"})
	check(t, err)
	sess, err := sb.OpenSession(t.Context(), client.SessionOptions{})
	check(t, err)
	t.Cleanup(func() { _ = sess.Close(t.Context()) }) // its stream alone, by a context that has ended: so has the server
	var out strings.Builder
	_, err = sess.Run(t.Context(), "X=kept", 0, &out, nil)
	check(t, err)
	p, err := sb.Command("echo", "spooled").Detach(t.Context())
	check(t, err)

	// The apiserver dies without a word, and nothing is lost.
	api.kill()
	api = again()
	c = api.client(t)
	sb = c.Sandbox(string(sb.ID()))
	o, err := sb.Process(p.ID).Attach(t.Context(), 0, &out, nil, nil)
	if err != nil || !o.OK() || out.String() != "spooled\n" {
		t.Errorf("attach: %+v, %v, %q", o, err, out.String())
	}
	out.Reset()
	same := sb.Session(sess.ID())
	t.Cleanup(func() { _ = same.Close(t.Context()) })
	if _, err = same.Run(t.Context(), "echo $X", 0, &out, nil); err != nil || out.String() != "kept\n" {
		t.Errorf("session: %q, %v", out.String(), err)
	}

	// Without the edge there is an error, and no hang and no made-up answer.
	edge.kill()
	if _, _, err := sb.Command("true").Output(t.Context()); err == nil || dsec.CodeOf(err) != dsec.CodeUnavailable {
		t.Errorf("exec without an edge: %v", err)
	}
	once, err := client.New(client.Options{URL: api.url, KeyFile: api.keyFile, Attempts: 1})
	check(t, err)
	defer once.Close()
	if _, err := once.CreateSandbox(t.Context(), client.SandboxOptions{Backend: "fake"}); err == nil || dsec.CodeOf(err) != dsec.CodeUnavailable {
		t.Errorf("create without an edge: %v", err)
	}
}

// discardEdge is an edge whose files are endless and whose writes go nowhere,
// so that what is measured is the apiserver.
type discardEdge struct {
	dsecv1connect.UnimplementedEdgeServiceHandler
	dsecv1connect.UnimplementedFileServiceHandler
	id  dsec.EdgeID
	sum hash.Hash
}

func (e *discardEdge) Info(context.Context, *connect.Request[dsecv1.InfoRequest]) (*connect.Response[dsecv1.InfoResponse], error) {
	return connect.NewResponse(&dsecv1.InfoResponse{EdgeId: string(e.id), ApiVersion: 1}), nil
}

func (e *discardEdge) Write(_ context.Context, in *connect.ClientStream[dsecv1.WriteRequest]) (*connect.Response[dsecv1.WriteResponse], error) {
	var n int64
	for in.Receive() {
		e.sum.Write(in.Msg().GetData())
		n += int64(len(in.Msg().GetData()))
	}
	return connect.NewResponse(&dsecv1.WriteResponse{Size: n}), in.Err()
}

func (e *discardEdge) Read(_ context.Context, req *connect.Request[dsecv1.ReadRequest], out *connect.ServerStream[dsecv1.FileChunk]) error {
	data := make([]byte, 64<<10)
	for left := req.Msg.Length; left > 0; left -= int64(len(data)) {
		data = data[:min(left, int64(len(data)))]
		if err := out.Send(&dsecv1.FileChunk{Data: data}); err != nil {
			return err
		}
	}
	return nil
}

// TestStreamsTakeConstantMemory moves 1 GiB each way through an apiserver,
// whose memory may grow by at most 32 MiB.
func TestStreamsTakeConstantMemory(t *testing.T) {
	const total, most = 1 << 30, 32 << 20
	dir := testutil.Dir(t)
	edge := &discardEdge{id: dsec.NewEdgeID(), sum: sha256.New()}
	mux := http.NewServeMux()
	mux.Handle(dsecv1connect.NewEdgeServiceHandler(edge))
	mux.Handle(dsecv1connect.NewFileServiceHandler(edge))
	socket := filepath.Join(dir, "edge.sock")
	l, err := net.Listen("unix", socket)
	check(t, err)
	srv := &http.Server{Handler: mux}
	go func() { _ = srv.Serve(l) }()
	defer func() { _ = srv.Close() }()
	p := startEnv(t, []string{"DSEC_API_EDGES=" + socket}, "apiserver", "--listen", "127.0.0.1:0", "--data-dir", filepath.Join(dir, "data"), "--run-dir", filepath.Join(dir, "run"))
	s := &server{p, p.ready, filepath.Join(dir, "data", "admin.key"), dir}
	sb := s.client(t).Sandbox(string(dsec.NewSandboxID(edge.id)))
	_, err = sb.Write(t.Context(), "/warm", io.LimitReader(rand.Reader, 8<<20), client.WriteOptions{})
	check(t, err)
	_, err = sb.Read(t.Context(), "/warm", 0, 8<<20, io.Discard)
	check(t, err)
	resetPeak(t, p)
	before := memory(t, p, "VmRSS")

	edge.sum.Reset()
	want := sha256.New()
	n, err := sb.Write(t.Context(), "/big", io.TeeReader(io.LimitReader(&noise{}, total), want), client.WriteOptions{})
	if err != nil || n != total || hex.EncodeToString(edge.sum.Sum(nil)) != hex.EncodeToString(want.Sum(nil)) {
		t.Errorf("upload: %d bytes, %v; same bytes: %v", n, err, hex.EncodeToString(edge.sum.Sum(nil)) == hex.EncodeToString(want.Sum(nil)))
	}
	if n, err := sb.Read(t.Context(), "/big", 0, total, io.Discard); err != nil || n != total {
		t.Errorf("download: %d bytes, %v", n, err)
	}
	grown := memory(t, p, "VmHWM") - before
	t.Logf("peak grew by %.1f MiB from %.1f", float64(grown)/(1<<20), float64(before)/(1<<20))
	if grown > most {
		t.Errorf("memory grew by %d MiB, at most %d", grown>>20, most>>20)
	}
}

// noise is cheap bytes that are not all the same.
type noise struct{ at byte }

func (n *noise) Read(b []byte) (int, error) {
	for i := 0; i < len(b); i += 512 {
		n.at++
		b[i] = n.at
	}
	return len(b), nil
}

// resetPeak makes VmHWM start from now.
func resetPeak(t testing.TB, p *process) {
	t.Helper()
	check(t, os.WriteFile(fmt.Sprintf("/proc/%d/clear_refs", p.cmd.Process.Pid), []byte("5"), 0))
}

// memory reads a row of the process's status, in bytes.
func memory(t testing.TB, p *process, row string) int64 {
	t.Helper()
	data, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", p.cmd.Process.Pid))
	check(t, err)
	for line := range strings.Lines(string(data)) {
		if rest, ok := strings.CutPrefix(line, row+":"); ok {
			n, err := strconv.ParseInt(strings.Fields(rest)[0], 10, 64)
			check(t, err)
			return n << 10
		}
	}
	t.Fatalf("no %s", row)
	return 0
}
