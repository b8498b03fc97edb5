package edge

import (
	"context"
	"crypto/sha256"
	"fmt"
	"io"
	"net/http"
	"path"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/proto"

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
		c.files = true
		return do(c)
	})
}

// starvedFiles is err, or where what served the call was killed because the
// sandbox's own processes have taken all of its memory, an error that says so: it
// is not the platform's fault.
func (c *call) starvedFiles(began time.Time, err error) error {
	if err == nil || !c.files || c.ctx.Err() != nil {
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
		return c.do(dsecv1.TrajectoryKind_TRAJECTORY_KIND_FILE_STAT, req.Msg, ofPath(name), out, func() error {
			info, err := c.client.Stat(c.ctx, name, req.Msg.Follow)
			out.Entry = entryProto(&info)
			return err
		})
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
		return c.do(dsecv1.TrajectoryKind_TRAJECTORY_KIND_FILE_LIST, m, ofPath(name), out, func() error { return c.listDir(name, string(m.After), want, out) })
	})
	return respond(out, err)
}

func (c *call) listDir(name, after string, want int, out *dsecv1.ListDirResponse) error {
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
}

// Mkdir makes a directory.
func (f fileService) Mkdir(ctx context.Context, req *connect.Request[dsecv1.MkdirRequest]) (*connect.Response[dsecv1.MkdirResponse], error) {
	m, out := req.Msg, new(dsecv1.MkdirResponse)
	err := f.with(ctx, req.Header(), m.SandboxId, func(c *call) error {
		name, err := filePath("path", c, m.Path)
		if err != nil {
			return err
		}
		mode := m.Mode
		if mode == 0 {
			mode = 0o755
		}
		return c.do(dsecv1.TrajectoryKind_TRAJECTORY_KIND_FILE_MKDIR, m, ofPath(name), out, func() error { return c.client.Mkdir(c.ctx, name, mode, m.Parents) })
	})
	return respond(out, err)
}

// Rename moves a file or directory.
func (f fileService) Rename(ctx context.Context, req *connect.Request[dsecv1.RenameRequest]) (*connect.Response[dsecv1.RenameResponse], error) {
	out := new(dsecv1.RenameResponse)
	err := f.with(ctx, req.Header(), req.Msg.SandboxId, func(c *call) error {
		from, err := filePath("from", c, req.Msg.From)
		if err != nil {
			return err
		}
		to, err := filePath("to", c, req.Msg.To)
		if err != nil {
			return err
		}
		what := ofPath(from)
		what.NewPath = []byte(to)
		return c.do(dsecv1.TrajectoryKind_TRAJECTORY_KIND_FILE_RENAME, req.Msg, what, out, func() error { return renamed(c.client.Rename(c.ctx, from, to)) })
	})
	return respond(out, err)
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
	out := new(dsecv1.RemoveResponse)
	err := f.with(ctx, req.Header(), req.Msg.SandboxId, func(c *call) error {
		name, err := filePath("path", c, req.Msg.Path)
		if err != nil {
			return err
		}
		return c.do(dsecv1.TrajectoryKind_TRAJECTORY_KIND_FILE_REMOVE, req.Msg, ofPath(name), out, func() error { return c.client.Remove(c.ctx, name, req.Msg.Recursive) })
	})
	return respond(out, err)
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
		return c.doRead(dsecv1.TrajectoryKind_TRAJECTORY_KIND_FILE_READ, m, ofPath(name), stream, func() (io.ReadCloser, error) {
			return c.client.Read(c.ctx, name, m.Offset, length)
		})
	})
}

// Download streams a tar.
func (f fileService) Download(ctx context.Context, req *connect.Request[dsecv1.DownloadRequest], stream *connect.ServerStream[dsecv1.FileChunk]) error {
	return f.with(ctx, req.Header(), req.Msg.SandboxId, func(c *call) error {
		name, err := filePath("path", c, req.Msg.Path)
		if err != nil {
			return err
		}
		return c.doRead(dsecv1.TrajectoryKind_TRAJECTORY_KIND_FILE_DOWNLOAD, req.Msg, ofPath(name), stream, func() (io.ReadCloser, error) { return c.client.Download(c.ctx, name) })
	})
}

// ofPath says shortly what file something is done to.
func ofPath(name string) *dsecv1.TrajectoryRequest {
	return &dsecv1.TrajectoryRequest{Path: []byte(name)}
}

// doRead is do of a call that is answered by a stream of bytes. They are kept where the
// call has an action ID: a later one is to read the same, whatever the file is then.
func (c *call) doRead(kind dsecv1.TrajectoryKind, req proto.Message, what *dsecv1.TrajectoryRequest, stream *connect.ServerStream[dsecv1.FileChunk], open func() (io.ReadCloser, error)) error {
	a, earlier, err := c.begin(kind, req, what)
	if err != nil {
		return err
	}
	if earlier != nil {
		if err := errorOf(earlier.Ended); err != nil {
			return err
		}
		if o := earlier.Ended.Output; o.GetTotalBytes() > o.GetKeptBytes() {
			return errNotKept(o.TotalBytes-o.KeptBytes, o.GapReason)
		}
		return c.pieces(earlier.Ended, func(p *dsecv1.TrajectoryOutputPiece) error { return stream.Send(&dsecv1.FileChunk{Data: p.Data}) })
	}
	defer c.toTheEnd()()
	began := time.Now()
	sum, n, once := sha256.New(), int64(0), c.origin.action != ""
	r, err := open()
	if err == nil {
		err = sendFile(stream, r, once, func(data []byte) {
			n += int64(len(data))
			sum.Write(data)
			if once {
				a.Output(dsecv1.Stream_STREAM_UNSPECIFIED, data)
			}
		})
	}
	err = c.told(began, err)
	return c.finish(a, &dsecv1.TrajectoryEntry{Reason: fmt.Sprintf("%d bytes, sha256:%x", n, sum.Sum(nil))}, err)
}

// sendFile sends what r has, and shows it to look: to the end where that is wanted also
// by others than its caller, who may leave.
func sendFile(stream *connect.ServerStream[dsecv1.FileChunk], r io.ReadCloser, toTheEnd bool, look func([]byte)) error {
	defer func() { _ = r.Close() }()
	chunk, left := &dsecv1.FileChunk{}, false
	buf := make([]byte, chronusapi.MaxChunk)
	for {
		n, err := r.Read(buf)
		if n > 0 {
			chunk.Data = buf[:n]
			look(chunk.Data)
			if left {
				continue
			}
			if err := stream.Send(chunk); err != nil && !toTheEnd {
				return err
			} else if err != nil {
				left = true
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
		in := &content[dsecv1.WriteRequest, *dsecv1.WriteRequest]{stream: stream}
		return c.doWrite(dsecv1.TrajectoryKind_TRAJECTORY_KIND_FILE_WRITE, open, ofPath(name), !req.Append, in, out, func(data io.Reader) error {
			if err := c.parents(name); err != nil {
				return inOpen(err)
			}
			var err error
			out.Size, err = c.client.Write(c.ctx, req, data)
			return inOpen(err)
		})
	})
	return respond(out, err)
}

// doWrite is do of a call whose data follow it. They are no part of the digest by which
// it begins; a later call with the same action ID and other data has diverged all the same.
// whole says that nothing was done where it failed. Else a part was, perhaps, once data
// were read, and no error is told that frees the ID, or has an SDK send them again.
func (c *call) doWrite(kind dsecv1.TrajectoryKind, open proto.Message, what *dsecv1.TrajectoryRequest, whole bool, in io.Reader, out proto.Message, f func(io.Reader) error) error {
	a, earlier, err := c.begin(kind, open, what)
	if err != nil {
		return err
	}
	if earlier != nil {
		if err := errorOf(earlier.Ended); err != nil {
			return err
		}
		sum := sha256.New()
		if _, err := io.Copy(sum, in); err != nil {
			return err
		}
		if got := contentText(sum.Sum(nil)); got != earlier.Ended.Reason {
			return dsec.Errorf(dsec.CodeDiverged, "action %q wrote other data: entry %d has %s, this one %s", c.origin.action, earlier.Ended.Seq, earlier.Ended.Reason, got)
		}
		return proto.Unmarshal(earlier.Ended.Response, out)
	}
	defer c.toTheEnd()()
	began := time.Now()
	e, broke, begun := new(dsecv1.TrajectoryEntry), false, false
	err = c.told(began, f(readerFunc(func(p []byte) (int, error) {
		n, err := in.Read(p)
		begun = begun || n > 0
		a.Input(p[:n])
		broke = broke || err != nil && err != io.EOF && asError(err) == nil
		return n, err
	})))
	e.Marks = c.marks
	switch {
	case err == nil:
		e.Reason = contentText(a.InputDigest())
		e.Response, err = proto.Marshal(out)
	case broke && whole && c.origin.action != "":
		err = &dsec.Error{Code: dsec.CodeUnavailable, Message: "the data broke off, and nothing was written", Err: err}
	case begun && !whole:
		err = inPart(err)
	}
	return c.finish(a, e, err)
}

func contentText(digest []byte) string { return fmt.Sprintf("sha256:%x", digest) }

// inPart is err of what was done in part, perhaps, in place of one that says that nothing
// was.
func inPart(err error) error {
	code := dsec.CodeOutcomeUnknown
	switch dsec.CodeOf(err) {
	case dsec.CodeUnavailable:
	case dsec.CodeExhausted:
		code = dsec.CodeConflict // as the sandbox is: not the platform's fault
	default:
		return err
	}
	de := asError(err)
	return &dsec.Error{Code: code, Field: de.Field, Message: de.Message + ": a part of it may have been done", Err: err}
}

// readerFunc is an io.Reader.
type readerFunc func([]byte) (int, error)

// Read implements io.Reader.
func (f readerFunc) Read(p []byte) (int, error) { return f(p) }

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
		in := &content[dsecv1.UploadRequest, *dsecv1.UploadRequest]{stream: stream}
		return c.doWrite(dsecv1.TrajectoryKind_TRAJECTORY_KIND_FILE_UPLOAD, open, ofPath(name), false, in, out, func(data io.Reader) error {
			res, err := c.client.Upload(c.ctx, chronusapi.UploadRequest{Path: name, User: open.User}, data)
			out.Entries, out.Bytes = res.Entries, res.Bytes
			return inOpen(err)
		})
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
