package trajectory

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/testutil"
	"github.com/opendsec/dsec/internal/testutil/faultfs"
	dsecv1 "github.com/opendsec/dsec/proto/dsec/v1"
)

// On a full disk no action begins any more, and those under way end as they did.
func TestFullDisk(t *testing.T) {
	testutil.Require(t, testutil.Root)
	dir := testutil.SmallDisk(t, "size=8m,nr_inodes=64")
	opts := Options{Dir: filepath.Join(dir, "log"), SegmentBytes: 2 * maxPayload, MaxBytes: 1 << 30}
	l := open(t, opts)
	id := newSandbox(t, l)
	under := make([]*Action, 20)
	for i := range under {
		under[i] = begin(t, l, id, fmt.Sprint("c", i), fmt.Sprint("id", i))
	}
	fill := testutil.Fill(t, dir)
	begun := 0
	var err error
	for ; begun < 10_000; begun++ {
		var a *Action
		if a, _, err = l.Begin(t.Context(), id, execOf("more", "")); err != nil {
			break
		}
		a.Output(dsecv1.Stream_STREAM_STDOUT, []byte(strings.Repeat("x", 20<<10)))
		end(t, a, 0)
	}
	wantCode(t, err, dsec.CodeExhausted)
	if begun == 0 || begun == 10_000 {
		t.Errorf("%d actions on a full disk", begun)
	}
	// A change of state is noted for a while, as what ends here has to be.
	if _, err := l.Append(id, &dsecv1.TrajectoryEntry{State: "stopping"}); err != nil {
		t.Errorf("a change of state: %v", err)
	}
	for err = nil; err == nil; {
		_, err = l.Append(id, &dsecv1.TrajectoryEntry{State: "more", Reason: strings.Repeat("x", 500)})
	}
	wantCode(t, err, dsec.CodeExhausted)
	for i, a := range under {
		a.Output(dsecv1.Stream_STREAM_STDOUT, []byte(strings.Repeat("y", []int{10, 50 << 10, 500 << 10}[i%3])))
		e := exited(int32(i))
		e.Response, e.Error = make([]byte, maxResponse), &dsecv1.TrajectoryError{Message: strings.Repeat("\xff\xff ", 1000)}
		if err := a.End(e); err != nil {
			t.Errorf("end %d: %v", i, err)
		}
	}
	check := func(l *Log) {
		t.Helper()
		cut := 0
		for i, a := range under {
			e := endOf(t, l, id, a)
			if e.Outcome.GetExitCode() != int32(i) || e.Output.GetTotalBytes() == 0 {
				t.Errorf("action %d ended as %v", i, e)
			}
			if e.Output.KeptBytes < e.Output.TotalBytes {
				if cut++; e.Output.GapReason == "" {
					t.Errorf("action %d has no reason for a gap", i)
				}
			}
		}
		if cut == 0 {
			t.Error("all output was kept on a full disk")
		}
	}
	check(l)
	l.Close()
	l = open(t, opts) // there is no room for it to start with either
	check(l)
	_, _, err = l.Begin(t.Context(), id, execOf("more", ""))
	wantCode(t, err, dsec.CodeExhausted)
	l.Close()
	opts.SegmentBytes *= 2 // as where others took what its last segment had
	l = open(t, opts)
	check(l)
	_, _, err = l.Begin(t.Context(), id, execOf("more", ""))
	wantCode(t, err, dsec.CodeExhausted)
	if err := os.Remove(fill); err != nil {
		t.Fatal(err)
	}
	run(t, l, id, "room again", "", strings.Repeat("z", 100<<10))
	check(l)
}

// A segment that cannot be written as a whole stays one that can be read.
func TestAFailedWriteLeavesNothing(t *testing.T) {
	testutil.Require(t, testutil.Root)
	dir := testutil.SmallDisk(t, "size=1m")
	s, err := newSegment(dir, [8]byte{}, 4096)
	if err != nil {
		t.Fatal(err)
	}
	defer s.f.Close()
	if err := s.place(dir, 1); err != nil {
		t.Fatal(err)
	}
	fill := testutil.Fill(t, dir)
	record := make([]byte, 64<<10)
	for i := range record {
		record[i] = 1
	}
	if err := s.append(record); !errors.Is(err, unix.ENOSPC) {
		t.Fatalf("append on a full disk: %v", err)
	}
	if s.size != segmentHeaderLen {
		t.Errorf("size %d after an append that failed", s.size)
	}
	b, err := os.ReadFile(filepath.Join(dir, segmentName(1)))
	if err != nil || strings.Trim(string(b[segmentHeaderLen:]), "\x00") != "" {
		t.Errorf("%v, or something is left of what was not appended", err)
	}
	if err := os.Remove(fill); err != nil {
		t.Fatal(err)
	}
	if err := s.append(record); err != nil {
		t.Error(err)
	}
}

// Where the disk fails, what ended meanwhile has no outcome in the log, which is
// told, and nothing is done again.
func TestADiskThatFails(t *testing.T) {
	testutil.Require(t, testutil.Root)
	at, backing := t.TempDir(), t.TempDir()
	disk, err := faultfs.Mount(at, backing)
	if err != nil {
		t.Fatal(err)
	}
	defer disk.Close()
	opts := Options{Dir: filepath.Join(at, "log"), SegmentBytes: 2 * maxPayload, SyncEvery: time.Hour}
	l := open(t, opts)
	id := newSandbox(t, l)
	under := begin(t, l, id, "under way", "one")
	disk.Set(func(op faultfs.Op) faultfs.Fault {
		if op == faultfs.Write {
			return faultfs.Fault{Errno: unix.EIO}
		}
		return faultfs.Fault{}
	})
	_, _, err = l.Begin(t.Context(), id, execOf("new", ""))
	wantCode(t, err, dsec.CodeUnavailable)
	wantCode(t, under.End(exited(0)), dsec.CodeUnavailable)
	disk.Set(nil)
	_, _, err = l.Begin(t.Context(), id, execOf("under way", "one"))
	wantCode(t, err, dsec.CodeOutcomeUnknown)
	run(t, l, id, "after", "", "")
	wantStory(t, l, id, "1:under way 2:after 3:end-of-2=0 ")
	disk.Set(func(op faultfs.Op) faultfs.Fault {
		if op == faultfs.Fsync {
			return faultfs.Fault{Errno: unix.EIO}
		}
		return faultfs.Fault{}
	})
	wantCode(t, l.Sync(t.Context()), dsec.CodeUnavailable)
	disk.Set(nil)
	l.Close()
	l = open(t, opts)
	if err := l.Sync(t.Context()); err != nil {
		t.Errorf("sync of a log that was opened again: %v", err)
	}
	again, begun, err := l.Resume(t.Context(), id, under.Seq)
	if err != nil || begun.GetActionId() != "one" {
		t.Fatalf("resume: %v, %v", begun, err)
	}
	end(t, again, 4)
	wantStory(t, l, id, "1:under way 2:after 3:end-of-2=0 4:end-of-1=4 ")
	l.Close()
}
