package lazy

import (
	"context"
	"encoding/json"
	"errors"
	"maps"
	"os"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec"
)

// Open returns the file of an image, to be read or to be mounted from. Opening it
// again is no error. It is served until Release, through the death of either
// process. The file is the caller's. For a mount that a path names, use
// /proc/self/fd: a pre-content file must be opened anew, while this one is open.
//
// The error is invalid where the image's parts do not fit, conflict where its key
// is known with others or it is lost, internal where the cache cannot be written.
func (c *Client) Open(ctx context.Context, im Image) (*os.File, error) {
	if err := im.Validate(); err != nil {
		return nil, err
	}
	d, err := bulk(marshalMeta(&im))
	if err != nil {
		return nil, err
	}
	defer d.Close()
	a, err := c.call(ctx, message{Open: &openCall{c.cfg.FrontEnd}}, nil, d)
	if err != nil {
		return nil, err
	}
	c.mu.Lock()
	delete(c.releases, im.Key)
	c.mu.Unlock()
	if a.file != nil {
		return a.file, nil
	}
	return c.openFUSE(ctx, name(im.Key))
}

// openFUSE opens a file of the mount. layerd answers the kernel for that, and may
// not be there.
func (c *Client) openFUSE(ctx context.Context, name string) (*os.File, error) {
	c.mu.Lock()
	fd, err := unix.FcntlInt(c.mnt.Fd(), unix.F_DUPFD_CLOEXEC, 0)
	c.mu.Unlock()
	if err != nil {
		return nil, err
	}
	type opened struct {
		f   *os.File
		err error
	}
	done := make(chan opened, 1)
	go func() {
		mnt := os.NewFile(uintptr(fd), "mount")
		defer mnt.Close()
		f, err := openApart(mnt, name)
		done <- opened{f, err}
	}()
	select {
	case o := <-done:
		return o.f, o.err
	case <-ctx.Done():
		go func() { closeFiles(some((<-done).f)) }()
		return nil, context.Cause(ctx)
	}
}

// Release says that an image is not used any more: it was unmounted and closed.
// Its chunks may go. A mount of it that is left is served on: by fanotify it keeps
// them, by FUSE they come again. After an error it is repeated until it succeeds,
// or the image is opened again.
func (c *Client) Release(ctx context.Context, key string) error {
	err := c.release(ctx, key)
	c.mu.Lock()
	defer c.mu.Unlock()
	if err != nil && dsec.CodeOf(err) != dsec.CodeNotFound {
		c.releases[key] = true
	} else {
		delete(c.releases, key)
	}
	return err
}

func (c *Client) release(ctx context.Context, key string) error {
	c.mu.Lock()
	h := c.held[key]
	c.mu.Unlock()
	open := false
	if h != nil && h.FrontEnd == FUSE {
		var err error
		if open, err = c.openElsewhere(ctx, key); err != nil {
			return err
		}
	}
	a, err := c.call(ctx, message{Release: &releaseCall{Key: key, Open: open}}, nil)
	if err != nil {
		return err
	}
	c.mu.Lock()
	if h = c.held[key]; h != nil {
		h.InUse = false
	}
	c.mu.Unlock()
	if a.r.Idle && h != nil && h.FrontEnd == FUSE { // fanotify's are dropped in their order, by an event
		c.drop(key)
	}
	return nil
}

// openElsewhere reports whether anybody has the file of an image open that FUSE
// offers: the kernel grants a write lease only where nobody has.
func (c *Client) openElsewhere(ctx context.Context, key string) (bool, error) {
	f, err := c.openFUSE(ctx, name(key))
	if err != nil {
		return false, err
	}
	defer f.Close()
	_, err = unix.FcntlInt(f.Fd(), unix.F_SETLEASE, unix.F_WRLCK)
	if err == unix.EAGAIN {
		return true, nil
	}
	// Where there are no leases nobody can tell, and its caller is believed.
	return false, nil
}

// leave repeats the releases that failed, and looks again at images of FUSE that were
// released while somebody had them open: a file system that was unmounted closes its
// files a little later.
func (c *Client) leave(ctx context.Context) {
	c.mu.Lock()
	var keys []string
	again := slices.Collect(maps.Keys(c.releases))
	c.mu.Unlock()
	for _, key := range again {
		if err := c.Release(ctx, key); err != nil && ctx.Err() == nil {
			c.log.Warn("an image is not released yet", "key", key, "error", err)
		}
	}
	c.mu.Lock()
	for key, h := range c.held {
		if h.FrontEnd == FUSE && !h.InUse {
			keys = append(keys, key)
		}
	}
	c.mu.Unlock()
	for _, key := range keys {
		if open, err := c.openElsewhere(ctx, key); open || err != nil {
			continue
		}
		a, err := c.call(ctx, message{Release: &releaseCall{Key: key, Last: true}}, nil)
		if err != nil || !a.r.Idle {
			continue
		}
		c.mu.Lock()
		if h := c.held[key]; h != nil && !h.InUse {
			delete(c.held, key)
		}
		c.mu.Unlock()
	}
}

// Settle says that nothing of a lost image is mounted or open any more, so that it
// can be opened again. The error is conflict where that is not so.
func (c *Client) Settle(ctx context.Context, key string) error {
	if _, err := c.call(ctx, message{Settle: &keyCall{key}}, nil); err != nil {
		return err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.lost = slices.DeleteFunc(c.lost, func(k string) bool { return k == key })
	return nil
}

// Prefetch brings ranges of an image to local disk, in that order, all of it where
// ranges is nil. It need not be open. progress, where set, is called from another
// goroutine, and must not wait; layerd's death lets it begin anew, which fetches
// nothing twice. The error is unavailable where the store cannot be reached,
// exhausted where the disk is full.
func (c *Client) Prefetch(ctx context.Context, im Image, ranges []Range, progress func(Progress)) error {
	if err := im.Validate(); err != nil {
		return err
	}
	d, err := bulk(marshalMeta(&im))
	if err != nil {
		return err
	}
	defer d.Close()
	files := []*os.File{d}
	if ranges != nil {
		r, err := bulkJSON(ranges)
		if err != nil {
			return err
		}
		defer r.Close()
		files = append(files, r)
	}
	_, err = c.call(ctx, message{Prefetch: &prefetchCall{All: ranges == nil}}, progress, files...)
	return err
}

// Trace returns what was read of an image, in order of the first read, in whole
// chunks. It is empty unless Limits.Trace is set. The error is not_found where the
// image was never opened.
func (c *Client) Trace(ctx context.Context, key string) (ranges []Range, err error) {
	return ranges, c.callJSON(ctx, message{Trace: &keyCall{key}}, &ranges)
}

// Stats tells of all images of the cache.
func (c *Client) Stats(ctx context.Context) (stats []Stats, err error) {
	return stats, c.callJSON(ctx, message{Stats: true}, &stats)
}

func (c *Client) callJSON(ctx context.Context, m message, v any) error {
	a, err := c.call(ctx, m, nil)
	if err != nil {
		return err
	}
	if a.file == nil {
		return errors.New("layerd protocol: an answer without its content")
	}
	defer a.file.Close()
	b, err := readBulk(a.file)
	if err != nil {
		return err
	}
	return json.Unmarshal(b, v)
}

// Stop ends layerd, which serves nothing any more, and the client. The error is
// conflict where images are in use.
func (c *Client) Stop(ctx context.Context) error {
	c.stopping.Store(true) // so that it is not started again
	_, err := c.call(ctx, message{Stop: true}, nil)
	if err != nil && dsec.CodeOf(err) == dsec.CodeConflict {
		c.stopping.Store(false)
		return err
	}
	c.Close()
	return err
}
