package test

import (
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"google.golang.org/protobuf/reflect/protoreflect"

	"github.com/opendsec/dsec/client"
	"github.com/opendsec/dsec/internal/testutil"
	"github.com/opendsec/dsec/internal/testutil/s3server"
	dsecv1 "github.com/opendsec/dsec/proto/dsec/v1"
)

// TestDocsAreRunAsTheyStand follows the README on a server with containers: the
// quick start, which imports the layer that all examples use, then the calls by
// curl, there and in docs/api.md, and the Go program. The tests of the Python SDK
// run its examples.
func TestDocsAreRunAsTheyStand(t *testing.T) {
	testutil.Require(t, testutil.Program("curl"), testutil.Program("perl"), testutil.Program("bash"))
	s := containers(t)
	d := &reader{t: t, server: s, dir: testutil.Dir(t)}
	key, err := os.ReadFile(s.keyFile)
	check(t, err)
	d.key = strings.TrimSpace(string(key))
	check(t, os.WriteFile(filepath.Join(d.dir, "rootfs.tar"), busyboxTar(t), 0o600))
	check(t, os.Mkdir(filepath.Join(d.dir, "docs"), 0o700))
	check(t, os.Mkdir(filepath.Join(d.dir, "bin"), 0o700))
	check(t, os.Symlink(dsecBinary, filepath.Join(d.dir, "bin", "dsec")))

	readme := read(t, "../README.md")
	// What comes before is this machine's, and is in the way of no other test.
	before, start, ok := strings.Cut(section(t, readme, "## Five minutes"), "    sudo bin/dsec layer import")
	if !ok || strings.Count(before, "\n    sudo ") != 4 {
		t.Fatalf("the quick start begins with\n%s", before)
	}
	out := d.bash("    sudo bin/dsec layer import" + start)
	for _, want := range []string{"base:latest", "hello\n3\n"} {
		if !strings.Contains(out, want) {
			t.Errorf("the quick start does not say %q:\n%s", want, out)
		}
	}
	if out := d.bash(section(t, readme, "### curl")); strings.Count(out, `"outcome"`) != 1 || strings.Contains(out, `"code"`) {
		t.Errorf("curl of the README: %s", out)
	}
	out = d.bash(section(t, read(t, "../docs/api.md"), "# The API"))
	if strings.Count(out, `"outcome"`) != 4 || strings.Contains(out, `"code"`) || strings.Count(out, `"data":"b25lC`) != 2 {
		t.Errorf("curl of docs/api.md: %s", out)
	}
	d.program(section(t, readme, "### Go"))
	check(t, os.Mkdir(filepath.Join(d.dir, "checkout"), 0o700))
	check(t, os.WriteFile(filepath.Join(d.dir, "linters.tar"), tarOfOne(t, "opt/lint", "x"), 0o600))
	out = d.bash(section(t, read(t, "../docs/layers.md"), "# Layers"))
	if lines := strings.Fields(out); !strings.Contains(out, "linters:latest") || len(lines[len(lines)-1]) != 25 {
		t.Errorf("the commands of docs/layers.md say\n%s", out)
	}
}

// TestDocsOfLayersAreRunAsTheyStand follows what docs/layers.md says of images,
// checkouts and exports, with a registry in the place of those that it names.
func TestDocsOfLayersAreRunAsTheyStand(t *testing.T) {
	testutil.Require(t, testutil.Program("git"), testutil.Program("bash"))
	r := newImages(t)
	s := containersIn(t, "DSEC_REGISTRY_INSECURE="+r.host, "DSEC_REGISTRY_DEFAULT="+r.host)
	t.Cleanup(r.close)
	r.push(t, "python:3.12", nil, busyboxTar(t))
	r.push(t, "team/app:v1", nil, busyboxTar(t))
	d := &reader{t: t, server: s, dir: testutil.Dir(t)}
	check(t, os.Mkdir(filepath.Join(d.dir, "bin"), 0o700))
	check(t, os.Symlink(dsecBinary, filepath.Join(d.dir, "bin", "dsec")))
	check(t, os.WriteFile(filepath.Join(d.dir, "rootfs.tar"), busyboxTar(t), 0o600))
	check(t, os.WriteFile(filepath.Join(d.dir, "linters.tar"), tarOfOne(t, "opt/lint", "x"), 0o600))
	text := read(t, "../docs/layers.md")
	images := strings.ReplaceAll(section(t, text, "## Images of registries"), "ghcr.io/", r.host+"/")
	if out := strings.Fields(d.bash(images)); len(out) == 0 || out[0] != "python:latest" || len(out[len(out)-1]) != 25 {
		t.Errorf("of images: %q", out)
	}
	repository := `    git init -q -b trunk repository
    cd repository && echo 1 > file && git add file
    git -c user.name=t -c user.email=t@example.com commit -qm one && git tag v1.2 && cd ..
    mkdir checkout && echo 1 > checkout/file
`
	if out := d.bash(repository + section(t, text, "## Checkouts")); !strings.HasPrefix(out, "task:latest") {
		t.Errorf("of checkouts: %q", out)
	}
	out := d.bash(section(t, text, "# Layers") + section(t, text, "## Export"))
	if !strings.Contains(out, "image  ") || !strings.Contains(out, "base.tar  ") {
		t.Errorf("of exports: %q", out)
	}
	for _, name := range []string{"image/index.json", "image/oci-layout", "base.tar"} {
		if _, err := os.Stat(filepath.Join(d.dir, name)); err != nil {
			t.Error(err)
		}
	}
}

// TestDocsOfStoresAreRunAsTheyStand follows what docs/stores.md says of a bucket, on an S3
// server of the tests in the place of the one that it starts, which is the same.
func TestDocsOfStoresAreRunAsTheyStand(t *testing.T) {
	testutil.Require(t, testutil.Root, testutil.EROFS, testutil.Overlay, testutil.Program("busybox"), testutil.Program("bash"))
	bucket, err := s3server.Start(t.Context(), testutil.Dir(t), s3server.Options{})
	check(t, err)
	t.Cleanup(func() { _ = bucket.Close() })
	text := section(t, read(t, "../docs/stores.md"), "## Trying a bucket")
	given, rest, ok := strings.Cut(text, "    mkdir -p s3/dsec\n")
	_, rest, started := strings.Cut(rest, "    sudo -E bin/dsec up &\n")
	if !ok || !started {
		t.Fatalf("the docs say\n%s", text)
	}
	d := &reader{t: t, dir: testutil.Dir(t), server: &server{}}
	env := []string{"AWS_ACCESS_KEY_ID=" + bucket.ID, "AWS_SECRET_ACCESS_KEY=" + bucket.Secret}
	for line := range strings.Lines(d.bash(given + "    env | grep -E '^(AWS|DSEC_LAYERS)_'\n")) {
		if name, value, _ := strings.Cut(strings.TrimSpace(line), "="); name == "DSEC_LAYERS_STORE" {
			value = strings.NewReplacer("s3://dsec/", "s3://"+bucket.Bucket+"/", "http://127.0.0.1:9000", bucket.Endpoint(bucket.Addr)).Replace(value)
			env = append(env, name+"="+value)
		}
	}
	name, dir := testutil.Name(t), testutil.Dir(t)
	testutil.Ledger(t, name, filepath.Base(dir))
	c := &containerServer{name: name, dir: dir, env: env}
	t.Cleanup(func() {
		c.destroy(t)
		killLayerd(t, dir)
	})
	c.start(t)
	d.server = c.server
	check(t, os.Mkdir(filepath.Join(d.dir, "bin"), 0o700))
	check(t, os.Symlink(dsecBinary, filepath.Join(d.dir, "bin", "dsec")))
	check(t, os.WriteFile(filepath.Join(d.dir, "rootfs.tar"), busyboxTar(t), 0o600))
	if out := d.bash(rest); !strings.HasPrefix(out, "base:latest") || !strings.Contains(out, "\netc\n") {
		t.Errorf("of a bucket: %q", out)
	}
	if _, err := os.Stat(bucket.Object("layers/owner")); err != nil {
		t.Errorf("the bucket was not used: %v", err)
	}
}

// reader does what documentation says.
type reader struct {
	t        *testing.T
	server   *server
	dir, key string
}

// bash runs the indented lines of a text.
func (d *reader) bash(text string) string {
	d.t.Helper()
	script := ""
	for line := range strings.Lines(text) {
		if rest, ok := strings.CutPrefix(line, "    "); ok {
			script += rest
		}
	}
	script = strings.NewReplacer("sudo cat /var/lib/dsec/admin.key", "cat "+d.server.keyFile, "sudo ", "", client.DefaultURL, d.server.url).Replace(script)
	cmd := exec.Command("bash", "-c", script)
	cmd.Dir, cmd.Stdin = d.dir, strings.NewReader("exit\n")
	cmd.Env = append(environ(), "LC_ALL=C.UTF-8", "DSEC_URL="+d.server.url, "DSEC_KEY_FILE="+d.server.keyFile)
	var stderr strings.Builder
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil || stderr.Len() > 0 {
		d.t.Errorf("%v: %s\nof\n%s", err, &stderr, script)
	}
	return strings.ReplaceAll(string(out), ": ", ":")
}

// program builds and runs the Go program of a text as a module of its own, in
// place of whose `go mod tidy` stands what this module needs: a test asks no registry.
func (d *reader) program(text string) {
	d.t.Helper()
	_, code, _ := strings.Cut(text, "```go\n")
	code, _, _ = strings.Cut(code, "```")
	dir := filepath.Join(d.dir, "example")
	check(d.t, os.Mkdir(dir, 0o700))
	root, err := filepath.Abs("..")
	check(d.t, err)
	module := strings.Replace(read(d.t, "../go.mod"), "module github.com/opendsec/dsec\n", "module example\n", 1)
	module += "\nrequire github.com/opendsec/dsec v0.0.0\nreplace github.com/opendsec/dsec => " + root + "\n"
	for name, text := range map[string]string{"go.mod": module, "go.sum": read(d.t, "../go.sum"), "main.go": code} {
		check(d.t, os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600))
	}
	cmd := exec.Command("go", "run", "-mod=mod", ".")
	cmd.Dir = dir
	cmd.Env = append(environ(), "GOPROXY=off", "GOWORK=off", "DSEC_URL="+d.server.url, "DSEC_KEY_FILE="+d.server.keyFile)
	if out, err := cmd.CombinedOutput(); err != nil || string(out) != "hello\n3\n" {
		d.t.Errorf("the Go program: %v, %s", err, out)
	}
}

func read(t *testing.T, name string) string {
	t.Helper()
	text, err := os.ReadFile(name)
	check(t, err)
	return string(text)
}

// section is what stands below a heading, up to the next one.
func section(t *testing.T, text, heading string) string {
	t.Helper()
	_, text, ok := strings.Cut(text, heading+"\n")
	if !ok {
		t.Fatalf("there is no %q", heading)
	}
	if i := regexp.MustCompile("(?m)^#+ ").FindStringIndex(text); i != nil {
		text = text[:i[0]]
	}
	return text
}

// TestDocsListEveryCall: docs/api.md names all calls of each service, and no other, and
// both SDKs make them.
func TestDocsListEveryCall(t *testing.T) {
	text := read(t, "../docs/api.md")
	table := section(t, text, "## Services")
	sdk := read(t, "../python/src/libdsec/_methods.py")
	files, err := filepath.Glob("../client/*.go")
	check(t, err)
	client := ""
	for _, name := range files {
		if !strings.HasSuffix(name, "_test.go") {
			client += read(t, name)
		}
	}
	calls := 0
	for _, file := range []protoreflect.FileDescriptor{
		dsecv1.File_dsec_v1_sandbox_proto, dsecv1.File_dsec_v1_process_proto, dsecv1.File_dsec_v1_session_proto,
		dsecv1.File_dsec_v1_file_proto, dsecv1.File_dsec_v1_layer_proto, dsecv1.File_dsec_v1_admin_proto,
	} {
		for i := range file.Services().Len() {
			service := file.Services().Get(i)
			row := regexp.MustCompile(`(?m)^\| ` + string(service.Name()) + ` \|(.*)\|$`).FindStringSubmatch(table)
			if row == nil {
				t.Errorf("docs/api.md has no %s", service.Name())
				continue
			}
			words := regexp.MustCompile(`\b[A-Z][A-Za-z]+\b`).FindAllString(row[1], -1)
			for j := range service.Methods().Len() {
				method := string(service.Methods().Get(j).Name())
				calls++
				if !slices.Contains(words, method) {
					t.Errorf("docs/api.md does not name %s.%s", service.Name(), method)
				}
				if !regexp.MustCompile(`"` + method + `"`).MatchString(sdk) {
					t.Errorf("libdsec does not have %s", method)
				}
				if method == "RunCommand" {
					continue // which Go's sessions do with RunCommands
				}
				short := strings.ToLower(strings.TrimSuffix(string(service.Name()), "Service"))
				if !regexp.MustCompile(`\.` + short + `\.` + method + `\b`).MatchString(client) {
					t.Errorf("the Go SDK does not make %s", method)
				}
			}
			for _, word := range words {
				if service.Methods().ByName(protoreflect.Name(word)) == nil {
					t.Errorf("docs/api.md has %s of %s, which is no call", word, service.Name())
				}
			}
		}
	}
	if calls < 30 {
		t.Errorf("%d calls: this test looks in the wrong place", calls)
	}
}

// TestStreamsByCurl runs what docs/api.md says of streams, as it stands there.
func TestStreamsByCurl(t *testing.T) {
	testutil.Require(t, testutil.Program("curl"), testutil.Program("perl"), testutil.Program("bash"))
	s := up(t)
	sb, err := s.client(t).CreateSandbox(t.Context(), client.SandboxOptions{Backend: "fake"})
	check(t, err)
	key, err := os.ReadFile(s.keyFile)
	check(t, err)
	text, err := os.ReadFile("../docs/api.md")
	check(t, err)
	snippet := regexp.MustCompile(`(?s)    stream\(\) \{.*?\n\n(    stream [^\n]*\n)+`).FindString(string(text))
	if snippet == "" {
		t.Fatal("docs/api.md has no example of a stream")
	}
	if snippet = strings.Replace(snippet, "echo two", "echo zwölf", 1); !strings.Contains(snippet, "zwölf") {
		t.Fatal("the example of a stream has no message to put more than ASCII into")
	}
	snippet = strings.Replace(snippet, `"processId": "3"`, `"processId": "1"`, 1) // the first here
	cmd := exec.Command("bash", "-euo", "pipefail", "-c", strings.ReplaceAll(snippet, "http://127.0.0.1:7321", s.url))
	cmd.Env = append(environ(), "LC_ALL=C.UTF-8", "KEY="+strings.TrimSpace(string(key)), "ID="+string(sb.ID()))
	out, err := cmd.CombinedOutput()
	check(t, err)
	// Both calls tell the same command.
	for _, want := range []string{`"data":"b25lCg=="`, `"data":"enfDtmxmCg=="`, `"exitCode":0`} {
		if n := strings.Count(strings.ReplaceAll(string(out), ": ", ":"), want); n != 2 {
			t.Errorf("%d times %s in\n%s", n, want, out)
		}
	}
}
