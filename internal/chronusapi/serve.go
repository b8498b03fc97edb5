package chronusapi

import (
	"context"
	"io"
)

// serve answers one request. Its error ends the connection.
func (s *server) serve(ctx context.Context, call uint8, d *dec) error {
	if s.rx != nil && len(s.rx.fds) > 0 && call != callSetup && call != callAddGroup {
		return errMalformed // descriptors that nobody asked for
	}
	if s.setup != nil && call != callInfo && call != callSetup && call != callAddGroup {
		if err := s.setup.Ready(); err != nil {
			if call == callWrite || call == callUpload {
				return s.receive(func(io.Reader) error { return err }, nil)
			}
			return s.answer(err, nil)
		}
	}
	switch call {
	case callInfo:
		if !d.ok() {
			return errMalformed
		}
		info, err := s.h.Info(ctx)
		return s.answer(err, func(e *enc) { e.info(&info) })
	case callStart, callAttach, callProcesses, callSignal, callWriteStdin, callResize:
		return s.serveProcess(ctx, call, d)
	case callOpenSession, callRunCommand, callSessions, callCloseSession:
		return s.serveSession(ctx, call, d)
	case callStat, callListDir, callMkdir, callRename, callRemove:
		return s.serveTree(ctx, call, d)
	case callRead, callWrite, callDownload, callUpload:
		return s.serveContent(ctx, call, d)
	case callSetup, callAddGroup:
		return s.serveSetup(ctx, call, d)
	}
	return errMalformed
}

func (s *server) serveProcess(ctx context.Context, call uint8, d *dec) error {
	switch call {
	case callStart:
		req := d.startRequest()
		if !d.ok() {
			return errMalformed
		}
		if err := req.Validate(); err != nil {
			return s.answer(err, nil)
		}
		return s.stream(ctx, func(ctx context.Context, sink Sink) error { return s.h.Start(ctx, req, sink) })
	case callAttach:
		id, from := d.u64(), d.u64()
		if !d.ok() {
			return errMalformed
		}
		return s.stream(ctx, func(ctx context.Context, sink Sink) error { return s.h.Attach(ctx, id, from, sink) })
	case callProcesses:
		if !d.ok() {
			return errMalformed
		}
		list, err := s.h.Processes(ctx)
		return s.answer(err, func(e *enc) {
			e.u32(uint32(len(list)))
			for i := range list {
				e.process(&list[i])
			}
		})
	case callSignal:
		id, signal, tree := d.u64(), int(int32(d.u32())), d.bool()
		if !d.ok() {
			return errMalformed
		}
		err := checkSignal(signal)
		if err == nil {
			err = s.h.Signal(ctx, id, signal, tree)
		}
		return s.answer(err, nil)
	case callWriteStdin:
		id, eof, data := d.u64(), d.bool(), d.bytes(MaxChunk)
		if !d.ok() {
			return errMalformed
		}
		var n int
		var err error
		if ended := s.watched(ctx, func(ctx context.Context) { n, err = s.h.WriteStdin(ctx, id, data, eof) }); ended != nil {
			return ended
		}
		return s.answer(err, func(e *enc) { e.u32(uint32(n)) })
	case callResize:
		id, size := d.u64(), d.windowSize()
		if !d.ok() {
			return errMalformed
		}
		err := checkSize(size)
		if err == nil {
			err = s.h.Resize(ctx, id, size)
		}
		return s.answer(err, nil)
	}
	return errMalformed
}

func (s *server) serveSession(ctx context.Context, call uint8, d *dec) error {
	switch call {
	case callOpenSession:
		req := d.sessionRequest()
		if !d.ok() {
			return errMalformed
		}
		var sess Session
		err := req.Validate()
		if err == nil {
			if ended := s.watched(ctx, func(ctx context.Context) { sess, err = s.h.OpenSession(ctx, req) }); ended != nil {
				return ended
			}
		}
		return s.answer(err, func(e *enc) { e.session(&sess) })
	case callRunCommand:
		cmd := d.sessionCommand()
		if !d.ok() {
			return errMalformed
		}
		if err := cmd.Validate(); err != nil {
			return s.answer(err, nil)
		}
		return s.stream(ctx, func(ctx context.Context, sink Sink) error { return s.h.RunCommand(ctx, cmd, sink) })
	case callSessions:
		if !d.ok() {
			return errMalformed
		}
		list, err := s.h.Sessions(ctx)
		return s.answer(err, func(e *enc) {
			e.u32(uint32(len(list)))
			for i := range list {
				e.session(&list[i])
			}
		})
	case callCloseSession:
		id := d.str(maxSessionID)
		if !d.ok() {
			return errMalformed
		}
		return s.answer(s.h.CloseSession(ctx, id), nil)
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
			f, err = s.h.Stat(ctx, path, follow)
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
			if ended := s.watched(ctx, func(ctx context.Context) { list, more, err = s.h.ListDir(ctx, path, after, limit) }); ended != nil {
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
			err = s.h.Mkdir(ctx, path, mode, parents)
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
			err = s.h.Rename(ctx, path, to)
		}
		return s.answer(err, nil)
	case callRemove:
		recursive := d.bool()
		if !d.ok() {
			return errMalformed
		}
		if err == nil {
			if ended := s.watched(ctx, func(ctx context.Context) { err = s.h.Remove(ctx, path, recursive) }); ended != nil {
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
		return s.send(ctx, func(ctx context.Context, w io.Writer) error { return s.h.Read(ctx, path, offset, length, w) })
	case callDownload:
		path := d.str(MaxPath)
		if !d.ok() {
			return errMalformed
		}
		if err := checkPath("path", path); err != nil {
			return s.answer(err, nil)
		}
		return s.send(ctx, func(ctx context.Context, w io.Writer) error { return s.h.Download(ctx, path, w) })
	case callWrite:
		req := d.writeRequest()
		if !d.ok() {
			return errMalformed
		}
		var size int64
		return s.receive(func(r io.Reader) error {
			err := req.Validate()
			if err == nil {
				size, err = s.h.Write(ctx, req, r)
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
				res, err = s.h.Upload(ctx, req, r)
			}
			return err
		}, func(e *enc) { e.i64(res.Entries); e.i64(res.Bytes) })
	}
	return errMalformed
}
