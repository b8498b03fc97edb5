package dirblob

import (
	"os"
	"sync"
	"time"
)

const (
	maxOpen  = 64          // files kept open
	openIdle = time.Minute // after which one that nobody reads is closed, as soon as anything is read
)

// files keeps those open that were read lately: on a shared file system an open is
// several questions to a server, a read one. One whose blob another host deletes
// keeps its space there until it is closed.
type files struct {
	mu   sync.Mutex
	open map[string]*openFile
}

type openFile struct {
	*os.File
	used time.Time
}

// get is nil where no file is open for key.
func (c *files) get(key string) *os.File {
	c.mu.Lock()
	defer c.mu.Unlock()
	o := c.open[key]
	if o == nil {
		return nil
	}
	o.used = time.Now()
	return o.File
}

// add keeps f, and returns what is to be closed for it.
func (c *files) add(key string, f *os.File) (out []*os.File) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.open == nil {
		c.open = map[string]*openFile{}
	}
	if o := c.open[key]; o != nil {
		return []*os.File{f} // another reader was first
	}
	now := time.Now()
	oldest := ""
	for k, o := range c.open {
		if now.Sub(o.used) > openIdle {
			out = append(out, o.File)
			delete(c.open, k)
		} else if oldest == "" || o.used.Before(c.open[oldest].used) {
			oldest = k
		}
	}
	if len(c.open) >= maxOpen {
		out = append(out, c.open[oldest].File)
		delete(c.open, oldest)
	}
	c.open[key] = &openFile{f, now}
	return out
}

// drop forgets the file of key, if it is f or f is nil, and returns what is to be closed.
func (c *files) drop(key string, f *os.File) []*os.File {
	c.mu.Lock()
	defer c.mu.Unlock()
	o := c.open[key]
	if o == nil || f != nil && o.File != f {
		return nil
	}
	delete(c.open, key)
	return []*os.File{o.File}
}

// all forgets all.
func (c *files) all() (out []*os.File) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, o := range c.open {
		out = append(out, o.File)
	}
	c.open = nil
	return out
}

// Reopen implements blob.Reopener.
func (s *Store) Reopen(key string) { s.closeFiles(s.files.drop(key, nil)) }

// closeFiles does not wait, for a file system may hang. Reads of a file that is
// being closed get to their end.
func (s *Store) closeFiles(files []*os.File) {
	for _, f := range files {
		s.late.Go(func() { _ = f.Close() })
	}
}
