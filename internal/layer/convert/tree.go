package convert

import (
	"maps"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec"
)

// Bounds that Linux sets.
const (
	maxName   = 255
	maxPath   = 4095
	maxTarget = 4095
	maxHops   = 40 // symbolic links followed in one look-up
)

// inode is a file of the tree; several names may lead to one that is not a
// directory.
type inode struct {
	mode     uint32 // type and permission bits, as in stat(2)
	uid, gid uint32
	nlink    uint32 // counted by finish
	mtime    int64  // seconds
	mtimeNs  uint32
	xattrs   map[string]string
	target   string     // of a symbolic link
	off      int64      // of a regular file's content
	image    *imageFile // its content is in the image, where it stays; nil: in the scratch
	gone     bool       // it was a layer, which has been applied
	token    token      // what its content looks like
	size     int64
	children map[string]dirent // of a directory
	opaque   bool              // a directory that hides what layers below have in it
	pruned   int               // last layer whose whiteouts were applied to everything below
	layer    int               // that made it; of a directory, this copy of it
	id       int               // of a directory: all copies of it have the same

	// Set by finish. The first name is the one that carries the content of an
	// inode with several.
	run       int      // of finish, that counted nlink
	names     []string // of a directory: its children, sorted
	hides     bool     // of a directory: it has whiteouts
	firstDir  *inode
	firstName string
}

// dirent is one name of an inode.
type dirent struct {
	n     *inode
	layer int // that gave the name
}

func (n *inode) isDir() bool      { return n.mode&unix.S_IFMT == unix.S_IFDIR }
func (n *inode) isSymlink() bool  { return n.mode&unix.S_IFMT == unix.S_IFLNK }
func (n *inode) isWhiteout() bool { return n.mode&unix.S_IFMT == unix.S_IFCHR }
func (n *inode) isRegular() bool  { return n.mode&unix.S_IFMT == unix.S_IFREG }

// tree is a root file system in memory.
type tree struct {
	c     *converter
	root  *inode
	layer int // being applied
	// keep has a directory copied before another layer than the one that made it
	// changes it: a root that was taken before stays the tree as it was.
	keep bool
	// Set by finish.
	paths  int64
	files  int64
	placed []*inode // those whose content is in the image
}

func newTree(c *converter, layer int) *tree {
	t := &tree{c: c, layer: layer}
	t.root = t.newDir()
	return t
}

func (t *tree) newDir() *inode {
	t.c.dirs++
	return &inode{mode: unix.S_IFDIR | 0o755, children: map[string]dirent{}, layer: t.layer, id: t.c.dirs}
}

// own gives a directory that the layer being applied may change: n, or a copy of it.
func (t *tree) own(n *inode) *inode {
	if n.layer == t.layer {
		return n
	}
	if t.keep {
		n = &inode{
			mode: n.mode, uid: n.uid, gid: n.gid, mtime: n.mtime, mtimeNs: n.mtimeNs, xattrs: n.xattrs,
			children: maps.Clone(n.children), opaque: n.opaque, pruned: n.pruned, id: n.id,
		}
	}
	n.layer = t.layer
	return n
}

// ownChild is own of a directory in one that is owned.
func (t *tree) ownChild(dir *inode, name string) *inode {
	e := dir.children[name]
	e.n = t.own(e.n)
	dir.children[name] = e
	return e.n
}

// splitPath checks a name of an archive and gives its parts. A leading slash
// and "." are dropped: the name starts at the image's root whatever it says.
func splitPath(name string) ([]string, error) {
	switch {
	case name == "":
		return nil, dsec.Invalid("data", "empty name")
	case len(name) > maxPath:
		return nil, dsec.Invalid("data", "name of %d bytes, want at most %d", len(name), maxPath)
	case strings.IndexByte(name, 0) >= 0:
		return nil, dsec.Invalid("data", "name with a NUL byte")
	}
	var parts []string
	for part := range strings.SplitSeq(name, "/") {
		switch {
		case part == "" || part == ".":
		case part == "..":
			return nil, dsec.Invalid("data", "name with a \"..\" part")
		case len(part) > maxName:
			return nil, dsec.Invalid("data", "name part of %d bytes, want at most %d", len(part), maxName)
		default:
			parts = append(parts, part)
		}
	}
	return parts, nil
}

// dir finds the directory that parts lead to, following symbolic links inside
// the tree as a kernel whose root it were. With create, what is missing is
// made, and what stands in the way (and is no link) is replaced. Without, it
// returns nil where there is no such directory, and what must not be changed.
func (t *tree) dir(parts []string, create bool) (*inode, error) {
	if create {
		t.root = t.own(t.root)
	}
	stack := []*inode{t.root}
	hops := 0
	for len(parts) > 0 {
		part, cur := parts[0], stack[len(stack)-1]
		parts = parts[1:]
		if part == ".." {
			stack = stack[:max(1, len(stack)-1)]
			continue
		}
		child := cur.children[part].n
		if child != nil && child.isSymlink() {
			if hops++; hops > maxHops {
				return nil, dsec.Invalid("data", "more than %d symbolic links on the way", maxHops)
			}
			next := linkParts(child.target)
			if strings.HasPrefix(child.target, "/") {
				stack = stack[:1]
			}
			parts = append(next, parts...)
			continue
		}
		switch found := child != nil && child.isDir(); {
		case found && create:
			child = t.ownChild(cur, part)
		case !found && !create:
			return nil, nil
		case !found:
			child = t.newDir()
			if err := t.add(cur, part, child); err != nil {
				return nil, err
			}
		}
		if stack = append(stack, child); len(stack) > t.c.limits.Depth {
			return nil, dsec.Invalid("data", "directories more than %d deep", t.c.limits.Depth)
		}
	}
	return stack[len(stack)-1], nil
}

// linkParts are the parts of a link's target, ".." among them.
func linkParts(target string) []string {
	return slices.DeleteFunc(strings.Split(target, "/"), func(s string) bool { return s == "" || s == "." || len(s) > maxName })
}

// add gives n the name in dir, replacing what had it.
func (t *tree) add(dir *inode, name string, n *inode) error {
	if err := t.c.addEntry(1); err != nil {
		return err
	}
	if err := t.c.addMetadata(len(name)); err != nil {
		return err
	}
	if old, ok := dir.children[name]; ok && n.isDir() {
		// What was hidden does not come back with the directory.
		n.opaque = old.n.isWhiteout() || t.c.upper && t.layer > 0 && !old.n.isDir()
	}
	dir.children[name] = dirent{n, t.layer}
	return nil
}

// lookup finds the inode with a name, following symbolic links everywhere if
// follow is set, else only on the way. It returns nil if there is none.
func (t *tree) lookup(parts []string, follow bool) (*inode, error) {
	for range maxHops {
		if len(parts) == 0 {
			return t.root, nil
		}
		dir, err := t.dir(parts[:len(parts)-1], false)
		if err != nil || dir == nil {
			return nil, err
		}
		n := dir.children[parts[len(parts)-1]].n
		if n == nil || !follow || !n.isSymlink() {
			return n, nil
		}
		next := linkParts(n.target)
		if !strings.HasPrefix(n.target, "/") {
			next = append(slices.Clone(parts[:len(parts)-1]), next...)
		}
		if parts, err = lexical(next); err != nil {
			return nil, err
		}
	}
	return nil, dsec.Invalid("data", "more than %d symbolic links on the way", maxHops)
}

// lexical resolves ".." by name; used only to find documents of an archive,
// whose links stay in one directory or its parent.
func lexical(parts []string) ([]string, error) {
	var out []string
	for _, p := range parts {
		if p == ".." {
			out = out[:max(0, len(out)-1)]
		} else {
			out = append(out, p)
		}
	}
	return out, nil
}

// prune removes from dir what layers below the current one put there, and
// keeps what the current one wrote. A directory stays if something in it does.
func (t *tree) prune(dir *inode) {
	if dir.pruned == t.layer {
		return // nothing of a lower layer can have come back
	}
	dir.pruned = t.layer
	for name := range dir.children {
		t.pruneName(dir, name)
	}
}

func (t *tree) pruneName(dir *inode, name string) {
	e, ok := dir.children[name]
	if !ok {
		return
	}
	mine := e.n.isDir() && e.n.layer == t.layer // else the current layer has nothing in it
	if mine {
		t.prune(e.n)
	}
	if e.layer != t.layer && !(mine && len(e.n.children) > 0) {
		delete(dir.children, name)
	}
}

// at is the tree of a layer that has t's root as the directory path.
func (t *tree) at(path string) (*tree, error) {
	if path == "" {
		return t, nil
	}
	parts, err := splitPath(path)
	if err != nil || len(parts) == 0 {
		return t, err
	}
	below := newTree(t.c, t.layer)
	dir, err := below.dir(parts[:len(parts)-1], true)
	if err != nil {
		return nil, err
	}
	return below, below.add(dir, parts[len(parts)-1], t.root)
}

// mountPoints are the directories that the platform mounts on.
var mountPoints = []string{"proc", "sys", "dev"}

// checkMountPoints refuses an image in which a directory that the platform
// mounts on is something else: a link there points at a place of its choice.
func (t *tree) checkMountPoints() error {
	for _, name := range mountPoints {
		if n := t.root.children[name].n; n != nil && !n.isDir() {
			return dsec.Invalid("data", "/%s in the image is not a directory", name)
		}
	}
	return nil
}

// finish sorts the names, counts links and settles which name of an inode is
// its first. The tree does not change afterwards; one that shares inodes with it may
// be finished once what was settled of this is not asked for any more.
func (t *tree) finish() error {
	t.c.runs++
	return t.finishDir(t.root, 0)
}

func (t *tree) finishDir(dir *inode, pathLen int) error {
	dir.names = slices.Sorted(maps.Keys(dir.children))
	dir.nlink, dir.hides = 2, false
	for _, name := range dir.names {
		n := dir.children[name].n
		dir.hides = dir.hides || n.isWhiteout()
		t.files++
		length := pathLen + 1 + len(name)
		if length > maxPath {
			return dsec.Invalid("data", "a path of the image has more than %d bytes", maxPath)
		}
		// go-erofs keeps each path as a string.
		if t.paths += int64(length); t.paths > t.c.limits.MetadataBytes {
			return dsec.Invalid("data", "the paths of the image take more than %d bytes", t.c.limits.MetadataBytes)
		}
		if n.isDir() {
			dir.nlink++
			if err := t.finishDir(n, length); err != nil {
				return err
			}
			continue
		}
		if n.run != t.c.runs {
			n.run, n.nlink = t.c.runs, 0
		}
		if n.nlink++; n.nlink == 1 {
			n.firstDir, n.firstName = dir, name
			if n.image != nil {
				t.placed = append(t.placed, n)
			}
		}
	}
	return nil
}
