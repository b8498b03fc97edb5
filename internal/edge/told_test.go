package edge_test

import (
	"context"
	"sync/atomic"
	"testing"
	"time"

	"connectrpc.com/connect"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/backend/fake"
	"github.com/opendsec/dsec/internal/edge"
	dsecv1 "github.com/opendsec/dsec/proto/dsec/v1"
)

// write writes a file, as the action where that is not "".
func (n *node) write(action string, open *dsecv1.WriteOpen, data []byte) error {
	s := n.file.Write(n.t.Context())
	if action != "" {
		s.RequestHeader().Set(actionHeader, action)
	}
	_ = s.Send(&dsecv1.WriteRequest{Message: &dsecv1.WriteRequest_Open{Open: open}})
	for len(data) > 0 {
		part := data[:min(len(data), 64<<10)]
		data = data[len(part):]
		if s.Send(&dsecv1.WriteRequest{Message: &dsecv1.WriteRequest_Data{Data: part}}) != nil {
			break // it is refused, as the answer tells
		}
	}
	_, err := s.CloseAndReceive()
	return err
}

// read reads a file.
func (n *node) read(ctx context.Context, req *connect.Request[dsecv1.ReadRequest]) error {
	s, err := n.file.Read(ctx, req)
	if err != nil {
		return err
	}
	for s.Receive() {
	}
	return s.Err()
}

// TestTheLogSaysWhatItsCallerWasTold, where the error of a call for files is put right:
// who comes again is told the same.
func TestTheLogSaysWhatItsCallerWasTold(t *testing.T) {
	var full atomic.Bool
	n := newNode(t, func(_ *edge.Config, o *fake.Options) {
		o.DiskStarved = func(_, _ time.Time) bool { return full.Load() }
	})
	path := &dsecv1.Path{Path: "/tmp/f"}
	mkdir := func(id string) error {
		_, err := n.file.Mkdir(t.Context(), named(&dsecv1.MkdirRequest{SandboxId: id, Path: path}, "mkdir"))
		return err
	}
	write := func(id string) error {
		return n.write("write", &dsecv1.WriteOpen{SandboxId: id, Path: path}, make([]byte, 2<<20))
	}
	read := func(id string) error {
		return n.read(t.Context(), named(&dsecv1.ReadRequest{SandboxId: id, Path: path}, "read"))
	}
	for _, tt := range []struct {
		call    func(id string) error
		starved bool
		want    dsec.Code
		log     string
	}{
		{mkdir, true, dsec.CodeConflict, "file_mkdir ended conflict"},
		{write, true, dsec.CodeConflict, "file_write ended conflict"},
		{read, true, dsec.CodeExhausted, "file_read ended exhausted"},
		{write, false, dsec.CodeUnavailable, "file_write ended unavailable"},
	} {
		id := n.create(&dsecv1.CreateRequest{Limits: &dsecv1.Limits{DiskBytes: 1 << 20}})
		if full.Store(!tt.starved); tt.starved {
			n.edge.Starve(dsec.SandboxID(id))
		}
		for range 2 {
			if err := typedError(tt.call(id)); err.Code != tt.want {
				t.Errorf("told %s (%s), want %s", err.Code, err.Message, tt.want)
			}
			if got := told(n.trajectory(id)); got[len(got)-1] != tt.log {
				t.Errorf("the log says %q, want %q as the caller was told", got[len(got)-1], tt.log)
			}
		}
	}
}
