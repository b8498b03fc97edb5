package chronus_test

import (
	"bytes"
	"errors"
	"io"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/chronusapi"
)

// filesProcess is the pid of the chronus-files that chronus has started, or 0.
func (f *fixture) filesProcess(t testing.TB) int {
	t.Helper()
	for _, child := range f.children(t) {
		if comm, err := os.ReadFile("/proc/" + child + "/comm"); err == nil && string(comm) == "chronus-files\n" {
			pid, err := strconv.Atoi(child)
			if err != nil {
				t.Fatal(err)
			}
			return pid
		}
	}
	return 0
}

func (f *fixture) readFile(t testing.TB, path string) ([]byte, error) {
	t.Helper()
	r, err := f.Read(t.Context(), path, 0, -1)
	if err != nil {
		return nil, err
	}
	defer r.Close()
	return io.ReadAll(r)
}

func TestFilesAreServedByAProcessOfTheirOwn(t *testing.T) {
	each(t, func(t *testing.T, f *fixture) {
		if f.filesProcess(t) != 0 {
			t.Error("it runs before anybody asks for a file")
		}
		path := filepath.Join(t.TempDir(), "file")
		for _, size := range []int{1, 100, 70_000, 3_000_000} { // some come with their request
			want := bytes.Repeat([]byte("0123456789"), size/10+1)[:size]
			if n, err := f.Write(t.Context(), chronusapi.WriteRequest{Path: path}, bytes.NewReader(want)); err != nil || int(n) != size {
				t.Fatal(n, err)
			}
			if got, err := f.readFile(t, path); err != nil || !bytes.Equal(got, want) {
				t.Fatalf("%d of %d bytes, %v", len(got), size, err)
			}
		}
		pid := f.filesProcess(t)
		if pid == 0 {
			t.Fatal("no process serves files")
		}
		if list, err := f.Processes(t.Context()); err != nil || len(list) != 0 {
			t.Errorf("%d commands, %v: it counts as one", len(list), err)
		}
		env, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/environ")
		if err != nil || strings.Contains(string(env), "PATH=") {
			t.Errorf("its environment is %q, %v", env, err)
		}
		fds, err := os.ReadDir("/proc/" + strconv.Itoa(pid) + "/fd")
		if err != nil || len(fds) > 10 {
			t.Errorf("it has %d descriptors, %v", len(fds), err)
		}
	})
}

// An agent can kill it. The call that it served breaks, and the next starts
// another one.
func TestAKilledFilesProcessIsReplaced(t *testing.T) {
	each(t, func(t *testing.T, f *fixture) {
		before := 0
		for range 3 {
			if _, err := f.Stat(t.Context(), "/", false); err != nil {
				t.Fatal(err)
			}
			pid := f.filesProcess(t)
			if pid == 0 || pid == before {
				t.Fatalf("pid %d after %d", pid, before)
			}
			before = pid
			r, err := f.Read(t.Context(), "/proc/self/environ", 0, -1)
			if err != nil {
				t.Fatal(err)
			}
			r.Close()
			big := filepath.Join(t.TempDir(), "big")
			if err := os.WriteFile(big, nil, 0o600); err != nil {
				t.Fatal(err)
			}
			if err := os.Truncate(big, 1<<30); err != nil {
				t.Fatal(err)
			}
			if r, err = f.Read(t.Context(), big, 0, -1); err != nil {
				t.Fatal(err)
			}
			if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
				t.Fatal(err)
			}
			n, err := io.Copy(io.Discard, r)
			r.Close()
			if err == nil || dsec.CodeOf(err) != dsec.CodeUnavailable || errors.Is(err, io.EOF) {
				t.Errorf("%d bytes and %v, want a broken connection", n, err)
			}
			eventually(t, "it is reaped", func() bool { return f.filesProcess(t) != pid })
		}
	})
}

// An agent that stops everything leaves its files readable all the same.
func TestAStoppedFilesProcessGoesOn(t *testing.T) {
	each(t, func(t *testing.T, f *fixture) {
		if _, err := f.Stat(t.Context(), "/", false); err != nil {
			t.Fatal(err)
		}
		pid := f.filesProcess(t)
		for range 20 {
			if err := syscall.Kill(pid, syscall.SIGSTOP); err != nil {
				t.Fatal(err)
			}
			if _, err := f.Stat(t.Context(), "/", false); err != nil {
				t.Fatal(err)
			}
		}
		if now := f.filesProcess(t); now != pid {
			t.Errorf("it is %d now and was %d", now, pid)
		}
	})
}

func TestTheFilesProcessEndsWhenIdle(t *testing.T) {
	each(t, func(t *testing.T, f *fixture) {
		t.Parallel() // it waits for 20 s
		if _, err := f.Stat(t.Context(), "/", false); err != nil {
			t.Fatal(err)
		}
		if f.filesProcess(t) == 0 {
			t.Fatal("no process serves files")
		}
		// The client keeps its connection: that ends first, and then the process.
		eventually(t, "it ends", func() bool { return f.filesProcess(t) == 0 })
		if _, err := f.Stat(t.Context(), "/", false); err != nil {
			t.Error(err)
		}
	})
}

// A connection is handed over with its first call for files, also after others.
func TestAnyConnectionCanBeHandedOver(t *testing.T) {
	each(t, func(t *testing.T, f *fixture) {
		stat := frame(callStat, str("/"), "\x00")
		want := f.talk(t, 1, preface, stat)
		if want == "" || want[0] != frameResult || !strings.Contains(want, "dir") {
			t.Fatalf("got %q", want)
		}
		if r := f.talk(t, 2, preface, frame(callInfo), stat); !strings.HasSuffix(r, want) || r == want {
			t.Errorf("after another call: %q", r)
		}
		if r := f.talk(t, 1, strings.Split(preface+stat, "")...); r != want {
			t.Errorf("in pieces: %q", r)
		}
		if r := f.talk(t, 2, preface+stat+stat); r != want+want {
			t.Errorf("two at once: %q", r)
		}
		// Then it has no other calls any more.
		if r := f.talk(t, 2, preface+stat+frame(callInfo)); r != want {
			t.Errorf("another call afterwards: %q", r)
		}
		if r := f.talk(t, 1, preface+frame(callStat, "x")); r != "" {
			t.Errorf("a malformed call: %q", r)
		}
	})
}

func TestNoFilesBeforeSetup(t *testing.T) {
	s := warm(t)
	_, err := s.Stat(t.Context(), "/", false)
	wantError(t, err, dsec.CodeConflict, "")
	_, err = s.Write(t.Context(), chronusapi.WriteRequest{Path: "/x"}, bytes.NewReader(make([]byte, 10<<20)))
	wantError(t, err, dsec.CodeConflict, "")
	if n := len(s.children(t)); n != 0 {
		t.Errorf("%d processes were started", n)
	}
	// A client may send its data before it sees the answer, and goes on after it.
	write := frame(callWrite, str("/x"), u32(0o644), str(""), "\x00") + frame(frameData, "data") + frame(0x84)
	if r := s.talk(t, 3, preface, write, write, frame(callInfo)); strings.Count(r, "conflict") != 2 || !strings.HasSuffix(r[:len(r)-12], string([]byte{frameResult, 0, 0, 0, 12})) {
		t.Errorf("got %q", r)
	}
}

// The connection of a hand-over that nobody can take is answered.
func TestFilesWithoutAProgramAreUnavailable(t *testing.T) {
	for _, b := range builds {
		t.Run(b.name, func(t *testing.T) {
			f := newFixture(t, b, "CHRONUS_FILES=/nonexistent")
			_, err := f.Stat(t.Context(), "/", false)
			wantError(t, err, dsec.CodeUnavailable, "")
			if r := f.run(t, argv("echo", "still")); r.stdout != "still\n" {
				t.Errorf("got %+v", r)
			}
		})
	}
}

func TestManyFileCallsAtOnce(t *testing.T) {
	each(t, func(t *testing.T, f *fixture) {
		dir := t.TempDir()
		errs := make(chan error, 40)
		for i := range cap(errs) {
			go func() {
				path := filepath.Join(dir, strconv.Itoa(i))
				_, err := f.Write(t.Context(), chronusapi.WriteRequest{Path: path}, strings.NewReader(path))
				if err == nil {
					_, err = f.Stat(t.Context(), path, false)
				}
				errs <- err
			}()
		}
		for range cap(errs) {
			if err := <-errs; err != nil {
				t.Error(err)
			}
		}
		if list, err := os.ReadDir(dir); err != nil || len(list) != cap(errs) {
			t.Errorf("%d files, %v", len(list), err)
		}
	})
}
