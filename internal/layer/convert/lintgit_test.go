package convert

import (
	"bytes"
	"compress/zlib"
	"crypto/sha1"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/opendsec/dsec/internal/testutil"
)

// loose is a commit as git stores it, and its id.
func loose(t testing.TB, parents ...string) (entry, string) {
	t.Helper()
	body := "tree 4b825dc642cb6eb9a060e54bf8d69288fbee4904\n"
	for _, p := range parents {
		body += "parent " + p + "\n"
	}
	body += fmt.Sprintf("author a <a@b> 1 +0000\ncommitter a <a@b> 1 +0000\n\nwith %v\nparent of none\n", parents)
	whole := fmt.Sprintf("commit %d\x00%s", len(body), body)
	id := fmt.Sprintf("%x", sha1.Sum([]byte(whole)))
	return text("r/.git/objects/"+id[:2]+"/"+id[2:], deflate(t, whole)), id
}

func deflate(t testing.TB, s string) string {
	t.Helper()
	var b bytes.Buffer
	w := zlib.NewWriter(&b)
	if _, err := w.Write([]byte(s)); err != nil {
		t.Fatal(err)
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return b.String()
}

// A commit that nothing names is found among the objects. (S46)
func TestDanglingCommits(t *testing.T) {
	first, one := loose(t)
	second, two := loose(t, one)
	fix, answer := loose(t, two)
	merge, merged := loose(t, two, answer)
	repo := func(head string, more ...entry) []entry {
		return append([]entry{text("r/.git/HEAD", "ref: refs/heads/main\n"), text("r/.git/refs/heads/main", head+"\n"), dir("r/.git/objects/pack/"), first, second}, more...)
	}
	blob := text("r/.git/objects/aa/"+strings.Repeat("b", 38), deflate(t, "blob 14\x00parent "+one))
	for name, tc := range map[string]struct {
		entries []entry
		want    string
	}{
		"all lead back":     {repo(two), ""},
		"merged":            {repo(merged, fix, merge), ""},
		"the fix, reset":    {repo(two, fix), "1 loose commits"},
		"everything later":  {repo(one, fix), "2 loose commits"},
		"HEAD is detached":  {append(repo(two, fix)[1:], text("r/.git/HEAD", two+"\n")), "1 loose commits"},
		"HEAD in a pack":    {append(repo(two, fix)[:1], text("r/.git/packed-refs", strings.Repeat("1", 40)+" refs/heads/main\n"), fix), "1 loose commits"},
		"blobs are none":    {repo(two, blob), ""},
		"damaged are none":  {repo(two, text("r/.git/objects/ab/"+strings.Repeat("c", 38), "x\x9cnot zlib")), ""},
		"a cruft pack":      {repo(two, file("r/.git/objects/pack/pack-1.mtimes")), "a cruft pack"},
		"a bomb is bounded": {repo(two, text("r/.git/objects/ad/"+strings.Repeat("d", 38), deflate(t, "commit 9\x00"+strings.Repeat("parent x\n", 1_000_000)))), "1 loose commits"},
	} {
		t.Run(name, func(t *testing.T) {
			got := mustConvert(t, tarOf(t, tc.entries...)).Findings
			found := slices.ContainsFunc(got, func(f string) bool { return strings.Contains(f, "loose commits") || strings.Contains(f, "cruft") })
			if tc.want == "" && found || tc.want != "" && !strings.Contains(strings.Join(got, "\n"), tc.want) {
				t.Errorf("findings %q, want %q", got, tc.want)
			}
		})
	}
}

// The same of what git itself makes: a fix is committed and taken back, and all
// that names it is removed.
func TestDanglingCommitsOfGit(t *testing.T) {
	testutil.Require(t, testutil.Program("git"))
	root := t.TempDir()
	git := func(args ...string) {
		t.Helper()
		cmd := exec.Command("git", append([]string{"-C", root, "-c", "user.name=a", "-c", "user.email=a@b", "-c", "gc.auto=0"}, args...)...)
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Fatalf("git %v: %v\n%s", args, err, out)
		}
	}
	findings := func() []string {
		var entries []entry
		err := filepath.WalkDir(root, func(path string, d os.DirEntry, err error) error {
			if err == nil && d.Type().IsRegular() {
				data, rerr := os.ReadFile(path)
				entries, err = append(entries, text(strings.TrimPrefix(path, root+"/"), string(data))), rerr
			}
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
		return mustConvert(t, tarOf(t, entries...)).Findings
	}
	git("init", "-q", "-b", "main")
	for _, n := range []string{"1", "2", "fix"} {
		if err := os.WriteFile(filepath.Join(root, "file"), []byte(n), 0o644); err != nil {
			t.Fatal(err)
		}
		git("add", "file")
		git("commit", "-q", "-m", n)
	}
	forget := func() {
		for _, name := range []string{"logs", "ORIG_HEAD"} {
			if err := os.RemoveAll(filepath.Join(root, ".git", name)); err != nil {
				t.Fatal(err)
			}
		}
	}
	forget()
	if got := findings(); len(got) != 0 {
		t.Errorf("control: %q of a repository with nothing to hide", got)
	}
	git("reset", "-q", "--hard", "HEAD~1")
	forget()
	if got := findings(); len(got) != 1 || !strings.Contains(got[0], "1 loose commits") {
		t.Errorf("findings %q, want the fix", got)
	}
}
