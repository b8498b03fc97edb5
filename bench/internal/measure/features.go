package measure

import (
	"context"
	"fmt"
	"os"
	"strings"

	"github.com/opendsec/dsec/client"
)

// Observe finds out from inside a sandbox with ls and cat in /bin what isolates it: what is printed
// beside a figure is what was in force, not what was meant to be.
func Observe(ctx context.Context, sb *client.Sandbox) (features []string, err error) {
	read := func(argv ...string) string {
		out, _, cerr := sb.Command(argv...).Output(ctx)
		if cerr != nil && err == nil {
			err = cerr
		}
		return string(out)
	}
	var namespaces []string
	for line := range strings.Lines(read("/bin/ls", "-l", "/proc/self/ns")) {
		// cgroup -> 'cgroup:[4026531835]'
		f := strings.Fields(line)
		if len(f) < 3 || f[len(f)-2] != "->" {
			continue
		}
		name := f[len(f)-3]
		if host, herr := os.Readlink("/proc/self/ns/" + name); herr == nil && host != strings.Trim(f[len(f)-1], "'") && !strings.HasSuffix(name, "_for_children") {
			namespaces = append(namespaces, name)
		}
	}
	if len(namespaces) > 0 {
		features = append(features, "namespaces: "+strings.Join(namespaces, " "))
	}
	status := map[string]string{}
	for line := range strings.Lines(read("/bin/cat", "/proc/self/status")) {
		name, value, _ := strings.Cut(line, ":")
		status[name] = strings.TrimSpace(value)
	}
	if status["Seccomp"] == "2" {
		features = append(features, fmt.Sprintf("seccomp filters: %s", status["Seccomp_filters"]))
	}
	if status["NoNewPrivs"] == "1" {
		features = append(features, "no_new_privs")
	}
	if bound := status["CapBnd"]; bound != "" {
		features = append(features, "capabilities "+bound)
	}
	for line := range strings.Lines(read("/bin/cat", "/proc/self/mountinfo")) {
		left, right, _ := strings.Cut(line, " - ")
		if f := strings.Fields(left); len(f) > 4 && f[4] == "/" {
			fstype, _, _ := strings.Cut(right, " ")
			features = append(features, "root: "+fstype)
		}
	}
	if f := strings.Fields(read("/bin/cat", "/proc/self/uid_map")); len(f) == 3 && f[1] != "0" {
		features = append(features, "own id range of "+f[2])
	}
	return append(features, "limits: memory pids cpu disk", "chronus as PID 1"), err
}
