package convert

import (
	"bytes"
	"compress/zlib"
	"fmt"
	"io"
	"strings"
)

// What is looked at of the objects of one repository.
const (
	maxLooseObjects = 50_000
	maxCommitBytes  = 64 << 10 // of one commit, as it is stored and unpacked
)

// lintCommits reports commits that HEAD is not seen to lead to: a fix that was
// committed and then reset stays among the objects, also where no reference and
// no log names it. Those in packs are not looked into, but git puts what nothing
// leads to into packs of their own.
func (c *converter) lintCommits(git *inode, at, head string) {
	objects := git.children["objects"].n
	if objects == nil || !objects.isDir() {
		return
	}
	if pack := objects.children["pack"].n; pack != nil && pack.isDir() {
		for name := range pack.children {
			if strings.HasSuffix(name, ".mtimes") {
				c.findings.add(at, "git: a cruft pack, of objects that no reference leads to")
				break
			}
		}
	}
	commits, all := c.looseCommits(objects)
	if !all {
		c.findings.add(at, fmt.Sprintf("git: more than %d loose objects, of which the rest was not looked at", maxLooseObjects))
	}
	for todo := []string{c.commitOf(git, head)}; len(todo) > 0; {
		id := todo[len(todo)-1]
		todo = append(todo[:len(todo)-1], commits[id]...)
		delete(commits, id)
	}
	if len(commits) > 0 {
		c.findings.add(at, fmt.Sprintf("git: %d loose commits that HEAD is not seen to lead to", len(commits)))
	}
}

// looseCommits are the parents of each commit that has a file of its own.
func (c *converter) looseCommits(objects *inode) (commits map[string][]string, all bool) {
	commits = map[string][]string{}
	looked := 0
	for _, fan := range objects.names {
		dir := objects.children[fan].n
		if len(fan) != 2 || !dir.isDir() {
			continue
		}
		for _, rest := range dir.names {
			if len(rest) != 38 && len(rest) != 62 { // SHA-1 and SHA-256
				continue
			}
			if looked++; looked > maxLooseObjects {
				return commits, false
			}
			if parents, ok := c.parents(dir.children[rest].n); ok {
				commits[fan+rest] = parents
			}
		}
	}
	return commits, true
}

// parents reads a loose object; ok is false where it is no commit.
func (c *converter) parents(n *inode) (parents []string, ok bool) {
	if !n.isRegular() || n.size > maxCommitBytes {
		return nil, false
	}
	z, err := zlib.NewReader(c.section(n, n.size))
	if err != nil {
		return nil, false
	}
	kind := make([]byte, len("commit "))
	if _, err := io.ReadFull(z, kind); err != nil || string(kind) != "commit " {
		return nil, false
	}
	text, err := io.ReadAll(io.LimitReader(z, maxCommitBytes))
	if err != nil {
		return nil, false
	}
	_, text, _ = bytes.Cut(text, []byte{0}) // its size
	for line := range strings.Lines(string(text)) {
		if id, ok := strings.CutPrefix(line, "parent "); ok {
			parents = append(parents, strings.TrimSpace(id))
		} else if line == "\n" {
			break // the message
		}
	}
	return parents, true
}

// commitOf is the commit that HEAD names; head is what HEAD holds, without ref.
func (c *converter) commitOf(git *inode, head string) string {
	if !strings.HasPrefix(head, "refs/") {
		return head
	}
	n := git
	for part := range strings.SplitSeq(head, "/") {
		if n == nil || !n.isDir() {
			n = nil
			break
		}
		n = n.children[part].n
	}
	if id := strings.TrimSpace(c.head(n)); id != "" {
		return id
	}
	for line := range strings.SplitSeq(c.head(git.children["packed-refs"].n), "\n") {
		if id, ref, ok := strings.Cut(line, " "); ok && ref == head {
			return id
		}
	}
	return ""
}
