package test

import (
	"strings"
	"testing"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/client"
)

// TestSandboxesOfOneSnapshot is S43 and S84 for disks: two sandboxes of one pack are machines of their own,
// by what is random and by what the platform says to them, and nothing in it gives them more than
// their own creates ask for.
func TestSandboxesOfOneSnapshot(t *testing.T) {
	cl := containers(t).client(t)
	importOf(t, cl, "base", client.ImportOptions{}, busyboxTar(t))
	of := func(o client.SandboxOptions) (*client.Sandbox, *dsec.Sandbox) {
		t.Helper()
		sb, err := cl.CreateSandbox(t.Context(), o)
		check(t, err)
		info, err := sb.Info(t.Context())
		check(t, err)
		return sb, info
	}
	first, was := of(client.SandboxOptions{
		Layers: []string{"base"}, Limits: dsec.Limits{Pids: 900, MemoryBytes: 2 << 30, MilliCPU: 2000}, Env: map[string]string{"SECRET": "of its creator"},
		Labels: map[string]string{"k": "v"}, Job: "j", Workdir: "/tmp", IdleTimeout: client.Never, MaxLifetime: client.Never, IdleAction: dsec.IdlePause,
	})
	says(t, first, "echo kept > /root/kept; for f in hosts hostname resolv.conf; do echo forged >> /etc/$f; done; hostname forged || true; echo x > /dev/shm/x")
	_, _, err := first.Pack(t.Context(), "snap", nil)
	check(t, err)
	_, plain := of(client.SandboxOptions{Layers: []string{"base"}})
	seen := map[string]string{}
	for range 2 {
		sb, is := of(client.SandboxOptions{Layers: []string{"snap"}})
		p, s := plain.Spec, is.Spec
		if s.Limits != p.Limits || s.Limits == was.Spec.Limits || len(s.Env) != len(p.Env) || len(s.Labels) > 0 || s.Job != "" || s.User != p.User || s.Workdir != p.Workdir ||
			s.IdleTimeout != p.IdleTimeout || s.MaxLifetime != p.MaxLifetime || s.IdleAction != p.IdleAction {
			t.Errorf("of a snapshot it is %+v, want what it is without: %+v", s, p)
		}
		if got := says(t, sb, "cat /root/kept; cat /etc/hosts /etc/hostname /etc/resolv.conf; ls /dev/shm; env"); !strings.HasPrefix(got, "kept\n") || strings.Contains(got, "forged") ||
			strings.Contains(got, "creator") || strings.Contains(got, "\nx\n") {
			t.Errorf("it has %q", got)
		}
		for what, script := range map[string]string{
			"random bytes": "head -c 16 /dev/urandom | md5sum", "UUID": "cat /proc/sys/kernel/random/uuid", "namespace": "readlink /proc/self/ns/uts",
		} {
			got := says(t, sb, script)
			if got == "" || seen[what] == got {
				t.Errorf("%s is %q in both", what, got)
			}
			seen[what] = got
		}
	}
}
