package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/opendsec/dsec/internal/doctor"
	"github.com/opendsec/dsec/internal/testutil"
)

func layerFindings(t *testing.T, change func(*Config)) map[string]doctor.Finding {
	t.Helper()
	var c Config
	if err := decode(defaultConfig, &c); err != nil {
		t.Fatal(err)
	}
	c.DataDir = filepath.Join(testutil.Dir(t), "not", "there")
	change(&c)
	found := map[string]doctor.Finding{}
	for _, q := range layerQuestions(&c) {
		f := doctor.Finding{Name: q.Name, OK: true}
		var err error
		if f.Detail, err = q.Run(t.Context(), doctor.Options{Dir: c.DataDir}); err != nil {
			f.OK, f.Fix = false, err.Error()
		}
		found[q.Name] = f
	}
	if _, err := os.Stat(c.DataDir); err == nil {
		t.Error("it made the data directory")
	}
	return found
}

func TestDoctorLooksAtTheLayerStore(t *testing.T) {
	file := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	for _, tt := range []struct {
		store  string
		ok     bool
		detail string
	}{
		{"", true, "made at the first start"},
		{"dir:" + filepath.Dir(file), true, filepath.Dir(file)},
		{file, false, file},
		{"s3://bucket?endpoint=http://127.0.0.1:1&path_style=true", false, "s3"},
	} {
		got := layerFindings(t, func(c *Config) { c.Layers.Store = tt.store })["layer store"]
		if got.OK != tt.ok || !strings.Contains(got.Detail, tt.detail) {
			t.Errorf("%q: %+v", tt.store, got)
		}
	}
}

func TestDoctorTellsTheFrontEnd(t *testing.T) {
	testutil.Require(t, testutil.Root, testutil.Kernel(6, 14))
	for _, tt := range []struct{ frontEnd, verify, want string }{
		{"", verifyAlways, "fuse, which is taken first"},
		{"", verifyAuto, "fuse, which is taken first, not used: the kernel reads the store by itself (layers.verify)"},
		{"fanotify", verifyAlways, "fanotify, as layers.front_end says"},
	} {
		found := layerFindings(t, func(c *Config) { c.Layers.FrontEnd, c.Layers.Verify = tt.frontEnd, tt.verify })
		if got := found["layer front end"]; got.Detail != tt.want || !got.OK {
			t.Errorf("%+v, want %q", got, tt.want)
		}
		if got := found["loop devices"]; !got.OK || got.Detail != "with direct I/O" {
			t.Errorf("%+v", got)
		}
	}
}
