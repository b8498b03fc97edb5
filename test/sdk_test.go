package test

import (
	"archive/tar"
	"bytes"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/client"
	"github.com/opendsec/dsec/internal/testutil"
)

// TestSDK and TestSDKOnContainers make the calls of the Go SDK that no other
// story makes.
func TestSDK(t *testing.T) {
	sb, err := up(t).client(t).CreateSandbox(t.Context(), client.SandboxOptions{Backend: "fake"})
	check(t, err)
	sdkFiles(t, sb)
	sdkProcesses(t, sb)
	sdkSessions(t, sb)
}

func TestSDKOnContainers(t *testing.T) {
	cl := containers(t).client(t)
	_, _, err := cl.ImportLayer(t.Context(), "base", "", bytes.NewReader(busyboxTar(t)))
	check(t, err)
	sb, err := cl.CreateSandbox(t.Context(), client.SandboxOptions{Layers: []string{"base"}})
	check(t, err)
	sdkFiles(t, sb)
	sdkProcesses(t, sb)
	sdkSessions(t, sb)
}

func sdkFiles(t *testing.T, sb *client.Sandbox) {
	t.Helper()
	ctx := t.Context()
	const files = 2500 // more than one page
	var archive bytes.Buffer
	w := tar.NewWriter(&archive)
	for i := range files {
		check(t, w.WriteHeader(&tar.Header{Name: fmt.Sprintf("f%04d", i), Mode: 0o640, Size: 1}))
		_, err := w.Write([]byte("x"))
		check(t, err)
	}
	check(t, w.WriteHeader(&tar.Header{Typeflag: tar.TypeSymlink, Name: "link", Linkname: "f0001"}))
	check(t, w.Close())
	_, err := sb.Upload(ctx, "/tmp/dir", &archive, "")
	check(t, err)
	var names []string
	for f, err := range sb.ReadDir(ctx, "/tmp/dir") {
		check(t, err)
		names = append(names, f.Name)
	}
	if len(names) != files+1 || !slices.IsSorted(names) || names[0] != "f0000" || names[files] != "link" {
		t.Errorf("listed %d, first %q, last %q", len(names), names[0], names[len(names)-1])
	}
	for range sb.ReadDir(ctx, "/tmp/dir") {
		break // a list that is not wanted to its end
	}
	if f, err := sb.Lstat(ctx, "/tmp/dir/link"); err != nil || f.Type != "symlink" || f.Target != "f0001" {
		t.Errorf("lstat: %+v, %v", f, err)
	}
	if f, err := sb.Stat(ctx, "/tmp/dir/link"); err != nil || f.Type != "file" || f.Mode != 0o640 || f.Size != 1 {
		t.Errorf("stat: %+v, %v", f, err)
	}
	check(t, sb.Rename(ctx, "/tmp/dir/f0002", "/tmp/dir/f0003"))
	if _, err := sb.Lstat(ctx, "/tmp/dir/f0002"); dsec.CodeOf(orOK(err)) != dsec.CodeNotFound {
		t.Errorf("the old name: %v", err)
	}
	if err := sb.Rename(ctx, "/tmp/dir/none", "/tmp/dir/x"); dsec.CodeOf(orOK(err)) != dsec.CodeNotFound {
		t.Errorf("rename of nothing: %v", err)
	}
	check(t, sb.Remove(ctx, "/tmp/dir/link", false))
	if _, err := sb.Lstat(ctx, "/tmp/dir/f0001"); err != nil {
		t.Errorf("the target of a link that was removed: %v", err)
	}
	if err := sb.Remove(ctx, "/tmp/dir", false); dsec.CodeOf(orOK(err)) != dsec.CodeConflict {
		t.Errorf("remove of a directory that is not empty: %v", err)
	}
	check(t, sb.Remove(ctx, "/tmp/dir", true))
	for _, err := range sb.ReadDir(ctx, "/tmp/dir") {
		if dsec.CodeOf(orOK(err)) != dsec.CodeNotFound {
			t.Errorf("list of what was removed: %v", err)
		}
	}
}

func sdkProcesses(t *testing.T, sb *client.Sandbox) {
	t.Helper()
	ctx := t.Context()
	sleep := sb.Command("sleep", "1000")
	check(t, sleep.Start(ctx))
	check(t, sleep.Process().Signal(ctx, syscall.SIGTERM))
	if o, err := sleep.Wait(); err != nil || o.Signal != 15 {
		t.Errorf("signalled: %+v, %v", o, err)
	}
	if err := sleep.Process().Signal(ctx, syscall.SIGTERM); dsec.CodeOf(orOK(err)) != dsec.CodeConflict {
		t.Errorf("signal to a process that has ended: %v, want conflict", err)
	}
	check(t, sleep.Process().Kill(ctx)) // wanted dead, and dead it is
	if err := sb.Process(12345).Kill(ctx); dsec.CodeOf(orOK(err)) != dsec.CodeNotFound {
		t.Errorf("kill of a process that never was: %v", err)
	}

	// What is held in memory is bounded also where the output is streamed.
	endless := sb.Command("cat")
	endless.Stdin = bytes.NewReader(make([]byte, client.MaxOutput+1))
	if out, o, err := endless.Output(ctx); err != nil || !o.OutputLimit || len(out) > client.MaxOutput {
		t.Errorf("%d bytes, %+v, %v; want no more than %d", len(out), o, err, client.MaxOutput)
	}

	// Input that others write: the command's own reader says nothing.
	silent, end := io.Pipe()
	defer func() { _ = end.Close() }()
	var out strings.Builder
	cat := sb.Command("cat")
	cat.Stdin, cat.Stdout = silent, &out
	check(t, cat.Start(ctx))
	large := bytes.Repeat([]byte("0123456789abcdef"), 40_000) // more than one message
	other := sb.Process(cat.Process().ID)
	if n, err := other.WriteStdin(ctx, large); err != nil || n != len(large) {
		t.Errorf("written %d, %v", n, err)
	}
	check(t, other.CloseStdin(ctx))
	if o, err := cat.Wait(); err != nil || !o.OK() || out.String() != string(large) {
		t.Errorf("%+v, %v, %d bytes", o, err, out.Len())
	}
	if _, err := other.WriteStdin(ctx, []byte("x")); dsec.CodeOf(orOK(err)) != dsec.CodeConflict {
		t.Errorf("input of a process that has ended: %v, want conflict", err)
	}
}

func sdkSessions(t *testing.T, sb *client.Sandbox) {
	t.Helper()
	ctx := t.Context()
	var want []string
	for range 2 {
		s, err := sb.OpenSession(ctx, client.SessionOptions{})
		check(t, err)
		want = append(want, s.ID())
	}
	list := func() []string {
		ids, err := sb.Sessions(ctx)
		check(t, err)
		slices.Sort(ids)
		return ids
	}
	slices.Sort(want)
	if got := list(); !slices.Equal(got, want) {
		t.Errorf("sessions %q, want %q", got, want)
	}
	check(t, sb.Session(want[0]).Close(ctx))
	testutil.WaitFor(t, 10*time.Second, "the session's end", func() error {
		if got := list(); !slices.Equal(got, want[1:]) {
			return errors.New(strings.Join(got, " "))
		}
		return nil
	})
}
