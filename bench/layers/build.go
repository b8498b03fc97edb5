package main

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/bench/internal/measure"
	"github.com/opendsec/dsec/client"
)

// buildScript compiles a real program and all that it is made of, from nothing.
const buildScript = `set -e
/bin/busybox rm -rf /build/cache /build/out
GOCACHE=/build/cache /usr/local/go/bin/go build -o /build/out $PACKAGE
/bin/busybox test -e /build/out`

// buildEnv says what is built: to try the program out, a package of few lines.
func (b *bench) buildEnv() map[string]string {
	env := maps.Clone(goEnv)
	env["PACKAGE"] = "cmd/gofmt"
	if b.quick {
		env["PACKAGE"] = "errors"
	}
	return env
}

// runs are builds of one contestant.
type runs struct {
	wall measure.Samples
	cpu  time.Duration // of the build alone
}

func (r *runs) add(wall, cpu time.Duration) {
	r.wall.Times = append(r.wall.Times, wall)
	r.cpu += cpu
}

func (r *runs) cpuMS() float64 { return measure.Milliseconds(r.cpu) / float64(len(r.wall.Times)) }

// build: a real build in a sandbox against the same build in the same tree,
// unpacked on this machine's disk, with the same limits.
func build(ctx context.Context, b *bench) (rows []measure.Row, err error) {
	t := b.tree
	if b.quick { // its tree has nothing to build from
		if t, err = goTree(ctx, filepath.Join(b.work, "full.tar"), false); err != nil {
			return nil, err
		}
	}
	var env []string
	if b.store != "dir" {
		st, err := b.newStore(ctx)
		if err != nil {
			return nil, err
		}
		defer func() { err = errors.Join(err, st.close()) }()
		env = st.env
	}
	n, err := b.newNode(ctx, env...)
	if err != nil {
		return nil, err
	}
	defer func() { err = n.stop(err) }()
	root := filepath.Join(b.work, "local")
	if _, err := untar(ctx, t.path, root); err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(root)) }()
	l, err := newLocal(root, large, b.buildEnv())
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, l.remove()) }()
	cold := max(1, b.rounds/2)
	if err := n.loadVariants(ctx, t, 0, cold+1); err != nil {
		return nil, err
	}
	first, later := map[string]*runs{"dsec": {}, "ext4": {}}, map[string]*runs{"dsec": {}, "ext4": {}}
	if err := b.coldBuilds(ctx, n, l, cold, first); err != nil {
		return nil, err
	}
	if err := b.warmBuilds(ctx, n, l, cold, later); err != nil {
		return nil, err
	}
	row := func(id, what string, got map[string]*runs, must, aim float64) measure.Row {
		ours, theirs := got["dsec"], got["ext4"]
		return measure.NewRow(id, what, "%", 100*(ours.wall.P50()/theirs.wall.P50()-1)).Target(measure.AtMost, must, aim).
			Against("local ext4 (ms)", theirs.wall.P50()).
			Noted(fmt.Sprintf("%.0f ms; CPU of the build %.0f ms against %.0f ms: %+.1f %%; medians of %d", ours.wall.P50(), ours.cpuMS(), theirs.cpuMS(),
				100*(ours.cpuMS()/theirs.cpuMS()-1), len(ours.wall.Times)))
	}
	return []measure.Row{
		row("I3_warm_pct", "go build of gofmt and all that it is made of, no delay, warm: longer than on local ext4", later, 10, 1),
		row("I3_cold_pct", "the same for the first time, nothing of the image in the page cache: longer than on local ext4 from a cold page cache", first, 15, 6),
	}, nil
}

// coldBuilds has each build be the first of its image on the node.
func (b *bench) coldBuilds(ctx context.Context, n *node, l *local, times int, got map[string]*runs) error {
	for i := range times {
		if err := forgetBelow(filepath.Join(n.Dir, "data")); err != nil {
			return err
		}
		sb, err := n.create(ctx, large, variantName(i))
		if err == nil {
			err = b.buildIn(ctx, sb, got["dsec"])
		}
		if err := kill(sb, err); err != nil {
			return err
		}
		if err := forgetBelow(l.root); err != nil {
			return err
		}
		if err := l.build(ctx, got["ext4"]); err != nil {
			return err
		}
	}
	return nil
}

// warmBuilds has one sandbox and the local tree take turns.
func (b *bench) warmBuilds(ctx context.Context, n *node, l *local, variant int, got map[string]*runs) error {
	sb, err := n.create(ctx, large, variantName(variant))
	if err != nil {
		return err
	}
	var ignored runs // warms
	err = errors.Join(b.buildIn(ctx, sb, &ignored), l.build(ctx, &ignored))
	for range b.rounds {
		if err == nil {
			err = b.buildIn(ctx, sb, got["dsec"])
		}
		if err == nil {
			err = l.build(ctx, got["ext4"])
		}
	}
	return kill(sb, err)
}

func (b *bench) buildIn(ctx context.Context, sb *client.Sandbox, r *runs) error {
	cmd := sb.Command("/bin/sh", "-c", buildScript)
	cmd.Env = b.buildEnv()
	var outcome dsec.Outcome
	wall, err := measure.Timed(func() (err error) { outcome, err = cmd.Run(ctx); return })
	if err == nil && !outcome.OK() {
		err = fmt.Errorf("the build in a sandbox ended with %+v", outcome)
	}
	r.add(wall, outcome.CPU)
	return err
}

// local is a tree on this machine's disk, and groups with the limits of a sandbox.
type local struct {
	root   string
	env    []string // of the build
	groups []string
}

// newLocal makes cgroups, of version 1 where the machine has its controllers there.
func newLocal(root string, limits dsec.Limits, env map[string]string) (*local, error) {
	l := &local{root: root, env: pairs(env)}
	name := fmt.Sprintf("dsec-bench-%d", os.Getpid())
	memory, pids := strconv.FormatInt(limits.MemoryBytes, 10), strconv.FormatInt(limits.Pids, 10)
	quota := strconv.FormatInt(limits.MilliCPU*100, 10)
	set := func(dir string, values ...[2]string) error {
		group := filepath.Join(dir, name)
		if err := os.Mkdir(group, 0o755); err != nil {
			return err
		}
		l.groups = append(l.groups, group)
		for _, v := range values {
			if err := os.WriteFile(filepath.Join(group, v[0]), []byte(v[1]), 0); err != nil {
				return err
			}
		}
		return nil
	}
	const v1 = "/sys/fs/cgroup/"
	var err error
	if _, serr := os.Stat(v1 + "memory"); serr == nil {
		err = errors.Join(
			set(v1+"memory", [2]string{"memory.limit_in_bytes", memory}),
			set(v1+"cpu", [2]string{"cpu.cfs_period_us", "100000"}, [2]string{"cpu.cfs_quota_us", quota}),
			set(v1+"pids", [2]string{"pids.max", pids}))
	} else {
		err = set(v1, [2]string{"memory.max", memory}, [2]string{"cpu.max", quota + " 100000"}, [2]string{"pids.max", pids})
	}
	if err != nil {
		return nil, errors.Join(err, l.remove())
	}
	return l, nil
}

const localScript = `set -e
for group in $DSEC_BENCH_GROUPS; do echo $$ > $group/cgroup.procs; done
/bin/busybox mount -t proc proc "$DSEC_BENCH_ROOT/proc"
/bin/busybox mount --bind /dev "$DSEC_BENCH_ROOT/dev"
exec /bin/busybox chroot "$DSEC_BENCH_ROOT" /bin/sh -c "$DSEC_BENCH_SCRIPT"`

func (l *local) build(ctx context.Context, r *runs) error {
	cmd := exec.CommandContext(ctx, "/bin/busybox", "sh", "-c", localScript)
	cmd.Env = append([]string{"DSEC_BENCH_GROUPS=" + strings.Join(l.groups, " "), "DSEC_BENCH_ROOT=" + l.root, "DSEC_BENCH_SCRIPT=" + buildScript}, l.env...)
	cmd.SysProcAttr = &syscall.SysProcAttr{Unshareflags: syscall.CLONE_NEWNS}
	var out []byte
	wall, err := measure.Timed(func() (err error) { out, err = cmd.CombinedOutput(); return })
	if err != nil {
		return fmt.Errorf("the build on the local disk: %w: %.300s", err, out)
	}
	r.add(wall, cmd.ProcessState.UserTime()+cmd.ProcessState.SystemTime())
	return nil
}

func (l *local) remove() error {
	var errs []error
	for _, g := range l.groups {
		errs = append(errs, os.Remove(g))
	}
	return errors.Join(errs...)
}
