package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"strings"
	"syscall"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/layer"
	"github.com/opendsec/dsec/internal/layer/blob"
	"github.com/opendsec/dsec/internal/layer/blob/dirblob"
	"github.com/opendsec/dsec/internal/layer/blob/s3blob"
)

// blobDrivers is the list of all kinds of stores of layers.
var blobDrivers = []blob.Driver{dirblob.Driver, s3blob.Driver}

// LayersConfig is the section [layers].
type LayersConfig struct {
	Store            string   `toml:"store"`
	StoreCredentials string   `toml:"store_credentials"`
	StoreRequests    int64    `toml:"store_requests"`
	Verify           string   `toml:"verify"`
	FrontEnd         string   `toml:"front_end"`
	TraceFor         duration `toml:"trace_for"`
	CollapseBytes    int64    `toml:"collapse_bytes"`
	CacheDir         string   `toml:"cache_dir"`
	CacheBytes       int64    `toml:"cache_bytes"`
	RetryFor         duration `toml:"retry_for"`
	Scrub            int64    `toml:"scrub_bytes_per_second"`
}

func (l *LayersConfig) validate() error {
	if l.Store != "" {
		if err := blob.Check(blobDrivers, l.Store); err != nil {
			return ofStore(err, "")
		}
	}
	if l.StoreCredentials != "" && !filepath.IsAbs(l.StoreCredentials) {
		return dsec.Invalid("layers.store_credentials", "want an absolute path")
	}
	if l.StoreRequests < 1 || l.StoreRequests > 4096 {
		return dsec.Invalid("layers.store_requests", "is %d, want 1 to 4096", l.StoreRequests)
	}
	if l.CollapseBytes < 0 || l.CollapseBytes > 1<<50 {
		return dsec.Invalid("layers.collapse_bytes", "is %d, want 0 to %d", l.CollapseBytes, int64(1<<50))
	}
	return l.validateReads()
}

// storeURL is where layers are.
func (c *Config) storeURL() string {
	return cmp.Or(c.Layers.Store, filepath.Join(c.DataDir, "layers", "blobs"))
}

// storeDir is the directory of the store; empty if it is none.
func (c *Config) storeDir() string {
	dir := strings.TrimPrefix(c.storeURL(), dirblob.Driver.Scheme+":")
	if !strings.HasPrefix(dir, "/") {
		return ""
	}
	return dir
}

// cacheDir is where what was read of layers is kept.
func (c *Config) cacheDir() string {
	return cmp.Or(c.Layers.CacheDir, filepath.Join(c.DataDir, "layers", "cache"))
}

// openBlobs opens the store that the configuration names: a blob.Sweeper and an
// io.Closer.
func openBlobs(ctx context.Context, cfg *Config, reg prometheus.Registerer) (blob.Store, error) {
	s, err := blob.Open(ctx, blobDrivers, cfg.storeURL(),
		blob.Credentials{File: cfg.Layers.StoreCredentials, Env: os.LookupEnv},
		blob.Options{Requests: int(cfg.Layers.StoreRequests), Metrics: reg})
	return s, ofStore(err, cfg.storeDir())
}

// checkStore refuses a store that is another control plane's before anything is made of
// a new one, which has no etcd yet. Of any other the apiserver knows whose it is.
func checkStore(ctx context.Context, cfg *Config) error {
	if cfg.Layers.Store == "" || len(cfg.Etcd.Endpoints) > 0 {
		return nil
	}
	if _, err := os.Stat(cfg.etcdDir()); !errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	blobs, err := openBlobs(ctx, cfg, nil)
	if err != nil {
		return err
	}
	defer func() { _ = blobs.(io.Closer).Close() }()
	return layer.CheckUnowned(ctx, blobs)
}

// ofStore has an error about the store name the key of the configuration. dir is
// where the store is, if it is a directory.
func ofStore(err error, dir string) error {
	if err == nil {
		return nil
	}
	named := *typed(err)
	switch errno, ok := errors.AsType[syscall.Errno](err); {
	case named.Field != "":
		return ofLayers(&named)
	case ok && dir != "":
		named = *ofDir("layers.store", dir, errno)
	default:
		named.Field = "layers.store"
		if op, ok := errors.AsType[*net.OpError](err); ok { // which says nothing but where and why
			named.Message += ": " + op.Error()
		}
	}
	return &named
}

// ofLayers has an error about a field name it as the file does.
func ofLayers(err error) error {
	e, ok := errors.AsType[*dsec.Error](err)
	if !ok || e.Field == "" {
		return err
	}
	named := *e
	named.Field = "layers." + e.Field
	return &named
}

// ofDir is the error of a directory that the configuration names.
func ofDir(key, dir string, err error) *dsec.Error {
	return &dsec.Error{
		Code: systemCode(err), Field: key, Err: err,
		Message: fmt.Sprintf("%s: %s; want a directory that this process may make, read and write", dir, cause(err)),
	}
}
