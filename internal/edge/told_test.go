package edge_test

import (
	"archive/tar"
	"bytes"
	"context"
	"slices"
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
	for part := range slices.Chunk(data, 64<<10) {
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

// TestDoneInPartIsNotDoneAgain: an append or an upload that failed half way would do twice
// what it did. A file that was to be replaced is as it was.
func TestDoneInPartIsNotDoneAgain(t *testing.T) {
	var full atomic.Bool
	n := newNode(t, func(_ *edge.Config, o *fake.Options) {
		o.DiskStarved = func(_, _ time.Time) bool { return full.Load() }
	})
	big := make([]byte, 2<<20)
	open := func(id string, more bool) *dsecv1.WriteOpen {
		return &dsecv1.WriteOpen{SandboxId: id, Path: &dsecv1.Path{Path: "/tmp/f"}, Append: more}
	}
	for _, tt := range []struct {
		what string
		call func(id string) error
		full bool
		want dsec.Code
		free bool
	}{
		{"append", func(id string) error { return n.write("a", open(id, true), big) }, false, dsec.CodeConflict, false},
		{"append to the node's full disk", func(id string) error { return n.write("a", open(id, true), big) }, true, dsec.CodeOutcomeUnknown, false},
		{"upload", func(id string) error { return n.upload("a", id, "/tmp", big) }, false, dsec.CodeConflict, false},
		{"replace", func(id string) error { return n.write("a", open(id, false), big) }, false, dsec.CodeExhausted, true},
	} {
		full.Store(tt.full)
		id := n.create(&dsecv1.CreateRequest{Limits: &dsecv1.Limits{DiskBytes: 1 << 20}})
		first := typedError(tt.call(id))
		if first.Code != tt.want {
			t.Errorf("%s: %s (%s), want %s", tt.what, first.Code, first.Message, tt.want)
		}
		full.Store(false)
		n.shell(id, "rm -f /tmp/first")
		if again := typedError(tt.call(id)); again.Code != first.Code || again.Error() != first.Error() {
			t.Errorf("%s, again: %s (%s), want %s (%s)", tt.what, again.Code, again.Message, first.Code, first.Message)
		}
		if got := string(n.shell(id, "ls /tmp").Stdout); got != "" {
			t.Errorf("%s is done again: /tmp has %q", tt.what, got)
		}
		begun := 0
		for _, e := range n.trajectory(id) {
			if e.ActionId == "a" {
				begun++
			}
		}
		if free := begun > 1; free != tt.free {
			t.Errorf("%s: its ID is free: %t, want %t", tt.what, free, tt.free)
		}
	}
}

// upload unpacks a small file and one with data in a directory, as an action.
func (n *node) upload(action, id, dir string, data []byte) error {
	var b bytes.Buffer
	tw := tar.NewWriter(&b)
	for i, content := range [][]byte{[]byte("x"), data} {
		_ = tw.WriteHeader(&tar.Header{Name: []string{"first", "second"}[i], Mode: 0o644, Size: int64(len(content))})
		_, _ = tw.Write(content)
	}
	_ = tw.Close()
	s := n.file.Upload(n.t.Context())
	s.RequestHeader().Set(actionHeader, action)
	_ = s.Send(&dsecv1.UploadRequest{Message: &dsecv1.UploadRequest_Open{Open: &dsecv1.UploadOpen{SandboxId: id, Path: &dsecv1.Path{Path: dir}}}})
	for part := range slices.Chunk(b.Bytes(), 64<<10) {
		if s.Send(&dsecv1.UploadRequest{Message: &dsecv1.UploadRequest_Data{Data: part}}) != nil {
			break // it is refused, as the answer tells
		}
	}
	_, err := s.CloseAndReceive()
	return err
}
