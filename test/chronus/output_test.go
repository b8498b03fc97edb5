package chronus_test

import (
	"bytes"
	"context"
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/chronusapi"
)

func TestOutputStreamsAndBytes(t *testing.T) {
	each(t, func(t *testing.T, f *fixture) {
		r := f.run(t, shell(`printf 'a\nb\377\303'; printf 'e' >&2`))
		if r.stdout != "a\nb\377\303" || r.stderr != "e" {
			t.Errorf("stdout %q, stderr %q", r.stdout, r.stderr)
		}
		big := f.run(t, shell(`head -c 3000000 /dev/zero; head -c 1000000 /dev/zero >&2`))
		if len(big.stdout) != 3000000 || len(big.stderr) != 1000000 || big.gaps != 0 || strings.Trim(big.stdout, "\x00") != "" {
			t.Errorf("stdout %d, stderr %d bytes, %d gaps", len(big.stdout), len(big.stderr), big.gaps)
		}
		if big.outcome.MaxRSS <= 0 || big.outcome.CPU <= 0 {
			t.Errorf("no usage in %+v", big.outcome)
		}
	})
}

func TestOutputLimitKeepsExactlyThatMuch(t *testing.T) {
	each(t, func(t *testing.T, f *fixture) {
		for _, limit := range []int64{1, 1000, 300_000} {
			req := shell("while :; do echo 0123456789 || exit; done")
			req.Command.OutputLimit = limit
			r := f.run(t, req)
			if int64(len(r.stdout)) != limit || !r.outcome.OutputLimit || r.outcome.Signal != 9 {
				t.Errorf("limit %d: %d bytes, %+v", limit, len(r.stdout), r.outcome)
			}
		}
		req := shell("printf 0123456789")
		req.Command.OutputLimit = 10
		if r := f.run(t, req); r.outcome.OutputLimit || !r.outcome.OK() || r.stdout != "0123456789" {
			t.Errorf("exactly the limit: %+v", r)
		}
	})
}

func TestStdin(t *testing.T) {
	each(t, func(t *testing.T, f *fixture) {
		if r := f.run(t, argv("cat")); r.stdout != "" || !r.outcome.OK() {
			t.Errorf("without input: %+v", r)
		}
		// First input of more than a pipe holds, while output flows.
		req := argv("cat")
		req.Stdin = bytes.Repeat([]byte("0123456789abcdef"), 60_000)
		if r := f.run(t, req); r.stdout != string(req.Stdin) {
			t.Errorf("got %d bytes back of %d", len(r.stdout), len(req.Stdin))
		}
	})
}

func TestStdinInChunksWithBackPressure(t *testing.T) {
	each(t, func(t *testing.T, f *fixture) {
		req := argv("sha256sum")
		req.OpenStdin = true
		s, err := f.Start(t.Context(), req)
		if err != nil {
			t.Fatal(err)
		}
		ev, err := s.Next()
		if err != nil {
			t.Fatal(err)
		}
		chunk := make([]byte, 1<<20)
		for range 50 {
			if n, err := f.WriteStdin(t.Context(), ev.Process, chunk, false); err != nil || n != len(chunk) {
				t.Fatal(n, err)
			}
		}
		if _, err := f.WriteStdin(t.Context(), ev.Process, nil, true); err != nil {
			t.Fatal(err)
		}
		r, err := drainEvents(s)
		if !errors.Is(err, io.EOF) || !r.outcome.OK() { // started was read above
			t.Fatal(r, err)
		}
		want := f.run(t, shell("head -c 52428800 /dev/zero | sha256sum"))
		if r.stdout != want.stdout {
			t.Errorf("got %q, want %q", r.stdout, want.stdout)
		}
		_, err = f.WriteStdin(t.Context(), ev.Process, []byte("x"), false)
		wantError(t, err, dsec.CodeConflict, "stdin")
	})
}

func TestStdinThatIsClosedIsAConflict(t *testing.T) {
	each(t, func(t *testing.T, f *fixture) {
		req := shell("exec 0<&-; echo ready; sleep 1000")
		req.OpenStdin = true
		s, err := f.Start(t.Context(), req)
		if err != nil {
			t.Fatal(err)
		}
		defer s.Close()
		ev, _ := s.Next()
		if out, err := s.Next(); err != nil || string(out.Data) != "ready\n" {
			t.Fatal(out, err)
		}
		_, err = f.WriteStdin(t.Context(), ev.Process, []byte("x"), false)
		wantError(t, err, dsec.CodeConflict, "stdin")
		_, err = f.WriteStdin(t.Context(), 12345, []byte("x"), false)
		wantError(t, err, dsec.CodeNotFound, "")
	})
}

func TestBlockedStdinEndsWithItsContext(t *testing.T) {
	each(t, func(t *testing.T, f *fixture) {
		req := argv("sleep", "1000")
		req.OpenStdin = true
		s, err := f.Start(t.Context(), req)
		if err != nil {
			t.Fatal(err)
		}
		defer s.Close()
		ev, _ := s.Next()
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error, 1)
		go func() {
			_, err := f.WriteStdin(ctx, ev.Process, make([]byte, 1<<20), false)
			done <- err
		}()
		cancel()
		if err := <-done; err == nil {
			t.Error("a write of 1 MiB to a process that does not read worked")
		}
	})
}

func TestBackPressureLosesNothing(t *testing.T) {
	each(t, func(t *testing.T, f *fixture) {
		marker := filepath.Join(t.TempDir(), "done")
		s, err := f.Start(t.Context(), shell("head -c 5000000 /dev/zero; touch "+marker))
		if err != nil {
			t.Fatal(err)
		}
		defer s.Close()
		// The writer stops once spool, pipe and sockets are full.
		eventually(t, "the spool is full", func() bool {
			p := f.only(t)
			return p.NextSeq-p.FirstSeq > spoolLimit-maxBlock
		})
		if _, err := os.Stat(marker); err == nil {
			t.Fatal("the writer ended although nobody reads")
		}
		r := collect(t, s, nil)
		if len(r.stdout) != 5000000 || r.gaps != 0 {
			t.Errorf("%d bytes, %d gaps", len(r.stdout), r.gaps)
		}
	})
}

func TestDetachedOutputOverwritesAndMarksTheGap(t *testing.T) {
	each(t, func(t *testing.T, f *fixture) {
		req := shell("head -c 2000000 /dev/zero; echo end; read x")
		req.Detach, req.OpenStdin = true, true
		s, err := f.Start(t.Context(), req)
		if err != nil {
			t.Fatal(err)
		}
		ev, err := s.Next()
		if err != nil || ev.Kind != chronusapi.EventStarted {
			t.Fatal(ev, err)
		}
		if _, err := s.Next(); !errors.Is(err, io.EOF) {
			t.Fatalf("a detached start goes on: %v", err)
		}
		eventually(t, "all is written", func() bool {
			list, err := f.Processes(t.Context())
			return err == nil && list[0].NextSeq == 2000004
		})
		if p := f.only(t); p.NextSeq-p.FirstSeq > spoolLimit || p.NextSeq-p.FirstSeq < spoolLimit/2 {
			t.Errorf("the spool has %d bytes, want at most %d and no less than half", p.NextSeq-p.FirstSeq, spoolLimit)
		}
		if _, err := f.WriteStdin(t.Context(), ev.Process, []byte("x\n"), true); err != nil {
			t.Fatal(err)
		}
		for range 2 { // detached output may be read again
			s, err := f.Attach(t.Context(), ev.Process, 0)
			r := collect(t, s, err)
			if r.gaps != 1 || !strings.HasSuffix(r.stdout, "\x00end\n") || r.next != 2000004 || !r.outcome.OK() {
				t.Errorf("%d gaps, %d bytes, %+v", r.gaps, len(r.stdout), r.outcome)
			}
		}
		s, err = f.Attach(t.Context(), ev.Process, 2000001)
		if r := collect(t, s, err); r.stdout != "nd\n" || r.gaps != 0 {
			t.Errorf("from the middle: %+v", r)
		}
	})
}
