package test

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"io/fs"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"connectrpc.com/connect"
	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/client"
	"github.com/opendsec/dsec/internal/testutil"
	dsecv1 "github.com/opendsec/dsec/proto/dsec/v1"
	"github.com/opendsec/dsec/proto/dsec/v1/dsecv1connect"
)

// cli runs dsec as a client of s in dir.
func (s *server) cli(dir string, args ...string) (stdout, stderr string, code int) {
	cmd := exec.Command(dsecBinary, args...)
	cmd.Dir = dir
	cmd.Env = append(environ(), "DSEC_URL="+s.url, "DSEC_KEY_FILE="+s.keyFile)
	var out, errw bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &errw
	_ = cmd.Run()
	return out.String(), errw.String(), cmd.ProcessState.ExitCode()
}

func importOf(t *testing.T, c *client.Client, name string, o client.ImportOptions, archive []byte) client.Layer {
	t.Helper()
	l, _, err := c.ImportLayer(t.Context(), name, o, bytes.NewReader(archive))
	check(t, err)
	return l
}

// An export has the layers in an order in which a sandbox could have them; one alone is
// of any kind.
func TestExportHasTheOrderOfASandbox(t *testing.T) {
	s := up(t)
	c := s.client(t)
	importOf(t, c, "base", client.ImportOptions{}, tarOfOne(t, "b", "x"))
	importOf(t, c, "base2", client.ImportOptions{}, tarOfOne(t, "b2", "x"))
	importOf(t, c, "work", client.ImportOptions{Kind: dsec.LayerWorkspace}, tarOfOne(t, "w", "x"))
	importOf(t, c, "work2", client.ImportOptions{Kind: dsec.LayerWorkspace}, tarOfOne(t, "w2", "x"))
	importOf(t, c, "tool", client.ImportOptions{Kind: dsec.LayerToolkit}, tarOfOne(t, "t", "x"))
	for want, layers := range map[string][]string{
		"": {"base", "tool", "work"},
		`layers[0]: "work" is a workspace, want a base as the first layer`:                          {"work", "base"},
		`layers[0]: "tool" is a toolkit, want a base as the first layer`:                            {"tool", "work"},
		`layers[2]: "work2" is a workspace, want at most one; layers[1] is one`:                     {"base", "work", "work2"},
		`layers[2]: "tool" is there already, want each layer once`:                                  {"base", "tool", "tool"},
		`layers[1]: "base" is there already, want each layer once`:                                  {"base", "base"},
		`layers[1]: "base2" is a base, want a workspace or a toolkit on the base that is layers[0]`: {"base", "base2"},
		`layers[1]: no layer "nosuch"; ` + "`dsec layer list` shows those that there are":           {"base", "nosuch"},
	} {
		_, err := c.ExportLayers(t.Context(), layers, io.Discard, nil)
		if want == "" && err != nil || want != "" && (err == nil || err.Error() != want) {
			t.Errorf("%q: %v, want %s", layers, err, want)
		}
		// What cannot be exported is no sandbox, for the same reason.
		if want != "" {
			if _, err := c.CreateSandbox(t.Context(), client.SandboxOptions{Backend: "fake", Layers: layers}); err == nil || err.Error() != want {
				t.Errorf("a sandbox of %q: %v, want %s", layers, err, want)
			}
		}
	}
	for _, one := range []string{"base", "work", "tool"} {
		_, err := c.ExportLayers(t.Context(), []string{one}, io.Discard, nil)
		check(t, err)
	}
}

// What a directory has that no layer has is told as of an archive.
func TestImportOfADirectoryTellsWhatItLeavesOut(t *testing.T) {
	testutil.Require(t, testutil.Root)
	s := up(t)
	dir := testutil.Dir(t)
	tree := filepath.Join(dir, "tree")
	check(t, os.Mkdir(tree, 0o755))
	check(t, os.WriteFile(filepath.Join(tree, "file"), []byte("x"), 0o644))
	check(t, unix.Setxattr(filepath.Join(tree, "file"), "trusted.t", []byte("x"), 0))
	check(t, unix.Mknod(filepath.Join(tree, "null"), unix.S_IFCHR|0o666, int(unix.Mkdev(1, 3))))
	l, err := net.Listen("unix", filepath.Join(tree, "sock"))
	check(t, err)
	defer l.Close()
	out, stderr, code := s.cli(dir, "layer", "import", "x", "tree", "--kind", "toolkit", "--at", "/opt/x", "-o", "json")
	var got struct{ Findings []string }
	check(t, json.Unmarshal([]byte(out), &got))
	want := []string{
		`attributes left out (all but user.* of files and directories): 1, the first at "/opt/x/file"`,
		`device nodes left out: 1, the first at "/opt/x/null"`, `sockets left out: 1, the first at "/opt/x/sock"`,
	}
	if code != 0 || !slices.Equal(got.Findings, want) || strings.Count(stderr, "dsec: found: ") != len(want) {
		t.Errorf("exit %d, %q, %s, want %q", code, got.Findings, stderr, want)
	}
}

// An empty base is none; an empty layer on one is.
func TestEmptyDirectories(t *testing.T) {
	s := up(t)
	dir := testutil.Dir(t)
	check(t, os.Mkdir(filepath.Join(dir, "empty"), 0o755))
	if _, stderr, code := s.cli(dir, "layer", "import", "x", "empty"); code != 2 || stderr != "dsec: empty: nothing is in it, and a base is a whole root file system (invalid)\n" {
		t.Errorf("exit %d: %s", code, stderr)
	}
	if _, stderr, code := s.cli(dir, "layer", "import", "x", "empty", "--kind", "workspace"); code != 0 {
		t.Errorf("exit %d: %s", code, stderr)
	}
}

// Inspect shows what an image says of its processes, and where an import was put.
func TestInspectShowsAll(t *testing.T) {
	s := up(t)
	c := s.client(t)
	importOf(t, c, "image", client.ImportOptions{}, ociLayout(t, tarOfOne(t, "f", "x"), `{"Env":["A=1"],"User":"1:2","WorkingDir":"/dir","Entrypoint":["/bin/sh","-c"],"Cmd":["a b"]}`))
	importOf(t, c, "work", client.ImportOptions{Kind: dsec.LayerWorkspace, At: "/work/project"}, tarOfOne(t, "f", "x"))
	check(t, func() error { _, err := c.TagLayer(t.Context(), "work", "other", false); return err }())
	for name, rows := range map[string][]string{
		"image": {"env A=1", "user 1:2", "workdir /dir", `entrypoint ["/bin/sh" "-c"]`, `cmd ["a b"]`, "at -"},
		"work":  {"env -", "entrypoint -", "cmd -", "at /work/project"},
		"other": {"at /work/project"},
	} {
		out, _, _ := s.cli(".", "layer", "inspect", name)
		lines := strings.Split(out, "\n")
		for i, l := range lines {
			lines[i] = strings.Join(strings.Fields(l), " ")
		}
		for _, row := range rows {
			if !slices.Contains(lines, row) {
				t.Errorf("%s: no %q in\n%s", name, row, out)
			}
		}
	}
}

// Who says what a layer is for is told where it is of another kind.
func TestALayerIsWhatItIsTakenFor(t *testing.T) {
	s := up(t)
	c := s.client(t)
	importOf(t, c, "base", client.ImportOptions{}, tarOfOne(t, "b", "x"))
	importOf(t, c, "tool", client.ImportOptions{Kind: dsec.LayerToolkit}, tarOfOne(t, "t", "x"))
	calls := dsecv1connect.NewSandboxServiceClient(http.DefaultClient, s.url)
	for want, kinds := range map[string][]string{
		"":         {"base", "toolkit"},
		" (any)":   {"", "toolkit"},
		" (first)": {"base"},
		" (none)":  nil,
		`layers[1]: "tool" is a toolkit, want a workspace`:              {"base", "workspace"},
		`layers[0]: "base" is a base, want a toolkit`:                   {"toolkit"},
		`layers[1]: of kind "tools", want base, workspace or toolkit`:   {"", "tools"},
		`layer_kinds: want one for each of the 2 layers at most, got 3`: {"base", "toolkit", "base"},
	} {
		req := connect.NewRequest(&dsecv1.CreateRequest{Backend: "fake", Layers: []string{"base", "tool"}, LayerKinds: kinds})
		req.Header().Set("Authorization", "Bearer "+strings.TrimSpace(read(t, s.keyFile)))
		_, err := calls.Create(t.Context(), req)
		if strings.Contains(want, ":") != (err != nil) || err != nil && err.Error() != "invalid_argument: "+want {
			t.Errorf("%q: %v, want %s", kinds, err, want)
		}
	}
}

// An import that breaks off says so, whoever broke it off, and nothing of it stays.
func TestABrokenImportLeavesNothing(t *testing.T) {
	for want, end := range map[string]func(s *server, client *os.Process){
		"dsec: interrupted (130)":                func(_ *server, client *os.Process) { check(t, client.Signal(os.Interrupt)) },
		"broke (unavailable) (75)":               func(s *server, _ *os.Process) { s.kill() },
		"the archive is truncated (invalid) (2)": func(*server, *os.Process) {},
	} {
		s := up(t)
		cmd := exec.Command(dsecBinary, "layer", "import", "x", "-")
		cmd.Env = append(environ(), "DSEC_URL="+s.url, "DSEC_KEY_FILE="+s.keyFile)
		var stderr bytes.Buffer
		cmd.Stderr = &stderr
		in, err := cmd.StdinPipe()
		check(t, err)
		check(t, cmd.Start())
		// More than pipes and buffers hold: most of it is on its way.
		_, err = in.Write(tarOfOne(t, "f", strings.Repeat("x", 8<<20))[:4<<20])
		check(t, err)
		end(s, cmd.Process)
		if !strings.HasPrefix(want, "dsec: interrupted") {
			check(t, in.Close())
		}
		_ = cmd.Wait()
		if got := fmt.Sprintf("%s (%d)", strings.TrimSpace(stderr.String()), cmd.ProcessState.ExitCode()); !strings.HasPrefix(got, "dsec: ") || !strings.HasSuffix(got, want) {
			t.Errorf("%s, want %s", got, want)
		}
		s.stop() // which waits for what it does
		check(t, filepath.WalkDir(filepath.Join(s.dir, "data", "layers"), func(path string, d fs.DirEntry, err error) error {
			if err == nil && d.Type().IsRegular() && !slices.Contains([]string{"lock", "scrub.json", ".dsec-id", "owner"}, d.Name()) {
				t.Errorf("%s left %s", want, path)
			}
			return err
		}))
	}
}
