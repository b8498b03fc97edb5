package main

import (
	"context"
	"errors"
	"os"
	"path/filepath"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/layer/blob"
	"github.com/opendsec/dsec/internal/layer/blob/dirblob"
	"github.com/opendsec/dsec/internal/layer/blob/s3blob"
)

// blobDrivers is the list of all kinds of stores of layers.
var blobDrivers = []blob.Driver{dirblob.Driver, s3blob.Driver}

// LayersConfig is the section [layers].
type LayersConfig struct {
	Store            string `toml:"store"`
	StoreCredentials string `toml:"store_credentials"`
	StoreRequests    int64  `toml:"store_requests"`
}

func (l *LayersConfig) validate() error {
	if l.Store != "" {
		if err := blob.Check(blobDrivers, l.Store); err != nil {
			return ofLayers(err)
		}
	}
	if l.StoreCredentials != "" && !filepath.IsAbs(l.StoreCredentials) {
		return dsec.Invalid("layers.store_credentials", "want an absolute path")
	}
	if l.StoreRequests < 1 || l.StoreRequests > 4096 {
		return dsec.Invalid("layers.store_requests", "is %d, want 1 to 4096", l.StoreRequests)
	}
	return nil
}

// openBlobs opens the store that the configuration names: a blob.Sweeper and an
// io.Closer.
func openBlobs(ctx context.Context, cfg *Config, reg prometheus.Registerer) (blob.Store, error) {
	url := cfg.Layers.Store
	if url == "" {
		url = filepath.Join(cfg.DataDir, "layers", "blobs")
	}
	s, err := blob.Open(ctx, blobDrivers, url,
		blob.Credentials{File: cfg.Layers.StoreCredentials, Env: os.LookupEnv},
		blob.Options{Requests: int(cfg.Layers.StoreRequests), Metrics: reg})
	return s, ofLayers(err)
}

// ofLayers has an error about a field name it as the file does.
func ofLayers(err error) error {
	e, ok := errors.AsType[*dsec.Error](err)
	if !ok || e.Code != dsec.CodeInvalid || e.Field == "" {
		return err
	}
	named := *e
	named.Field = "layers." + e.Field
	return &named
}
