package backendtest

import (
	"errors"
	"io"
	"os"
	"strconv"
	"strings"
	"sync"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/backend"
	"github.com/opendsec/dsec/internal/chronusapi"
)

func snapshotable(t *testing.T, h Harness, be backend.Backend) (*box, backend.Snapshotter) {
	t.Helper()
	b := create(t, h, be)
	s, ok := b.inst.(backend.Snapshotter)
	if !ok {
		t.Skip("of its instances nothing can be told")
	}
	return b, s
}

// snapshot gives what it has of some files, by their names, and frees it.
func (b *box) snapshot(s backend.Snapshotter, names ...string) (found []string) {
	b.t.Helper()
	snap, err := s.Snapshot(b.ctx())
	if err != nil {
		b.t.Fatalf("snapshot: %v", err)
	}
	for _, name := range names {
		text, err := readBelow(snap.Upper, name)
		if err != nil {
			b.t.Errorf("%s: %v", name, err)
		}
		found = append(found, text)
	}
	if snap.GoOn != nil {
		err = errors.Join(snap.GoOn(), snap.GoOn())
	}
	if err = errors.Join(err, snap.Close()); err != nil {
		b.t.Errorf("close: %v", err)
	}
	if snap.Frozen() <= 0 {
		b.t.Errorf("it stood still for %v", snap.Frozen())
	}
	return found
}

func readBelow(dir *os.File, name string) (string, error) {
	fd, err := unix.Openat2(int(dir.Fd()), name, &unix.OpenHow{Flags: unix.O_RDONLY | unix.O_CLOEXEC, Resolve: unix.RESOLVE_BENEATH | unix.RESOLVE_NO_SYMLINKS})
	if err != nil {
		return "", err
	}
	f := os.NewFile(uintptr(fd), name)
	defer f.Close()
	text, err := io.ReadAll(f)
	return string(text), err
}

// What was written is in a snapshot, and nothing that is written later; who is paused stays
// so, and what runs goes on.
func testSnapshot(t *testing.T, h Harness) {
	b, s := snapshotable(t, h, h.New(t))
	session := b.openSession(chronusapi.SessionRequest{Cwd: "/tmp"})
	b.in(session, "export KEPT=yes")
	for _, text := range []string{"one", "two"} {
		b.write("/root/file", text)
		if got := b.snapshot(s, "root/file"); got[0] != text {
			t.Errorf("it has %q, want %q", got, text)
		}
		if got := b.in(session, "echo $KEPT"); got.stdout != "yes\n" {
			t.Errorf("the session says %q", got.stdout)
		}
	}
	p := b.pauser()
	b.pause(p)
	for range 2 {
		if got := b.snapshot(s, "root/file"); got[0] != "two" {
			t.Errorf("paused: it has %q", got)
		}
		b.standsStill()
	}
	b.resume(p)
	if got := b.in(session, "echo $KEPT"); got.stdout != "yes\n" {
		t.Errorf("the session says %q", got.stdout)
	}
}

// All of it is as it was at one moment: what a program wrote in an order is not there in
// another, whatever it does meanwhile.
func testSnapshotIsOfOneMoment(t *testing.T, h Harness) {
	b, s := snapshotable(t, h, h.New(t))
	b.write("/root/a", "0")
	b.write("/root/b", "0")
	writes, err := b.start(chronusapi.StartRequest{Command: chronusapi.Command{
		Shell: "cd /root; i=1; while :; do echo $i > n; mv n a; echo $i > n; mv n b; i=$((i+1)); done",
	}})
	if err != nil {
		t.Fatal(err)
	}
	defer writes.Close()
	last := -1
	for range 10 {
		var have [2]int
		for i, text := range b.snapshot(s, "root/a", "root/b") {
			if have[i], err = strconv.Atoi(strings.TrimSpace(text)); err != nil {
				t.Error(err)
			}
		}
		if d := have[0] - have[1]; d != 0 && d != 1 || have[0] < last {
			t.Errorf("a has %d, b %d, after %d", have[0], have[1], last)
		}
		last = have[0]
	}
	if last <= 0 && h.Pids { // else no program writes
		t.Error("the program wrote nothing")
	}
}

// One that has ended, or ends meanwhile, says so; what was taken of it before can still be
// read where it is a copy, and is freed.
func testSnapshotDestroy(t *testing.T, h Harness) {
	b, s := snapshotable(t, h, h.New(t))
	b.write("/root/file", "text")
	snap, err := s.Snapshot(b.ctx())
	if err != nil {
		t.Fatal(err)
	}
	var others sync.WaitGroup
	begun := make(chan struct{}, 3)
	for range 3 {
		others.Go(func() {
			for i := 0; ; i++ {
				snap, err := s.Snapshot(b.ctx())
				if i == 0 {
					begun <- struct{}{}
				}
				if err != nil {
					if code := dsec.CodeOf(err); code != dsec.CodeLost && code != dsec.CodeConflict {
						t.Errorf("beside its end: %v", err)
					}
					return
				}
				_ = snap.Close()
			}
		})
	}
	if snap.GoOn == nil {
		<-begun
	}
	destroy(t, b.inst)
	others.Wait()
	if snap.GoOn == nil {
		if got, err := readBelow(snap.Upper, "root/file"); err != nil || got != "text" {
			t.Errorf("of one that has ended: %q, %v", got, err)
		}
	}
	_ = snap.Close()
	if _, err := s.Snapshot(b.ctx()); err == nil || dsec.CodeOf(err) != dsec.CodeLost {
		t.Errorf("of one that has ended: %v, want lost", err)
	}
}
