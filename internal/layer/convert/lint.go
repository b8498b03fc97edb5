package convert

import (
	"bytes"
	"fmt"
	"path"
	"regexp"
	"strconv"
	"strings"

	"github.com/opendsec/dsec"
)

// findings are remarks for whoever imports: what was left out, and what looks
// like a secret or like the answer to a task. They never fail an import.
type findings struct {
	lines   []string
	more    int
	counted map[string]*tally
	order   []string
}

type tally struct {
	n     int
	first string
}

// maxFindings bounds the list; what is beyond it is counted.
const maxFindings = 200

func (f *findings) init() { *f = findings{counted: map[string]*tally{}} }

func (f *findings) add(name, what string) {
	if len(f.lines) == maxFindings {
		f.more++
		return
	}
	f.lines = append(f.lines, quote("/"+name)+": "+what)
}

// count is for what may be true of very many files: told once.
func (f *findings) count(what, name string) {
	t := f.counted[what]
	if t == nil {
		t = &tally{first: name}
		f.counted[what] = t
		f.order = append(f.order, what)
	}
	t.n++
}

// refuse is the error of an import that wants nothing found.
func (f *findings) refuse() error {
	if len(f.lines) == 0 {
		return nil
	}
	return dsec.Invalid("strict", "the lint finds %d things, the first: %s", len(f.lines)+f.more, f.lines[0])
}

// list has names as a sandbox has them, whose root is at in it.
func (f *findings) list(at string) []string {
	list := f.lines
	if f.more > 0 {
		list = append(list, fmt.Sprintf("%d findings more", f.more))
	}
	for _, what := range f.order {
		t := f.counted[what]
		list = append(list, fmt.Sprintf("%s: %d, the first at %s", what, t.n, quote(path.Join("/", at, t.first))))
	}
	return list
}

// quote makes a name of an archive fit to show, short and on one line.
func quote(s string) string {
	const most = 200
	if len(s) > most {
		s = s[:most] + "..."
	}
	return strconv.QuoteToASCII(s)
}

// LintBytes is how much of a file's start is looked at for secrets.
const LintBytes = 16 << 10

var (
	privateKey = regexp.MustCompile(`-----BEGIN (?:[A-Z0-9]+ ){0,3}PRIVATE KEY(?: BLOCK)?-----`)
	// tokens are told by a hint that is searched first, at the byte of it that
	// is rare in text: no other way keeps up with the disk.
	tokens = []struct {
		rare byte
		at   int // of the byte in the hint
		hint string
		re   *regexp.Regexp
		what string
	}{
		{'K', 8, "PRIVATE KEY", privateKey, "a private key"},
		{'K', 1, "AKIA", regexp.MustCompile(`\bAKIA[0-9A-Z]{16}\b`), "an AWS access key"},
		{'_', 3, "ghp_", regexp.MustCompile(`\bghp_[0-9A-Za-z]{36}\b`), "a GitHub token"},
		{'_', 6, "github_pat_", regexp.MustCompile(`\bgithub_pat_[0-9A-Za-z_]{40,}`), "a GitHub token"},
		{'_', 3, "e2b_", regexp.MustCompile(`\be2b_[0-9a-f]{40,}\b`), "an API key"},
		{'-', 5, "glpat-", regexp.MustCompile(`\bglpat-[0-9A-Za-z_-]{20}`), "a GitLab token"},
		{'-', 4, "xoxb-", regexp.MustCompile(`\bxoxb-[0-9A-Za-z-]{20,}`), "a Slack token"},
		{'-', 2, "sk-ant-", regexp.MustCompile(`\bsk-ant-[0-9A-Za-z_-]{20,}`), "an API key"},
	}
	// credentials are files whose whole purpose is to hold a secret; the
	// expression tells a filled-in one from an empty one.
	credentials = map[string]*regexp.Regexp{
		".npmrc":              regexp.MustCompile(`_auth(?:Token)?\s*=\s*[^\s$]`),
		".pypirc":             regexp.MustCompile(`(?m)^\s*password\s*[=:]\s*\S`),
		".netrc":              regexp.MustCompile(`(?s)\bpassword\s+\S`),
		".git-credentials":    regexp.MustCompile(`://[^/\s]+:[^/\s]+@`),
		".docker/config.json": regexp.MustCompile(`"auth"\s*:\s*"[^"]`),
		".aws/credentials":    regexp.MustCompile(`aws_secret_access_key\s*=\s*\S`),
		"kubeconfig":          regexp.MustCompile(`client-key-data:\s*\S`),
		".kube/config":        regexp.MustCompile(`client-key-data:\s*\S|token:\s*\S`),
	}
)

// token is what a text seems to hold: one more than its place in tokens; 0 is none.
type token uint8

// findToken looks at the start of a file for what has the shape of a secret.
func findToken(head []byte) token {
	text := head[:min(len(head), LintBytes)]
	if !isText(text) {
		return 0
	}
	seen := 0 // tokens whose hint is there, a bit each: matched once
	for _, rare := range []byte("K_-") {
		for i := 0; i < len(text); i++ {
			n := bytes.IndexByte(text[i:], rare)
			if n < 0 {
				break
			}
			i += n
			for b := range tokens {
				t := &tokens[b]
				if t.rare == rare && i >= t.at && seen&(1<<b) == 0 && hasPrefix(text[i-t.at:], t.hint) {
					seen |= 1 << b
					if t.re.Match(text) {
						return token(b + 1)
					}
				}
			}
		}
	}
	return 0
}

func hasPrefix(text []byte, hint string) bool {
	return len(text) >= len(hint) && string(text[:len(hint)]) == hint
}

func isText(head []byte) bool { return bytes.IndexByte(head[:min(len(head), 512)], 0) < 0 }

// lintFile tells what a file holds that has the shape of a secret.
func (c *converter) lintFile(n *inode, name, parent, base string) {
	if n.token > 0 {
		c.findings.add(name, "holds what looks like "+tokens[n.token-1].what)
	}
	if !mayHoldCredentials(parent, base) {
		return
	}
	if head, err := c.readFile(n, LintBytes); err == nil && holdsCredentials(parent, base, head) {
		c.findings.add(name, "holds credentials")
	}
}

func mayHoldCredentials(parent, base string) bool {
	return credentials[base] != nil || credentials[parent+"/"+base] != nil
}

func holdsCredentials(parent, base string, head []byte) bool {
	for _, re := range []*regexp.Regexp{credentials[base], credentials[parent+"/"+base]} {
		if re != nil && isText(head) && re.Match(head) {
			return true
		}
	}
	return false
}

// Secret says what the file base of a directory parent, whose first LintBytes are head,
// seems to hold that is a secret; nothing else than the lint finds is one.
func Secret(parent, base string, head []byte) string {
	if found := findToken(head); found > 0 {
		return "what looks like " + tokens[found-1].what
	}
	if mayHoldCredentials(parent, base) && holdsCredentials(parent, base, head) {
		return "credentials"
	}
	return ""
}

// lintTree looks for secrets, for files by name, which are the platform's own, and for
// git repositories that hold more than the commit that is checked out.
func (c *converter) lintTree(t *tree) { c.lintDir(t.root, "") }

func (c *converter) lintDir(dir *inode, at string) {
	for _, name := range dir.names {
		n, where := dir.children[name].n, path.Join(at, name)
		switch {
		case strings.HasPrefix(name, ".dsec"):
			c.findings.add(where, "has a name that the platform uses")
		case strings.HasPrefix(name, whiteoutPrefix):
			c.findings.add(where, "has the name of a whiteout, which is an ordinary file here")
		}
		if n.isRegular() && n.firstDir == dir && n.firstName == name {
			c.lintFile(n, where, path.Base(at), name)
		}
		if n.isDir() {
			if n.children["HEAD"].n != nil && n.children["objects"].n != nil {
				c.lintGit(n, where)
			}
			c.lintDir(n, where)
		}
	}
}

// lintGit reports what in a repository may lead to commits other than HEAD's:
// the fix that a task asks for is often one of them.
func (c *converter) lintGit(git *inode, at string) {
	head := strings.TrimSpace(strings.TrimPrefix(c.head(git.children["HEAD"].n), "ref:"))
	if logs := git.children["logs"].n; logs != nil && logs.isDir() && len(logs.children) > 0 {
		c.findings.add(at, "git: reflogs, which name earlier and later commits")
	}
	for _, name := range []string{"ORIG_HEAD", "FETCH_HEAD", "MERGE_HEAD"} {
		if git.children[name].n != nil {
			c.findings.add(at, "git: "+name+", which names another commit")
		}
	}
	others := 0
	for line := range strings.SplitSeq(c.head(git.children["packed-refs"].n), "\n") {
		if _, ref, ok := strings.Cut(line, " "); ok && line[0] != '#' && ref != head {
			others++
		}
	}
	if refs := git.children["refs"].n; refs != nil {
		others += countRefs(refs, "refs", head)
	}
	if others > 0 {
		c.findings.add(at, fmt.Sprintf("git: %d references besides the branch that is checked out", others))
	}
	c.lintCommits(git, at, head)
}

func countRefs(dir *inode, at, head string) (n int) {
	for name, e := range dir.children {
		ref := at + "/" + name
		if e.n.isDir() {
			n += countRefs(e.n, ref, head)
		} else if ref != head {
			n++
		}
	}
	return n
}

// head is the start of a small text file; empty if there is none.
func (c *converter) head(n *inode) string {
	if n == nil || !n.isRegular() {
		return ""
	}
	b, err := c.readFile(n, 1<<20)
	if err != nil {
		return ""
	}
	return string(b)
}
