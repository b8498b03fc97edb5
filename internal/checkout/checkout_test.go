package checkout

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/opendsec/dsec"
)

func check(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// upstream is a repository whose history goes on behind what is checked out.
type upstream struct {
	t   *testing.T
	dir string
}

func newUpstream(t *testing.T) *upstream {
	t.Helper()
	t.Setenv("GIT_CONFIG_GLOBAL", filepath.Join(t.TempDir(), "gitconfig"))
	u := &upstream{t, t.TempDir()}
	u.git("init", "--quiet", "-b", "trunk")
	u.git("config", "user.name", "t")
	u.git("config", "user.email", "t@example.com")
	return u
}

func (u *upstream) git(args ...string) string {
	u.t.Helper()
	cmd := exec.Command("git", args...)
	cmd.Dir = u.dir
	out, err := cmd.Output()
	if err != nil {
		u.t.Fatalf("git %v: %v", args, err)
	}
	return strings.TrimSpace(string(out))
}

// commit commits one file and gives the commit.
func (u *upstream) commit(name, content string) string {
	u.t.Helper()
	check(u.t, os.MkdirAll(filepath.Dir(filepath.Join(u.dir, name)), 0o755))
	check(u.t, os.WriteFile(filepath.Join(u.dir, name), []byte(content), 0o644))
	u.git("add", "-A")
	u.git("commit", "--quiet", "-m", name)
	return u.git("rev-parse", "HEAD")
}

// make checks out, and removes it with the test.
func (u *upstream) make(o Options) *Checkout {
	u.t.Helper()
	if o.From == "" {
		o.From = u.dir
	}
	c, err := Make(u.t.Context(), o)
	check(u.t, err)
	u.t.Cleanup(func() { check(u.t, c.Remove()) })
	return c
}

// in runs git in a checkout.
func in(t *testing.T, dir string, args ...string) string {
	t.Helper()
	cmd := exec.Command("git", args...)
	cmd.Dir = dir
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("git %v: %v: %s", args, err, out)
	}
	return strings.TrimSpace(string(out))
}

// sum is of all that a layer would have of a directory.
func sum(t *testing.T, dir string) string {
	t.Helper()
	h := sha256.New()
	check(t, filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		fi, err := d.Info()
		if err != nil {
			return err
		}
		rel, _ := filepath.Rel(dir, path)
		_, _ = fmt.Fprintf(h, "%q %v %v\n", rel, fi.Mode(), fi.ModTime().UTC())
		if fi.Mode().IsRegular() {
			b, err := os.ReadFile(path)
			_, _ = fmt.Fprintf(h, "%q\n", b)
			return err
		}
		return nil
	}))
	return fmt.Sprintf("%x", h.Sum(nil))
}

// Nothing of what comes after the commit is in a checkout, nor what leads there,
// and it is the same each time.
func TestNoFuture(t *testing.T) {
	u := newUpstream(t)
	first := u.commit("a", "1")
	middle := u.commit("dir/b", "2")
	u.git("tag", "-a", "-m", "x", "v1")
	check(t, os.Symlink("a", filepath.Join(u.dir, "link")))
	future := u.commit("fix", "the answer")
	u.git("branch", "later")
	u.git("tag", "v2")
	u.git("reset", "--quiet", "--hard", middle)
	other := u.commit("c", "dangling")
	u.git("reset", "--quiet", "--hard", middle)

	c := u.make(Options{Depth: 0})
	if c.Commit != middle || c.From != u.dir {
		t.Errorf("checked out %s from %s, want %s", c.Commit, c.From, middle)
	}
	if log := in(t, c.Dir, "log", "--format=%H", "--all"); log != middle+"\n"+first {
		t.Errorf("history %q", log)
	}
	for _, id := range []string{future, other} {
		if exec.Command("git", "-C", c.Dir, "cat-file", "-e", id).Run() == nil {
			t.Errorf("commit %s can be read", id)
		}
	}
	if status := in(t, c.Dir, "status", "--porcelain"); status != "" {
		t.Errorf("status %q", status)
	}
	shallow := u.make(Options{Depth: 1})
	if log := in(t, shallow.Dir, "log", "--format=%H"); log != middle {
		t.Errorf("history of depth 1: %q", log)
	}
	for _, name := range []string{".git/logs", ".git/FETCH_HEAD", ".git/ORIG_HEAD", ".git/hooks", ".git/refs/remotes", ".git/packed-refs"} {
		if _, err := os.Lstat(filepath.Join(shallow.Dir, name)); err == nil {
			t.Errorf("%s is there", name)
		}
	}
	if config := in(t, shallow.Dir, "config", "--local", "--list"); strings.Contains(config, "remote.") {
		t.Errorf("configuration %q", config)
	}
	if refs := in(t, shallow.Dir, "for-each-ref", "--format=%(refname)"); refs != "refs/heads/trunk" {
		t.Errorf("references %q", refs)
	}
	again := sum(t, u.make(Options{Depth: 1}).Dir)
	shallow2 := u.make(Options{Depth: 1})
	if s := sum(t, shallow2.Dir); s != again {
		t.Error("two checkouts of one commit differ")
	}
	bare := u.make(Options{NoGit: true})
	if _, err := os.Lstat(filepath.Join(bare.Dir, ".git")); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf(".git: %v", err)
	}
}

// A ref is a branch, which is then checked out as that, a tag or a commit; of a URL
// as of a path.
func TestRefs(t *testing.T) {
	u := newUpstream(t)
	first := u.commit("a", "1")
	u.git("tag", "light")
	u.git("tag", "-a", "-m", "x", "heavy")
	second := u.commit("a", "2")
	u.git("branch", "side", first)
	for _, from := range []string{u.dir, "file://" + u.dir} {
		for ref, want := range map[string][2]string{
			"": {second, "trunk"}, "trunk": {second, "trunk"}, "side": {first, "side"}, "light": {first, ""}, "heavy": {first, ""}, first: {first, ""},
		} {
			c := u.make(Options{From: from, Ref: ref, Depth: 1})
			cmd := exec.Command("git", "-C", c.Dir, "symbolic-ref", "--short", "-q", "HEAD")
			branch, _ := cmd.Output()
			if c.Commit != want[0] || strings.TrimSpace(string(branch)) != want[1] {
				t.Errorf("%s, ref %q: %s on %q, want %v", from, ref, c.Commit, branch, want)
			}
		}
		_, err := Make(t.Context(), Options{From: from, Ref: "none"})
		wantError(t, err, dsec.CodeNotFound, "ref")
	}
	_, err := Make(t.Context(), Options{From: t.TempDir()})
	wantError(t, err, dsec.CodeInvalid, "git")
	_, err = Make(t.Context(), Options{From: "file:///nonexistent/repository"})
	wantError(t, err, dsec.CodeNotFound, "git")
	_, err = Make(t.Context(), Options{From: "http://127.0.0.1:1/repository"})
	wantError(t, err, dsec.CodeUnavailable, "git")
	_, err = Make(t.Context(), Options{From: "./nosuch"})
	wantError(t, err, dsec.CodeNotFound, "git")
	if want := "git: ./nosuch: no such file or directory"; err.Error() != want {
		t.Errorf("%v, want %s", err, want)
	}
	_, err = Make(t.Context(), Options{From: filepath.Join(u.dir, "a")})
	wantError(t, err, dsec.CodeInvalid, "git")
	_, err = Make(t.Context(), Options{From: "file://" + u.dir, Ref: strings.Repeat("1", 40), Depth: 1})
	wantError(t, err, dsec.CodeNotFound, "ref")
	check(t, os.Mkdir(filepath.Join(u.dir, "below"), 0o755))
	_, err = Make(t.Context(), Options{From: filepath.Join(u.dir, "below")}) // which is no repository itself
	wantError(t, err, dsec.CodeInvalid, "git")
	_, err = Make(t.Context(), Options{From: u.dir, Ref: "--upload-pack=touch x"})
	wantError(t, err, dsec.CodeInvalid, "git")
	_, err = Make(t.Context(), Options{From: u.dir, Depth: -1})
	wantError(t, err, dsec.CodeInvalid, "depth")
	if left, _ := filepath.Glob(filepath.Join(os.TempDir(), "dsec-checkout-*")); slices.ContainsFunc(left, func(name string) bool {
		_, err := os.Stat(filepath.Join(name, "tree"))
		return err != nil
	}) {
		t.Errorf("what failed left %q", left)
	}
}

// What git says is told in one line, without its advice.
func TestWordsOfGit(t *testing.T) {
	for words, want := range map[string]string{
		"":                                "",
		"fatal: not found\n":              "not found",
		"warning: x\nfatal: y\nhint: z\n": "y",
		"git@host: Permission denied (publickey).\nfatal: Could not read from remote repository.\n\nPlease make sure you have the correct access rights\nand the repository exists.\n": "git@host: Permission denied (publickey).; Could not read from remote repository.",
		"fatal: detected dubious ownership in repository at '/x'\nTo add an exception for this directory, call:\n\n\tgit config --global --add safe.directory /x\n":                    "detected dubious ownership in repository at '/x'",
		"Receiving objects:   1%\rReceiving objects: 100%, done.\nfatal: early EOF\n":                                                                                                  "Receiving objects: 100%, done.; early EOF",
	} {
		if got := said(words); got != want {
			t.Errorf("%q is told as %q, want %q", words, got, want)
		}
	}
}

// git that is killed because nobody wants the checkout any more is no fault of the repository.
func TestGivenUp(t *testing.T) {
	u := newUpstream(t)
	u.commit("a", "1")
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := Make(ctx, Options{From: u.dir}); !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
}

// Submodules are repositories of one commit, too.
func TestSubmodules(t *testing.T) {
	lib := newUpstream(t)
	pinned := lib.commit("lib", "1")
	u := &upstream{t, filepath.Join(filepath.Dir(lib.dir), "main")}
	check(t, os.Mkdir(u.dir, 0o755))
	u.git("init", "--quiet", "-b", "trunk")
	u.git("config", "user.name", "t")
	u.git("config", "user.email", "t@example.com")
	u.commit("a", "1")
	u.git("-c", "protocol.file.allow=always", "submodule", "--quiet", "add", "../"+filepath.Base(lib.dir), "vendor/lib")
	u.git("commit", "--quiet", "-m", "lib")
	future := lib.commit("lib", "2")
	c := u.make(Options{Submodules: true, Depth: 1})
	dir := filepath.Join(c.Dir, "vendor", "lib")
	if b, err := os.ReadFile(filepath.Join(dir, "lib")); err != nil || string(b) != "1" {
		t.Errorf("%q, %v", b, err)
	}
	if head := in(t, dir, "rev-parse", "HEAD"); head != pinned {
		t.Errorf("at %s, want %s", head, pinned)
	}
	if exec.Command("git", "-C", dir, "cat-file", "-e", future).Run() == nil {
		t.Error("a later commit of the submodule can be read")
	}
	if status := in(t, c.Dir, "status", "--porcelain"); status != "" {
		t.Errorf("status %q", status)
	}
	without := u.make(Options{Depth: 1})
	if _, err := os.Stat(filepath.Join(without.Dir, "vendor", "lib", "lib")); err == nil {
		t.Error("a submodule is there unasked")
	}
}

func TestURLs(t *testing.T) {
	for from, want := range map[string]string{
		"https://user:secret@host/a/b.git": "https://host/a/b.git",
		"https://token@host/a?x=secret#f":  "https://host/a",
		"ssh://git:secret@host:22/a":       "ssh://git@host:22/a",
		"git@host:a/b.git":                 "git@host:a/b.git",
		"/a/path":                          "/a/path",
		"file:///a/path":                   "file:///a/path",
	} {
		if got := Bare(from); got != want {
			t.Errorf("%s: %s, want %s", from, got, want)
		}
	}
	for _, tt := range [][3]string{
		{"https://host/a/b.git", "../c.git", "https://host/a/c.git"}, {"https://host/a/b", "./c", "https://host/a/b/c"},
		{"git@host:a/b", "../c", "git@host:a/c"}, {"file:///x/y", "../z", "file:///x/z"}, {"https://host/a", "https://other/b", "https://other/b"},
	} {
		if got, err := relative(tt[0], tt[1]); err != nil || got != tt[2] {
			t.Errorf("%s of %s: %s, %v", tt[1], tt[0], got, err)
		}
	}
	for _, bad := range []string{"-x", "--upload-pack=x"} {
		if got, err := relative("https://host/a", bad); err == nil {
			t.Errorf("%s is %s", bad, got)
		}
	}
}

func wantError(t *testing.T, err error, code dsec.Code, field string) {
	t.Helper()
	e, ok := errors.AsType[*dsec.Error](err)
	if !ok || e.Code != code || e.Field != field {
		t.Errorf("%v, want %s of %s", err, code, field)
	}
}
