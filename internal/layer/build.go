package layer

import (
	"bytes"
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"hash"
	"io"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/hostos"
	"github.com/opendsec/dsec/internal/layer/convert"
)

// Build makes a layer of an archive: a tar of a root file system, an OCI
// layout or a docker-archive, plain or compressed with gzip or zstd. A layer that
// is no base keeps the whiteouts of its archive, in the form of OCI or of overlayfs,
// and hides by them what is below it in a sandbox. Build returns the layer and the
// findings of this archive.
//
// The layer is durable when Build returns. Where the store has it already, the
// one that is there is returned. On error nothing is visible, and no more
// space is used than before. Errors that the archive caused are invalid or
// unsupported; exhausted is a full disk, unavailable a stream that broke off
// or a build that took too long.
//
// Build returns once ctx ends; a Read of r that blocks then is left to
// whoever owns r, and nothing is done with what it returns.
func (s *Store) Build(ctx context.Context, opt BuildOptions, r io.Reader) (Meta, []string, error) {
	todo := convert.Options{Select: opt.Select, Kind: opt.Kind, At: opt.At, Strict: opt.Strict, Limits: s.opt.Limits}
	if err := todo.Check(); err != nil {
		return Meta{}, nil, err
	}
	ctx, cancel := context.WithTimeoutCause(ctx, s.opt.Timeout,
		dsec.Errorf(dsec.CodeUnavailable, "the import took more than %s", s.opt.Timeout))
	defer cancel()
	select {
	case s.builds <- struct{}{}:
		defer func() { <-s.builds }()
	case <-ctx.Done():
		return Meta{}, nil, canceled(ctx)
	}
	image, err := os.CreateTemp(s.tmp(), "image-*")
	if err != nil {
		return Meta{}, nil, storeError("make image file", err)
	}
	// After publish the name is gone, and this does nothing.
	defer func() { _ = os.Remove(image.Name()); _ = image.Close() }()

	res, src, err := s.convert(ctx, image, todo, r)
	if err != nil {
		return Meta{}, nil, err
	}
	meta := Meta{
		Version: metaVersion, Size: res.Size, Files: res.Files, Kind: cmp.Or(opt.Kind, dsec.LayerBase), Source: res.Source,
		SourceDigest: src.digest(), SourceSize: src.n,
		Created: time.Now().UTC(), Config: res.Config, Findings: res.Findings,
	}
	if err := digestImage(image, &meta); err != nil {
		return Meta{}, nil, err
	}
	meta, err = s.publish(image, meta)
	return meta, res.Findings, err
}

// canceled is the error of a call whose context ended: the cause where there
// is one for users, else that it was given up.
func canceled(ctx context.Context) error {
	if e, ok := errors.AsType[*dsec.Error](context.Cause(ctx)); ok {
		return e
	}
	return &dsec.Error{Code: dsec.CodeUnavailable, Message: "the import was given up", Err: context.Cause(ctx)}
}

// digestImage hashes the image, and apart the part that look-ups read.
func digestImage(f *os.File, meta *Meta) error {
	off, err := indexOffset(f, meta.Size)
	if err != nil {
		return err
	}
	whole, index := sha256.New(), sha256.New()
	for _, part := range []struct {
		from, to int64
		h        []hash.Hash
	}{
		{0, firstBlock, []hash.Hash{whole, index}},
		{firstBlock, off, []hash.Hash{whole}},
		{off, meta.Size, []hash.Hash{whole, index}},
	} {
		w := make([]io.Writer, len(part.h))
		for i, h := range part.h {
			w[i] = h
		}
		if err := copySection(io.MultiWriter(w...), f, part.from, part.to); err != nil {
			return fmt.Errorf("hash image: %w", err)
		}
	}
	meta.Digest = sumOf(whole)
	meta.IndexOffset, meta.IndexDigest = off, sumOf(index)
	return nil
}

func sumOf(h hash.Hash) string { return "sha256:" + hex.EncodeToString(h.Sum(nil)) }

type onlyWriter struct{ io.Writer }
type onlyReader struct{ io.Reader }

func copySection(w io.Writer, f io.ReaderAt, from, to int64) error {
	n, err := io.CopyBuffer(onlyWriter{w}, onlyReader{io.NewSectionReader(f, from, to-from)}, make([]byte, 256<<10))
	if err == nil && n != to-from {
		err = io.ErrUnexpectedEOF
	}
	return err
}

// firstBlock is the block with the superblock; go-erofs puts file data after
// it and the inodes at the end.
const firstBlock = 4096

// indexOffset reads from the superblock where the inodes begin.
func indexOffset(f io.ReaderAt, size int64) (int64, error) {
	const superOffset, metaBlock, magic = 1024, 40, 0xe0f5e1e2
	var super [48]byte
	if _, err := f.ReadAt(super[:], superOffset); err != nil {
		return 0, fmt.Errorf("read superblock: %w", err)
	}
	off := int64(binary.LittleEndian.Uint32(super[metaBlock:])) * firstBlock
	if binary.LittleEndian.Uint32(super[:]) != magic || off < firstBlock || off > size {
		return 0, errors.New("the image has no sound superblock")
	}
	return off, nil
}

// verify checks the image against what was written down when it was made:
// size, first block and inodes. File data are not read: that would be the
// whole image.
func (s *Store) verify(meta Meta) error {
	if err := s.checkSize(meta); err != nil {
		return err
	}
	f, err := os.Open(s.file(meta.Digest, imageExt))
	if err != nil {
		return err
	}
	defer f.Close()
	if meta.IndexOffset < firstBlock || meta.IndexOffset > meta.Size {
		return errors.New("metadata with an impossible index offset")
	}
	h := sha256.New()
	if err := copySection(h, f, 0, firstBlock); err != nil {
		return err
	}
	if err := copySection(h, f, meta.IndexOffset, meta.Size); err != nil {
		return err
	}
	if got := sumOf(h); got != meta.IndexDigest {
		return fmt.Errorf("the image's index has digest %s, want %s", got, meta.IndexDigest)
	}
	return nil
}

// publish makes the image visible: data first, then its name, then the
// metadata, whose name is what counts.
func (s *Store) publish(image *os.File, meta Meta) (Meta, error) {
	if err := image.Chmod(0o444); err != nil {
		return Meta{}, storeError("publish layer", err)
	}
	if err := image.Sync(); err != nil {
		return Meta{}, storeError("publish layer", err)
	}
	doc, err := json.Marshal(meta)
	if err != nil {
		return Meta{}, err
	}
	tmp := filepath.Join(s.tmp(), "meta-"+filepath.Base(image.Name()))
	defer func() { _ = os.Remove(tmp) }()
	if err := writeSynced(tmp, doc); err != nil {
		return Meta{}, storeError("publish layer", err)
	}

	// One that is there already is kept, unless it went bad: the new one then
	// takes its name. Mounts of the old one go on with the old file.
	if old, err := s.Get(meta.Digest); err == nil && s.verify(old) == nil {
		return old, nil
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	imagePath := s.file(meta.Digest, imageExt)
	if err := os.Rename(image.Name(), imagePath); err != nil {
		return Meta{}, storeError("publish layer", err)
	}
	if err := errors.Join(hostos.SyncDir(s.blobs()), os.Rename(tmp, s.file(meta.Digest, metaExt))); err != nil {
		_ = os.Remove(imagePath)
		return Meta{}, storeError("publish layer", err)
	}
	s.layers[meta.Digest] = &entry{meta: meta}
	if err := hostos.SyncDir(s.blobs()); err != nil {
		return Meta{}, storeError("publish layer", err)
	}
	return meta, nil
}

func writeSynced(path string, data []byte) error {
	f, err := os.OpenFile(path, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o644)
	if err != nil {
		return err
	}
	_, err = io.Copy(f, bytes.NewReader(data))
	return errors.Join(err, f.Sync(), f.Close())
}

// scratchFile makes a file without a name: it goes with its last descriptor.
func (s *Store) scratchFile() (*os.File, error) {
	fd, err := unix.Open(s.tmp(), unix.O_TMPFILE|unix.O_RDWR|unix.O_CLOEXEC, 0o600)
	if err == nil {
		return os.NewFile(uintptr(fd), "scratch"), nil
	}
	if !errors.Is(err, unix.EOPNOTSUPP) && !errors.Is(err, unix.EISDIR) {
		return nil, err
	}
	f, err := os.CreateTemp(s.tmp(), "scratch-*")
	if err != nil {
		return nil, err
	}
	return f, os.Remove(f.Name())
}

// sourceReader counts and hashes what came in, and keeps the error it ended
// with: the helper only sees the end of a pipe.
type sourceReader struct {
	r   io.Reader
	h   hash.Hash
	n   int64
	err error
}

func (s *sourceReader) Read(p []byte) (int, error) {
	n, err := s.r.Read(p)
	s.h.Write(p[:n])
	s.n += int64(n)
	if err != nil && err != io.EOF {
		s.err = err
	}
	return n, err
}

func (s *sourceReader) digest() string { return sumOf(s.h) }

// brokenOff is the error of a stream that its sender did not end.
func brokenOff(err error) error {
	if e, ok := errors.AsType[*dsec.Error](err); ok {
		return e
	}
	return &dsec.Error{Code: dsec.CodeUnavailable, Message: "the archive's stream broke off", Err: err}
}

// killGrace is how long the helper's descriptors may take to close after it
// was killed.
const killGrace = 5 * time.Second
