package chronusapi

import (
	"context"
	"io"

	"github.com/opendsec/dsec"
)

// Stat describes a file; with follow, what a symlink points to.
func (c *Client) Stat(ctx context.Context, path string, follow bool) (f FileInfo, err error) {
	if err := checkPath("path", path); err != nil {
		return f, err
	}
	var e enc
	e.str(path)
	e.bool(follow)
	err = c.simple(ctx, callStat, e.b, dsec.CodeUnavailable, func(d *dec) { f = d.fileInfo() })
	return f, err
}

// ListDir returns at most limit (1 to MaxList) entries after the name after,
// sorted by bytes, and whether there are more.
func (c *Client) ListDir(ctx context.Context, path, after string, limit int) (list []FileInfo, more bool, err error) {
	if err := checkPath("path", path); err != nil {
		return nil, false, err
	}
	if limit < 1 || limit > MaxList {
		return nil, false, dsec.Invalid("limit", "want 1 to %d, got %d", MaxList, limit)
	}
	if len(after) >= MaxPath {
		return nil, false, dsec.Invalid("after", "want the name of an entry")
	}
	var e enc
	e.str(path)
	e.str(after)
	e.u32(uint32(limit))
	err = c.simple(ctx, callListDir, e.b, dsec.CodeUnavailable, func(d *dec) {
		more = d.bool()
		for n := d.u32(); n > 0 && !d.bad; n-- {
			list = append(list, d.fileInfo())
		}
	})
	if err != nil {
		return nil, false, err
	}
	return list, more, nil
}

// Mkdir makes a directory; with parents those above it too, and one that is
// there is no error.
func (c *Client) Mkdir(ctx context.Context, path string, mode uint32, parents bool) error {
	if err := checkPath("path", path); err != nil {
		return err
	}
	if mode > 0o7777 {
		return dsec.Invalid("mode", "want permission bits, at most 07777, got 0%o", mode)
	}
	var e enc
	e.str(path)
	e.u32(mode)
	e.bool(parents)
	return c.simple(ctx, callMkdir, e.b, dsec.CodeOutcomeUnknown, nil)
}

// Rename moves a file or directory, replacing a file at the new name.
func (c *Client) Rename(ctx context.Context, from, to string) error {
	if err := checkPath("path", from); err != nil {
		return err
	}
	if err := checkPath("to", to); err != nil {
		return err
	}
	var e enc
	e.str(from)
	e.str(to)
	return c.simple(ctx, callRename, e.b, dsec.CodeOutcomeUnknown, nil)
}

// Remove removes a file or an empty directory, with recursive a whole tree.
func (c *Client) Remove(ctx context.Context, path string, recursive bool) error {
	if err := checkPath("path", path); err != nil {
		return err
	}
	var e enc
	e.str(path)
	e.bool(recursive)
	return c.simple(ctx, callRemove, e.b, dsec.CodeOutcomeUnknown, nil)
}

// Read streams length bytes of a regular file from offset on, or all of them
// where length is -1. A file that ends before gives what there is.
func (c *Client) Read(ctx context.Context, path string, offset, length int64) (io.ReadCloser, error) {
	if err := checkRange(path, offset, length); err != nil {
		return nil, err
	}
	var e enc
	e.str(path)
	e.i64(offset)
	e.i64(length)
	return c.content(ctx, callRead, e.b)
}

// Download streams a file or directory as a tar.
func (c *Client) Download(ctx context.Context, path string) (io.ReadCloser, error) {
	if err := checkPath("path", path); err != nil {
		return nil, err
	}
	var e enc
	e.str(path)
	return c.content(ctx, callDownload, e.b)
}

// Write replaces a file by what r has, or appends to it, and returns the size
// written. On error the file is as it was, or where appending has part of the
// data at its end.
func (c *Client) Write(ctx context.Context, req WriteRequest, r io.Reader) (size int64, err error) {
	if err := req.Validate(); err != nil {
		return 0, err
	}
	var e enc
	e.writeRequest(&req)
	err = c.send(ctx, callWrite, e.b, r, func(d *dec) { size = d.i64() })
	return size, err
}

// Upload unpacks a tar stream below a directory, which it makes if needed. On
// error the entries before the one at fault are there.
func (c *Client) Upload(ctx context.Context, req UploadRequest, tar io.Reader) (res UploadResult, err error) {
	if err := req.Validate(); err != nil {
		return res, err
	}
	var e enc
	e.uploadRequest(&req)
	err = c.send(ctx, callUpload, e.b, tar, func(d *dec) { res.Entries, res.Bytes = d.i64(), d.i64() })
	return res, err
}

// content opens a call that answers with data, and waits for the first.
func (c *Client) content(ctx context.Context, typ uint8, payload []byte) (io.ReadCloser, error) {
	var r *contentReader
	err := retry(typ, func() error {
		k, err := c.begin(ctx, typ, payload, dsec.CodeUnavailable)
		if err != nil {
			return err
		}
		r = &contentReader{k: k}
		if err = r.fill(); err == io.EOF {
			return nil // it is empty
		}
		return err
	})
	if err != nil {
		return nil, err
	}
	return r, nil
}

type contentReader struct {
	k    *call
	rest []byte
	err  error
}

func (r *contentReader) fill() error {
	typ, d, err := r.k.next()
	switch {
	case err != nil:
		r.err = err
	case typ == frameResult && d.ok():
		r.k.end(true)
		r.err = io.EOF
	case typ == frameData && len(d.b) > 0 && len(d.b) <= MaxChunk:
		r.rest = d.b
	default:
		r.err = r.k.broken(errMalformed)
	}
	return r.err
}

// Read implements io.Reader.
func (r *contentReader) Read(p []byte) (int, error) {
	if len(p) == 0 {
		return 0, nil
	}
	if len(r.rest) == 0 {
		if r.err != nil {
			return 0, r.err
		}
		if err := r.fill(); err != nil {
			return 0, err
		}
	}
	n := copy(p, r.rest)
	r.rest = r.rest[n:]
	return n, nil
}

// Close gives the rest up.
func (r *contentReader) Close() error {
	r.k.end(false)
	return nil
}

// send makes a call that takes data. The answer may come before the data's
// end, where chronus cannot go on; then the rest of r is not read.
func (c *Client) send(ctx context.Context, typ uint8, payload []byte, r io.Reader, result func(*dec)) error {
	k, err := c.begin(ctx, typ, payload, dsec.CodeOutcomeUnknown)
	if err != nil {
		return err
	}
	answered := make(chan sendAnswer, 1)
	go func() { answered <- k.sendAnswer() }()
	early, srcErr := k.sendData(r, answered)
	last := frameEnd
	if srcErr != nil && srcErr != io.EOF {
		last = frameAbort
	}
	k.cn.put(last, nil)
	werr := k.cn.flush()
	var a sendAnswer
	if early != nil {
		a = *early
	} else {
		a = <-answered
	}
	if last == frameAbort && ctx.Err() == nil {
		k.end(werr == nil && clean(a.err))
		return srcErr
	}
	if a.err != nil {
		return k.sendFailed(a.err, werr)
	}
	d := &dec{b: a.body}
	if result != nil {
		result(d)
	}
	if !d.ok() || werr != nil {
		return k.broken(errMalformed)
	}
	k.end(true)
	return nil
}

// sendAnswer is what chronus said to a call that takes data: a result's body,
// or why there is none.
type sendAnswer struct {
	err  error
	body []byte
}

// sendAnswer reads it. The connection is kept until the data's end is sent, so
// k.next, which gives it back after an error, is not for here.
func (k *call) sendAnswer() sendAnswer {
	typ, payload, err := k.cn.read()
	switch {
	case err != nil:
		return sendAnswer{err: err}
	case typ == frameResult:
		return sendAnswer{body: payload}
	case typ == frameError:
		return sendAnswer{err: (&dec{b: payload}).error()}
	}
	return sendAnswer{err: errMalformed}
}

// sendData sends r until it ends, which srcErr tells, or an answer came early.
func (k *call) sendData(r io.Reader, answered <-chan sendAnswer) (early *sendAnswer, srcErr error) {
	buf := make([]byte, MaxChunk)
	for srcErr == nil {
		var n int
		n, srcErr = r.Read(buf)
		if n > 0 {
			if err := k.cn.putData(frameData, nil, buf[:n]); err != nil {
				a := <-answered // tells why, if anything can
				if a.err == nil {
					a.err = err
				}
				return &a, nil
			}
		}
		select {
		case a := <-answered:
			return &a, srcErr
		default:
		}
	}
	return nil, srcErr
}

// sendFailed ends a call that chronus, or with werr its connection, refused.
func (k *call) sendFailed(err, werr error) error {
	if !clean(err) {
		return k.broken(err)
	}
	k.end(werr == nil)
	return err
}

// clean reports whether err came from chronus in a whole frame.
func clean(err error) bool {
	if err == nil {
		return true
	}
	_, ok := err.(*dsec.Error) //nolint:errorlint // as it was decoded; one that broke the connection wraps other errors
	return ok
}
