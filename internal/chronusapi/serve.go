package chronusapi

import (
	"context"
)

// serve answers one request. Its error ends the connection.
func (s *server) serve(ctx context.Context, call uint8, d *dec) error {
	if isFileCall(call) {
		return s.serveFile(ctx, call, d)
	}
	switch call {
	case callInfo:
		if !d.ok() {
			return errMalformed
		}
		info, err := s.h.Info(ctx)
		return s.answer(err, func(e *enc) { e.info(&info) })
	case callStart, callStartTagged, callAttach, callProcesses, callSignal, callWriteStdin, callResize:
		return s.serveProcess(ctx, call, d)
	case callFindTag, callForgetTag:
		return s.serveTag(ctx, call, d)
	case callOpenSession, callRunCommand, callSessions, callCloseSession, callInterrupt:
		return s.serveSession(ctx, call, d)
	}
	return errMalformed
}

func (s *server) serveProcess(ctx context.Context, call uint8, d *dec) error {
	switch call {
	case callStart, callStartTagged:
		return s.serveStart(ctx, call == callStartTagged, d)
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

func (s *server) serveStart(ctx context.Context, tagged bool, d *dec) error {
	var tag uint64
	if tagged {
		tag = d.u64()
	}
	req := d.startRequest()
	req.Tag = tag
	if !d.ok() {
		return errMalformed
	}
	err := req.Validate()
	if err == nil && tagged {
		err = checkTag(tag)
	}
	if err != nil {
		return s.answer(err, nil)
	}
	return s.stream(ctx, func(ctx context.Context, sink Sink) error { return s.h.Start(ctx, req, sink) })
}

func (s *server) serveTag(ctx context.Context, call uint8, d *dec) error {
	tag := d.u64()
	if !d.ok() {
		return errMalformed
	}
	if err := checkTag(tag); err != nil {
		return s.answer(err, nil)
	}
	if call == callForgetTag {
		return s.answer(s.h.ForgetTag(ctx, tag), nil)
	}
	process, err := s.h.FindTag(ctx, tag)
	return s.answer(err, func(e *enc) { e.u64(process) })
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
	case callCloseSession, callInterrupt:
		id := d.str(maxSessionID)
		if !d.ok() {
			return errMalformed
		}
		if call == callInterrupt {
			return s.answer(s.h.Interrupt(ctx, id), nil)
		}
		return s.answer(s.h.CloseSession(ctx, id), nil)
	}
	return errMalformed
}
