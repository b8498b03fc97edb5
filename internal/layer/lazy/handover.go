package lazy

import (
	"context"
	"errors"
	"os"
	"slices"

	"github.com/opendsec/dsec"
)

// greet hands over what there is, and takes what layerd has. Only the goroutine
// that receives calls it, which is the one that changes what is held.
func (c *Client) greet(ctx context.Context, conn *connection) error {
	defer c.bounded(ctx, conn)()
	c.mu.Lock()
	h := &hello{Version: protocolVersion, Store: c.cfg.Store, Limits: c.cfg.Limits, Fresh: c.fresh, Lost: slices.Clone(c.lost),
		Group: c.group != nil, FUSE: c.dev != nil}
	files := some(c.group, c.slots, c.dev, c.mnt)
	var holds []held
	for _, one := range c.held {
		holds = append(holds, *one)
	}
	c.mu.Unlock()
	h.Holds = len(holds)
	if err := conn.send(&message{Hello: h}, files...); err != nil {
		return err
	}
	for _, one := range holds {
		if err := conn.send(&message{Hold: &one.hold}, some(one.data)...); err != nil {
			return err
		}
	}
	m, files, err := conn.receive()
	switch {
	case err != nil:
		return err
	case m.Hello == nil || m.Hello.Refused != nil:
		closeFiles(files)
		if m.Hello == nil {
			return errors.New("layerd protocol: no greeting")
		}
		return m.Hello.Refused.err()
	}
	return c.welcome(conn, m.Hello, files)
}

// welcome takes over what layerd holds: its word is the truth from here on. If it
// dies in the middle, what came is not all and worth nothing. What this client had
// before is kept then: all of it, or, at its start, nothing, and what was served is
// lost.
func (c *Client) welcome(conn *connection, h *hello, files []*os.File) error {
	group, events, dev, mnt, err := h.split(files)
	if err != nil {
		closeFiles(files)
		return err
	}
	holds, data, err := receiveHolds(conn, h.Holds)
	c.mu.Lock()
	defer c.mu.Unlock()
	if err != nil {
		closeFiles(files)
		return err
	}
	closeFiles(some(c.group, c.slots, c.dev, c.mnt))
	for _, old := range c.held {
		closeFiles(some(old.data))
	}
	c.group, c.slots, c.dev, c.mnt, c.fresh = group, events, dev, mnt, false
	c.held = map[string]*held{}
	for n, one := range holds {
		c.held[one.Key] = &held{one, data[n]}
	}
	for _, key := range h.Lost {
		if !slices.Contains(c.lost, key) && c.end != nil {
			c.emit(Event{Kind: EventLost, Key: key})
		}
	}
	c.lost = h.Lost
	if c.cfg.FrontEnd == FUSE && dev == nil { // it was cut off
		return errors.Join(errNoFUSE, c.makeDescriptors())
	}
	c.conn = conn
	close(c.up)
	return nil
}

var errNoFUSE = errors.New("the FUSE connection was cut off")

// Probe reports why a front end cannot be had with a cache in dir; nil: it can. It
// leaves nothing.
func Probe(front FrontEnd, dir string) error {
	if front == Fanotify {
		d, err := os.Open(dir)
		if err != nil {
			return err
		}
		defer d.Close()
		return probeFanotify(d)
	}
	dev, mnt, err := mountFUSE()
	closeFiles(some(dev, mnt))
	return err
}

// choose finds the front end: FUSE where none is named, and fanotify where there is
// no FUSE.
func (c *Client) choose() error {
	if c.cfg.FrontEnd != "" {
		return c.makeDescriptors()
	}
	c.cfg.FrontEnd = FUSE
	err := c.makeDescriptors()
	if err == nil {
		return nil
	}
	c.cfg.FrontEnd = Fanotify
	if other := c.makeDescriptors(); other != nil {
		return &dsec.Error{Code: dsec.CodeUnsupported, Field: "front_end",
			Message: "neither FUSE nor fanotify pre-content events can be had here: " + err.Error() + "; " + other.Error(), Err: errors.Join(err, other)}
	}
	c.log.Info("files are filled by fanotify", "reason", err)
	return nil
}

// makeDescriptors makes what the front end needs anew.
func (c *Client) makeDescriptors() (err error) {
	closeFiles(some(c.group, c.slots, c.dev, c.mnt))
	c.group, c.slots, c.dev, c.mnt, c.fresh = nil, nil, nil, nil, true
	if c.cfg.FrontEnd == Fanotify {
		if err := probeFanotify(c.cacheDir); err != nil {
			return &dsec.Error{Code: dsec.CodeUnsupported, Field: "front_end",
				Message: "fanotify pre-content events need Linux 6.14, and the cache on ext4, XFS or btrfs", Err: err}
		}
		if c.group, err = newGroup(); err == nil {
			c.slots, err = newEventLog()
		}
		return err
	}
	if c.dev, c.mnt, err = mountFUSE(); err != nil {
		return &dsec.Error{Code: dsec.CodeUnsupported, Field: "front_end", Message: "there is no FUSE", Err: err}
	}
	if err := setReadAhead(c.mnt); err != nil {
		c.log.Info("the kernel reads ahead less than it could", "error", err)
	}
	return nil
}
