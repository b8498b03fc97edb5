package backendtest

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/backend"
	"github.com/opendsec/dsec/internal/chronusapi"
)

func testUsage(t *testing.T, h Harness) {
	b := create(t, h, h.New(t))
	b.write("/root/some", strings.Repeat("x", 1<<20))
	var u dsec.Usage
	b.eventually("the file is counted", func() (ok bool) {
		if h.Flush != nil {
			h.Flush()
		}
		var err error
		if u, err = b.inst.Usage(b.ctx()); err != nil {
			t.Fatal(err)
		}
		return u.DiskBytes >= 1<<20
	})
	if u.PidsLimit != h.Spec.Limits.Pids || u.MemoryLimit != h.Spec.Limits.MemoryBytes || u.MilliCPU != h.Spec.Limits.MilliCPU {
		t.Errorf("limits in %+v, want those of the spec", u)
	}
	if u.Pids < 1 || u.DiskInodes < 1 && u.DiskInodes != dsec.NotCounted {
		t.Errorf("usage %+v after 1 MiB was written", u)
	}
}

func testDestroy(t *testing.T, h Harness) {
	b := create(t, h, h.New(t))
	p := b.detach(chronusapi.StartRequest{Command: chronusapi.Command{Shell: "echo up; sleep 1000"}})
	s, err := b.Attach(b.ctx(), p, 0)
	if err != nil {
		t.Fatal(err)
	}
	streamed := make(chan error, 1)
	go func() {
		_, err := gather(s, 0)
		streamed <- err
	}()
	select {
	case <-b.inst.Done():
		t.Fatal("done before it was destroyed")
	default:
	}
	var wg sync.WaitGroup
	for range 4 {
		wg.Go(func() { destroy(t, b.inst) })
	}
	wg.Wait()
	select {
	case <-b.inst.Done():
	case <-time.After(hang):
		t.Fatal("destroyed, and not done")
	}
	if exit := b.inst.Exit(); exit.Reason == "" || time.Since(exit.At) > hang {
		t.Errorf("exit %+v, want a reason and a time", exit)
	}
	if err := <-streamed; err == nil {
		t.Error("the stream of a destroyed instance ended with an exit that nobody saw")
	}
	if conn, err := b.inst.Dial(b.ctx()); err == nil {
		_ = conn.Close()
		_, err = chronusapi.NewClient(b.inst.Dial).Info(b.ctx())
		if err == nil {
			t.Error("a destroyed instance answers")
		}
	}
	destroy(t, b.inst)
}

func testCreateGivenUp(t *testing.T, h Harness) {
	be := h.New(t)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	id := dsec.NewSandboxID("testd")
	if inst, err := be.Create(ctx, h.request(id)); err == nil {
		destroy(t, inst)
		t.Log("create did not look at its context")
	}
	// Given up at any moment there is an instance or nothing.
	for i := range 8 {
		ctx, cancel := context.WithTimeout(t.Context(), time.Duration(i)*500*time.Microsecond)
		if inst, err := be.Create(ctx, h.request(dsec.NewSandboxID("testd"))); err == nil {
			destroy(t, inst)
		}
		cancel()
	}
}

func testRecover(t *testing.T, h Harness) {
	b := create(t, h, h.New(t))
	p := b.detach(chronusapi.StartRequest{Command: chronusapi.Command{Argv: []string{"cat"}}, OpenStdin: true})
	if _, err := b.WriteStdin(b.ctx(), p, []byte("before "), false); err != nil {
		t.Fatal(err)
	}
	b.write("/tmp/kept", "kept")
	next := h.New(t)
	inst, err := next.Recover(b.ctx(), b.id, b.inst.Handle())
	if err != nil {
		t.Fatal(err)
	}
	if err := next.Sweep(b.ctx(), map[dsec.SandboxID]bool{b.id: true}); err != nil {
		t.Fatal(err)
	}
	r := newBox(t, b.id, inst)
	if got := r.read("/tmp/kept", 0, -1); got != "kept" {
		t.Errorf("file holds %q", got)
	}
	if _, err := r.WriteStdin(r.ctx(), p, []byte("after"), true); err != nil {
		t.Fatal(err)
	}
	if got := r.attach(p, 0); got.stdout != "before after" || !got.outcome.OK() {
		t.Errorf("the process said %q, %+v", got.stdout, got.outcome)
	}
	if got := r.shell("echo new"); got.stdout != "new\n" {
		t.Errorf("a new command said %q", got.stdout)
	}
	if string(inst.Handle()) == "" || len(inst.Handle()) > 4096 {
		t.Errorf("handle of %d bytes", len(inst.Handle()))
	}
	destroy(t, inst)
	select {
	case <-inst.Done():
	case <-time.After(hang):
		t.Error("destroyed, and not done")
	}
}

func testRecoverLost(t *testing.T, h Harness) {
	b := create(t, h, h.New(t))
	handle := b.inst.Handle()
	destroy(t, b.inst)
	next := h.New(t)
	for what, hd := range map[string]backend.Handle{"dead": handle, "empty": backend.Handle("{}"), "garbage": backend.Handle(`{"v":-1,"pid":1}`)} {
		inst, err := next.Recover(b.ctx(), b.id, hd)
		if err == nil {
			t.Errorf("%s handle: an instance, want lost", what)
			destroy(t, inst)
			continue
		}
		if dsec.CodeOf(err) != dsec.CodeLost {
			t.Errorf("%s handle: %v, want code lost", what, err)
		}
	}
}

func testSweep(t *testing.T, h Harness) {
	be := h.New(t)
	kept, swept := create(t, h, be), create(t, h, be)
	next := h.New(t)
	inst, err := next.Recover(kept.ctx(), kept.id, kept.inst.Handle())
	if err != nil {
		t.Fatal(err)
	}
	for range 2 { // again is no harm
		if err := next.Sweep(kept.ctx(), map[dsec.SandboxID]bool{kept.id: true}); err != nil {
			t.Fatal(err)
		}
	}
	if r := newBox(t, kept.id, inst).shell("echo alive"); r.stdout != "alive\n" {
		t.Errorf("kept instance said %q", r.stdout)
	}
	if _, err := next.Recover(kept.ctx(), swept.id, swept.inst.Handle()); err == nil || dsec.CodeOf(err) != dsec.CodeLost {
		t.Errorf("swept instance: %v, want lost", err)
	}
	select {
	case <-swept.inst.Done():
	case <-time.After(hang):
		t.Error("swept, and not done")
	}
	destroy(t, inst)
}

func testLimits(t *testing.T, h Harness) {
	if h.OOM {
		t.Run("OOM", func(t *testing.T) {
			b := create(t, h, h.New(t))
			r := b.shell(fmt.Sprintf("exec dd if=/dev/zero of=/dev/null bs=%d count=1", 2*h.Spec.Limits.MemoryBytes))
			if !r.outcome.OOM || r.outcome.Signal != 9 {
				t.Errorf("%q, outcome %+v; want oom", r.stdout, r.outcome)
			}
			if r := b.shell("echo alive"); r.stdout != "alive\n" || r.outcome.OOM {
				t.Errorf("after the OOM: %q, %+v", r.stdout, r.outcome)
			}
		})
	}
	if h.Pids {
		t.Run("Pids", func(t *testing.T) {
			b := create(t, h, h.New(t))
			r := b.run(chronusapi.StartRequest{Command: chronusapi.Command{
				Shell: "i=0; while [ $i -lt 500 ]; do sleep 1000 & i=$((i+1)); done; echo all", Timeout: 10 * time.Second,
			}})
			if strings.Contains(r.stdout, "all") {
				t.Errorf("500 processes ran with a limit of %d", h.Spec.Limits.Pids)
			}
			if err := b.Signal(b.ctx(), r.process, 9, true); err != nil && !errors.Is(err, chronusapi.ErrNeedGroup) {
				t.Error(err)
			}
			b.noneLingers()
			if r := b.shell("echo alive"); r.stdout != "alive\n" {
				t.Errorf("after the fork bomb: %q", r.stdout)
			}
		})
	}
	if h.Disk {
		t.Run("Disk", func(t *testing.T) {
			b := create(t, h, h.New(t))
			r := b.shell("yes 0123456789abcde > /root/fill; echo $?; wc -c < /root/fill")
			var status, size int64
			if _, err := fmt.Sscan(r.stdout, &status, &size); err != nil || status == 0 {
				t.Fatalf("%q, %v; want a failed write", r.stdout, err)
			}
			if limit := h.Spec.Limits.DiskBytes; size < limit*8/10 || size > limit*105/100 {
				t.Errorf("%d bytes were written with a limit of %d", size, limit)
			}
			_, err := b.Write(b.ctx(), chronusapi.WriteRequest{Path: "/root/more"}, strings.NewReader(strings.Repeat("x", 1<<20)))
			want(t, "write on a full disk", err, "path", dsec.CodeExhausted)
			if r := b.shell("rm /root/fill && echo room > /root/room && cat /root/room"); r.stdout != "room\n" {
				t.Errorf("after room was made: %q %q", r.stdout, r.stderr)
			}
		})
	}
}
