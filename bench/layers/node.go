package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/bench/internal/measure"
	"github.com/opendsec/dsec/client"
)

const smallLayer = "small:1" // static busybox

// node is a `dsec up` of one suite.
type node struct {
	*measure.Server
	b   *bench
	env []string
}

// newNode starts one with the busybox layer.
func (b *bench) newNode(ctx context.Context, env ...string) (*node, error) {
	dir, err := os.MkdirTemp(b.work, "up-")
	if err != nil {
		return nil, err
	}
	n := &node{b: b, env: append([]string{"DSEC_EDGE_BACKENDS=container", "DSEC_EDGE_MAX_SANDBOXES=4000", "DSEC_CONTAINER_DISK_IMAGE_BYTES=4294967296"}, env...)}
	if n.Server, err = measure.StartServer(ctx, b.binary, dir, n.env...); err != nil {
		return nil, err
	}
	image, err := measure.BusyboxTar()
	if err == nil {
		err = n.load(ctx, smallLayer, client.ImportOptions{}, bytes.NewReader(image))
	}
	if err == nil && b.features == nil {
		var sb *client.Sandbox
		if sb, err = n.create(ctx, small, smallLayer); err == nil {
			b.features, err = measure.Observe(ctx, sb)
		}
		err = kill(sb, err)
	}
	if err != nil {
		return nil, n.stop(err)
	}
	return n, nil
}

// load imports a layer.
func (n *node) load(ctx context.Context, name string, o client.ImportOptions, archive io.Reader) error {
	_, _, err := n.ImportLayer(ctx, name, o, archive)
	return err
}

// loadVariants imports variants of the tree, as "tree-N:1".
func (n *node) loadVariants(ctx context.Context, t tree, from, to int) error {
	for i := from; i < to; i++ {
		r, err := t.variant(i)
		if err != nil {
			return err
		}
		if err := errors.Join(n.load(ctx, variantName(i), client.ImportOptions{}, r), r.Close()); err != nil {
			return err
		}
	}
	return nil
}

func variantName(i int) string { return fmt.Sprintf("tree-%d:1", i) }

// forget starts the server anew with an empty directory of layers: it knows the
// names, and has nothing of what they stand for. One sandbox of busybox was there
// since, so that what a server does once is done.
func (n *node) forget(ctx context.Context) error {
	if err := n.end(); err != nil {
		return err
	}
	measure.UnmountBelow(n.Dir)
	if err := os.RemoveAll(filepath.Join(n.Dir, "data", "layers")); err != nil {
		return err
	}
	var err error
	if n.Server, err = measure.StartServer(ctx, n.b.binary, n.Dir, n.env...); err != nil {
		return err
	}
	sb, err := n.create(ctx, small, smallLayer)
	return kill(sb, err)
}

var (
	small = dsec.Limits{MemoryBytes: 128 << 20, DiskBytes: 64 << 20, Pids: 64, MilliCPU: 1000}
	large = dsec.Limits{MemoryBytes: 4 << 30, DiskBytes: 4 << 30, Pids: 1024, MilliCPU: 2000}
)

func (n *node) create(ctx context.Context, limits dsec.Limits, layers ...string) (*client.Sandbox, error) {
	return n.CreateSandbox(ctx, client.SandboxOptions{Backend: dsec.KindContainer, Layers: layers, Limits: limits})
}

// first creates a sandbox and takes its first useful output.
func (n *node) first(ctx context.Context, layer string) (*client.Sandbox, error) {
	sb, err := n.create(ctx, small, layer)
	if err != nil {
		return nil, err
	}
	return sb, version(ctx, sb)
}

// version runs `go version`, and takes any other output than a version for an error.
func version(ctx context.Context, sb *client.Sandbox) error {
	cmd := sb.Command(goVersion...)
	cmd.Env = goEnv
	out, outcome, err := cmd.Output(ctx)
	if err != nil {
		return err
	}
	return checkVersion(out, outcome.OK(), fmt.Sprintf("%+v", outcome))
}

func checkVersion(out []byte, ok bool, how string) error {
	if !ok || !strings.HasPrefix(string(out), "go version ") {
		return fmt.Errorf("go version ended with %s and said %.200q", how, out)
	}
	return nil
}

// written is how many bytes the server and its layerd have had written to disks,
// what they waited for included.
func (n *node) written() (total int64) {
	for _, pid := range []int{n.PID(), n.layerd()} {
		for line := range strings.Lines(measure.ReadFile(fmt.Sprintf("/proc/%d/io", pid))) {
			if f := strings.Fields(line); len(f) == 2 && f[0] == "write_bytes:" {
				v, _ := strconv.ParseInt(f[1], 10, 64)
				total += v
			}
		}
	}
	return total
}

// layerd is the process that fills this node's layers, or 0: it has the directory
// of its socket open as descriptor 3.
func (n *node) layerd() int {
	dirs, _ := filepath.Glob("/proc/[0-9]*")
	for _, dir := range dirs {
		if at, err := os.Readlink(dir + "/fd/3"); err == nil && at == filepath.Join(n.Dir, "run", "layerd") {
			pid, _ := strconv.Atoi(filepath.Base(dir))
			return pid
		}
	}
	return 0
}

// end ends the server, and its layerd, which would outlive it.
func (n *node) end() error {
	err := n.End()
	if pid := n.layerd(); pid != 0 {
		err = errors.Join(err, endProcess(pid))
	}
	return err
}

// endProcess kills a process that is no child of ours, and waits for its end.
func endProcess(pid int) error {
	fd, err := unix.PidfdOpen(pid, 0)
	if err != nil {
		return err
	}
	defer func() { _ = unix.Close(fd) }()
	if err := unix.PidfdSendSignal(fd, unix.SIGKILL, nil, 0); err != nil {
		return err
	}
	_, err = unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}, 10_000)
	return err
}

// stop ends the server and takes away what it kept. After a failure it returns
// that, and what the server said last.
func (n *node) stop(failed error) error {
	err := n.end()
	if failed != nil {
		failed = fmt.Errorf("%w; the server's log ends with: %s", failed, n.LogEnd())
	}
	return errors.Join(failed, err, n.Remove())
}

// kill ends a sandbox after a sample, whatever became of it.
func kill(sb *client.Sandbox, err error) error {
	if sb == nil {
		return err
	}
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	return errors.Join(err, sb.Kill(ctx))
}
