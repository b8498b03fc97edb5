package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/bench/internal/measure"
	"github.com/opendsec/dsec/client"
)

// copies: a large file in and out. The server is apiserver and edge in one
// process; its memory must not grow with the file.
func copies(ctx context.Context, b *bench) (rows []measure.Row, err error) {
	sb, err := b.CreateSandbox(ctx, client.SandboxOptions{
		Backend: b.kind, Layers: []string{layerName},
		Limits: dsec.Limits{MemoryBytes: 1 << 30, DiskBytes: 2*b.copySize + 64<<20, Pids: 64, MilliCPU: 2000},
	})
	if err != nil {
		return nil, err
	}
	defer func() { err = kill(sb, err) }()
	watch := watchMemory(b.PID())
	up, err := measure.Timed(func() error {
		n, err := sb.Write(ctx, "/root/big", io.LimitReader(pattern{}, b.copySize), client.WriteOptions{})
		if err == nil && n != b.copySize {
			err = fmt.Errorf("wrote %d of %d bytes", n, b.copySize)
		}
		return err
	})
	if err != nil {
		return nil, errors.Join(err, ignore(watch()))
	}
	down, err := measure.Timed(func() error {
		n, err := sb.Read(ctx, "/root/big", 0, 0, io.Discard)
		if err == nil && n != b.copySize {
			err = fmt.Errorf("read %d of %d bytes", n, b.copySize)
		}
		return err
	})
	growth := watch()
	if err != nil {
		return nil, err
	}
	mib := float64(b.copySize) / (1 << 20)
	what := fmt.Sprintf("of a file of %.0f MiB", mib)
	upRow := measure.NewRow("F1_up_mib_per_s", "upload "+what, "MiB/s", mib/up.Seconds()).With(b.features)
	downRow := measure.NewRow("F1_down_mib_per_s", "download "+what, "MiB/s", mib/down.Seconds()).With(b.features)
	in, out, ok, err := b.rivals.copyThrough(ctx, b.work, b.copySize)
	if ok {
		upRow, downRow = upRow.Against("tar | podman exec -i", mib/in.Seconds()), downRow.Against("podman exec | tar", mib/out.Seconds())
		upRow, downRow = upRow.Target(measure.AtLeast, mib/in.Seconds()/2, mib/in.Seconds()), downRow.Target(measure.AtLeast, mib/out.Seconds()/2, mib/out.Seconds())
	}
	rows = []measure.Row{
		upRow, downRow,
		measure.NewRow("F1_growth_mib", "growth of the server's memory meanwhile (apiserver and edge in one process)", "MiB", float64(growth)/(1<<20)).Target(measure.AtMost, 64, 32).With(b.features),
	}
	return rows, err
}

func ignore(int64) error { return nil }

// pattern is bytes without end that no layer can leave out as a hole.
type pattern struct{}

func (pattern) Read(p []byte) (int, error) {
	for i := range p {
		p[i] = byte(i*7 + 13)
	}
	return len(p), nil
}

// watchMemory looks at a process's own memory until the returned function is
// called, which returns how much more it was at most than at the start.
func watchMemory(pid int) (stop func() int64) {
	read := func() int64 {
		for line := range strings.Lines(measure.ReadFile(fmt.Sprintf("/proc/%d/status", pid))) {
			if f := strings.Fields(line); len(f) > 1 && f[0] == "RssAnon:" {
				var kib int64
				_, _ = fmt.Sscan(f[1], &kib)
				return kib << 10
			}
		}
		return 0
	}
	start := read()
	most := start
	done := make(chan struct{})
	var wg sync.WaitGroup
	wg.Go(func() {
		tick := time.NewTicker(20 * time.Millisecond)
		defer tick.Stop()
		for {
			select {
			case <-done:
				return
			case <-tick.C:
				most = max(most, read())
			}
		}
	})
	return func() int64 {
		close(done)
		wg.Wait()
		return most - start
	}
}

// copyThrough moves the same bytes through tar and podman exec.
func (r rivals) copyThrough(ctx context.Context, work string, size int64) (in, out time.Duration, ok bool, err error) {
	podman := r["podman"]
	if podman == nil {
		return 0, 0, false, nil
	}
	file := filepath.Join(work, "big")
	f, err := os.Create(file)
	if err != nil {
		return 0, 0, false, err
	}
	defer func() { _ = os.Remove(file) }()
	if _, err := io.CopyN(f, pattern{}, size); err != nil {
		return 0, 0, false, err
	}
	if err := f.Close(); err != nil {
		return 0, 0, false, err
	}
	id := newID()
	if err := command(ctx, podman.start(id)); err != nil {
		return 0, 0, false, err
	}
	defer func() { err = errors.Join(err, command(context.WithoutCancel(ctx), podman.stop(id))) }()
	inside := func(args ...string) []string {
		argv := podman.exec(id) // ends with ID /bin/true
		argv = argv[:len(argv)-2]
		return append(append(argv, "-i", id), args...)
	}
	in, err = measure.Timed(func() error {
		return pipe(ctx, []string{"tar", "-C", work, "-cf", "-", "big"}, inside("/bin/tar", "-C", "/root", "-xf", "-"))
	})
	if err != nil {
		return 0, 0, false, err
	}
	out, err = measure.Timed(func() error {
		return pipe(ctx, inside("/bin/tar", "-C", "/root", "-cf", "-", "big"), []string{"cat"})
	})
	return in, out, err == nil, err
}

// pipe runs a | b.
func pipe(ctx context.Context, a, b []string) error {
	first, second := exec.CommandContext(ctx, a[0], a[1:]...), exec.CommandContext(ctx, b[0], b[1:]...)
	out, err := first.StdoutPipe()
	if err != nil {
		return err
	}
	second.Stdin = out
	if err := errors.Join(first.Start(), second.Start()); err != nil {
		return err
	}
	return errors.Join(second.Wait(), first.Wait())
}
