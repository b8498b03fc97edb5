package main

import (
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/opendsec/dsec"
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
