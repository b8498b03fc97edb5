package test

import (
	"archive/tar"
	"bytes"
	"errors"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"io"
	"path/filepath"
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
	sdkBatch(t, up(t).client(t))
}

func sdkBatch(t *testing.T, cl *client.Client) {
	t.Helper()
	made, err := cl.CreateSandboxes(t.Context(), 3, client.SandboxOptions{Backend: "fake"})
	check(t, err)
	for _, m := range made {
		check(t, m.Err)
		check(t, m.Sandbox.Kill(t.Context()))
	}
	if len(made) != 3 {
		t.Errorf("%d results of 3", len(made))
	}
}

func TestSDKOnContainers(t *testing.T) {
	cl := containers(t).client(t)
	_, _, err := cl.ImportLayer(t.Context(), "base", client.ImportOptions{}, bytes.NewReader(busyboxTar(t)))
	check(t, err)
	sb, err := cl.CreateSandbox(t.Context(), client.SandboxOptions{Layers: []string{"base"}})
	check(t, err)
	sdkFiles(t, sb)
	sdkProcesses(t, sb)
	sdkSessions(t, sb)
	sdkUserToCome(t, cl)
	check(t, cl.RemoveLayer(t.Context(), "base"))
	if list, err := cl.Layers(t.Context()); err != nil || len(list) > 0 {
		t.Errorf("layers %+v, %v", list, err)
	}
}

// sdkUserToCome: a sandbox may be for a user that its first commands make.
func sdkUserToCome(t *testing.T, cl *client.Client) {
	t.Helper()
	sb, err := cl.CreateSandbox(t.Context(), client.SandboxOptions{Layers: []string{"base"}, User: "agent"})
	check(t, err)
	var de *dsec.Error
	if _, _, err := sb.Command("id", "-u").Output(t.Context()); !errors.As(err, &de) || de.Code != dsec.CodeNotFound || de.Field != "command.user" {
		t.Errorf("before it is there: %v", err)
	}
	add := sb.Shell("echo agent:x:1000:1000::/:/bin/sh >> /etc/passwd")
	add.User = "root"
	if _, o, err := add.Output(t.Context()); err != nil || !o.OK() {
		t.Fatalf("%+v, %v", o, err)
	}
	if out, _, err := sb.Command("id", "-u").Output(t.Context()); err != nil || string(out) != "1000\n" {
		t.Errorf("%q, %v", out, err)
	}
}

// TestEveryCallOfTheSDKIsMade: no method of the Go SDK is without a test that
// calls it.
func TestEveryCallOfTheSDKIsMade(t *testing.T) {
	set := token.NewFileSet()
	called := map[string]bool{}
	methods := map[string]string{}
	for _, dir := range []string{".", "../client"} {
		files, err := filepath.Glob(filepath.Join(dir, "*.go"))
		check(t, err)
		for _, name := range files {
			file, err := parser.ParseFile(set, name, nil, parser.SkipObjectResolution)
			check(t, err)
			test := strings.HasSuffix(name, "_test.go")
			for n := range ast.Preorder(file) {
				switch n := n.(type) {
				case *ast.CallExpr:
					if sel, ok := n.Fun.(*ast.SelectorExpr); ok && test {
						called[sel.Sel.Name] = true
					}
				case *ast.FuncDecl:
					if n.Recv != nil && !test && ast.IsExported(n.Name.Name) && ast.IsExported(receiver(n)) {
						methods[receiver(n)+"."+n.Name.Name] = n.Name.Name
					}
				}
			}
		}
	}
	if len(methods) < 40 {
		t.Errorf("found %d methods: this test looks in the wrong place", len(methods))
	}
	for method, name := range methods {
		if !called[name] {
			t.Errorf("no test calls %s", method)
		}
	}
}

// receiver is the name of a method's type.
func receiver(f *ast.FuncDecl) string {
	typ := f.Recv.List[0].Type
	if star, ok := typ.(*ast.StarExpr); ok {
		typ = star.X
	}
	id, _ := typ.(*ast.Ident)
	return id.Name
}

func sdkMkdir(t *testing.T, sb *client.Sandbox) {
	t.Helper()
	ctx := t.Context()
	check(t, sb.Mkdir(ctx, "/tmp/made", 0o750, false))
	if f, err := sb.Lstat(ctx, "/tmp/made"); err != nil || !f.IsDir() || f.Mode != 0o750 {
		t.Errorf("made: %+v, %v", f, err)
	}
	if err := sb.Mkdir(ctx, "/tmp/made", 0o700, false); dsec.CodeOf(orOK(err)) != dsec.CodeConflict {
		t.Errorf("once more: %v", err)
	}
	if err := sb.Mkdir(ctx, "/tmp/made/a/b", 0o700, false); dsec.CodeOf(orOK(err)) != dsec.CodeNotFound {
		t.Errorf("without its parent: %v", err)
	}
	check(t, sb.Mkdir(ctx, "/tmp/made/a/b", 0o700, true))
	check(t, sb.Mkdir(ctx, "/tmp/made/a/b", 0o700, true))
	if f, err := sb.Lstat(ctx, "/tmp/made/a"); err != nil || f.Type != "dir" {
		t.Errorf("its parent: %+v, %v", f, err)
	}
	check(t, sb.WriteFile(ctx, "/tmp/made/file", nil, 0o600))
	if err := sb.Mkdir(ctx, "/tmp/made/file", 0o700, true); err == nil || dsec.CodeOf(err).Platform() {
		t.Errorf("where a file is: %v", err)
	}
	check(t, sb.Remove(ctx, "/tmp/made", true))
}

func sdkFiles(t *testing.T, sb *client.Sandbox) {
	t.Helper()
	sdkMkdir(t, sb)
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
	var back bytes.Buffer
	if n, err := sb.Download(ctx, "/tmp/dir", &back); err != nil || n != int64(back.Len()) {
		t.Errorf("download: %d bytes of %d, %v", n, back.Len(), err)
	}
	entries := 0
	for r := tar.NewReader(&back); ; entries++ {
		if _, err := r.Next(); errors.Is(err, io.EOF) {
			break
		} else if err != nil {
			t.Fatal(err)
		}
	}
	if entries < files+1 {
		t.Errorf("downloaded %d entries", entries)
	}
	if u, err := sb.Usage(ctx); err != nil || u.Pids < 1 || u.DiskLimit == 0 {
		t.Errorf("usage: %+v, %v", u, err)
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

	// A terminal that grows.
	size := sb.Command("sh")
	input, typed := io.Pipe()
	size.Stdin, size.Stdout, size.PTY = input, io.Discard, &client.WindowSize{Rows: 24, Cols: 80}
	check(t, size.Start(ctx))
	check(t, size.Process().Resize(ctx, client.WindowSize{Rows: 30, Cols: 100}))
	if err := size.Process().Resize(ctx, client.WindowSize{}); dsec.CodeOf(orOK(err)) != dsec.CodeInvalid {
		t.Errorf("a terminal without a size: %v", err)
	}
	_, err := io.WriteString(typed, "exit 6\n")
	check(t, err)
	if o, err := size.Wait(); err != nil || o.Code != 6 {
		t.Errorf("on a terminal: %+v, %v", o, err)
	}
	check(t, typed.Close())

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
	if err := sb.Session(want[0]).Interrupt(ctx); dsec.CodeOf(orOK(err)) != dsec.CodeConflict {
		t.Errorf("interrupt of no command: %v", err)
	}
	check(t, sb.Session(want[0]).Close(ctx))
	testutil.WaitFor(t, 10*time.Second, "the session's end", func() error {
		if got := list(); !slices.Equal(got, want[1:]) {
			return errors.New(strings.Join(got, " "))
		}
		return nil
	})
}
