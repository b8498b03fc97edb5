package main

import (
	"encoding/json"
	"os"
	"path/filepath"

	"github.com/moby/profiles/seccomp"
	"github.com/opencontainers/runtime-spec/specs-go"

	"github.com/opendsec/dsec/internal/confine"
)

// writeBundles writes three OCI bundles beside each other, on one root file
// system: `bundle` runs /bin/true with little around it, `sleeper` stays, and
// `confined` runs /bin/true with what dsec's sandboxes have, as far as OCI
// knows it: a user namespace, moby's seccomp profile, /proc's masks, a CPU limit.
func writeBundles(dir, root string) error {
	confined := plain(root, "/bin/true")
	if err := confineSpec(confined); err != nil {
		return err
	}
	for name, spec := range map[string]*specs.Spec{
		"bundle": plain(root, "/bin/true"), "sleeper": plain(root, "/bin/sleep", "100000"), "confined": confined,
	} {
		b, err := json.Marshal(spec)
		if err != nil {
			return err
		}
		if err := os.MkdirAll(filepath.Join(dir, name), 0o755); err != nil {
			return err
		}
		if err := os.WriteFile(filepath.Join(dir, name, "config.json"), b, 0o600); err != nil {
			return err
		}
	}
	return nil
}

func plain(root string, args ...string) *specs.Spec {
	memory := int64(128 << 20)
	spec := &specs.Spec{
		Version: "1.0.2",
		Process: &specs.Process{
			Args: args, Cwd: "/", Env: []string{"PATH=/bin"}, NoNewPrivileges: true,
			Rlimits: []specs.POSIXRlimit{{Type: "RLIMIT_NOFILE", Hard: 1024, Soft: 1024}},
		},
		Root: &specs.Root{Path: root, Readonly: true},
		Mounts: []specs.Mount{
			{Destination: "/proc", Type: "proc", Source: "proc"},
			{Destination: "/dev", Type: "tmpfs", Source: "tmpfs", Options: []string{"nosuid", "mode=755", "size=65536k"}},
		},
		Linux: &specs.Linux{Resources: &specs.LinuxResources{
			Memory: &specs.LinuxMemory{Limit: &memory}, Pids: &specs.LinuxPids{Limit: pids},
		}},
	}
	for _, ns := range []specs.LinuxNamespaceType{
		specs.PIDNamespace, specs.NetworkNamespace, specs.IPCNamespace, specs.UTSNamespace, specs.MountNamespace, specs.CgroupNamespace,
	} {
		spec.Linux.Namespaces = append(spec.Linux.Namespaces, specs.LinuxNamespace{Type: ns})
	}
	return spec
}

// confineSpec adds what a sandbox of dsec has and OCI can say.
func confineSpec(spec *specs.Spec) error {
	quota, period := int64(100_000), uint64(100_000)
	spec.Linux.Resources.CPU = &specs.LinuxCPU{Quota: &quota, Period: &period}
	spec.Linux.Namespaces = append(spec.Linux.Namespaces, specs.LinuxNamespace{Type: specs.UserNamespace})
	ids := []specs.LinuxIDMapping{{ContainerID: 0, HostID: 100_000, Size: 65_536}}
	spec.Linux.UIDMappings, spec.Linux.GIDMappings = ids, ids
	caps := confine.CapNames()
	spec.Process.Capabilities = &specs.LinuxCapabilities{Bounding: caps, Effective: caps, Permitted: caps}
	spec.Mounts = append(spec.Mounts,
		specs.Mount{Destination: "/dev/pts", Type: "devpts", Source: "devpts", Options: []string{"nosuid", "noexec", "newinstance", "ptmxmode=0666", "mode=0620"}},
		specs.Mount{Destination: "/dev/shm", Type: "tmpfs", Source: "shm", Options: []string{"nosuid", "noexec", "nodev", "mode=1777", "size=65536k"}},
		specs.Mount{Destination: "/dev/mqueue", Type: "mqueue", Source: "mqueue", Options: []string{"nosuid", "noexec", "nodev"}},
	)
	masks, err := confine.ProcMasks("/proc")
	if err != nil {
		return err
	}
	for _, m := range masks {
		spec.Linux.MaskedPaths = append(spec.Linux.MaskedPaths, "/proc/"+m.Path)
	}
	spec.Linux.ReadonlyPaths = []string{"/proc/sys"}
	spec.Linux.Seccomp, err = seccomp.GetDefaultProfile(spec)
	return err
}
