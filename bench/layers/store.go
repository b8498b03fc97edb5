package main

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"github.com/opendsec/dsec/internal/testutil/faultnet"
	"github.com/opendsec/dsec/internal/testutil/s3server"
)

// layerStore is where the layers of one suite are.
type layerStore struct {
	place *place // of rivals, and of a dir
	dir   string // whose files the store is; empty: elsewhere
	url   string
	env   []string // of a server that uses it
	net   *faultnet.Proxy
	s3    *s3server.Server
}

// newStore makes the store that the flag asks for, in a directory of its own.
func (b *bench) newStore(ctx context.Context) (*layerStore, error) {
	dir, err := os.MkdirTemp(b.work, "store-")
	if err != nil {
		return nil, err
	}
	s := &layerStore{url: b.store}
	if s.place, err = newPlace(dir); err != nil {
		return nil, err
	}
	switch b.store {
	case "dir":
		s.dir, s.url = filepath.Join(s.place.backing, "layers"), filepath.Join(s.place.Dir(), "layers")
	case "s3":
		err = s.startS3(ctx, filepath.Join(dir, "s3"))
	}
	if b.verify {
		s.env = append(s.env, "DSEC_LAYERS_VERIFY=always")
	}
	s.env = append(s.env, "DSEC_LAYERS_STORE="+s.url)
	if err != nil {
		return nil, errors.Join(err, s.close())
	}
	return s, nil
}

func (s *layerStore) startS3(ctx context.Context, dir string) error {
	if err := os.Mkdir(dir, 0o700); err != nil {
		return err
	}
	var err error
	if s.s3, err = s3server.Start(ctx, dir, s3server.Options{}); err != nil {
		return err
	}
	if s.net, err = faultnet.Listen(s.s3.Addr); err != nil {
		return err
	}
	s.dir = filepath.Join(dir, "objects")
	s.url = fmt.Sprintf("s3://%s?endpoint=%s&path_style=true", s.s3.Bucket, s.s3.Endpoint(s.net.Addr()))
	s.env = append(s.env, "AWS_ACCESS_KEY_ID="+s.s3.ID, "AWS_SECRET_ACCESS_KEY="+s.s3.Secret)
	return nil
}

// fast takes all slowness away.
func (s *layerStore) fast() {
	s.place.fast()
	if s.net != nil {
		s.net.Set(faultnet.Fault{})
	}
}

// delay has each read of the store, and of what rivals read, take so much longer.
func (s *layerStore) delay(d time.Duration) {
	s.place.delay(d)
	if s.net != nil {
		s.net.Set(faultnet.Fault{Delay: d})
	}
}

// pace bounds the bytes a second.
func (s *layerStore) pace(bytesPerSecond int64) {
	s.place.pace(bytesPerSecond)
	if s.net != nil {
		s.net.Set(faultnet.Fault{BytesPerSecond: bytesPerSecond})
	}
}

// read is how many bytes came from the store so far, and ok whether that is known.
func (s *layerStore) read() (n int64, ok bool) {
	switch {
	case s.net != nil:
		return s.net.FromServer(), true
	case s.dir != "":
		return s.place.BytesRead(), true
	}
	return 0, false
}

// forget takes what the store and rivals read from the page cache.
func (s *layerStore) forget() error {
	err := s.place.forget()
	if s.s3 != nil {
		err = errors.Join(err, forgetBelow(s.dir))
	}
	return err
}

// waitTraces waits for the traces of n layers.
func (s *layerStore) waitTraces(ctx context.Context, n int) error {
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	for {
		found := 0
		err := filepath.WalkDir(s.dir, func(_ string, d fs.DirEntry, err error) error {
			if err == nil && d.Name() == "trace" {
				found++
			}
			return err
		})
		if err != nil || found >= n {
			return err
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("%d of %d traces: %w", found, n, ctx.Err())
		case <-time.After(100 * time.Millisecond):
		}
	}
}

func (s *layerStore) close() error {
	var errs []error
	if s.net != nil {
		errs = append(errs, s.net.Close())
	}
	if s.s3 != nil {
		errs = append(errs, s.s3.Close())
	}
	errs = append(errs, s.place.Close())
	return errors.Join(append(errs, os.RemoveAll(filepath.Dir(s.place.backing)))...)
}
