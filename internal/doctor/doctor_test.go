package doctor

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/disk"
	"github.com/opendsec/dsec/internal/testutil"
)

func TestCheckSaysWhatIsMissingAndHowToGetIt(t *testing.T) {
	findings := Check(t.Context(), Options{Dir: filepath.Join(t.TempDir(), "not", "there")})
	seen := map[string]bool{}
	for _, f := range findings {
		t.Logf("%-18s %-12s ok=%-5v %s | %s", f.Name, f.Need, f.OK, f.Detail, f.Fix)
		if seen[f.Name] || f.Name == "" || f.Need == "" {
			t.Errorf("finding %+v", f)
		}
		seen[f.Name] = true
		if f.OK == (f.Fix != "") {
			t.Errorf("%s: ok %v with fix %q", f.Name, f.OK, f.Fix)
		}
		if f.Detail == "" {
			t.Errorf("%s says nothing", f.Name)
		}
	}
	// This test runs where the rest of the tests do.
	for _, f := range findings {
		if f.Name == "kernel" && !f.OK {
			t.Errorf("%+v", f)
		}
	}
}

func TestCheckLeavesNothing(t *testing.T) {
	testutil.Require(t, testutil.Root)
	dir := testutil.Dir(t)
	testutil.Ledger(t, filepath.Base(dir))
	Check(t.Context(), Options{Dir: dir})
	if left, err := os.ReadDir(dir); err != nil || len(left) > 0 {
		t.Errorf("left: %v, %v", left, err)
	}
}

// What doctor says of the disk of all sandboxes is what the store of volumes says.
func TestDiskSpace(t *testing.T) {
	testutil.Require(t, testutil.Root)
	dir := testutil.Dir(t)
	testutil.Ledger(t, filepath.Base(dir))
	if detail, err := diskSpace(t.Context(), Options{Volumes: disk.Options{Dir: filepath.Join(dir, "none")}}); err != nil || detail != "no sandbox was made yet" {
		t.Errorf("without volumes: %q, %v", detail, err)
	}
	o := disk.Options{Dir: dir, Driver: "btrfs", ImageBytes: 512 << 20, MaxImageBytes: 512 << 20}
	s, err := disk.Open(o)
	if err != nil && dsec.CodeOf(err) == dsec.CodeUnsupported {
		t.Skip(err)
	}
	if err != nil {
		t.Fatal(err)
	}
	detail, err := diskSpace(t.Context(), Options{Volumes: o})
	if err != nil || !strings.HasPrefix(detail, "btrfs: size 512 MiB, used ") || !strings.Contains(detail, ", limit of one sandbox at most ") {
		t.Errorf("%q, %v", detail, err)
	}
	if err := s.Destroy(t.Context()); err != nil {
		t.Error(err)
	}
}

func TestOKAsksForWhatIsRequired(t *testing.T) {
	if !OK([]Finding{{Need: Required, OK: true}, {Need: Recommended}, {Need: Optional}}) {
		t.Error("a missing recommendation stops dsec")
	}
	if OK([]Finding{{Need: Recommended, OK: true}, {Need: Required}}) {
		t.Error("a missing requirement does not")
	}
}

func TestOlderThan(t *testing.T) {
	for release, old := range map[string]bool{"6.1.0-13-amd64": false, "6.0.9": true, "5.15": true, "6.18.44-fc": false, "7.0.0": false, "x": true} {
		if err := olderThan(release, 6, 1); (err != nil) != old {
			t.Errorf("%s: %v", release, err)
		}
	}
}

func TestAboveFindsADirectory(t *testing.T) {
	dir := t.TempDir()
	for path, want := range map[string]string{dir: dir, dir + "/a/b/c": dir, "/nowhere-at-all/x": "/", "": ""} {
		if got := Above(path); got != want {
			t.Errorf("Above(%q) = %q, want %q", path, got, want)
		}
	}
}
