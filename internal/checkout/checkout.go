// Package checkout makes a clean checkout of one commit of a git repository, for an
// import as a layer. It runs the user's own git, with the user's credentials and
// protocols.
//
// A checkout has no more of its repository than was asked for: one commit, or so
// many of its ancestors, and nothing that leads to another: no remote, no tag, no
// log, no reference but the branch that is checked out. What came after the commit
// is not there to be found. The same commit gives the same files with the same
// times, so that it gives the same layer.
//
//	c, err := checkout.Make(ctx, checkout.Options{From: url, Ref: "v1.2"})
//	defer c.Remove()
//	tar of c.Dir, of c.Commit
package checkout

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec"
)

// Options say what is checked out.
type Options struct {
	// From is a URL as git takes it, or the path of a local repository, of which only
	// what is committed counts.
	From string
	// Ref is a branch, a tag or a commit in full; empty is what HEAD is there. Of a
	// local repository it is whatever `git rev-parse` knows.
	Ref string
	// Depth is how many commits of the history are kept; 0 is all.
	Depth int
	// NoGit leaves the files alone, without .git.
	NoGit bool
	// Submodules are checked out, too.
	Submodules bool
	// Progress is where git's own words go. Nil: nowhere.
	Progress io.Writer
}

// Checkout is a directory with one commit's files.
type Checkout struct {
	Dir    string
	Commit string // hex
	// From is where it is from, without credentials.
	From string

	opt  Options // with From as git gets it
	root string  // removed with it
}

// maxSubmodules is how deep submodules may lie in each other.
const maxSubmodules = 8

var commitForm = regexp.MustCompile(`^(?:[0-9a-f]{40}|[0-9a-f]{64})$`)

// Make checks out a commit into a directory of its own below the system's temporary
// one. Errors that the caller can cure are of the fields git and ref.
func Make(ctx context.Context, o Options) (_ *Checkout, err error) {
	if _, err := exec.LookPath("git"); err != nil {
		return nil, &dsec.Error{Code: dsec.CodeUnsupported, Field: "git", Message: "there is no git on this machine, want it in PATH", Err: err}
	}
	if o.From == "" || strings.HasPrefix(o.From, "-") || strings.HasPrefix(o.Ref, "-") {
		return nil, dsec.Invalid("git", "want a URL or a path, and a ref, that do not begin with a dash")
	}
	if o.Depth < 0 {
		return nil, dsec.Invalid("depth", "is %d, want 0 for all, or more", o.Depth)
	}
	root, err := os.MkdirTemp("", "dsec-checkout-")
	if err != nil {
		return nil, err
	}
	c := &Checkout{Dir: filepath.Join(root, "tree"), From: Bare(o.From), opt: o, root: root}
	defer func() {
		if err != nil {
			_ = c.Remove()
			if ctx.Err() != nil { // git was killed for it
				err = context.Cause(ctx)
			}
		}
	}()
	switch fi, err := os.Stat(o.From); {
	case err == nil && fi.IsDir():
		if err := c.local(ctx); err != nil {
			return nil, err
		}
	case err != nil && isPath(o.From):
		return nil, noSuch(o.From, err)
	}
	branch := ""
	if c.Commit == "" {
		if c.Commit, branch, err = c.remote(ctx); err != nil {
			return nil, err
		}
	} else {
		branch = c.localBranch(ctx)
	}
	tree := repository{c: c, dir: c.Dir, from: c.opt.From, commit: c.Commit, branch: branch}
	if err := tree.make(ctx, maxSubmodules); err != nil {
		return nil, err
	}
	return c, nil
}

// isPath reports whether git takes it for a path: it has no scheme and no host before a colon.
func isPath(from string) bool {
	host, _, colon := strings.Cut(from, ":")
	return !colon || strings.Contains(host, "/")
}

// noSuch is the error of a path that cannot be looked at.
func noSuch(path string, err error) error {
	code := dsec.CodeNotFound
	if errors.Is(err, fs.ErrPermission) {
		code = dsec.CodeDenied
	}
	cause := err
	if of, ok := errors.AsType[*fs.PathError](err); ok {
		cause = of.Err
	}
	return &dsec.Error{Code: code, Field: "git", Message: fmt.Sprintf("%s: %v", path, cause), Err: err}
}

// refused is the error of a repository that gave nothing: of one that is not there it
// is no use to try again.
func (c *Checkout) refused(err error, format string, args ...any) error {
	e := &dsec.Error{Code: dsec.CodeUnavailable, Field: "git", Message: fmt.Sprintf(format, args...) + ": " + err.Error(), Err: err}
	switch text := err.Error(); {
	case isPath(c.opt.From): // a file
		e.Code = dsec.CodeInvalid
	case strings.Contains(text, "does not appear to be a git repository"), strings.Contains(text, "not found"):
		e.Code = dsec.CodeNotFound
	case strings.Contains(text, "not our ref"):
		e.Code, e.Field = dsec.CodeNotFound, "ref"
	}
	return e
}

// Remove removes the directory.
func (c *Checkout) Remove() error { return os.RemoveAll(c.root) }

// Bare is a URL without what opens it; a path stays as it is.
func Bare(from string) string {
	u, err := url.Parse(from)
	if err != nil || u.Scheme == "" || u.Host == "" {
		return from // a path, or host:path, whose user is no secret
	}
	u.RawQuery, u.Fragment = "", ""
	if u.Scheme == "ssh" && u.User != nil {
		u.User = url.User(u.User.Username())
	} else {
		u.User = nil
	}
	return u.String()
}

// local finds the commit in a repository of this machine, which is then fetched
// from like any other.
func (c *Checkout) local(ctx context.Context) error {
	abs, err := filepath.Abs(c.opt.From)
	if err != nil {
		return err
	}
	ref := c.opt.Ref
	if ref == "" {
		ref = "HEAD"
	}
	out, err := c.output(ctx, abs, "rev-parse", "--verify", "--quiet", "--end-of-options", ref+"^{commit}")
	if err != nil {
		if _, err := c.output(ctx, abs, "rev-parse", "--git-dir"); err != nil {
			return dsec.Invalid("git", "%s is no git repository that can be read: %v", c.opt.From, err)
		}
		return &dsec.Error{Code: dsec.CodeNotFound, Field: "ref", Message: fmt.Sprintf("no commit %.200q in %s", ref, c.opt.From)}
	}
	c.Commit = strings.TrimSpace(out)
	c.opt.From = (&url.URL{Scheme: "file", Path: abs}).String()
	c.From = abs
	return nil
}

// localBranch is the branch that was asked for; empty where it is none.
func (c *Checkout) localBranch(ctx context.Context) string {
	ref := c.opt.Ref
	if ref == "" {
		out, _ := c.output(ctx, c.From, "symbolic-ref", "--quiet", "--short", "HEAD")
		ref = strings.TrimSpace(out)
	}
	if ref == "" || c.git(ctx, c.From, "show-ref", "--verify", "--quiet", "refs/heads/"+ref) != nil {
		return ""
	}
	return ref
}

// remote asks a repository which commit a ref is, and whether it is a branch.
func (c *Checkout) remote(ctx context.Context) (commit, branch string, err error) {
	ref := c.opt.Ref
	if commitForm.MatchString(ref) {
		return ref, "", nil
	}
	patterns := []string{"HEAD"}
	if ref != "" {
		patterns = []string{"refs/heads/" + ref, "refs/tags/" + ref, "refs/tags/" + ref + "^{}", ref}
	}
	out, err := c.output(ctx, "", append([]string{"ls-remote", "--symref", "--", c.opt.From}, patterns...)...)
	if err != nil {
		return "", "", c.refused(err, "%s cannot be read", c.From)
	}
	found := map[string]string{}
	for line := range strings.Lines(out) {
		id, name, _ := strings.Cut(strings.TrimSpace(line), "\t")
		if target, ok := strings.CutPrefix(id, "ref: refs/heads/"); ok && name == "HEAD" {
			branch = target
		} else if commitForm.MatchString(id) {
			found[name] = id
		}
	}
	if ref == "" {
		if found["HEAD"] == "" {
			return "", "", &dsec.Error{Code: dsec.CodeNotFound, Field: "ref", Message: c.From + " has no commit that is checked out; name one"}
		}
		return found["HEAD"], branch, nil
	}
	for _, name := range patterns {
		id, ok := found[name]
		if !ok {
			continue
		}
		if peeled := found[name+"^{}"]; peeled != "" {
			id = peeled // of a tag with a message
		}
		if name == patterns[0] {
			return id, ref, nil
		}
		return id, "", nil
	}
	return "", "", &dsec.Error{Code: dsec.CodeNotFound, Field: "ref", Message: fmt.Sprintf("%s has no branch or tag %.200q", c.From, ref)}
}

// git runs git, in dir where it is set.
func (c *Checkout) git(ctx context.Context, dir string, args ...string) error {
	_, err := c.output(ctx, dir, args...)
	return err
}

// own is what git is told whatever its user's configuration says: no hook runs, no
// file is changed on its way, nothing is written that a checkout does not need.
var own = []string{
	"-c", "core.hooksPath=/dev/null", "-c", "core.fsmonitor=false", "-c", "core.autocrlf=false", "-c", "core.logAllRefUpdates=false",
	"-c", "gc.auto=0", "-c", "maintenance.auto=false", "-c", "advice.detachedHead=false", "-c", "index.version=2",
	"-c", "core.untrackedCache=false", "-c", "core.splitIndex=false", "-c", "fetch.writeCommitGraph=false",
}

// output runs git and gives what it says. Its errors are git's own last words. A
// directory is a repository itself, and none below one.
func (c *Checkout) output(ctx context.Context, dir string, args ...string) (string, error) {
	cmd := exec.CommandContext(ctx, "git", slices.Concat(own, args)...)
	cmd.Dir = dir
	cmd.Env = cleanEnv()
	if real, err := filepath.EvalSymlinks(dir); err == nil && dir != "" {
		cmd.Env = append(cmd.Env, "GIT_CEILING_DIRECTORIES="+filepath.Dir(real))
	}
	var stdout, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	if c.opt.Progress != nil {
		cmd.Stderr = io.MultiWriter(&stderr, c.opt.Progress)
	}
	err := cmd.Run()
	if _, ok := errors.AsType[*exec.ExitError](err); ok {
		if words := said(stderr.String()); words != "" {
			// git repeats URLs as they were given.
			err = errors.New(strings.ReplaceAll(words, c.opt.From, c.From))
		}
	}
	return stdout.String(), err
}

// said is what git complains of, in one line: without the advice that it gives to
// people, which stands behind an empty line or before one.
func said(stderr string) string {
	var lines []string
	for line := range strings.Lines(stderr) {
		line = strings.TrimSpace(line)
		line = line[strings.LastIndexByte(line, '\r')+1:] // of a line that shows progress, its last state
		if line == "" && lines != nil {
			break
		}
		if line == "" || strings.HasPrefix(line, "hint:") || strings.HasPrefix(line, "warning:") || strings.HasSuffix(line, ":") {
			continue
		}
		lines = append(lines, strings.TrimPrefix(strings.TrimPrefix(line, "fatal: "), "error: "))
	}
	return fmt.Sprintf("%.400s", strings.Join(lines[max(0, len(lines)-3):], "; "))
}

// cleanEnv is the environment without what makes git work in another repository.
func cleanEnv() []string {
	var env []string
	for _, kv := range os.Environ() {
		name, _, _ := strings.Cut(kv, "=")
		switch name {
		case "GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_OBJECT_DIRECTORY", "GIT_ALTERNATE_OBJECT_DIRECTORIES", "GIT_NAMESPACE", "GIT_TEMPLATE_DIR", "GIT_COMMON_DIR", "GIT_CEILING_DIRECTORIES":
			continue
		}
		env = append(env, kv)
	}
	return append(env, "LC_ALL=C")
}

// repository is one that is being checked out: the one asked for, or a submodule.
type repository struct {
	c                         *Checkout
	dir, from, commit, branch string
	sub                       bool
}

// make fetches the commit and checks it out.
func (r *repository) make(ctx context.Context, deeper int) error {
	git := func(args ...string) error { return r.c.git(ctx, r.dir, args...) }
	format := "sha1"
	if len(r.commit) == 64 {
		format = "sha256"
	}
	if err := r.c.git(ctx, "", "init", "--quiet", "--template=", "--object-format="+format, "--", r.dir); err != nil {
		return err
	}
	fetch := []string{"fetch", "--quiet", "--no-tags", "--no-recurse-submodules", "--no-write-fetch-head"}
	if r.sub { // its URL is a stranger's word: what git only takes from its user it does not take
		fetch = append([]string{"-c", "protocol.allow=never", "-c", "protocol.https.allow=always", "-c", "protocol.ssh.allow=always", "-c", "protocol.git.allow=always"}, fetch...)
		for _, as := range []string{"file", "http"} { // as the user had it for the first
			if strings.HasPrefix(r.c.opt.From, as+"://") {
				fetch = append([]string{"-c", "protocol." + as + ".allow=always"}, fetch...)
			}
		}
	}
	if r.c.opt.Depth > 0 {
		fetch = append(fetch, "--depth="+strconv.Itoa(r.c.opt.Depth))
	}
	if err := git(append(fetch, "--", r.from, r.commit)...); err != nil {
		return r.c.refused(err, "commit %s cannot be fetched from %s", r.commit, Bare(r.from))
	}
	if r.branch != "" {
		if err := git("symbolic-ref", "HEAD", "refs/heads/"+r.branch); err != nil {
			return err
		}
		if err := git("update-ref", "refs/heads/"+r.branch, r.commit); err != nil {
			return err
		}
	} else if err := git("update-ref", "--no-deref", "HEAD", r.commit); err != nil {
		return err
	}
	if err := git("checkout", "--quiet", "--force", "--no-recurse-submodules"); err != nil {
		return dsec.Invalid("git", "commit %s cannot be checked out: %v", r.commit, err)
	}
	if r.c.opt.Submodules {
		if err := r.submodules(ctx, deeper); err != nil {
			return err
		}
	}
	return r.settle(ctx)
}

// settle makes of what git left what is the same each time: the index without what
// is of this machine's files, every file with the commit's time.
func (r *repository) settle(ctx context.Context) error {
	when, err := r.c.output(ctx, r.dir, "show", "--no-patch", "--format=%ct", r.commit)
	if err != nil {
		return err
	}
	seconds, err := strconv.ParseInt(strings.TrimSpace(when), 10, 64)
	if err != nil {
		return err
	}
	git := filepath.Join(r.dir, ".git")
	if r.c.opt.NoGit {
		err = os.RemoveAll(git)
	} else {
		// read-tree writes an index of the tree alone.
		if err = os.Remove(filepath.Join(git, "index")); err == nil {
			err = r.c.git(ctx, r.dir, "read-tree", r.commit)
		}
		for _, name := range []string{"logs", "FETCH_HEAD", "ORIG_HEAD", "hooks", "info", "description", "branches"} {
			err = errors.Join(err, os.RemoveAll(filepath.Join(git, name)))
		}
	}
	if err != nil {
		return err
	}
	return settleFiles(r.dir, time.Unix(seconds, 0))
}

// settleFiles gives every file below dir one time, and the permissions that its
// owner has to all, but for writing: the user's umask is no part of a commit.
func settleFiles(dir string, when time.Time) error {
	ts, err := unix.TimeToTimespec(when)
	if err != nil {
		return err
	}
	return filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if d.Type()&fs.ModeSymlink == 0 {
			fi, err := d.Info()
			if err != nil {
				return err
			}
			own := fi.Mode().Perm() >> 6 & 7
			if err := os.Chmod(path, own<<6|(own&5)<<3|own&5); err != nil {
				return err
			}
		}
		return unix.UtimesNanoAt(unix.AT_FDCWD, path, []unix.Timespec{ts, ts}, unix.AT_SYMLINK_NOFOLLOW)
	})
}
