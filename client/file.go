package client

import (
	"bytes"
	"context"
	"errors"
	"io"
	"io/fs"
	"iter"
	"strings"
	"time"
	"unicode/utf8"

	"connectrpc.com/connect"

	"github.com/opendsec/dsec"
	dsecv1 "github.com/opendsec/dsec/proto/dsec/v1"
	"github.com/opendsec/dsec/proto/dsec/v1/dsecv1connect"
)

// FileInfo describes a file of a sandbox. Names may hold any bytes but NUL and /.
type FileInfo struct {
	Name string
	// Type is file, dir, symlink, fifo, socket, char or block.
	Type     string
	Size     int64
	Mode     uint32 // 07777 bits
	UID, GID uint32 // as seen inside
	Modified time.Time
	Target   string // of a symlink
}

// IsDir reports whether it is a directory.
func (f FileInfo) IsDir() bool { return f.Type == "dir" }

func pathOf(name string) *dsecv1.Path {
	if utf8.ValidString(name) {
		return &dsecv1.Path{Path: name}
	}
	return &dsecv1.Path{Raw: []byte(name)}
}

func fileInfoOf(e *dsecv1.Entry) FileInfo {
	name := e.GetName()
	if raw := e.GetRawName(); len(raw) > 0 {
		name = string(raw)
	}
	return FileInfo{
		Name: name, Type: e.GetType(), Size: e.GetSize(), Mode: e.GetMode(), UID: e.GetUid(), GID: e.GetGid(),
		Modified: timeOf(e.GetModified()), Target: string(e.GetLinkTarget()),
	}
}

// Stat describes the file at path, and where it is a symlink its target.
func (s *Sandbox) Stat(ctx context.Context, path string) (FileInfo, error) {
	return s.stat(ctx, path, true)
}

// Lstat is Stat without following a symlink in the last place.
func (s *Sandbox) Lstat(ctx context.Context, path string) (FileInfo, error) {
	return s.stat(ctx, path, false)
}

func (s *Sandbox) stat(ctx context.Context, path string, follow bool) (FileInfo, error) {
	res, err := call(ctx, s.c, s.c.file.Stat, &dsecv1.StatRequest{SandboxId: string(s.id), Path: pathOf(path), Follow: follow}, dsec.Retryable)
	if err != nil {
		return FileInfo{}, err
	}
	return fileInfoOf(res.Entry), nil
}

// ReadDir lists a directory, sorted by the bytes of the names. An error ends the list.
func (s *Sandbox) ReadDir(ctx context.Context, path string) iter.Seq2[FileInfo, error] {
	return func(yield func(FileInfo, error) bool) {
		req := &dsecv1.ListDirRequest{SandboxId: string(s.id), Path: pathOf(path)}
		for {
			res, err := call(ctx, s.c, s.c.file.ListDir, req, dsec.Retryable)
			if err != nil {
				yield(FileInfo{}, err)
				return
			}
			for _, e := range res.Entries {
				f := fileInfoOf(e)
				req.After = []byte(f.Name)
				if !yield(f, nil) {
					return
				}
			}
			if !res.More || len(res.Entries) == 0 {
				return
			}
		}
	}
}

// Mkdir makes a directory; with parents also missing parents, and it is then
// no error where it is there already.
func (s *Sandbox) Mkdir(ctx context.Context, path string, mode fs.FileMode, parents bool) error {
	_, err := call(ctx, s.c, s.c.file.Mkdir, &dsecv1.MkdirRequest{
		SandboxId: string(s.id), Path: pathOf(path), Mode: unixMode(mode), Parents: parents,
	}, dsec.Retryable)
	return err
}

// Rename moves a file, replacing what is at the new place as rename(2) does.
func (s *Sandbox) Rename(ctx context.Context, from, to string) error {
	_, err := call(ctx, s.c, s.c.file.Rename, &dsecv1.RenameRequest{SandboxId: string(s.id), From: pathOf(from), To: pathOf(to)}, dsec.Retryable)
	return err
}

// Remove removes a file or an empty directory; with recursive all that is below it.
func (s *Sandbox) Remove(ctx context.Context, path string, recursive bool) error {
	_, err := call(ctx, s.c, s.c.file.Remove, &dsecv1.RemoveRequest{SandboxId: string(s.id), Path: pathOf(path), Recursive: recursive}, dsec.Retryable)
	return err
}

// Read copies a regular file to w, from offset on, length bytes or to the end
// where length is 0.
func (s *Sandbox) Read(ctx context.Context, path string, offset, length int64, w io.Writer) (int64, error) {
	req := &dsecv1.ReadRequest{SandboxId: string(s.id), Path: pathOf(path), Offset: offset, Length: length}
	return receive(ctx, s.c, s.c.file.Read, req, w, dsecv1connect.FileServiceReadProcedure)
}

// MaxReadFile is how many bytes ReadFile takes into memory. A file may say that
// it is as large as it likes: one without a single byte on the sandbox's disk can
// have a size of terabytes, all zeros.
const MaxReadFile = 256 << 20

// ReadFile returns a whole file. One of more than MaxReadFile bytes is invalid;
// Read takes it.
func (s *Sandbox) ReadFile(ctx context.Context, path string) ([]byte, error) {
	var b bytes.Buffer
	n, err := s.Read(ctx, path, 0, MaxReadFile+1, &b)
	if err != nil {
		return b.Bytes(), err
	}
	if n > MaxReadFile { // not looked at before: files of /proc do not tell their size
		info, err := s.Stat(ctx, path)
		if err != nil {
			return nil, err
		}
		return nil, dsec.Invalid("path", "%s has %d bytes, and ReadFile takes at most %d: use Read", path, max(info.Size, n), MaxReadFile)
	}
	return b.Bytes(), nil
}

// Download copies a tar of a file or a directory to w.
func (s *Sandbox) Download(ctx context.Context, path string, w io.Writer) (int64, error) {
	req := &dsecv1.DownloadRequest{SandboxId: string(s.id), Path: pathOf(path)}
	return receive(ctx, s.c, s.c.file.Download, req, w, dsecv1connect.FileServiceDownloadProcedure)
}

// receive copies what a call answers with to w, and counts it.
func receive[Req any](
	ctx context.Context, c *Client, call func(context.Context, *connect.Request[Req]) (*connect.ServerStreamForClient[dsecv1.FileChunk], error), msg *Req, w io.Writer, procedure string,
) (n int64, err error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	nothing := func() bool { return n == 0 }
	err = overRestart(ctx, nothing, func() error {
		stream, err := call(ctx, connect.NewRequest(msg))
		if err != nil {
			return c.typed(err, procedure)
		}
		defer func() { _ = stream.Close() }()
		for stream.Receive() {
			m, err := w.Write(stream.Msg().Data)
			n += int64(m)
			if err != nil {
				return err
			}
		}
		if err := stream.Err(); err != nil {
			return c.typed(err, procedure)
		}
		return nil
	})
	return n, err
}

// WriteOptions say how a file is written.
type WriteOptions struct {
	// Mode 0 is that of the file replaced, or 0644.
	Mode fs.FileMode
	// User owns a new file; empty is the sandbox's user.
	User   string
	Append bool
}

// Write replaces the file at path by what r holds, atomically: until r has
// ended without an error the old one stays. Missing parents are made.
func (s *Sandbox) Write(ctx context.Context, path string, r io.Reader, o WriteOptions) (int64, error) {
	open := &dsecv1.WriteRequest{Message: &dsecv1.WriteRequest_Open{Open: &dsecv1.WriteOpen{
		SandboxId: string(s.id), Path: pathOf(path), Mode: unixMode(o.Mode), User: o.User, Append: o.Append,
	}}}
	res, err := send(ctx, s.c, s.c.file.Write, open, r, "data", func(b []byte) *dsecv1.WriteRequest {
		return &dsecv1.WriteRequest{Message: &dsecv1.WriteRequest_Data{Data: b}}
	})
	if err != nil {
		return 0, err
	}
	return res.Size, nil
}

// WriteFile is Write of a slice.
func (s *Sandbox) WriteFile(ctx context.Context, path string, data []byte, mode fs.FileMode) error {
	_, err := s.Write(ctx, path, bytes.NewReader(data), WriteOptions{Mode: mode})
	return err
}

// Uploaded counts what an upload made.
type Uploaded struct{ Entries, Bytes int64 }

// Upload unpacks a tar below the directory path, which is made if missing.
// user owns all entries; empty is as in the tar. What was unpacked before an error
// stays, as with tar: for all or nothing, upload to a new directory and Rename it.
func (s *Sandbox) Upload(ctx context.Context, path string, tar io.Reader, user string) (Uploaded, error) {
	open := &dsecv1.UploadRequest{Message: &dsecv1.UploadRequest_Open{Open: &dsecv1.UploadOpen{SandboxId: string(s.id), Path: pathOf(path), User: user}}}
	res, err := send(ctx, s.c, s.c.file.Upload, open, tar, "tar", func(b []byte) *dsecv1.UploadRequest {
		return &dsecv1.UploadRequest{Message: &dsecv1.UploadRequest_Data{Data: b}}
	})
	if err != nil {
		return Uploaded{}, err
	}
	return Uploaded{res.Entries, res.Bytes}, nil
}

// send streams open and then r in chunks. A reader that fails cancels the
// call, so that a part never looks like the whole. Errors name r as the caller's
// caller does. Where r is an io.Seeker it goes on over a restart of the server, as
// calls do.
func send[Req, Res any](
	ctx context.Context, c *Client, call func(context.Context) *connect.ClientStreamForClient[Req, Res], open *Req, r io.Reader, name string, data func([]byte) *Req,
) (res *Res, err error) {
	err = overRestart(ctx, rewinder(r), func() error {
		res, err = sendAll(ctx, c, call, open, r, data)
		return err
	})
	if de, ok := errors.AsType[*dsec.Error](err); ok {
		// What carries it is of no interest to who called with an argument.
		if de.Field = strings.TrimPrefix(de.Field, "open."); de.Field == "data" {
			de.Field = name
		}
	}
	return res, err
}

func sendAll[Req, Res any](
	ctx context.Context, c *Client, call func(context.Context) *connect.ClientStreamForClient[Req, Res], open *Req, r io.Reader, data func([]byte) *Req,
) (*Res, error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	stream := call(ctx)
	procedure := stream.Spec().Procedure
	err := stream.Send(open)
	buf := make([]byte, chunk)
	for err == nil {
		n, rerr := readFull(ctx, r, buf)
		if n > 0 {
			err = stream.Send(data(buf[:n]))
		}
		if errors.Is(rerr, io.EOF) || errors.Is(rerr, io.ErrUnexpectedEOF) {
			break
		} else if rerr != nil {
			cancel() // and no close, which would look like the end of r
			return nil, rerr
		}
	}
	if err != nil && !errors.Is(err, io.EOF) { // EOF: the server has answered already
		cancel()
		return nil, c.typed(err, procedure)
	}
	res, err := stream.CloseAndReceive()
	if err != nil {
		return nil, c.typed(err, procedure)
	}
	return res.Msg, nil
}

// readFull is io.ReadFull until ctx ends: a pipe into which nobody writes must not
// hold up who gives up. The read is then left to itself, with buf.
func readFull(ctx context.Context, r io.Reader, buf []byte) (int, error) {
	switch r.(type) {
	case *bytes.Reader, *bytes.Buffer, *strings.Reader: // memory holds nobody up
		return io.ReadFull(r, buf)
	}
	type result struct {
		n   int
		err error
	}
	done := make(chan result, 1)
	go func() {
		n, err := io.ReadFull(r, buf)
		done <- result{n, err}
	}()
	select {
	case res := <-done:
		return res.n, res.err
	case <-ctx.Done():
		return 0, ctx.Err()
	}
}

// unixMode is mode as stat(2) has it.
func unixMode(mode fs.FileMode) uint32 {
	m := uint32(mode.Perm())
	for bit, unix := range map[fs.FileMode]uint32{fs.ModeSetuid: 0o4000, fs.ModeSetgid: 0o2000, fs.ModeSticky: 0o1000} {
		if mode&bit != 0 {
			m |= unix
		}
	}
	return m
}
