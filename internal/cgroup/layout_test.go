package cgroup

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/opendsec/dsec"
)

func TestPlaceDecidesFromTheMounts(t *testing.T) {
	v1 := map[string]string{"memory": "/c/memory", "pids": "/c/pids", "cpu": "/c/cpu"}
	for name, test := range map[string]struct {
		mounts string
		on     []string
		want   Layout
		code   dsec.Code
	}{
		"unified": {
			mounts: "cgroup2 /sys/fs/cgroup cgroup2 rw,nosuid,nsdelegate,memory_recursiveprot 0 0\n",
			on:     []string{"cpuset", "cpu", "io", "memory", "hugetlb", "pids"},
			want:   Layout{V2: "/sys/fs/cgroup", Unified: true, NSDelegate: true, V1: map[string]string{}},
		},
		"hybrid": {
			mounts: "c /c/cpu cgroup rw,cpu,cpuacct 0 0\nc /c/memory cgroup rw,memory 0 0\nc /c/pids cgroup rw,pids 0 0\n" +
				"x /c/memory2 cgroup rw,memory 0 0\ncgroup2 /c/unified cgroup2 rw 0 0\n",
			on:   []string{"hugetlb"},
			want: Layout{V2: "/c/unified", V1: v1},
		},
		"unified, quick to join": {
			mounts: "cgroup2 /sys/fs/cgroup cgroup2 rw,nsdelegate,favordynmods 0 0\n",
			on:     controllers,
			want:   Layout{V2: "/sys/fs/cgroup", Unified: true, NSDelegate: true, V1: map[string]string{}},
		},
		"escaped mount point": {
			mounts: `cgroup2 /a\040b\134 cgroup2 rw 0 0`,
			on:     controllers,
			want:   Layout{V2: `/a b\`, Unified: true, V1: map[string]string{}},
		},
		"memory on v2, cpu on v1": {
			mounts: "c /c/cpu cgroup rw,cpu 0 0\ncgroup2 /c/unified cgroup2 rw 0 0\n",
			on:     []string{"memory", "pids"},
			code:   dsec.CodeUnsupported,
		},
		"no pids": {
			mounts: "c /c/cpu cgroup rw,cpu,memory 0 0\ncgroup2 /c/unified cgroup2 rw 0 0\n",
			code:   dsec.CodeUnsupported,
		},
	} {
		t.Run(name, func(t *testing.T) {
			l, all := parseMounts(test.mounts)
			got, err := l.place(test.on, all)
			if test.code != "" {
				if err == nil || dsec.CodeOf(err) != test.code {
					t.Fatalf("got %v, %v; want code %s", got, err, test.code)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			if d := cmp.Diff(test.want, got); d != "" {
				t.Error(d)
			}
		})
	}
}

// The names that Sweep finds become paths: only those that newGroup makes may pass.
func TestOnlyGroupNamesAreGroups(t *testing.T) {
	tree := &Tree{prefix: "g" + randomName(6)}
	name := tree.prefix + randomName(8)
	if !isGroup(name) {
		t.Errorf("isGroup(%q) = false", name)
	}
	for _, bad := range []string{"", "init", launcherDir, "../gaaaaaaaaaaaa", "gaaaaaa/aaaaaaa", "Gaaaaaaaaaaaaaa", name + "a", "g" + name[2:]} {
		if isGroup(bad) {
			t.Errorf("isGroup(%q) = true", bad)
		}
	}
}

func TestCPUFiguresStayInTheKernelsRange(t *testing.T) {
	for _, test := range []struct{ milli, quota, shares, weight int64 }{
		{1, 1000, 2, 1},
		{10, 1000, 10, 1},
		{500, 50_000, 512, 20},
		{1000, 100_000, 1024, 39},
		{16_000, 1_600_000, 16_384, 625},
		{1 << 40, 100 << 40, 262_144, 10_000},
	} {
		if q, s := quotaMicros(test.milli), shares(test.milli); q != test.quota || s != test.shares || weight(s) != test.weight {
			t.Errorf("%d: quota %d, shares %d, weight %d; want %+v", test.milli, q, s, weight(s), test)
		}
	}
}

func FuzzParseMounts(f *testing.F) {
	own, err := os.ReadFile("/proc/self/mounts")
	if err != nil {
		f.Fatal(err)
	}
	f.Add(string(own))
	f.Add("cgroup2 /a\\04 cgroup2 rw\ncgroup /b cgroup\n\\777 \\ cgroup2 x y")
	f.Fuzz(func(t *testing.T, mounts string) {
		l, v1 := parseMounts(mounts)
		got, err := l.place(nil, v1)
		if err == nil && (got.Unified || len(got.V1) != len(controllers)) {
			t.Errorf("without a controller on v2: %+v", got)
		}
		for c, m := range got.V1 {
			if m == "" || filepath.Clean(m) == "." {
				t.Errorf("%s is mounted at %q", c, m)
			}
		}
	})
}
