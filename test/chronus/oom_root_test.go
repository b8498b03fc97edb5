package chronus_test

import (
	"strings"
	"testing"

	"github.com/opendsec/dsec/internal/chronusapi"
)

// Files in memory that fill a group's limit leave the kernel nobody to kill but
// the child of the next start. That shares no memory with chronus, which would
// be killed with it.
func TestAStartWithoutMemoryDoesNotEndChronus(t *testing.T) {
	s := newSandbox(t, 0, func(*chronusapi.SetupRequest) {})
	if s.groups.memory == "" {
		t.Skip("the memory controller is not on v1 here; the backend's tests have the other")
	}
	s.groups.limit = "8M"
	if err := s.AddGroup(t.Context(), s.groups.add(t)); err != nil {
		t.Fatal(err)
	}
	s.run(t, shell("head -c 20000000 /dev/zero >/tmp/full"))
	killed := 0
	for _, size := range []int{1, 100, 10_000, 100_000} {
		args := []string{"/bin/true"}
		for range 19 {
			args = append(args, strings.Repeat("x", size))
		}
		stream, err := s.Start(t.Context(), argv(args...))
		if err != nil {
			killed++ // refused for want of memory
			continue
		}
		if r := collect(t, stream, nil); r.outcome.Signal == 9 {
			killed++
			if !r.outcome.OOM {
				t.Errorf("%d bytes: %+v, want it marked", size, r.outcome)
			}
		}
	}
	if killed == 0 {
		t.Error("the control: there was memory")
	}
	if err := s.AddGroup(t.Context(), s.groups.add(t)); err != nil {
		t.Fatal(err)
	}
	if info, err := s.Info(t.Context()); err != nil || info.Processes != 0 {
		t.Errorf("got %+v, %v", info, err)
	}
}
