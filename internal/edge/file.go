package edge

import (
	"context"
	"io"
	"net/http"
	"path"
	"time"

	"connectrpc.com/connect"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/backend"
	"github.com/opendsec/dsec/internal/chronusapi"
	"github.com/opendsec/dsec/internal/daemon"
	dsecv1 "github.com/opendsec/dsec/proto/dsec/v1"
)

// fileService serves FileService. Content passes through in pieces, none of
// which is kept.
type fileService struct{ e *Edge }

// with runs one call.
func (f fileService) with(ctx context.Context, h http.Header, id string, do func(*call) error) error {
	return f.e.with(ctx, h, id, func(c *call) error {
		began := time.Now()
		return c.starvedFiles(began, do(c))
	})
}

// starvedFiles is err, or where what served the call was killed because the
// sandbox's own processes have taken all of its memory, an error that says so: it
// is not the platform's fault.
func (c *call) starvedFiles(began time.Time, err error) error {
	if err == nil || c.ctx.Err() != nil {
		return err
	}
	code := dsec.CodeOf(err)
	if code != dsec.CodeUnavailable && code != dsec.CodeOutcomeUnknown {
		return err
	}
	if files, ok := c.inst.(backend.FileServer); !ok || !files.FilesStarved(began) {
		return err
	}
	if code == dsec.CodeOutcomeUnknown {
		return &dsec.Error{Code: dsec.CodeConflict, Message: "the sandbox's memory is used up: what served this call was killed for want of it, and the call may have been done or not", Err: err}
	}
	return &dsec.Error{Code: dsec.CodeExhausted, Message: "the sandbox's memory is used up: what serves its files was killed for want of it", Err: err}
}

// filePath is the absolute path that p names.
func filePath(field string, c *call, p *dsecv1.Path) (string, error) {
	name := p.GetPath()
	switch raw := p.GetRaw(); {
	case len(raw) > 0 && name != "":
		return "", dsec.Invalid(field, "want path or raw, not both")
	case len(raw) > 0:
		name = string(raw)
	}
	if name == "" {
		return "", dsec.Invalid(field, "want a path")
	}
	return inside(c.spec.Workdir, name), nil
}

// Stat describes a file.
func (f fileService) Stat(ctx context.Context, req *connect.Request[dsecv1.StatRequest]) (*connect.Response[dsecv1.StatResponse], error) {
	out := new(dsecv1.StatResponse)
	err := f.with(ctx, req.Header(), req.Msg.SandboxId, func(c *call) error {
		name, err := filePath("path", c, req.Msg.Path)
		if err != nil {
			return err
		}
		info, err := c.client.Stat(c.ctx, name, req.Msg.Follow)
		out.Entry = entryProto(&info)
		return err
	})
	return respond(out, err)
}

// The size of a page of a listing.
const (
	defaultList = 1000
	maxList     = 10000
)

// ListDir lists a directory.
func (f fileService) ListDir(ctx context.Context, req *connect.Request[dsecv1.ListDirRequest]) (*connect.Response[dsecv1.ListDirResponse], error) {
	m, out := req.Msg, new(dsecv1.ListDirResponse)
	err := f.with(ctx, req.Header(), m.SandboxId, func(c *call) error {
		name, err := filePath("path", c, m.Path)
		if err != nil {
			return err
		}
		want := int(m.PageSize)
		if want == 0 {
			want = defaultList
		}
		if want < 1 || want > maxList {
			return dsec.Invalid("page_size", "want 1 to %d, or 0 for %d; got %d", maxList, defaultList, want)
		}
		after := string(m.After)
		for out.More = true; out.More && len(out.Entries) < want; {
			list, more, err := c.client.ListDir(c.ctx, name, after, min(want-len(out.Entries), chronusapi.MaxList))
			if err != nil {
				return err
			}
			for i := range list {
				out.Entries = append(out.Entries, entryProto(&list[i]))
				after = list[i].Name
			}
			out.More = more && len(list) > 0
		}
		return nil
	})
	return respond(out, err)
}

// Mkdir makes a directory.
func (f fileService) Mkdir(ctx context.Context, req *connect.Request[dsecv1.MkdirRequest]) (*connect.Response[dsecv1.MkdirResponse], error) {
	m := req.Msg
	err := f.with(ctx, req.Header(), m.SandboxId, func(c *call) error {
		name, err := filePath("path", c, m.Path)
		if err != nil {
			return err
		}
		mode := m.Mode
		if mode == 0 {
			mode = 0o755
		}
		return c.client.Mkdir(c.ctx, name, mode, m.Parents)
	})
	return respond(new(dsecv1.MkdirResponse), err)
}

// Rename moves a file or directory.
func (f fileService) Rename(ctx context.Context, req *connect.Request[dsecv1.RenameRequest]) (*connect.Response[dsecv1.RenameResponse], error) {
	err := f.with(ctx, req.Header(), req.Msg.SandboxId, func(c *call) error {
		from, err := filePath("from", c, req.Msg.From)
		if err != nil {
			return err
		}
		to, err := filePath("to", c, req.Msg.To)
		if err != nil {
			return err
		}
		return renamed(c.client.Rename(c.ctx, from, to))
	})
	return respond(new(dsecv1.RenameResponse), err)
}

// renamed gives the fields the names that they have in this API.
func renamed(err error) error {
	if de := asError(err); de != nil && de.Field == "path" {
		return at(err, "from")
	}
	return err
}

// Remove removes a file or directory.
func (f fileService) Remove(ctx context.Context, req *connect.Request[dsecv1.RemoveRequest]) (*connect.Response[dsecv1.RemoveResponse], error) {
	err := f.with(ctx, req.Header(), req.Msg.SandboxId, func(c *call) error {
		name, err := filePath("path", c, req.Msg.Path)
		if err != nil {
			return err
		}
		return c.client.Remove(c.ctx, name, req.Msg.Recursive)
	})
	return respond(new(dsecv1.RemoveResponse), err)
}

// Read streams a regular file.
func (f fileService) Read(ctx context.Context, req *connect.Request[dsecv1.ReadRequest], stream *connect.ServerStream[dsecv1.FileChunk]) error {
	m := req.Msg
	return f.with(ctx, req.Header(), m.SandboxId, func(c *call) error {
		name, err := filePath("path", c, m.Path)
		if err != nil {
			return err
		}
		if m.Length < 0 {
			return dsec.Invalid("length", "want a count of bytes, or 0 for all; got %d", m.Length)
		}
		length := m.Length
		if length == 0 {
			length = -1
		}
		r, err := c.client.Read(c.ctx, name, m.Offset, length)
		return sendFile(stream, r, err)
	})
}

// Download streams a tar.
func (f fileService) Download(ctx context.Context, req *connect.Request[dsecv1.DownloadRequest], stream *connect.ServerStream[dsecv1.FileChunk]) error {
	return f.with(ctx, req.Header(), req.Msg.SandboxId, func(c *call) error {
		name, err := filePath("path", c, req.Msg.Path)
		if err != nil {
			return err
		}
		r, err := c.client.Download(c.ctx, name)
		return sendFile(stream, r, err)
	})
}

func sendFile(stream *connect.ServerStream[dsecv1.FileChunk], r io.ReadCloser, err error) error {
	if err != nil {
		return err
	}
	defer func() { _ = r.Close() }()
	chunk := &dsecv1.FileChunk{}
	buf := make([]byte, chronusapi.MaxChunk)
	for {
		n, err := r.Read(buf)
		if n > 0 {
			chunk.Data = buf[:n]
			if err := stream.Send(chunk); err != nil {
				return err
			}
		}
		if err == io.EOF { // wrapped it would be a broken stream
			return nil
		}
		if err != nil {
			return err
		}
	}
}

// Write replaces a file, or appends to it.
func (f fileService) Write(ctx context.Context, stream *connect.ClientStream[dsecv1.WriteRequest]) (*connect.Response[dsecv1.WriteResponse], error) {
	if !stream.Receive() {
		return nil, firstMessage(stream.Err(), "open", "want a first message that opens the file")
	}
	open, out := stream.Msg().GetOpen(), new(dsecv1.WriteResponse)
	if open == nil {
		return nil, dsec.Invalid("open", "want a first message that opens the file")
	}
	err := f.with(ctx, stream.RequestHeader(), open.SandboxId, func(c *call) error {
		name, err := filePath("open.path", c, open.Path)
		if err != nil {
			return err
		}
		req := chronusapi.WriteRequest{Path: name, Mode: open.Mode, User: open.User, Append: open.Append}
		if req.User == "" {
			req.User = c.spec.User
		}
		if err := req.Validate(); err != nil {
			return inOpen(err)
		}
		if err := c.parents(name); err != nil {
			return inOpen(err)
		}
		out.Size, err = c.client.Write(c.ctx, req, &content[dsecv1.WriteRequest, *dsecv1.WriteRequest]{stream: stream})
		return inOpen(err)
	})
	return respond(out, err)
}

// parents makes the directories above a file. What stands in the way of that
// is the write's to tell.
func (c *call) parents(name string) error {
	err := c.client.Mkdir(c.ctx, path.Dir(name), 0o755, true)
	if de := asError(err); de != nil && (de.Code == dsec.CodeConflict || de.Code == dsec.CodeInvalid || de.Code == dsec.CodeNotFound) {
		return nil
	}
	return err
}

// Upload unpacks a tar.
func (f fileService) Upload(ctx context.Context, stream *connect.ClientStream[dsecv1.UploadRequest]) (*connect.Response[dsecv1.UploadResponse], error) {
	if !stream.Receive() {
		return nil, firstMessage(stream.Err(), "open", "want a first message that names the directory")
	}
	open, out := stream.Msg().GetOpen(), new(dsecv1.UploadResponse)
	if open == nil {
		return nil, dsec.Invalid("open", "want a first message that names the directory")
	}
	err := f.with(ctx, stream.RequestHeader(), open.SandboxId, func(c *call) error {
		name, err := filePath("open.path", c, open.Path)
		if err != nil {
			return err
		}
		res, err := c.client.Upload(c.ctx, chronusapi.UploadRequest{Path: name, User: open.User}, &content[dsecv1.UploadRequest, *dsecv1.UploadRequest]{stream: stream})
		out.Entries, out.Bytes = res.Entries, res.Bytes
		return inOpen(err)
	})
	return respond(out, err)
}

// inOpen gives the fields the names that they have in this API.
func inOpen(err error) error {
	de := asError(err)
	if de == nil {
		return err
	}
	switch de.Field {
	case "path", "mode", "user":
		return at(err, "open."+de.Field)
	}
	return err
}

// content reads the data messages of a client stream.
type content[T any, P dataMessage[T]] struct {
	stream *connect.ClientStream[T]
	data   []byte // of the last message
	rest   []byte // of data
}

type dataMessage[T any] interface {
	*T
	GetData() []byte
}

// Read implements io.Reader.
func (c *content[T, P]) Read(p []byte) (int, error) {
	for len(c.rest) == 0 {
		daemon.FreeData(c.data)
		c.data = nil
		if !c.stream.Receive() {
			if err := c.stream.Err(); err != nil {
				return 0, err
			}
			return 0, io.EOF
		}
		c.data = P(c.stream.Msg()).GetData()
		if c.rest = c.data; c.rest == nil {
			return 0, dsec.Invalid("open", "want data after the first message")
		}
	}
	n := copy(p, c.rest)
	c.rest = c.rest[n:]
	return n, nil
}
