package fake

import (
	"errors"
	"maps"
	"path"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/opendsec/dsec"
)

type kind uint8

const (
	kindFile kind = iota
	kindDir
	kindSymlink
)

// node is one file of a file system.
type node struct {
	kind     kind
	mode     uint32
	uid, gid uint32
	modified time.Time
	data     []byte
	entries  map[string]*node
	target   string
}

// The errors a file operation can end in.
var (
	errNotFound  = errors.New("no such file or directory")
	errNotDir    = errors.New("not a directory")
	errIsDir     = errors.New("is a directory")
	errExists    = errors.New("exists already")
	errNotEmpty  = errors.New("directory not empty")
	errLoop      = errors.New("too many levels of symbolic links")
	errNoSpace   = errors.New("no space left on device")
	errNameLong  = errors.New("file name too long")
	errNoRegular = errors.New("not a regular file")
)

// fileSystem is a tree with limits on bytes and files.
type fileSystem struct {
	mu                  sync.Mutex
	root                *node
	bytes, files        int64
	maxBytes, maxInodes int64
}

func newFileSystem(l dsec.Limits) *fileSystem {
	f := &fileSystem{maxBytes: l.DiskBytes, maxInodes: l.DiskInodes}
	f.root = &node{kind: kindDir, mode: 0o755, modified: time.Now(), entries: make(map[string]*node)}
	for _, dir := range []string{"bin", "dev", "etc", "home", "proc", "root", "sys", "tmp", "usr", "usr/bin", "var"} {
		if err := f.mkdir("/"+dir, 0o755, false); err != nil {
			panic(err) // an empty tree takes them
		}
	}
	f.root.entries["tmp"].mode = 0o1777
	f.files = 0 // the base is not the sandbox's
	return f
}

func (f *fileSystem) usage() (bytes, files int64) {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.bytes, f.files
}

const maxSymlinks = 40

// walk resolves a path to the directory that holds its last element and that
// element's name, which is empty for the root. The caller holds mu.
func (f *fileSystem) walk(name string, follow bool, links int) (dir *node, last string, err error) {
	// stack holds the directories from the root on, for "..".
	stack := []*node{f.root}
	elems := strings.FieldsFunc(name, func(r rune) bool { return r == '/' })
	for i := 0; i < len(elems); i++ {
		e, cur := elems[i], stack[len(stack)-1]
		if len(e) > 255 {
			return nil, "", errNameLong
		}
		if cur.kind != kindDir {
			return nil, "", errNotDir
		}
		if e == "." {
			continue
		}
		if e == ".." {
			stack = stack[:max(1, len(stack)-1)]
			continue
		}
		n := cur.entries[e]
		end := i == len(elems)-1
		if n != nil && n.kind == kindSymlink && (!end || follow) {
			if links++; links > maxSymlinks {
				return nil, "", errLoop
			}
			rest := strings.FieldsFunc(n.target, func(r rune) bool { return r == '/' })
			if path.IsAbs(n.target) {
				stack = stack[:1]
			}
			elems = append(rest, elems[i+1:]...)
			i = -1
			if len(elems) == 0 {
				break
			}
			continue
		}
		if end {
			return cur, e, nil
		}
		if n == nil {
			return nil, "", errNotFound
		}
		stack = append(stack, n)
	}
	// The path ended in "..", "." or the root.
	return stack[len(stack)-1], "", nil
}

func (f *fileSystem) get(name string, follow bool) (*node, error) {
	dir, last, err := f.walk(name, follow, 0)
	if err != nil {
		return nil, err
	}
	if last == "" {
		return dir, nil
	}
	if n := dir.entries[last]; n != nil {
		return n, nil
	}
	return nil, errNotFound
}

// lookup returns a copy of what is at name.
func (f *fileSystem) lookup(name string, follow bool) (node, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	n, err := f.get(name, follow)
	if err != nil {
		return node{}, err
	}
	return *n, nil
}

// add puts a new node at name. The caller holds mu.
func (f *fileSystem) add(dir *node, name string, n *node) error {
	if f.maxInodes > 0 && f.files+1 > f.maxInodes {
		return errNoSpace
	}
	f.files++
	n.modified = time.Now()
	dir.entries[name] = n
	dir.modified = n.modified
	return nil
}

func (f *fileSystem) mkdir(name string, mode uint32, parents bool) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.mkdirLocked(name, mode, parents)
}

func (f *fileSystem) mkdirLocked(name string, mode uint32, parents bool) error {
	dir, last, err := f.walk(name, true, 0)
	if parents && errors.Is(err, errNotFound) {
		if err := f.mkdirLocked(path.Dir(path.Clean(name)), 0o755, true); err != nil {
			return err
		}
		dir, last, err = f.walk(name, true, 0)
	}
	if err != nil {
		return err
	}
	if n := dir.entries[last]; last == "" || n != nil {
		if parents && (last == "" || n.kind == kindDir) {
			return nil
		}
		return errExists
	}
	return f.add(dir, last, &node{kind: kindDir, mode: mode, entries: make(map[string]*node)})
}

// writeFile replaces a file's content, or appends to it. Mode 0 keeps that of
// the file replaced.
func (f *fileSystem) writeFile(name string, data []byte, mode uint32, appendTo bool) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	dir, last, err := f.walk(name, true, 0)
	if err != nil {
		return err
	}
	if last == "" {
		return errIsDir
	}
	n := dir.entries[last]
	if n != nil && n.kind != kindFile {
		return errIsDir
	}
	grow := int64(len(data))
	if n != nil && !appendTo {
		grow -= int64(len(n.data))
	}
	if f.maxBytes > 0 && f.bytes+grow > f.maxBytes {
		return errNoSpace
	}
	if n == nil {
		n = &node{mode: 0o644}
		if err := f.add(dir, last, n); err != nil {
			return err
		}
	}
	if appendTo {
		n.data = append(n.data, data...)
	} else {
		n.data = slices.Clone(data)
	}
	f.bytes += grow
	n.modified = time.Now()
	if mode != 0 {
		n.mode = mode
	}
	return nil
}

func (f *fileSystem) readFile(name string) ([]byte, error) {
	n, err := f.lookup(name, true)
	switch {
	case err != nil:
		return nil, err
	case n.kind == kindDir:
		return nil, errIsDir
	}
	// What is there now is never changed in place, only appended to.
	return n.data, nil
}

func (f *fileSystem) names(dir string) ([]string, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	n, err := f.get(dir, true)
	switch {
	case err != nil:
		return nil, err
	case n.kind != kindDir:
		return nil, errNotDir
	}
	return slices.Sorted(maps.Keys(n.entries)), nil
}

func (f *fileSystem) symlink(name, target string) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	dir, last, err := f.walk(name, false, 0)
	if err != nil {
		return err
	}
	if last == "" || dir.entries[last] != nil {
		return errExists
	}
	return f.add(dir, last, &node{kind: kindSymlink, mode: 0o777, target: target})
}

func (f *fileSystem) remove(name string, recursive bool) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	dir, last, err := f.walk(name, false, 0)
	if err != nil {
		return err
	}
	n := dir.entries[last]
	switch {
	case last == "":
		return errIsDir
	case n == nil:
		return errNotFound
	case n.kind == kindDir && len(n.entries) > 0 && !recursive:
		return errNotEmpty
	}
	f.free(n)
	delete(dir.entries, last)
	return nil
}

func (f *fileSystem) free(n *node) {
	f.files--
	f.bytes -= int64(len(n.data))
	for _, e := range n.entries {
		f.free(e)
	}
}

func (f *fileSystem) rename(from, to string) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	fromDir, fromName, err := f.walk(from, false, 0)
	if err != nil {
		return err
	}
	toDir, toName, err := f.walk(to, false, 0)
	if err != nil {
		return err
	}
	n := fromDir.entries[fromName]
	switch old := toDir.entries[toName]; {
	case n == nil:
		return errNotFound
	case toName == "":
		return errExists
	case old == n:
		return nil
	case old != nil && old.kind == kindDir:
		return errExists
	case n.kind == kindDir && n.holds(toDir):
		return errExists // a directory cannot move into itself
	case old != nil:
		f.free(old)
	}
	delete(fromDir.entries, fromName)
	toDir.entries[toName] = n
	return nil
}

func (n *node) holds(dir *node) bool {
	if n == dir {
		return true
	}
	for _, e := range n.entries {
		if e.kind == kindDir && e.holds(dir) {
			return true
		}
	}
	return false
}
