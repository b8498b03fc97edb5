package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"strings"
	"syscall"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/client"
	"github.com/opendsec/dsec/internal/layer/tardir"
)

// place is one side of a copy: a path on this machine, or in a sandbox.
type place struct {
	sandbox string // empty: this machine
	path    string
}

func parsePlace(arg string) place {
	if id, p, ok := strings.Cut(arg, ":"); ok {
		if _, err := dsec.ParseSandboxID(id); err == nil {
			return place{id, p}
		}
	}
	return place{path: arg}
}

func runCp(ctx context.Context, e *env, args []string) error {
	f := clientFlags(e, "cp")
	archive := f.Bool("a", false, "keep the owners of this machine's files, in place of the sandbox's user")
	args, err := f.parse(args, 2, 2, 0)
	if err != nil {
		return err
	}
	src, dst := parsePlace(args[0]), parsePlace(args[1])
	if (src.sandbox == "") == (dst.sandbox == "") {
		return dsec.Invalid("SRC", "want exactly one of SRC and DST as ID:PATH, with the 25 characters of an ID that `dsec sandbox list` shows")
	}
	if src.sandbox != "" || src.path == "-" {
		if err := f.without("but for files and directories of this machine", "a"); err != nil {
			return err
		}
	}
	c, err := f.client()
	if err != nil {
		return err
	}
	defer c.Close()
	cp := copier{env: e, sandbox: c.Sandbox(src.sandbox + dst.sandbox), archive: *archive}
	if src.sandbox != "" {
		return cp.fetch(ctx, src.path, dst.path)
	}
	return cp.put(ctx, src.path, dst.path)
}

type copier struct {
	env     *env
	sandbox *client.Sandbox
	archive bool
}

// put copies to the sandbox.
func (c copier) put(ctx context.Context, src, dst string) error {
	if src == "-" {
		_, err := c.sandbox.Upload(ctx, dst, c.env.stdin, "")
		return err
	}
	info, err := os.Stat(src)
	if err != nil {
		return ofSystem("SRC", err)
	}
	target, err := c.target(ctx, src, dst)
	if err != nil {
		return err
	}
	switch {
	case info.IsDir():
		user := ""
		if !c.archive {
			if user, err = c.user(ctx); err != nil {
				return err
			}
		}
		tree := tarOf(src, tardir.Write)
		defer func() { _ = tree.Close() }()
		_, err = c.sandbox.Upload(ctx, target, tree, user)
		return err
	case !info.Mode().IsRegular():
		return dsec.Invalid("SRC", "want a regular file or a directory")
	}
	f, err := os.Open(src)
	if err != nil {
		return ofSystem("SRC", err)
	}
	defer func() { _ = f.Close() }()
	o := client.WriteOptions{Mode: info.Mode()}
	if st, ok := info.Sys().(*syscall.Stat_t); ok && c.archive {
		o.User = fmt.Sprintf("%d:%d", st.Uid, st.Gid)
	}
	_, err = c.sandbox.Write(ctx, target, f, o)
	return err
}

// target is where in the sandbox src goes: below dst where that is a
// directory, else to dst itself.
func (c copier) target(ctx context.Context, src, dst string) (string, error) {
	info, err := c.sandbox.Stat(ctx, dst)
	switch {
	case err == nil && info.IsDir():
	case err == nil || dsec.CodeOf(err) == dsec.CodeNotFound:
		if !strings.HasSuffix(dst, "/") {
			return dst, nil
		}
	default:
		return "", err
	}
	abs, err := filepath.Abs(src) // of "." and "..", too, the name is wanted
	if err != nil {
		return "", err
	}
	return path.Join(dst, filepath.Base(abs)), nil
}

func (c copier) user(ctx context.Context) (string, error) {
	info, err := c.sandbox.Info(ctx)
	if err != nil {
		return "", err
	}
	if info.Spec.User == "" {
		return "root", nil
	}
	return info.Spec.User, nil
}

// fetch copies from the sandbox.
func (c copier) fetch(ctx context.Context, src, dst string) error {
	if dst == "-" {
		_, err := c.sandbox.Download(ctx, src, c.env.stdout)
		return err
	}
	info, err := c.sandbox.Stat(ctx, src)
	if err != nil {
		return err
	}
	if local, err := os.Stat(dst); err == nil && local.IsDir() {
		name := path.Base(path.Clean(src))
		if name == "/" || name == "." {
			name = "root"
		}
		dst = filepath.Join(dst, name)
	} else if err == nil && info.IsDir() {
		return dsec.Invalid("DST", "is a file, and SRC a directory")
	} else if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return ofSystem("DST", err)
	}
	switch info.Type {
	case "dir":
		return c.fetchTree(ctx, src, dst)
	case "file":
		return c.fetchFile(ctx, src, dst, fs.FileMode(info.Mode&0o777))
	}
	return dsec.Invalid("SRC", "is a %s; want a file or a directory", info.Type)
}

// fetchFile replaces dst once the whole file is there.
func (c copier) fetchFile(ctx context.Context, src, dst string, mode fs.FileMode) error {
	f, err := os.CreateTemp(filepath.Dir(dst), ".dsec-*")
	if err != nil {
		return &dsec.Error{Code: systemCode(err), Field: "DST", Message: dst + ": " + cause(err), Err: err}
	}
	defer func() { _ = os.Remove(f.Name()) }()
	_, err = c.sandbox.Read(ctx, src, 0, 0, f)
	if err == nil {
		err = f.Chmod(mode)
	}
	if cerr := f.Close(); err == nil {
		err = cerr
	}
	if err != nil {
		return err
	}
	return os.Rename(f.Name(), dst)
}

func (c copier) fetchTree(ctx context.Context, src, dst string) error {
	if err := os.MkdirAll(dst, 0o755); err != nil {
		return ofSystem("DST", err)
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	r, w := io.Pipe()
	downloaded := make(chan error, 1)
	go func() {
		_, err := c.sandbox.Download(ctx, src, w)
		_ = w.CloseWithError(err)
		downloaded <- err
	}()
	err := unpack(r, dst)
	_ = r.CloseWithError(err)
	if derr := <-downloaded; err == nil || derr != nil && !errors.Is(derr, err) && dsec.CodeOf(derr) != dsec.CodeInternal {
		return derr
	}
	return err
}
