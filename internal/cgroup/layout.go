package cgroup

import (
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/opendsec/dsec"
)

// Layout tells where a host's controllers are.
type Layout struct {
	// V2 is the mount point of the v2 hierarchy.
	V2 string
	// Unified is true where V2 has every controller that dsec needs.
	Unified bool
	// V1 has the mount points of memory, pids and cpu where they are on v1.
	V1 map[string]string
	// NSDelegate tells that V2 was mounted with this option.
	NSDelegate bool
}

// String names the layout: unified or hybrid.
func (l Layout) String() string {
	if l.Unified {
		return "unified"
	}
	return "hybrid"
}

// Detect finds the host's layout from what is mounted. It changes nothing.
func Detect() (Layout, error) {
	mounts, err := os.ReadFile("/proc/self/mounts")
	if err != nil {
		return Layout{}, err
	}
	l, all := parseMounts(string(mounts))
	if l.V2 == "" {
		return l, dsec.Errorf(dsec.CodeUnsupported, "cgroup: no cgroup2 file system is mounted")
	}
	on, err := os.ReadFile(filepath.Join(l.V2, "cgroup.controllers"))
	if err != nil {
		return l, err
	}
	return l.place(strings.Fields(string(on)), all)
}

// place decides which of the mounts are used.
func (l Layout) place(onV2 []string, v1 map[string]string) (Layout, error) {
	var missing []string
	l.V1 = map[string]string{}
	for _, c := range controllers {
		if slices.Contains(onV2, c) {
			continue
		}
		missing = append(missing, c)
		if m, ok := v1[c]; ok {
			l.V1[c] = m
		}
	}
	switch {
	case len(missing) == 0:
		l.Unified = true
		return l, nil
	case len(l.V1) == len(controllers):
		return l, nil
	}
	return l, dsec.Errorf(dsec.CodeUnsupported,
		"cgroup: want memory, pids and cpu all on v2 or all on v1; v2 has %q, v1 has %q",
		onV2, slices.Sorted(maps.Keys(v1)))
}

// parseMounts reads the cgroup mounts of a /proc/self/mounts. A later mount
// covers an earlier one; of two mounts of one hierarchy the first is used.
func parseMounts(mounts string) (l Layout, v1 map[string]string) {
	v1 = map[string]string{}
	for line := range strings.Lines(mounts) {
		f := strings.Fields(line)
		if len(f) < 4 {
			continue
		}
		point, options := unescape(f[1]), strings.Split(f[3], ",")
		switch f[2] {
		case "cgroup2":
			if l.V2 == "" {
				l.V2 = point
				l.NSDelegate = slices.Contains(options, "nsdelegate")
			}
		case "cgroup":
			for _, o := range options {
				if slices.Contains(controllers, o) && v1[o] == "" {
					v1[o] = point
				}
			}
		}
	}
	return l, v1
}

// unescape undoes the \ooo by which the kernel writes blanks in mount points.
func unescape(s string) string {
	if !strings.Contains(s, `\`) {
		return s
	}
	var b strings.Builder
	for i := 0; i < len(s); i++ {
		if s[i] == '\\' && i+3 < len(s) {
			if n, err := strconv.ParseUint(s[i+1:i+4], 8, 8); err == nil {
				b.WriteByte(byte(n))
				i += 3
				continue
			}
		}
		b.WriteByte(s[i])
	}
	return b.String()
}
