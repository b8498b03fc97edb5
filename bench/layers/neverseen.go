package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"github.com/opendsec/dsec/bench/internal/measure"
	"github.com/opendsec/dsec/client"
)

// sample is one image that a contestant saw for the first time.
type sample struct {
	took     time.Duration
	fetched  int64 // bytes from the store
	written  int64 // bytes to local disks
	requests int64
}

// sums are samples of one contestant.
type sums struct {
	measure.Samples
	fetched, written, requests int64
}

func (s *sums) add(one sample) {
	s.Times = append(s.Times, one.took)
	s.fetched, s.written, s.requests = s.fetched+one.fetched, s.written+one.written, s.requests+one.requests
}

func (s *sums) per(total int64) float64 { return float64(total) / float64(len(s.Times)) }

// neverSeen: a node meets an image for the first time, in a store that takes its
// time: create to first useful output.
func neverSeen(ctx context.Context, b *bench) (rows []measure.Row, err error) {
	st, err := b.newStore(ctx)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, st.close()) }()
	n, err := b.newNode(ctx, st.env...)
	if err != nil {
		return nil, err
	}
	defer func() { err = n.stop(err) }()
	s := &seeing{b: b, st: st, n: n, all: map[string]*sums{}}
	if err := n.loadVariants(ctx, b.tree, 0, 2*b.rounds); err != nil {
		return nil, err
	}
	if err := errors.Join(n.forget(ctx), st.forget()); err != nil {
		return nil, err
	}
	for i := range b.rounds {
		if err := s.round(ctx, i); err != nil {
			return nil, err
		}
	}
	return s.rows(), nil
}

// traced: the same where layerd fetches and checks what is read, and where it also
// has the trace of a node that saw the image before.
func traced(ctx context.Context, b *bench) (rows []measure.Row, err error) {
	st, err := b.newStore(ctx)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, st.close()) }()
	// A bucket is read through layerd in any case.
	n, err := b.newNode(ctx, append(st.env, "DSEC_LAYERS_VERIFY=always", "DSEC_LAYERS_TRACE_FOR=1s")...)
	if err != nil {
		return nil, err
	}
	defer func() { err = n.stop(err) }()
	if err := n.loadVariants(ctx, b.tree, 0, 2*b.rounds); err != nil {
		return nil, err
	}
	// A layer of which nothing is read gets no trace.
	if sb, err := n.create(ctx, small, smallLayer); err != nil {
		return nil, err
	} else if _, _, err := sb.Command("/bin/true").Output(ctx); err != nil {
		return nil, kill(sb, err)
	} else if err := kill(sb, nil); err != nil {
		return nil, err
	}
	for i := range b.rounds { // every other one is seen, and so gets one too
		if err := kill(n.first(ctx, variantName(2*i+1))); err != nil {
			return nil, err
		}
	}
	if err := st.waitTraces(ctx, b.rounds+1); err != nil {
		return nil, err
	}
	// Nodes that only look on note nothing.
	n.env = append(n.env, "DSEC_LAYERS_TRACE_FOR=1h")
	if err := errors.Join(n.forget(ctx), st.forget()); err != nil {
		return nil, err
	}
	s := &seeing{b: b, st: st, n: n}
	var filled, followed sums
	for i := range b.rounds {
		for v, sum := range []*sums{&filled, &followed} {
			st.delay(b.delay)
			one, err := s.ours(ctx, 2*i+v)
			if err != nil {
				return nil, err
			}
			sum.add(one)
		}
	}
	what := fmt.Sprintf("never-seen image of %.0f MB through layerd, %v for each read of the store", float64(b.tree.size)/1e6, b.delay)
	pct := func(s *sums) string {
		return fmt.Sprintf("%.1f %% of its bytes fetched, %.1f MB written", 100*s.per(s.fetched)/float64(b.tree.size), s.per(s.written)/1e6)
	}
	return []measure.Row{
		measure.NewRow("I2_filled_ms", what, "ms", filled.P50()).Details(&filled.Samples).Noted(pct(&filled)),
		measure.NewRow("I2_traced_ms", "the same with the trace of a node that saw it", "ms", followed.P50()).Details(&followed.Samples).
			Against("without a trace (ms)", filled.P50()).Noted(pct(&followed)),
	}, nil
}

// seeing is the state of neverSeen.
type seeing struct {
	b   *bench
	st  *layerStore
	n   *node
	all map[string]*sums
}

func (s *seeing) round(ctx context.Context, i int) error {
	delay := func() { s.st.delay(s.b.delay) }
	steps := []struct {
		name string
		slow func()
		once func(ctx context.Context, i int) (sample, error)
	}{
		{"dsec", delay, func(ctx context.Context, i int) (sample, error) { return s.ours(ctx, 2*i) }},
		{"tar", delay, s.tar},
		{"podman", delay, s.podman},
		{"tar at once", s.st.fast, s.tar},
		{"podman at once", s.st.fast, s.podman},
	}
	if s.b.store == "dir" {
		steps = append(steps, struct {
			name string
			slow func()
			once func(ctx context.Context, i int) (sample, error)
		}{"dsec all late", func() { s.st.place.delayAll(s.b.delay) }, func(ctx context.Context, i int) (sample, error) { return s.ours(ctx, 2*i+1) }})
	}
	for _, step := range steps {
		step.slow()
		one, err := step.once(ctx, i)
		s.st.fast()
		if err != nil {
			return fmt.Errorf("%s: %w", step.name, err)
		}
		if one.took == 0 { // not installed
			continue
		}
		if s.all[step.name] == nil {
			s.all[step.name] = new(sums)
		}
		s.all[step.name].add(one)
	}
	return nil
}

// ours is one create of a variant that the node knows no more of than its name.
func (s *seeing) ours(ctx context.Context, variant int) (one sample, err error) {
	read, _ := s.st.read()
	requests, written := s.st.place.Count("read"), s.n.written()
	var sb *client.Sandbox
	one.took, err = measure.Timed(func() (err error) { sb, err = s.n.first(ctx, variantName(variant)); return })
	after, _ := s.st.read()
	one.fetched, one.requests, one.written = after-read, s.st.place.Count("read")-requests, s.n.written()-written
	s.st.fast()
	return one, kill(sb, err)
}

func (s *seeing) image(i int) (path string, err error) {
	path = filepath.Join(s.st.place.Dir(), "image.tar")
	return path, s.b.tree.writeVariant(filepath.Join(s.st.place.backing, "image.tar"), i)
}

func (s *seeing) tar(ctx context.Context, i int) (one sample, err error) {
	path, err := s.image(i)
	if err != nil {
		return one, err
	}
	dir := filepath.Join(s.b.work, "untar")
	read := s.st.place.BytesRead()
	one.took, err = measure.Timed(func() (err error) {
		if one.written, err = untar(ctx, path, dir); err != nil {
			return err
		}
		return chrootVersion(ctx, dir)
	})
	one.fetched = s.st.place.BytesRead() - read
	return one, errors.Join(err, os.RemoveAll(dir))
}

func (s *seeing) podman(ctx context.Context, i int) (one sample, err error) {
	if s.b.podman == nil {
		return one, nil
	}
	path, err := s.image(i)
	if err != nil {
		return one, err
	}
	const name = "localhost/seen:1"
	read := s.st.place.BytesRead()
	one.took, err = measure.Timed(func() error {
		loaded, err := s.b.podman.load(ctx, path, name)
		if err != nil {
			return err
		}
		ran, err := s.b.podman.version(ctx, name)
		one.written = loaded + ran
		return err
	})
	one.fetched = s.st.place.BytesRead() - read
	return one, errors.Join(err, s.b.podman.remove(ctx, name))
}

func (s *seeing) rows() []measure.Row {
	ours, mb := s.all["dsec"], float64(s.b.tree.size)/1e6
	what := fmt.Sprintf("never-seen image of %.0f MB, %v for each read of the store: create to first useful output", mb, s.b.delay)
	r := measure.NewRow("I2_ms", what, "ms", ours.P50()).Details(&ours.Samples)
	if late := s.all["dsec all late"]; late != nil {
		r = r.Noted(fmt.Sprintf("%.0f reads each; with the delay at every request of the file system, look-ups too: %.1f ms", ours.per(ours.requests), late.P50()))
	}
	rows := []measure.Row{r}
	for _, v := range []struct {
		id, rival, name string
		must, aim       float64
	}{{"I2_vs_tar", "tar", "tar -x, go version", 10, 40}, {"I2_vs_podman", "podman", "podman import, podman run", 30, 150}} {
		s1, once := s.all[v.rival], s.all[v.rival+" at once"]
		if s1 == nil {
			continue
		}
		rows = append(rows, measure.NewRow(v.id, "how many times faster", "x", s1.P50()/ours.P50()).Target(measure.AtLeast, v.must, v.aim).
			Against(v.name+" (ms)", s1.P50()).
			Noted(fmt.Sprintf("where the rival's image comes without any delay it takes %.0f ms, %.1f times ours", once.P50(), once.P50()/ours.P50())))
	}
	if _, known := s.st.read(); known {
		rows = append(rows, measure.NewRow("I2_bytes_pct", "bytes fetched until then, of those of the image", "%", 100*ours.per(ours.fetched)/float64(s.b.tree.size)).
			Target(measure.AtMost, 15, 8).Against("tar -x", 100*s.all["tar"].per(s.all["tar"].fetched)/float64(s.b.tree.size)).
			Noted(fmt.Sprintf("%.1f MB", ours.per(ours.fetched)/1e6)))
	}
	tar := s.all["tar"]
	return append(rows, measure.NewRow("I2_written_fewer_pct", "bytes written to local disks until then, fewer than tar -x", "%", 100*(1-ours.per(ours.written)/tar.per(tar.written))).
		Target(measure.AtLeast, 85, 85).Against("tar -x (MB)", tar.per(tar.written)/1e6).Noted(fmt.Sprintf("%.2f MB", ours.per(ours.written)/1e6)))
}
