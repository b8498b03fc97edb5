package main

import (
	"archive/tar"
	"context"
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strings"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/client"
)

func runLayerExport(ctx context.Context, e *env, args []string) error {
	f := clientFlags(e, "layer export")
	replace := f.Bool("replace", false, "put the export in the place of an earlier one of that name")
	progress := progressFlag(f)
	c, args, err := f.connect(args, 2, -1, 0)
	if err != nil {
		return err
	}
	defer c.Close()
	layers, out := args[:len(args)-1], args[len(args)-1]
	m, err := startMeter(e, *progress)
	if err != nil {
		return err
	}
	digest, err := export(ctx, e, c, layers, out, *replace, m)
	m.stop()
	if err != nil || out == "-" {
		return err
	}
	return f.print(struct {
		Digest string `json:"digest"`
		File   string `json:"file"`
	}{digest, out}, "", [][]string{{out, digest}})
}

// export writes to a file, a directory or standard output. What is not whole does
// not have the name that was asked for.
func export(ctx context.Context, e *env, c *client.Client, layers []string, out string, replace bool, m *meter) (digest string, err error) {
	if out == "-" {
		if isTerminal(e.stdout) {
			return "", dsec.Invalid("FILE", "standard output is a terminal: want a pipe or a file for the archive")
		}
		return c.ExportLayers(ctx, layers, e.stdout, m.set)
	}
	if err := mayWrite(out, replace); err != nil {
		return "", err
	}
	part := filepath.Clean(out) + "." + rand.Text()[:8] + ".part"
	defer func() { _ = os.RemoveAll(part) }() // in vain once it has its name
	if isTar(out) {
		digest, err = exportTar(ctx, c, layers, part, m)
	} else {
		digest, err = exportLayout(ctx, c, layers, part, m)
	}
	if err == nil && replace && !isTar(out) {
		err = os.RemoveAll(out)
	}
	if err == nil {
		err = os.Rename(part, out)
	}
	return digest, ofPart(err, part, out)
}

// isTar reports whether an export to this name is one file.
func isTar(out string) bool { return strings.HasSuffix(out, ".tar") }

// mayWrite refuses an export in the place of something that is there, and also with
// replace of what no export has written.
func mayWrite(out string, replace bool) error {
	fi, err := os.Lstat(out)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil
	case err != nil:
		return ofSystem("FILE", err)
	case !replace:
		return &dsec.Error{Code: dsec.CodeConflict, Field: "FILE", Message: out + " is there already; --replace puts the export in its place"}
	case isTar(out) && fi.Mode().IsRegular():
		return nil
	case isTar(out):
		return &dsec.Error{Code: dsec.CodeConflict, Field: "FILE", Message: out + " is no file, want one to replace"}
	}
	if _, err := os.Lstat(filepath.Join(out, "oci-layout")); err != nil {
		return &dsec.Error{Code: dsec.CodeConflict, Field: "FILE", Message: out + " is no OCI layout, want one to replace", Err: err}
	}
	return nil
}

func exportTar(ctx context.Context, c *client.Client, layers []string, part string, m *meter) (digest string, err error) {
	f, err := os.OpenFile(part, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o666)
	if err != nil {
		return "", err
	}
	digest, err = c.ExportLayers(ctx, layers, f, m.set)
	return digest, errors.Join(err, f.Close())
}

func exportLayout(ctx context.Context, c *client.Client, layers []string, part string, m *meter) (digest string, err error) {
	if err := os.Mkdir(part, 0o777); err != nil {
		return "", err
	}
	r, w := io.Pipe()
	unpacked := make(chan error, 1)
	go func() {
		err := unpackLayout(part, r)
		_ = r.CloseWithError(err)
		unpacked <- err
	}()
	digest, err = c.ExportLayers(ctx, layers, w, m.set)
	_ = w.CloseWithError(err)
	if uerr := <-unpacked; err == nil {
		err = uerr
	}
	return digest, err
}

// ofPart has an error of this machine name what was asked for, and not the file that
// is to become that.
func ofPart(err error, part, out string) error {
	file, cause := inSystem(err)
	if cause == nil {
		return err
	}
	if rest, ok := strings.CutPrefix(file, part); ok {
		file = out + rest
	}
	return ofSystem("FILE", &fs.PathError{Path: file, Err: cause})
}

// layoutName are the files of an OCI layout; what else a server sends is not
// written anywhere.
var layoutName = regexp.MustCompile(`^(?:oci-layout|index\.json|blobs/sha256/[0-9a-f]{64})$`)

// unpackLayout unpacks the tar stream of an OCI layout, and checks its blobs.
func unpackLayout(dir string, r io.Reader) error {
	if err := os.MkdirAll(filepath.Join(dir, "blobs", "sha256"), 0o777); err != nil {
		return err
	}
	for tr := tar.NewReader(r); ; {
		hdr, err := tr.Next()
		if err == io.EOF {
			_, err = io.Copy(io.Discard, r) // what comes behind the end
			return err
		}
		if err != nil {
			return err
		}
		if hdr.Typeflag != tar.TypeReg || !layoutName.MatchString(hdr.Name) {
			return fmt.Errorf("the server sent %.100q, which is no file of an OCI layout", hdr.Name)
		}
		f, err := os.OpenFile(filepath.Join(dir, hdr.Name), os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o666)
		if err != nil {
			return err
		}
		h := sha256.New()
		_, err = io.Copy(io.MultiWriter(f, h), tr)
		if err = errors.Join(err, f.Close()); err != nil {
			return err
		}
		if want, ok := strings.CutPrefix(hdr.Name, "blobs/sha256/"); ok && hex.EncodeToString(h.Sum(nil)) != want {
			return fmt.Errorf("the server sent another blob than %s", want)
		}
	}
}
