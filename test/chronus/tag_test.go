package chronus_test

import (
	"io"
	"net"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/chronusapi"
)

func tagged(tag uint64, text string) chronusapi.StartRequest {
	req := shell(text)
	req.Tag, req.Orphan = tag, true
	return req
}

// What a client that is gone left in its socket starts nothing once another was told
// that there is no such command.
func TestAStartThatComesLateIsNone(t *testing.T) {
	each(t, func(t *testing.T, f *fixture) {
		told := map[uint64]uint64{}
		for tag := uint64(1); tag <= 20; tag++ {
			if err := unix.Kill(f.pid, unix.SIGSTOP); err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { _ = unix.Kill(f.pid, unix.SIGCONT) })
			old, err := net.Dial("unix", f.socket)
			if err != nil {
				t.Fatal(err)
			}
			// In many frames, so that it takes a while to be read.
			whole, in := u32(0)+u32(uint32(tag))+startFrame(map[string]string{"env": u32(1) + str("A="+strings.Repeat("x", 60_000)), "orphan": "\x01"})[5:], newer
			for len(whole) > 5000 {
				in += frame(frameMore, whole[:5000])
				whole = whole[5000:]
			}
			if _, err := io.WriteString(old, in+frame(callStartTagged, whole)); err != nil {
				t.Fatal(err)
			}
			old.Close()
			found := make(chan uint64)
			go func() {
				process, err := f.FindTag(t.Context(), tag)
				if err != nil {
					t.Error(err)
				}
				found <- process
			}()
			if err := unix.Kill(f.pid, unix.SIGCONT); err != nil {
				t.Fatal(err)
			}
			told[tag] = <-found
		}
		// All that came before is done when this is.
		f.run(t, tagged(1000, "true"))
		for tag, process := range told {
			if again, err := f.FindTag(t.Context(), tag); again != process || err != nil {
				t.Errorf("tag %d was first of process %d, then of %d, %v", tag, process, again, err)
			}
		}
	})
}

// The output of a command with a tag is there from its first byte, although it was
// delivered, for as long as its tag is not forgotten.
func TestDeliveredOutputOfATagIsKept(t *testing.T) {
	each(t, func(t *testing.T, f *fixture) {
		t.Parallel()
		const size = 150_000
		text := "head -c 100000 /dev/zero; head -c 50000 /dev/zero >&2; exit 3"
		kept, other := f.run(t, tagged(1, text)), f.run(t, shell(text))
		holds := func(process uint64) uint64 {
			list, err := f.Processes(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			for _, p := range list {
				if p.ID == process {
					return p.NextSeq - p.FirstSeq
				}
			}
			t.Fatalf("process %d is forgotten", process)
			return 0
		}
		eventually(t, "delivered output is forgotten", func() bool { return holds(other.process) == 0 })
		s, err := f.Attach(t.Context(), kept.process, 0)
		if r := collect(t, s, err); r.gaps != 0 || len(r.stdout)+len(r.stderr) != size || r.outcome != kept.outcome {
			t.Errorf("%d bytes and %d gaps, %+v", len(r.stdout)+len(r.stderr), r.gaps, r.outcome)
		}
		if err := f.ForgetTag(t.Context(), 1); err != nil {
			t.Fatal(err)
		}
		eventually(t, "it is forgotten with its tag", func() bool { return holds(kept.process) == 0 })
	})
}

// Output that is kept for tags has the room of all output, and no more: the oldest
// makes room, and an outcome stays.
func TestKeptOutputIsBounded(t *testing.T) {
	each(t, func(t *testing.T, f *fixture) {
		const size, commands = 200_000, 60
		for tag := uint64(1); tag <= commands; tag++ {
			if r := f.run(t, tagged(tag, "head -c 200000 /dev/zero; exit 5")); len(r.stdout) != size || r.gaps != 0 {
				t.Fatalf("tag %d: %d bytes, %d gaps", tag, len(r.stdout), r.gaps)
			}
		}
		list, err := f.Processes(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		all := uint64(0)
		for _, p := range list {
			all += p.NextSeq - p.FirstSeq
		}
		if all > budgetLimit || all < budgetLimit/4 {
			t.Errorf("%d bytes of output are kept, want at most %d, and no less than a quarter", all, budgetLimit)
		}
		for _, tag := range []uint64{1, commands} {
			process, err := f.FindTag(t.Context(), tag)
			if err != nil {
				t.Fatal(err)
			}
			s, err := f.Attach(t.Context(), process, 0)
			if r := collect(t, s, err); r.outcome.Code != 5 || (r.gaps == 0) != (tag == commands) {
				t.Errorf("tag %d: %d gaps, %+v", tag, r.gaps, r.outcome)
			}
		}
	})
}

// Many tags of which there is none are denied for good, the oldest of them by the
// largest of those that are not known one by one.
func TestManyDeniedTags(t *testing.T) {
	each(t, func(t *testing.T, f *fixture) {
		const tags = 200
		for tag := uint64(1); tag <= tags; tag++ {
			if process, err := f.FindTag(t.Context(), tag); process != 0 || err != nil {
				t.Fatal(process, err)
			}
		}
		for tag := uint64(1); tag <= tags; tag++ {
			_, err := f.Start(t.Context(), tagged(tag, "true"))
			wantError(t, err, dsec.CodeConflict, "tag")
		}
		if r := f.run(t, tagged(tags+1, "echo starts")); r.stdout != "starts\n" {
			t.Errorf("%+v", r)
		}
	})
}
