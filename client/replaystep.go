package client

import (
	"bytes"
	"context"
	"errors"
	"io"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"

	"github.com/opendsec/dsec"
	dsecv1 "github.com/opendsec/dsec/proto/dsec/v1"
	"github.com/opendsec/dsec/proto/dsec/v1/dsecv1connect"
)

// step is one action of a replay.
type step struct {
	begun   *dsecv1.TrajectoryEntry // of the original
	end     *end                    // of the original; nil: there is none
	action  string
	message []byte // the request
	data    []byte // what was streamed after it

	done    chan error  // takes what the call came to
	started chan uint64 // takes the process of a command that is streamed

	seq     uint64 // of the fresh sandbox's entry with which it began
	process uint64
	written *written                // by the command that it starts, or gives input to; nil: by none
	paced   int64                   // the time of the last mark that its input has come to
	ended   *dsecv1.TrajectoryEntry // of the fresh sandbox
	failed  error                   // it was not begun
	late    bool                    // it took too long
}

// told is what others are told of the step.
func (st *step) told(original time.Duration) ReplayStep {
	return ReplayStep{Seq: st.begun.Seq, Kind: st.begun.Kind, Request: st.begun.Request, Original: original, Replayed: st.ended.GetDuration().AsDuration()}
}

// take takes in an entry of the fresh sandbox.
func (r *replayer) take(e *dsecv1.TrajectoryEntry) {
	r.seen = e.Seq
	for _, st := range r.steps {
		switch {
		case e.ActionId == st.action:
			st.seq = e.Seq
		case e.BegunSeq > 0 && e.BegunSeq == st.seq:
			st.ended = e
		}
	}
}

// began asks whether the fresh sandbox's trajectory has an action of which it has not
// told yet.
func (r *replayer) began(st *step) bool {
	for e, err := range r.to.Trajectory(r.context, TrajectoryOptions{From: r.seen + 1}) {
		if err != nil {
			return false
		}
		if e.ActionId == st.action {
			return true
		}
	}
	return false
}

// load reads the request of an action, and what was streamed after it.
func (r *replayer) load(st *step) error {
	var err error
	if st.message, err = r.of.input(r.context, st.begun.Seq, st.begun.Input); err != nil {
		return err
	}
	if !streams(st) {
		return nil
	}
	if st.end == nil {
		return dsec.Errorf(dsec.CodeOutcomeUnknown, "entry %d has not ended: what is streamed to it is not known yet", st.begun.Seq)
	}
	if st.end.input != nil {
		st.data, err = r.of.input(r.context, st.end.seq, st.end.input)
	}
	return err
}

// streams tells whether data follow the request of an action.
func streams(st *step) bool {
	switch st.begun.Kind {
	case dsecv1.TrajectoryKind_TRAJECTORY_KIND_FILE_WRITE, dsecv1.TrajectoryKind_TRAJECTORY_KIND_FILE_UPLOAD:
		return true
	case dsecv1.TrajectoryKind_TRAJECTORY_KIND_STDIN:
		var m dsecv1.WriteStdinRequest
		return proto.Unmarshal(st.message, &m) == nil && len(m.Data) == 0 && !m.Eof
	}
	return false
}

// input is all that an entry says that its action was given.
func (s *Sandbox) input(ctx context.Context, seq uint64, in *dsecv1.TrajectoryOutput) ([]byte, error) {
	if in == nil {
		return nil, dsec.Errorf(dsec.CodeOutcomeUnknown, "entry %d has no request: it was written before requests were kept", seq)
	}
	if lost := in.TotalBytes - in.KeptBytes; lost > 0 {
		return nil, dsec.Errorf(dsec.CodeOutcomeUnknown, "of what entry %d was given %d bytes were not kept (%s): it cannot be replayed", seq, lost, in.GapReason)
	}
	if len(in.Digest) == 0 {
		var all []byte
		for _, p := range in.Head {
			all = append(all, p.Data...)
		}
		return all, nil
	}
	var b bytes.Buffer
	err := s.TrajectoryInput(ctx, seq, &b)
	if err != nil && dsec.CodeOf(err) == dsec.CodeNotFound {
		err = dsec.Errorf(dsec.CodeOutcomeUnknown, "what entry %d was given is gone: it cannot be replayed", seq)
	}
	return b.Bytes(), err
}

// named is a request with the action ID of a step.
func named[T any](st *step, m *T) *connect.Request[T] {
	req := connect.NewRequest(m)
	req.Header().Set(actionHeader, st.action)
	return req
}

// parsed is the request of a step, with the names that things have in the fresh sandbox.
func parsed[T any, M interface {
	*T
	proto.Message
}](r *replayer, st *step) (M, error) {
	m := M(new(T))
	if err := proto.Unmarshal(st.message, m); err != nil {
		return nil, dsec.Errorf(dsec.CodeOutcomeUnknown, "the request of entry %d is damaged: it cannot be replayed", st.begun.Seq)
	}
	fields := m.ProtoReflect()
	if f := fields.Descriptor().Fields().ByName("sandbox_id"); f != nil {
		fields.Set(f, protoreflect.ValueOfString(string(r.to.id)))
	}
	if f := fields.Descriptor().Fields().ByName("session_id"); f != nil {
		if id, ok := r.sessions[fields.Get(f).String()]; ok {
			fields.Set(f, protoreflect.ValueOfString(id))
		}
	}
	if f := fields.Descriptor().Fields().ByName("process_id"); f != nil {
		// A command that has not ended does not tell its number: then it is the same,
		// for numbers are given in the order of the starts.
		if id, ok := r.processes[fields.Get(f).Uint()]; ok {
			fields.Set(f, protoreflect.ValueOfUint64(id))
		}
	}
	return m, nil
}

// unaryStep is a call with one answer. What it is, the trajectory tells.
func unaryStep[T, Res any, M interface {
	*T
	proto.Message
}](r *replayer, st *step, method func(context.Context, *connect.Request[T]) (*connect.Response[Res], error), procedure string) (func(context.Context) error, error) {
	m, err := parsed[T, M](r, st)
	if err != nil {
		return nil, err
	}
	return func(ctx context.Context) error {
		if _, err := method(ctx, named(st, (*T)(m))); err != nil {
			return r.to.c.typed(err, procedure)
		}
		return nil
	}, nil
}

// streamStep is a call that is answered by a stream.
func streamStep[T, Res any, M interface {
	*T
	proto.Message
}](r *replayer, st *step, method func(context.Context, *connect.Request[T]) (*connect.ServerStreamForClient[Res], error), procedure string, look func(*Res)) (func(context.Context) error, error) {
	m, err := parsed[T, M](r, st)
	if err != nil {
		return nil, err
	}
	return func(ctx context.Context) error {
		stream, err := method(ctx, named(st, (*T)(m)))
		if err != nil {
			return r.to.c.typed(err, procedure)
		}
		defer func() { _ = stream.Close() }()
		for stream.Receive() {
			look(stream.Msg())
		}
		if err := stream.Err(); err != nil {
			return r.to.c.typed(err, procedure)
		}
		return nil
	}, nil
}

func ignore[T any](*T) {}

// calls is the call that does an action again.
func (r *replayer) calls(st *step) (func(context.Context) error, error) {
	c := r.to.c
	switch st.begun.Kind {
	case dsecv1.TrajectoryKind_TRAJECTORY_KIND_EXEC:
		return unaryStep(r, st, c.process.Exec, dsecv1connect.ProcessServiceExecProcedure)
	case dsecv1.TrajectoryKind_TRAJECTORY_KIND_START:
		return r.start(st)
	case dsecv1.TrajectoryKind_TRAJECTORY_KIND_SIGNAL:
		return unaryStep(r, st, c.process.Signal, dsecv1connect.ProcessServiceSignalProcedure)
	case dsecv1.TrajectoryKind_TRAJECTORY_KIND_RESIZE:
		return unaryStep(r, st, c.process.Resize, dsecv1connect.ProcessServiceResizeProcedure)
	case dsecv1.TrajectoryKind_TRAJECTORY_KIND_STDIN:
		if streams(st) {
			return r.stdin(st)
		}
		return unaryStep(r, st, c.process.WriteStdin, dsecv1connect.ProcessServiceWriteStdinProcedure)
	case dsecv1.TrajectoryKind_TRAJECTORY_KIND_SESSION_OPEN:
		return unaryStep(r, st, c.session.OpenSession, dsecv1connect.SessionServiceOpenSessionProcedure)
	case dsecv1.TrajectoryKind_TRAJECTORY_KIND_SESSION_COMMAND:
		return streamStep(r, st, c.session.RunCommand, dsecv1connect.SessionServiceRunCommandProcedure, ignore)
	case dsecv1.TrajectoryKind_TRAJECTORY_KIND_SESSION_INTERRUPT:
		return unaryStep(r, st, c.session.InterruptCommand, dsecv1connect.SessionServiceInterruptCommandProcedure)
	case dsecv1.TrajectoryKind_TRAJECTORY_KIND_SESSION_CLOSE:
		return unaryStep(r, st, c.session.CloseSession, dsecv1connect.SessionServiceCloseSessionProcedure)
	case dsecv1.TrajectoryKind_TRAJECTORY_KIND_FILE_STAT:
		return unaryStep(r, st, c.file.Stat, dsecv1connect.FileServiceStatProcedure)
	case dsecv1.TrajectoryKind_TRAJECTORY_KIND_FILE_LIST:
		return unaryStep(r, st, c.file.ListDir, dsecv1connect.FileServiceListDirProcedure)
	case dsecv1.TrajectoryKind_TRAJECTORY_KIND_FILE_MKDIR:
		return unaryStep(r, st, c.file.Mkdir, dsecv1connect.FileServiceMkdirProcedure)
	case dsecv1.TrajectoryKind_TRAJECTORY_KIND_FILE_RENAME:
		return unaryStep(r, st, c.file.Rename, dsecv1connect.FileServiceRenameProcedure)
	case dsecv1.TrajectoryKind_TRAJECTORY_KIND_FILE_REMOVE:
		return unaryStep(r, st, c.file.Remove, dsecv1connect.FileServiceRemoveProcedure)
	case dsecv1.TrajectoryKind_TRAJECTORY_KIND_FILE_READ:
		return streamStep(r, st, c.file.Read, dsecv1connect.FileServiceReadProcedure, ignore)
	case dsecv1.TrajectoryKind_TRAJECTORY_KIND_FILE_DOWNLOAD:
		return streamStep(r, st, c.file.Download, dsecv1connect.FileServiceDownloadProcedure, ignore)
	case dsecv1.TrajectoryKind_TRAJECTORY_KIND_FILE_WRITE:
		return r.write(st)
	case dsecv1.TrajectoryKind_TRAJECTORY_KIND_FILE_UPLOAD:
		return r.upload(st)
	}
	return nil, dsec.Errorf(dsec.CodeUnsupported, "entry %d is of a kind that this client cannot replay: %s", st.begun.Seq, st.begun.Kind)
}

// write writes a file.
func (r *replayer) write(st *step) (func(context.Context) error, error) {
	m, err := parsed[dsecv1.WriteOpen](r, st)
	if err != nil {
		return nil, err
	}
	open := &dsecv1.WriteRequest{Message: &dsecv1.WriteRequest_Open{Open: m}}
	return func(ctx context.Context) error {
		stream := r.to.c.file.Write(ctx)
		return given(ctx, r.to.c, st, stream, open, func(b []byte) *dsecv1.WriteRequest {
			return &dsecv1.WriteRequest{Message: &dsecv1.WriteRequest_Data{Data: b}}
		})
	}, nil
}

// upload unpacks a tar.
func (r *replayer) upload(st *step) (func(context.Context) error, error) {
	m, err := parsed[dsecv1.UploadOpen](r, st)
	if err != nil {
		return nil, err
	}
	open := &dsecv1.UploadRequest{Message: &dsecv1.UploadRequest_Open{Open: m}}
	return func(ctx context.Context) error {
		stream := r.to.c.file.Upload(ctx)
		return given(ctx, r.to.c, st, stream, open, func(b []byte) *dsecv1.UploadRequest {
			return &dsecv1.UploadRequest{Message: &dsecv1.UploadRequest_Data{Data: b}}
		})
	}, nil
}

// given streams to a call what the original was given.
func given[Req, Res any](ctx context.Context, c *Client, st *step, stream *connect.ClientStreamForClient[Req, Res], open *Req, data func([]byte) *Req) error {
	stream.RequestHeader().Set(actionHeader, st.action)
	err := stream.Send(open)
	for rest := st.data; len(rest) > 0 && err == nil; {
		n := min(chunk, len(rest), st.upTo(ctx, len(st.data)-len(rest)))
		err = stream.Send(data(rest[:n]))
		rest = rest[n:]
	}
	st.data = nil
	if err == nil || errors.Is(err, io.EOF) { // EOF: the server has answered already
		_, err = stream.CloseAndReceive()
	}
	if err != nil {
		return c.typed(err, stream.Spec().Procedure)
	}
	return nil
}
