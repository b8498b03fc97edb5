package main

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"

	"github.com/opendsec/dsec/bench/internal/measure"
)

// podman is the one of this machine, with directories of its own.
type podman struct {
	base []string
	undo func()
}

// findPodman gives it where it is installed. undo may be called on what it gave
// also where that is nil.
func findPodman(work string) *podman {
	if _, err := exec.LookPath("podman"); err != nil {
		fmt.Fprintln(os.Stderr, "bench-layers: podman is not installed: no figure for it")
		return nil
	}
	undoCgroup, undoParent := measure.HybridForCrun(work), measure.RemovePodmanParent()
	return &podman{
		base: []string{
			"podman", "--root", filepath.Join(work, "podman"), "--runroot", filepath.Join(work, "podman-run"), "--storage-driver", "overlay",
			"--cgroup-manager", "cgroupfs", "--events-backend", "none", "--log-level", "error",
		},
		undo: func() { undoParent(); undoCgroup() },
	}
}

func (p *podman) undoAll() {
	if p != nil {
		p.undo()
	}
}

// load makes an image of a tar.
func (p *podman) load(ctx context.Context, tar, name string) (written int64, err error) {
	_, written, err = command(ctx, p.args("import", "--quiet", tar, name)...)
	return written, err
}

// version runs `go version` in a new container of an image.
func (p *podman) version(ctx context.Context, image string) (written int64, err error) {
	args := []string{"run", "--rm", "--network", "none", "--ulimit", "nofile=1024:1024", "--ulimit", "nproc=4096:4096"}
	for _, e := range pairs(goEnv) {
		args = append(args, "--env", e)
	}
	out, written, err := command(ctx, p.args(slices.Concat(args, []string{image}, goVersion)...)...)
	if err == nil {
		err = checkVersion(out, true, "status 0")
	}
	return written, err
}

// remove takes images away.
func (p *podman) remove(ctx context.Context, names ...string) error {
	_, _, err := command(ctx, p.args(append([]string{"rmi", "--force"}, names...)...)...)
	return err
}

func (p *podman) args(args ...string) []string { return append(slices.Clone(p.base), args...) }

// untar unpacks a tar below dir, which is made.
func untar(ctx context.Context, path, dir string) (written int64, err error) {
	if err := os.Mkdir(dir, 0o755); err != nil {
		return 0, err
	}
	_, written, err = command(ctx, "tar", "-x", "-f", path, "-C", dir)
	return written, err
}

// chrootVersion runs `go version` in an unpacked tree.
func chrootVersion(ctx context.Context, root string) error {
	cmd := exec.CommandContext(ctx, goVersion[0], goVersion[1:]...)
	cmd.Err, cmd.Path, cmd.Dir, cmd.Env = nil, goVersion[0], "/", pairs(goEnv)
	cmd.SysProcAttr = &syscall.SysProcAttr{Chroot: root}
	out, err := cmd.Output()
	if err != nil {
		return fmt.Errorf("go version in %s: %w", filepath.Base(root), err)
	}
	return checkVersion(out, true, "status 0")
}

// command runs a rival's command to its end. written is what it and its children
// had written to disks, in bytes.
func command(ctx context.Context, argv ...string) (out []byte, written int64, err error) {
	cmd := exec.CommandContext(ctx, argv[0], argv[1:]...)
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err = cmd.Output()
	if err != nil {
		return nil, 0, fmt.Errorf("%s: %w: %s", strings.Join(argv[:min(3, len(argv))], " "), err, strings.TrimSpace(stderr.String()))
	}
	return out, cmd.ProcessState.SysUsage().(*syscall.Rusage).Oublock * 512, nil
}
