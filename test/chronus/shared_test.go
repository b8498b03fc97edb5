package chronus_test

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"testing"

	"golang.org/x/sys/unix"
)

// openFiles are the files that a process has open, by what the kernel knows them by.
func openFiles(t *testing.T, pid int) map[[2]uint64]uint32 {
	t.Helper()
	dir := fmt.Sprintf("/proc/%d/fd", pid)
	names, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	files := map[[2]uint64]uint32{}
	for _, name := range names {
		var st unix.Stat_t
		if unix.Stat(filepath.Join(dir, name.Name()), &st) == nil { // not closed meanwhile
			files[[2]uint64{st.Dev, st.Ino}] = st.Mode & unix.S_IFMT
		}
	}
	return files
}

// An inode is locked while a process writes to a regular file or changes it,
// and any process that has it open, or a path to it, can keep it so. What
// chronus has in common with its commands is pipes and devices.
func TestOnlyPipesAndDevicesAreShared(t *testing.T) {
	each(t, func(t *testing.T, f *fixture) {
		s := f.session(t)
		f.command(t, s, "exec 9<&250; sleep 1000 &")
		req := argv("cat")
		req.OpenStdin = true
		stream, err := f.Start(t.Context(), req)
		if err != nil {
			t.Fatal(err)
		}
		defer stream.Close()
		list, err := f.Processes(t.Context())
		if err != nil || len(list) != 2 {
			t.Fatalf("%+v, %v; want the session's shell and cat", list, err)
		}
		own := openFiles(t, f.pid)
		for _, p := range list {
			pipes := 0
			for id, kind := range openFiles(t, p.PID) {
				if own[id] == unix.S_IFIFO {
					pipes++
				}
				if own[id] != 0 && kind != unix.S_IFIFO && kind != unix.S_IFCHR {
					t.Errorf("chronus and %v have a file of kind 0%o open", p.Argv, kind)
				}
			}
			if pipes < 3 {
				t.Errorf("chronus and %v have %d pipes in common", p.Argv, pipes)
			}
		}
	})
}

// The text of a command comes through a pipe, which holds less than a text may
// have, and which a shell that ends the text early has not read.
func TestTextsThatAreNotReadToTheirEnd(t *testing.T) {
	shells(t, func(t *testing.T, f *fixture, s string) {
		for n := range 5 {
			// More than one read of the shell, and more than the pipe holds.
			for _, size := range []int{100, 10_000, 70_000, 1_000_000} {
				text := fmt.Sprintf("echo first %d\nreturn %d\n%s", n, n, fmt.Sprintf("%*d\n", size, 0))
				if r := f.command(t, s, text); r.stdout != "first "+strconv.Itoa(n)+"\n" || r.outcome.Code != n {
					t.Errorf("%d bytes: %.100q %.100q %+v", size, r.stdout, r.stderr, r.outcome)
				}
			}
			if r := f.command(t, s, "echo next"); r.stdout != "next\n" {
				t.Errorf("after texts that were not read to their end: %.100q", r.stdout)
			}
		}
	})
}

// A process that fills the pipe of the texts itself ends its own session at the most.
func TestTheTextsPipeIsFilled(t *testing.T) {
	each(t, func(t *testing.T, f *fixture) {
		s := f.session(t)
		r := f.command(t, s, "while :; do echo 'echo not ours'; done > /proc/$$/fd/252 & echo started")
		if r.stdout != "started\n" {
			t.Errorf("%+v", r)
		}
		if r := f.run(t, argv("echo", "still")); r.stdout != "still\n" {
			t.Errorf("a command beside it: %+v", r)
		}
		_ = f.CloseSession(t.Context(), s)
		if r := f.command(t, f.session(t), "echo new"); r.stdout != "new\n" {
			t.Errorf("in another session: %+v", r)
		}
	})
}
