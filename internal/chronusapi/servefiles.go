package chronusapi

import (
	"context"
	"io"
)

// isFileCall reports whether a call is one of FileHandler's.
func isFileCall(call uint8) bool { return call >= callStat && call <= callUpload }

// isFileRead reports whether a call is one of those and changes nothing.
func isFileRead(call uint8) bool {
	return call == callStat || call == callListDir || call == callRead || call == callDownload
}

// serveFile answers one request of FileHandler's.
func (s *server) serveFile(ctx context.Context, call uint8, d *dec) error {
	if s.files == nil {
		return errMalformed
	}
	switch call {
	case callStat, callListDir, callMkdir, callRename, callRemove:
		return s.serveTree(ctx, call, d)
	case callRead, callWrite, callDownload, callUpload:
		return s.serveContent(ctx, call, d)
	}
	return errMalformed
}

func (s *server) serveTree(ctx context.Context, call uint8, d *dec) error {
	path := d.str(MaxPath)
	err := checkPath("path", path)
	switch call {
	case callStat:
		follow := d.bool()
		if !d.ok() {
			return errMalformed
		}
		var f FileInfo
		if err == nil {
			f, err = s.files.Stat(ctx, path, follow)
		}
		return s.answer(err, func(e *enc) { e.fileInfo(&f) })
	case callListDir:
		after, limit := d.str(MaxPath), int(d.u32())
		if !d.ok() || limit > MaxList {
			return errMalformed
		}
		var list []FileInfo
		var more bool
		if err == nil {
			if ended := s.watched(ctx, func(ctx context.Context) { list, more, err = s.files.ListDir(ctx, path, after, limit) }); ended != nil {
				return ended
			}
		}
		return s.answer(err, func(e *enc) {
			e.bool(more)
			e.u32(uint32(len(list)))
			for i := range list {
				e.fileInfo(&list[i])
			}
		})
	case callMkdir:
		mode, parents := d.u32(), d.bool()
		if !d.ok() {
			return errMalformed
		}
		if err == nil {
			err = s.files.Mkdir(ctx, path, mode, parents)
		}
		return s.answer(err, nil)
	case callRename:
		to := d.str(MaxPath)
		if !d.ok() {
			return errMalformed
		}
		if err == nil {
			err = checkPath("to", to)
		}
		if err == nil {
			err = s.files.Rename(ctx, path, to)
		}
		return s.answer(err, nil)
	case callRemove:
		recursive := d.bool()
		if !d.ok() {
			return errMalformed
		}
		if err == nil {
			if ended := s.watched(ctx, func(ctx context.Context) { err = s.files.Remove(ctx, path, recursive) }); ended != nil {
				return ended
			}
		}
		return s.answer(err, nil)
	}
	return errMalformed
}

func (s *server) serveContent(ctx context.Context, call uint8, d *dec) error {
	switch call {
	case callRead:
		path, offset, length := d.str(MaxPath), d.i64(), d.i64()
		if !d.ok() {
			return errMalformed
		}
		if err := checkRange(path, offset, length); err != nil {
			return s.answer(err, nil)
		}
		return s.send(ctx, func(ctx context.Context, w io.Writer) error { return s.files.Read(ctx, path, offset, length, w) })
	case callDownload:
		path := d.str(MaxPath)
		if !d.ok() {
			return errMalformed
		}
		if err := checkPath("path", path); err != nil {
			return s.answer(err, nil)
		}
		return s.send(ctx, func(ctx context.Context, w io.Writer) error { return s.files.Download(ctx, path, w) })
	case callWrite:
		req := d.writeRequest()
		if !d.ok() {
			return errMalformed
		}
		var size int64
		return s.receive(func(r io.Reader) error {
			err := req.Validate()
			if err == nil {
				size, err = s.files.Write(ctx, req, r)
			}
			return err
		}, func(e *enc) { e.i64(size) })
	case callUpload:
		req := d.uploadRequest()
		if !d.ok() {
			return errMalformed
		}
		var res UploadResult
		return s.receive(func(r io.Reader) error {
			err := req.Validate()
			if err == nil {
				res, err = s.files.Upload(ctx, req, r)
			}
			return err
		}, func(e *enc) { e.i64(res.Entries); e.i64(res.Bytes) })
	}
	return errMalformed
}
