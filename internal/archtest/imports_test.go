package archtest

import (
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"
	"testing"
)

// table is imports.txt.
type table struct {
	rows  []row
	denys []deny
}

type row struct {
	level   int
	side    string
	pattern string
}

type deny struct{ from, to, why string }

func parseTable(text string) (*table, error) {
	var t table
	n := 0
	for line := range strings.Lines(text) {
		n++
		f := strings.Fields(line)
		if len(f) == 0 || f[0][0] == '#' {
			continue
		}
		if f[0] == "deny" {
			if len(f) < 4 {
				return nil, fmt.Errorf("line %d: want: deny FROM TO why", n)
			}
			t.denys = append(t.denys, deny{f[1], f[2], strings.Join(f[3:], " ")})
			continue
		}
		level, err := strconv.Atoi(f[0])
		if err != nil || len(f) != 3 || !slices.Contains([]string{"any", "ctl", "node", "main"}, f[1]) {
			return nil, fmt.Errorf("line %d: want: LEVEL any|ctl|node|main PACKAGE", n)
		}
		t.rows = append(t.rows, row{level, f[1], f[2]})
	}
	return &t, nil
}

// matches reports whether pattern names the package.
func matches(pattern, rel string) bool {
	if base, ok := strings.CutSuffix(pattern, "/..."); ok {
		return rel == base || strings.HasPrefix(rel, base+"/")
	}
	return pattern == rel
}

// find returns the row that names the package itself, or else the one with
// the longest pattern that covers it.
func (t *table) find(rel string) (row, bool) {
	var best row
	for _, r := range t.rows {
		if r.pattern == rel {
			return r, true
		}
		if matches(r.pattern, rel) && len(r.pattern) > len(best.pattern) {
			best = r
		}
	}
	return best, best.pattern != ""
}

// check returns what p breaks.
func (t *table) check(p pkg) []string {
	var broken []string
	self, ok := t.find(p.rel())
	if !ok {
		return []string{p.rel() + ": not in imports.txt: give it a level and a side"}
	}
	for _, path := range p.Imports {
		if !inModule(path) || t.family(p.rel(), rel(path)) {
			continue
		}
		other, ok := t.find(rel(path))
		if ok && other.level >= self.level {
			broken = append(broken, fmt.Sprintf("%s (level %d) imports %s (level %d): imports point down", p.rel(), self.level, rel(path), other.level))
		}
	}
	for _, path := range p.Deps {
		if !inModule(path) {
			continue
		}
		other, _ := t.find(rel(path))
		if self.side != "main" && other.side != "any" && self.side != other.side && (self.side != "any" || other.side == "main") {
			broken = append(broken, fmt.Sprintf("%s (%s) depends on %s (%s): the halves meet only in the edge API", p.rel(), self.side, rel(path), other.side))
		}
		for _, d := range t.denys {
			if matches(d.from, p.rel()) && matches(d.to, rel(path)) {
				broken = append(broken, fmt.Sprintf("%s depends on %s: %s", p.rel(), rel(path), d.why))
			}
		}
	}
	return broken
}

// family reports whether both are covered by one PACKAGE/... row: a package
// and its own subpackages may share a level.
func (t *table) family(a, b string) bool {
	ra, _ := t.find(a)
	rb, _ := t.find(b)
	return ra == rb && strings.HasSuffix(ra.pattern, "/...") && ra.side != "main" && !strings.HasPrefix(ra.pattern, "internal/backend/")
}

func TestImportsPointDownTheTable(t *testing.T) {
	text, err := os.ReadFile("imports.txt")
	if err != nil {
		t.Fatal(err)
	}
	table, err := parseTable(string(text))
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range packages(t) {
		for _, broken := range table.check(p) {
			t.Error(broken)
		}
	}
}

func TestTheTableRefuses(t *testing.T) {
	table, err := parseTable(`
0 any  .
0 any  internal/testutil
1 ctl  internal/store
1 node internal/cgroup
1 any  internal/daemon
2 node internal/backend
3 node internal/edge
3 ctl  internal/apiserver
4 node internal/backend/...
5 main cmd/...
deny cmd/dsec internal/testutil  test code
`)
	if err != nil {
		t.Fatal(err)
	}
	in := func(rels ...string) (paths []string) {
		for _, r := range rels {
			paths = append(paths, strings.TrimSuffix(modulePath+"/"+r, "/."))
		}
		return paths
	}
	for _, tc := range []struct {
		from string
		to   []string
		want string // part of the only complaint; empty for none
	}{
		{"internal/edge", []string{".", "internal/backend", "internal/cgroup"}, ""},
		{"cmd/dsec", []string{"internal/edge", "internal/apiserver", "internal/backend/container"}, ""},
		{"internal/new", nil, "not in imports.txt"},
		{"internal/edge", []string{"internal/backend/fake"}, "imports point down"},
		{"internal/backend/fake", []string{"internal/backend/container"}, "imports point down"},
		{"internal/cgroup", []string{"internal/edge"}, "imports point down"},
		{"internal/apiserver", []string{"internal/cgroup"}, "the halves meet"},
		{"internal/edge", []string{"internal/store"}, "the halves meet"},
		{"cmd/dsec", []string{"internal/testutil"}, "test code"},
	} {
		p := pkg{ImportPath: in(tc.from)[0], Imports: in(tc.to...), Deps: in(tc.to...)}
		broken := table.check(p)
		if tc.want == "" && len(broken) > 0 || tc.want != "" && (len(broken) != 1 || !strings.Contains(broken[0], tc.want)) {
			t.Errorf("%s importing %v: %q, want %q", tc.from, tc.to, broken, tc.want)
		}
	}
}

// chronusFilesMayImport is all of this module and of others that chronus-files
// may be made of: every byte of it is paid for in sandboxes.
var chronusFilesMayImport = []string{
	modulePath,
	modulePath + "/internal/chronusfiles",
	modulePath + "/internal/chronusapi",
	modulePath + "/internal/rawnet",
	modulePath + "/cmd/chronus-files",
	"golang.org/x/sys/unix",
	"golang.org/x/sys/internal/unsafeheader",
}

func TestChronusFilesStaysSmall(t *testing.T) {
	for _, dep := range find(t, "cmd/chronus-files").Deps {
		if !isStd(dep) && !slices.Contains(chronusFilesMayImport, dep) {
			t.Errorf("cmd/chronus-files depends on %s", dep)
		}
		switch dep {
		case "encoding/json", "net/http", "crypto/tls", "text/template", "log/slog", "os/signal":
			t.Errorf("cmd/chronus-files depends on %s, which costs memory in sandboxes", dep)
		}
	}
}

func TestTheRootPackageImportsOnlyStdAndDoesNoIO(t *testing.T) {
	for _, path := range find(t, ".").Imports {
		if !isStd(path) {
			t.Errorf("the root package imports %s", path)
		}
		switch first, _, _ := strings.Cut(path, "/"); first {
		case "os", "net", "syscall", "io", "log", "bufio", "database":
			t.Errorf("the root package imports %s: it is vocabulary and does no I/O", path)
		}
	}
}

func TestOnlyTestsImportTheTestKit(t *testing.T) {
	for _, p := range packages(t) {
		if slices.Contains(p.Imports, modulePath+"/internal/testutil") && p.rel() != "internal/backend/backendtest" {
			t.Errorf("%s imports internal/testutil outside its tests", p.rel())
		}
	}
}
