package main

import (
	"context"
	"io"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/daemon"
)

func TestOpenBlobs(t *testing.T) {
	open := func(change func(*Config)) error {
		var c Config
		if err := decode(defaultConfig, &c); err != nil {
			t.Fatal(err)
		}
		c.DataDir = t.TempDir()
		change(&c)
		if err := c.Validate(); err != nil {
			t.Fatal(err)
		}
		s, err := openBlobs(t.Context(), &c, prometheus.NewRegistry())
		if err != nil {
			return err
		}
		defer s.(io.Closer).Close()
		if err := s.Put(t.Context(), "a", strings.NewReader("a"), 1); err != nil {
			t.Error(err)
		}
		dir := strings.TrimPrefix(c.Layers.Store, "dir:")
		if dir == "" {
			dir = filepath.Join(c.DataDir, "layers", "blobs")
		}
		if _, err := os.Stat(filepath.Join(dir, "a")); err != nil {
			t.Error(err)
		}
		return nil
	}
	shared := t.TempDir()
	for _, store := range []string{"", shared, "dir:" + shared} {
		if err := open(func(c *Config) { c.Layers.Store = store }); err != nil {
			t.Errorf("%s: %v", store, err)
		}
	}
	loose := filepath.Join(shared, "keys")
	if err := os.WriteFile(loose, []byte("aws_access_key_id=a\naws_secret_access_key=b\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(loose, 0o644); err != nil {
		t.Fatal(err)
	}
	t.Setenv("AWS_ACCESS_KEY_ID", "")
	for file, want := range map[string]string{"": "layers.store_credentials: the store needs keys", loose: "layers.store_credentials: has mode 0644"} {
		err := open(func(c *Config) {
			c.Layers.Store, c.Layers.StoreCredentials = "s3://bucket", file
		})
		if err == nil || dsec.CodeOf(err) != dsec.CodeInvalid || !strings.HasPrefix(err.Error(), want) {
			t.Errorf("credentials in %q: %v, want %s", file, err, want)
		}
	}
}

// TestErrorsOfStoresNameTheirKeys: what the server says at its start is the file's
// own word for what is wrong, and what it wants.
func TestErrorsOfStoresNameTheirKeys(t *testing.T) {
	file := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	nobody, err := net.Listen("tcp", "127.0.0.1:0") // nothing is accepted here
	if err != nil {
		t.Fatal(err)
	}
	bucket := "s3://bucket?endpoint=http://" + nobody.Addr().String()
	if err := nobody.Close(); err != nil {
		t.Fatal(err)
	}
	t.Setenv("AWS_ACCESS_KEY_ID", "a")
	t.Setenv("AWS_SECRET_ACCESS_KEY", "b")
	const directory = ": not a directory; want a directory that this process may make, read and write (invalid)"
	for _, tt := range []struct {
		change    func(*Config)
		key, want string
	}{
		{func(c *Config) { c.Layers.Store = file }, "layers.store: ", file + directory},
		{func(c *Config) { c.Layers.Store = "dir:" + file + "/x" }, "layers.store: ", file + "/x" + directory},
		{func(c *Config) { c.Layers.Store = "nonsense" }, "layers.store: ", "want a path that begins with /, or a URL of dir: or s3: (invalid)"},
		{func(c *Config) { c.Layers.Store = bucket }, "layers.store: ", "connection refused (unavailable)"},
		{func(c *Config) { c.Layers.Store = bucket + "&ca_file=/nosuch" }, "layers.store: ", "ca_file cannot be read: want a file of certificates in PEM (invalid)"},
		{func(c *Config) { c.Layers.Store, c.Layers.StoreCredentials = bucket, "/nosuch" }, "layers.store_credentials: ", "no such file or directory: want a file that this process may read, with the keys in its section [default] (invalid)"},
		{func(c *Config) { c.Layers.CacheDir, c.Layers.Verify = file, verifyAlways }, "layers.cache_dir: ", file + directory},
	} {
		var c Config
		if err := decode(defaultConfig, &c); err != nil {
			t.Fatal(err)
		}
		c.DataDir = t.TempDir()
		c.RunDir = filepath.Join(c.DataDir, "run")
		tt.change(&c)
		if got := line(openAll(t, &c)); !strings.HasPrefix(got, tt.key) || !strings.HasSuffix(got, tt.want) {
			t.Errorf("%q, want %s...%s", got, tt.key, tt.want)
		}
	}
}

// openAll does of the server's start what is about stores, which is to fail.
func openAll(t *testing.T, c *Config) error {
	t.Helper()
	if err := c.Validate(); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	blobs, err := openBlobs(ctx, c, prometheus.NewRegistry())
	if err != nil {
		return err
	}
	defer blobs.(io.Closer).Close()
	var stack daemon.Stack
	_, err = openLazy(ctx, c, blobs, slog.New(slog.DiscardHandler), &stack)
	if err == nil {
		t.Fatal("a store was opened that cannot be")
	}
	return err
}
