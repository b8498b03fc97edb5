package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"time"

	"github.com/opendsec/dsec/internal/backend/container"
	"github.com/opendsec/dsec/internal/doctor"
	"github.com/opendsec/dsec/internal/layer/lazy"
)

// layerQuestions are what doctor asks about layers.
func layerQuestions(cfg *Config) []doctor.Question {
	return []doctor.Question{
		{Name: "layer store", Need: doctor.Required, Run: cfg.askStore,
			Fix: "see layers.store and layers.store_credentials in the configuration, and docs/stores.md"},
		{Name: "layer front end", Need: doctor.Recommended, Run: cfg.askFrontEnd,
			Fix: "modprobe fuse, or Linux 6.14 and layers.cache_dir on ext4, XFS or btrfs: without, layers are read only from a directory, by the kernel, unchecked"},
		{Name: "loop devices", Need: doctor.Recommended, Run: askLoop,
			Fix: "modprobe loop: without loop devices that read past the page cache reads of layers are small, or kept twice in memory"},
	}
}

// storeTimeout is how long the store may take to answer.
const storeTimeout = 10 * time.Second

// askStore opens the store, or looks at its directory, which the server makes.
func (c *Config) askStore(ctx context.Context, _ doctor.Options) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, storeTimeout)
	defer cancel()
	dir := c.storeDir()
	if dir == "" {
		scheme, _, _ := strings.Cut(c.storeURL(), ":") // the rest may hold what is nobody's
		s, err := openBlobs(ctx, c, nil)
		if err != nil {
			return scheme, err
		}
		return scheme + ", answers", s.(io.Closer).Close()
	}
	found := make(chan error, 1)
	go func() { // a file system may never answer
		info, err := os.Stat(dir)
		if err == nil && !info.IsDir() {
			err = errors.New("want a directory")
		}
		found <- err
	}()
	var err error
	select {
	case err = <-found:
	case <-ctx.Done():
		err = fmt.Errorf("its file system does not answer: %w", context.Cause(ctx))
	}
	if errors.Is(err, os.ErrNotExist) {
		return "directory " + dir + ", made at the first start", nil
	}
	return "directory " + dir, err
}

// askFrontEnd tells which front end is taken.
func (c *Config) askFrontEnd(_ context.Context, _ doctor.Options) (string, error) {
	if os.Geteuid() != 0 {
		return "", errors.New("only root can tell")
	}
	dir := doctor.Above(c.cacheDir())
	why := map[lazy.FrontEnd]error{lazy.FUSE: lazy.Probe(lazy.FUSE, dir), lazy.Fanotify: lazy.Probe(lazy.Fanotify, dir)}
	use := ""
	if c.storeDir() != "" && c.Layers.Verify != verifyAlways {
		use = ", not used: the kernel reads the store by itself (layers.verify)"
	}
	if front := lazy.FrontEnd(c.Layers.FrontEnd); front != "" {
		return string(front) + ", as layers.front_end says" + use, why[front]
	}
	switch {
	case why[lazy.FUSE] == nil:
		return string(lazy.FUSE) + ", which is taken first" + use, nil
	case why[lazy.Fanotify] == nil:
		return fmt.Sprintf("%s, for there is no FUSE (%v)%s", lazy.Fanotify, why[lazy.FUSE], use), nil
	}
	return "none" + use, errors.Join(why[lazy.FUSE], why[lazy.Fanotify])
}

// askLoop tries one.
func askLoop(_ context.Context, o doctor.Options) (string, error) {
	if os.Geteuid() != 0 {
		return "", errors.New("only root can tell")
	}
	direct, err := container.ProbeLoop(doctor.Above(o.Dir))
	if err == nil && !direct {
		err = errors.New("without direct I/O on the data directory's file system")
	}
	return "with direct I/O", err
}
