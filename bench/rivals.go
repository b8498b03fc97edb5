package main

import (
	"archive/tar"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/opendsec/dsec/bench/internal/measure"
)

// rival is a container tool of this machine, driven by its command line
// without a shell in between.
type rival struct {
	name     string
	binary   string
	features []string
	// args of one run of /bin/true to its end, and of starting one that stays
	// and running /bin/true in it; nil where the tool cannot.
	run   func(id string) []string
	start func(id string) []string
	exec  func(id string) []string
	stop  func(id string) []string
}

// rivals are those that are installed.
type rivals map[string]*rival

var ids atomic.Int64

func newID() string { return fmt.Sprintf("dsec-bench-%d-%d", os.Getpid(), ids.Add(1)) }

// findRivals prepares a root file system and a bundle below work for the tools
// that are installed. undo takes away what they left.
func findRivals(work string) (rivals, func(), error) {
	root := filepath.Join(work, "bundle", "rootfs")
	if err := unpackBusybox(root); err != nil {
		return nil, nil, err
	}
	if err := writeBundles(work, root); err != nil {
		return nil, nil, err
	}
	// The root user of a user namespace must reach the root file system.
	if err := os.Chmod(work, 0o711); err != nil {
		return nil, nil, err
	}
	all := []*rival{oci("crun", work), confinedCrun(work), oci("runc", work), bwrap(root), podman(root, work)}
	found := rivals{}
	for _, r := range all {
		if _, err := exec.LookPath(r.binary); err == nil {
			found[r.name] = r
		} else {
			fmt.Fprintf(os.Stderr, "bench: %s is not installed: no figure for it\n", r.name)
		}
	}
	undoCgroup := measure.HybridForCrun(work)
	undoParent := measure.RemovePodmanParent()
	return found, func() { measure.UnmountBelow(work); undoParent(); undoCgroup() }, nil
}

func oci(binary, work string) *rival {
	with := ociCommand(binary, work)
	return &rival{
		name: binary, binary: binary,
		features: []string{"namespaces: pid ipc uts mount net cgroup", "cgroup limits: memory pids", "no user namespace", "no seccomp", "no overlay"},
		run:      func(id string) []string { return with("run", "--bundle", filepath.Join(work, "bundle"), id) },
		start: func(id string) []string {
			return with("run", "--detach", "--bundle", filepath.Join(work, "sleeper"), id)
		},
		exec: func(id string) []string { return with("exec", id, "/bin/true") },
		stop: func(id string) []string { return with("delete", "--force", id) },
	}
}

// confinedCrun is crun with the isolation of dsec, as far as it goes. It has no
// disk of its own, no API and no agent inside.
func confinedCrun(work string) *rival {
	with := ociCommand("crun", work)
	return &rival{
		name: "crun confined", binary: "crun",
		features: []string{
			"namespaces: pid ipc uts mount net cgroup user", "cgroup limits: memory pids cpu", "seccomp", "capabilities",
			"/proc masked as dsec's", "no overlay", "no disk limit",
		},
		run: func(id string) []string { return with("run", "--bundle", filepath.Join(work, "confined"), id) },
	}
}

func ociCommand(binary, work string) func(args ...string) []string {
	base := []string{binary, "--root", filepath.Join(work, binary)}
	return func(args ...string) []string { return append(slices.Clone(base), args...) }
}

func bwrap(root string) *rival {
	return &rival{
		name: "bwrap", binary: "bwrap",
		features: []string{"namespaces: all", "no cgroup", "no seccomp", "no overlay"},
		run: func(string) []string {
			return []string{"bwrap", "--unshare-all", "--ro-bind", root, "/", "--proc", "/proc", "--dev", "/dev", "/bin/true"}
		},
	}
}

func podman(root, work string) *rival {
	base := []string{
		"podman", "--root", filepath.Join(work, "podman"), "--runroot", filepath.Join(work, "podman-run"),
		"--cgroup-manager", "cgroupfs", "--events-backend", "none", "--log-level", "error",
	}
	with := func(args ...string) []string { return append(slices.Clone(base), args...) }
	options := []string{"--network", "none", "--ulimit", "nofile=1024:1024", "--ulimit", "nproc=4096:4096", "--rootfs", root}
	return &rival{
		name: "podman", binary: "podman",
		features: []string{"namespaces: pid ipc uts mount net cgroup", "seccomp", "capabilities", "no user namespace", "conmon"},
		run: func(id string) []string {
			return with(slices.Concat([]string{"run", "--rm", "--name", id}, options, []string{"/bin/true"})...)
		},
		start: func(id string) []string {
			return with(slices.Concat([]string{"run", "--detach", "--name", id}, options, []string{"/bin/sleep", "100000"})...)
		},
		exec: func(id string) []string { return with("exec", id, "/bin/true") },
		stop: func(id string) []string { return with("rm", "--force", "--time", "0", id) },
	}
}

// command runs a rival's command line to its end.
func command(ctx context.Context, argv []string) error {
	cmd := exec.CommandContext(ctx, argv[0], argv[1:]...)
	var stderr bytes.Buffer
	if err := cmd.Start(); err != nil {
		return err
	}
	if err := cmd.Wait(); err != nil {
		// Once more with its words kept: a pipe would be part of what is measured.
		again := exec.CommandContext(ctx, argv[0], argv[1:]...)
		again.Stderr = &stderr
		_ = again.Run()
		return fmt.Errorf("%s: %w: %s", strings.Join(argv[:min(4, len(argv))], " "), err, strings.TrimSpace(stderr.String()))
	}
	return nil
}

// run are the rivals as contestants that run /bin/true in a new container.
func (r rivals) run(per int) []measure.Contestant {
	var all []measure.Contestant
	for _, name := range []string{"crun", "crun confined", "runc", "bwrap", "podman"} {
		rival := r[name]
		if rival == nil {
			continue
		}
		all = append(all, measure.Contestant{Name: name, Per: r.per(name, per), Once: func(ctx context.Context) (time.Duration, error) {
			return measure.Timed(func() error { return command(ctx, rival.run(newID())) })
		}})
	}
	return all
}

// per is fewer samples for what takes a tenth of a second each.
func (r rivals) per(name string, per int) int {
	if name == "podman" {
		return max(1, per/6)
	}
	return per
}

// execs starts one container of each rival that can and returns contestants
// that run /bin/true in it.
func (r rivals) execs(ctx context.Context, per int) (all []measure.Contestant, stop func() error, err error) {
	var stops [][]string
	stop = func() error {
		var errs []error
		for _, argv := range stops {
			errs = append(errs, command(context.WithoutCancel(ctx), argv))
		}
		return errors.Join(errs...)
	}
	for _, name := range []string{"crun", "runc", "podman"} {
		rival := r[name]
		if rival == nil {
			continue
		}
		id := newID()
		if err := command(ctx, rival.start(id)); err != nil {
			return nil, nil, errors.Join(err, stop())
		}
		stops = append(stops, rival.stop(id))
		all = append(all, measure.Contestant{Name: name, Per: r.per(name, per), Once: func(ctx context.Context) (time.Duration, error) {
			return measure.Timed(func() error { return command(ctx, rival.exec(id)) })
		}})
	}
	return all, stop, nil
}

// burst is how long a rival takes for n runs at once. They need not be alive
// together: that is in the rival's favour.
func (r rivals) burst(ctx context.Context, name string, n int) (time.Duration, bool, error) {
	rival := r[name]
	if rival == nil {
		return 0, false, nil
	}
	d, err := measure.Timed(func() error { return measure.EachOf(n, n, func(int) error { return command(ctx, rival.run(newID())) }) })
	return d, err == nil, err
}

// floorNamespaces is what the kernel alone takes for a process in new
// namespaces that executes a static program: nobody can be faster by much.
func floorNamespaces() measure.Contestant {
	return measure.Contestant{Name: "floor", Per: 30, Once: spawn(syscall.CLONE_NEWUSER | syscall.CLONE_NEWNS | syscall.CLONE_NEWPID | syscall.CLONE_NEWIPC | syscall.CLONE_NEWUTS)}
}

// floorExec is a plain process.
func floorExec() measure.Contestant {
	return measure.Contestant{Name: "floor", Per: 30, Once: spawn(0)}
}

func spawn(flags uintptr) func(ctx context.Context) (time.Duration, error) {
	return func(context.Context) (time.Duration, error) {
		return measure.Timed(func() error {
			cmd := &exec.Cmd{Path: "/bin/busybox", Args: []string{"true"}, SysProcAttr: &syscall.SysProcAttr{Cloneflags: flags}}
			return cmd.Run()
		})
	}
}

func unpackBusybox(root string) error {
	image, err := measure.BusyboxTar()
	if err != nil {
		return err
	}
	for r := tar.NewReader(bytes.NewReader(image)); ; {
		h, err := r.Next()
		if errors.Is(err, io.EOF) {
			return nil
		} else if err != nil {
			return err
		}
		path := filepath.Join(root, h.Name)
		switch h.Typeflag {
		case tar.TypeDir:
			err = os.MkdirAll(path, 0o755)
		case tar.TypeSymlink:
			err = os.Symlink(h.Linkname, path)
		default:
			data, rerr := io.ReadAll(r)
			err = errors.Join(rerr, os.WriteFile(path, data, h.FileInfo().Mode().Perm()))
		}
		if err != nil {
			return err
		}
	}
}
