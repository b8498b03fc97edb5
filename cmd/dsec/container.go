package main

import (
	"context"
	"log/slog"
	"os"
	"path/filepath"

	"github.com/opendsec/dsec/internal/backend"
	"github.com/opendsec/dsec/internal/backend/container"
	"github.com/opendsec/dsec/internal/chronusbin"
	"github.com/opendsec/dsec/internal/disk"
)

// openContainer opens the container backend. Its launcher is this binary, and
// chronus comes out of it.
func openContainer(cfg *Config, log *slog.Logger) (backend.Backend, error) {
	chronus, err := writeChronus(cfg.RunDir)
	if err != nil {
		return nil, err
	}
	c := cfg.Container
	return container.New(container.Config{
		RunDir: filepath.Join(cfg.RunDir, "container"),
		Disk:   cfg.disk(log),
		Cgroup: cfg.cgroup(), Exclusive: true,
		Chronus:  chronus,
		Warm:     int(c.Warm),
		NetSlots: int(c.Ready),
		Groups:   int(c.Ready),
		Crash:    crash(),
		Logger:   log,
	})
}

// writeChronus writes the programs of a container below dir, and returns the
// path of chronus. The launcher takes its own sealed copies of these files.
func writeChronus(dir string) (string, error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return "", err
	}
	chronus := filepath.Join(dir, "chronus")
	for _, program := range []struct {
		path string
		read func() ([]byte, error)
	}{{chronus, chronusbin.Binary}, {chronus + "-files", chronusbin.Files}} {
		bin, err := program.read()
		if err != nil {
			return "", err
		}
		if err := os.WriteFile(program.path+".new", bin, 0o600); err != nil {
			return "", err
		}
		if err := os.Rename(program.path+".new", program.path); err != nil {
			return "", err
		}
	}
	return chronus, nil
}

// disk is where the writable layers are, and how they share it.
func (c *Config) disk(log *slog.Logger) disk.Options {
	return disk.Options{
		Dir: filepath.Join(c.DataDir, "volumes"), Driver: c.Container.DiskDriver, ImageBytes: c.Container.DiskImageBytes,
		MaxImageBytes: c.Container.DiskImageMaxBytes, Share: int(c.Container.DiskShare), Log: log,
	}
}

// cgroup is the name of this server's cgroups: that of the configuration, or
// one that no server with other data has.
func (c *Config) cgroup() string {
	if c.Container.Cgroup != "" {
		return c.Container.Cgroup
	}
	return c.instance()
}

// runLauncher is the process that starts containers, started by the edge. It
// does not return.
func runLauncher(context.Context, *env, []string) error {
	container.LauncherMain()
	return nil
}
