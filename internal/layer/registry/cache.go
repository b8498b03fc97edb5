package registry

import (
	"cmp"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"time"
)

// cache keeps blobs that came whole, so that an import which is repeated does not
// fetch them again. It is a help and no truth: what it gives is checked like what
// a registry sends, and where the disk does not play along there is nothing kept.
type cache struct {
	dir string
	max int64
	mu  sync.Mutex
}

// keptFor is how long a blob that nobody asks for is kept.
const keptFor = 24 * time.Hour

const partSuffix = ".part"

// openCache takes over a directory and drops what an earlier owner left
// unfinished.
func openCache(dir string, most int64) (*cache, error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, err
	}
	c := &cache{dir: dir, max: most}
	left, err := filepath.Glob(filepath.Join(dir, "*"+partSuffix))
	for _, name := range left {
		err = errors.Join(err, os.Remove(name))
	}
	c.sweep(0)
	return c, err
}

func (c *cache) path(key string) string { return filepath.Join(c.dir, key) }

// open gives a blob; nil if there is none of that size.
func (c *cache) open(key string, size int64) *os.File {
	f, err := os.Open(c.path(key))
	if err != nil {
		return nil
	}
	if fi, err := f.Stat(); err != nil || fi.Size() != size {
		_ = f.Close()
		return nil
	}
	now := time.Now()
	_ = os.Chtimes(c.path(key), now, now) // it goes last
	return f
}

func (c *cache) remove(key string) { _ = os.Remove(c.path(key)) }

// sweep removes what is old, and the oldest until need bytes more fit.
func (c *cache) sweep(need int64) {
	c.mu.Lock()
	defer c.mu.Unlock()
	entries, err := os.ReadDir(c.dir)
	if err != nil {
		return
	}
	var all []fs.FileInfo
	total := need
	for _, e := range entries {
		if fi, err := e.Info(); err == nil && fi.Mode().IsRegular() {
			all = append(all, fi)
			total += fi.Size()
		}
	}
	slices.SortFunc(all, func(a, b fs.FileInfo) int {
		return cmp.Or(a.ModTime().Compare(b.ModTime()), cmp.Compare(a.Name(), b.Name()))
	})
	for _, fi := range all {
		if filepath.Ext(fi.Name()) == partSuffix || total <= c.max && time.Since(fi.ModTime()) < keptFor {
			continue // parts are their importers' own, and count
		}
		if os.Remove(c.path(fi.Name())) == nil {
			total -= fi.Size()
		}
	}
}

// kept is a blob on its way into the cache. A nil one keeps nothing.
type kept struct {
	c   *cache
	key string
	f   *os.File
}

// start makes room for a blob; nil where it will not be kept.
func (c *cache) start(key string, size int64) *kept {
	if size > c.max/2 || size == 0 {
		return nil
	}
	c.sweep(size)
	f, err := os.CreateTemp(c.dir, key+"-*"+partSuffix)
	if err != nil {
		return nil
	}
	return &kept{c: c, key: key, f: f}
}

func (k *kept) write(p []byte) {
	if k == nil || k.f == nil {
		return
	}
	if _, err := k.f.Write(p); err != nil {
		k.drop()
	}
}

// finish gives the blob its name.
func (k *kept) finish() {
	if k == nil || k.f == nil {
		return
	}
	name := k.f.Name()
	if k.f.Close() != nil || os.Rename(name, k.c.path(k.key)) != nil {
		_ = os.Remove(name)
	}
	k.f = nil
}

// drop gives it up; after finish it does nothing.
func (k *kept) drop() {
	if k == nil || k.f == nil {
		return
	}
	_, _ = k.f.Close(), os.Remove(k.f.Name())
	k.f = nil
}
