package main

import (
	"fmt"
	"log/slog"
	"path/filepath"
	"strings"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/layer/registry"
)

// RegistryConfig is the section [registry].
type RegistryConfig struct {
	Enabled      bool                `toml:"enabled"`
	AutoImport   bool                `toml:"auto_import"`
	Default      string              `toml:"default"`
	Insecure     []string            `toml:"insecure"`
	PrivateHosts []string            `toml:"private_hosts"`
	CAFile       string              `toml:"ca_file"`
	Credentials  string              `toml:"credentials"`
	MaxBytes     int64               `toml:"max_bytes"`
	CacheBytes   int64               `toml:"cache_bytes"`
	Mirrors      map[string][]string `toml:"mirrors"`
}

func (r *RegistryConfig) validate() error {
	for _, v := range []struct {
		name string
		v    int64
		low  int64
	}{{"max_bytes", r.MaxBytes, 1}, {"cache_bytes", r.CacheBytes, 0}} {
		if v.v < v.low || v.v > 1<<50 {
			return dsec.Invalid("registry."+v.name, "is %d, want %d to %d", v.v, v.low, int64(1<<50))
		}
	}
	return nil // the rest is checked by who uses it
}

// splitPairs reads HOST=URL pairs; a host may have several.
func splitPairs(text string) (map[string][]string, error) {
	m := map[string][]string{}
	for _, pair := range splitList(text) {
		k, v, ok := strings.Cut(pair, "=")
		if !ok || k == "" || v == "" {
			return nil, fmt.Errorf("%q: want HOST=URL", pair)
		}
		m[k] = append(m[k], v)
	}
	return m, nil
}

// openRegistry makes what fetches images; nil where that is off.
func openRegistry(cfg *Config, log *slog.Logger) (*registry.Client, error) {
	r := cfg.Registry
	if !r.Enabled {
		return nil, nil
	}
	c := registry.Config{
		Default: r.Default, Mirrors: r.Mirrors, Insecure: r.Insecure, Private: r.PrivateHosts, CAFile: r.CAFile,
		CredentialsFile: r.Credentials, MaxBytes: r.MaxBytes, CacheBytes: r.CacheBytes, Logger: log,
	}
	if r.CacheBytes > 0 {
		c.CacheDir = filepath.Join(cfg.DataDir, "registry")
	}
	return registry.New(c)
}
