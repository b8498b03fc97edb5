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
			found := make(chan uint64)
			f.stopped(t, func() {
				old, err := net.Dial("unix", f.socket)
				if err != nil {
					t.Fatal(err)
				}
				defer old.Close()
				// In many frames, so that it takes a while to be read.
				whole, in := u32(0)+u32(uint32(tag))+startFrame(map[string]string{"env": u32(1) + str("A="+strings.Repeat("x", 60_000)), "orphan": "\x01"})[5:], newer
				for len(whole) > 5000 {
					in += frame(frameMore, whole[:5000])
					whole = whole[5000:]
				}
				if _, err := io.WriteString(old, in+frame(callStartTagged, whole)); err != nil {
					t.Fatal(err)
				}
				go func() {
					process, err := f.FindTag(t.Context(), tag)
					if err != nil {
						t.Error(err)
					}
					found <- process
				}()
			})
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

// Who asks for a command that is being started is told what comes of that.
func TestATagThatIsBeingStarted(t *testing.T) {
	each(t, func(t *testing.T, f *fixture) {
		greeted := func() net.Conn {
			nc, err := net.Dial("unix", f.socket)
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { nc.Close() })
			if _, err := io.WriteString(nc, newer+frame(callInfo)); err != nil {
				t.Fatal(err)
			}
			if _, err := io.ReadFull(nc, make([]byte, 17)); err != nil {
				t.Fatal(err)
			}
			return nc
		}
		// Which of two connections is served first is the kernel's choice.
		tag, tries := uint32(0), 0
		eventually(t, "starts came first a few times", func() bool {
			tag++
			program := []string{"true", "no-such-program"}[tag%2]
			name := u32(0) + u32(tag)
			starts, asks := greeted(), greeted()
			f.stopped(t, func() {
				_, err := io.WriteString(starts, frame(callStartTagged, name, startFrame(map[string]string{"argv": u32(1) + str(program)})[5:]))
				if err == nil {
					_, err = io.WriteString(asks, frame(callFindTag, name))
				}
				if err != nil {
					t.Fatal(err)
				}
			})
			started, found := make([]byte, 14), make([]byte, 13)
			for nc, answer := range map[net.Conn][]byte{starts: started, asks: found} {
				if _, err := io.ReadFull(nc, answer); err != nil {
					t.Fatal(err)
				}
			}
			process := u32(0) + u32(0)
			if started[0] != frameError {
				process = string(started[6:])
				tries++
			}
			if want := frame(frameResult, process); string(found) != want {
				t.Errorf("while %s was started with tag %d the answer was %q, want %q", program, tag, found, want)
			}
			return tries >= 5
		})
	})
}

// stopped calls f while chronus is stopped.
func (f *fixture) stopped(t *testing.T, call func()) {
	t.Helper()
	if err := unix.Kill(f.pid, unix.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	defer func() { _ = unix.Kill(f.pid, unix.SIGCONT) }()
	eventually(t, "chronus is stopped", func() bool { return state(f.pid) == "T" })
	call()
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

// Output that is kept for tags has the room of all output, and no more: what others
// left goes first, then the oldest, and outcomes stay.
func TestKeptOutputIsBounded(t *testing.T) {
	each(t, func(t *testing.T, f *fixture) {
		const size, commands = 200_000, 50
		whole := func(tag uint64) bool {
			t.Helper()
			process, err := f.FindTag(t.Context(), tag)
			if err != nil {
				t.Fatal(err)
			}
			s, err := f.Attach(t.Context(), process, 0)
			r := collect(t, s, err)
			if r.outcome.Code != 5 {
				t.Errorf("tag %d: %+v", tag, r.outcome)
			}
			return r.gaps == 0 && len(r.stdout) == size
		}
		for tag := uint64(1); tag <= commands; tag++ {
			if tag == 2 {
				for range commands {
					req := shell("head -c 200000 /dev/zero")
					req.Detach = true
					s, err := f.Start(t.Context(), req)
					if err != nil {
						t.Fatal(err)
					}
					if _, err := drainEvents(s); err != io.EOF {
						t.Fatal(err)
					}
				}
				eventually(t, "what nobody waits for has ended", func() bool {
					info, err := f.Info(t.Context())
					return err != nil || info.Processes == 0
				})
				if !whole(1) {
					t.Error("output that is kept for a tag made room before that of others")
				}
			}
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
		if whole(1) || !whole(commands) {
			t.Error("want the oldest to have made room, and not the newest")
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
