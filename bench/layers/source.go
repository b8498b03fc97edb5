package main

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec/internal/testutil/faultfs"
)

// place is a directory whose reads can be made slow and are counted: where layers
// are stored, and what rivals read.
type place struct {
	*faultfs.FS
	backing string
	mu      sync.Mutex
	seen    int64     // bytes read that the pace has counted
	free    time.Time // when the bandwidth is free again
}

// newPlace makes one below dir.
func newPlace(dir string) (*place, error) {
	p := &place{backing: filepath.Join(dir, "backing")}
	at := filepath.Join(dir, "at")
	for _, d := range []string{p.backing, at} {
		if err := os.MkdirAll(d, 0o755); err != nil {
			return nil, err
		}
	}
	var err error
	p.FS, err = faultfs.Mount(at, p.backing)
	return p, err
}

// fast takes the slowness away.
func (p *place) fast() { p.Set(nil) }

// delay has each read take so much longer.
func (p *place) delay(d time.Duration) {
	p.Set(func(op faultfs.Op) faultfs.Fault {
		if op != faultfs.Read {
			return faultfs.Fault{}
		}
		return faultfs.Fault{Delay: d}
	})
}

// delayAll has each request take so much longer.
func (p *place) delayAll(d time.Duration) {
	p.Set(func(faultfs.Op) faultfs.Fault { return faultfs.Fault{Delay: d} })
}

// pace gives all reads together so many bytes a second. A read waits for those
// before it, whose sizes are known then; time in which nothing was read is lost.
func (p *place) pace(bytesPerSecond int64) {
	p.mu.Lock()
	p.seen, p.free = p.BytesRead(), time.Now()
	p.mu.Unlock()
	p.Set(func(op faultfs.Op) faultfs.Fault {
		if op != faultfs.Read {
			return faultfs.Fault{}
		}
		p.mu.Lock()
		defer p.mu.Unlock()
		now, read := time.Now(), p.BytesRead()
		if p.free.Before(now) {
			p.free = now
		}
		p.free = p.free.Add(time.Duration(float64(read-p.seen) / float64(bytesPerSecond) * float64(time.Second)))
		p.seen = read
		return faultfs.Fault{Delay: p.free.Sub(now)}
	})
}

// forget takes all files from the page cache.
func (p *place) forget() error { return forgetBelow(p.backing) }

// forgetBelow takes the files below dir from the page cache.
func forgetBelow(dir string) error {
	return filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil || !d.Type().IsRegular() {
			return err
		}
		return forgetFile(path)
	})
}

// forgetFile takes a file, which is stored by then, from the page cache.
func forgetFile(path string) error {
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	defer func() { _ = f.Close() }()
	if err := errors.Join(f.Sync(), unix.Fadvise(int(f.Fd()), 0, 0, unix.FADV_DONTNEED)); err != nil {
		return fmt.Errorf("forget %s: %w", path, err)
	}
	return nil
}
