package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"strconv"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/bench/internal/measure"
	"github.com/opendsec/dsec/client"
)

const layerName = "bench:1"

// server is a `dsec up` that has the bench's layer.
type server struct {
	*measure.Server
	features []string
	kind     dsec.Kind
}

// startServer starts one that holds warm containers ready and has the bench's layer.
func startServer(ctx context.Context, o options, work string, warm int) (*server, error) {
	dir, err := os.MkdirTemp(work, "up-")
	if err != nil {
		return nil, err
	}
	up, err := measure.StartServer(ctx, o.binary, dir,
		"DSEC_EDGE_BACKENDS="+o.backend,
		"DSEC_EDGE_MAX_SANDBOXES="+strconv.Itoa(o.density+1000),
		"DSEC_CONTAINER_WARM="+strconv.Itoa(warm),
		"DSEC_CONTAINER_DISK_IMAGE_BYTES="+strconv.FormatInt(4*o.copySize+(4<<30), 10),
	)
	if err != nil {
		return nil, err
	}
	s := &server{Server: up, kind: dsec.Kind(o.backend)}
	if err := s.prepare(ctx); err != nil {
		return nil, errors.Join(err, s.stop())
	}
	return s, nil
}

// prepare imports the layer and looks at a first sandbox.
func (s *server) prepare(ctx context.Context) error {
	image, err := measure.BusyboxTar()
	if err != nil {
		return err
	}
	if _, _, err = s.ImportLayer(ctx, layerName, client.ImportOptions{}, bytes.NewReader(image)); err != nil {
		return err
	}
	sb, err := s.create(ctx)
	if err == nil {
		s.features, err = measure.Observe(ctx, sb)
	}
	return kill(sb, err)
}

// profile takes CPU profiles of the server, one after another, until the
// returned function is called. They are files whose names start with prefix.
func (s *server) profile(ctx context.Context, prefix string) func() error {
	ctx, cancel := context.WithCancel(ctx)
	done := make(chan error, 1)
	go func() {
		for n := 0; ; n++ {
			b, err := s.Get(ctx, "/debug/pprof/profile?seconds=3")
			if ctx.Err() != nil {
				done <- nil
				return
			}
			if err == nil {
				err = os.WriteFile(fmt.Sprintf("%s-%d.pprof", prefix, n), b, 0o600)
			}
			if err != nil {
				done <- err
				return
			}
		}
	}()
	return func() error { cancel(); return <-done }
}

// stop ends the server. What it keeps for its next start, which will not come, is
// taken away.
func (s *server) stop() error { return errors.Join(s.End(), s.Remove()) }

// create makes a sandbox of the bench's layer.
func (s *server) create(ctx context.Context) (*client.Sandbox, error) {
	return s.createWith(ctx, pids)
}

const pids = 64

// createWith makes one with a limit of pids of its own.
func (s *server) createWith(ctx context.Context, pids int64) (*client.Sandbox, error) {
	return s.CreateSandbox(ctx, client.SandboxOptions{
		Backend: s.kind, Layers: []string{layerName},
		Limits: dsec.Limits{MemoryBytes: 128 << 20, DiskBytes: 64 << 20, Pids: pids, MilliCPU: 1000},
	})
}

// first creates one and runs its first command.
func (s *server) first(ctx context.Context) (*client.Sandbox, error) {
	sb, err := s.create(ctx)
	if err != nil {
		return nil, err
	}
	return sb, runTrue(ctx, sb)
}

// runTrue runs the static /bin/true and takes any other end than exit 0 for an error.
func runTrue(ctx context.Context, sb *client.Sandbox) error {
	_, outcome, err := sb.Command("/bin/true").Output(ctx)
	if err == nil && !outcome.OK() {
		err = fmt.Errorf("/bin/true ended with %+v", outcome)
	}
	return err
}
