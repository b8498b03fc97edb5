package test

import (
	"archive/tar"
	"bytes"
	"slices"
	"strings"
	"testing"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/client"
)

// tarOfHeaders is a tar stream of these; a file holds its own name.
func tarOfHeaders(t testing.TB, headers ...*tar.Header) []byte {
	t.Helper()
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	for _, h := range headers {
		if h.Typeflag == 0 {
			h.Size = int64(len(h.Name))
		}
		check(t, w.WriteHeader(h))
		if h.Typeflag == 0 {
			_, err := w.Write([]byte(h.Name))
			check(t, err)
		}
	}
	check(t, w.Close())
	return b.Bytes()
}

// severalLayers is an image of which every layer becomes one of ours where nothing is
// collapsed.
func severalLayers(t testing.TB, top string) []byte {
	t.Helper()
	return ociLayoutOf(t, `{"Env":["FROM=image"]}`,
		busyboxTar(t),
		tarOfHeaders(t, &tar.Header{Name: "etc/low", Mode: 0o644}, &tar.Header{Name: "dir/low", Mode: 0o644}, &tar.Header{Name: "etc/gone", Mode: 0o644},
			&tar.Header{Name: "bin/box", Typeflag: tar.TypeLink, Linkname: "bin/busybox"}),
		tarOfHeaders(t, &tar.Header{Name: "etc/.wh.gone"}, &tar.Header{Name: ".wh.dir"}, &tar.Header{Name: "dir/" + top, Mode: 0o644}, &tar.Header{Name: ".wh.tmp"},
			&tar.Header{Name: "etc/link", Typeflag: tar.TypeLink, Linkname: "etc/low"}, &tar.Header{Name: "root/", Typeflag: tar.TypeDir, Mode: 0o711}))
}

// An image that became several layers is one in every respect but in the store: a
// sandbox is made of all of it, what refers to it keeps all of it, and it is exported
// and imported again as it was.
func TestImageOfSeveralLayers(t *testing.T) {
	s := containersIn(t, "DSEC_LAYERS_COLLAPSE_BYTES=1")
	c := s.client(t)
	ctx := t.Context()
	load := func(name string, archive []byte) client.Layer {
		t.Helper()
		l, _, err := c.ImportLayer(ctx, name, client.ImportOptions{}, bytes.NewReader(archive))
		check(t, err)
		return l
	}
	app, other := load("app", severalLayers(t, "top")), load("other", severalLayers(t, "other"))
	if len(app.Parents) != 2 || !slices.Equal(app.Parents, other.Parents) || app.Digest == other.Digest || app.Size < 3*4096 {
		t.Errorf("imported %+v and %+v", app, other)
	}
	// What a sandbox sees of it.
	const look = `echo $FROM; ls -A /dir /etc; cat /etc/link; ls -ld /root | head -c 10; echo; ls -ld /tmp | head -c 10; echo; ls -i /bin/box /bin/busybox | { read a b; read c d; [ $a = $c ] && echo same; }`
	run := func(name string) (sb *client.Sandbox, out string) {
		t.Helper()
		sb, err := c.CreateSandbox(ctx, client.SandboxOptions{Layers: []string{name}})
		check(t, err)
		b, o, err := sb.Shell(look).Output(ctx)
		if err != nil || !o.OK() {
			t.Errorf("%s: %q, %+v, %v", name, b, o, err)
		}
		return sb, string(b)
	}
	sb, seen := run("app")
	want := "image\n/dir:\ntop\n\n/etc:\nhostname\nhosts\nlink\nlow\npasswd\nresolv.conf\netc/lowdrwx--x--x\ndrwxrwxrwt\nsame\n"
	if seen != want {
		t.Errorf("a sandbox sees %q, want %q", seen, want)
	}
	// The export is imported as the same.
	var layout bytes.Buffer
	_, err := c.ExportLayers(ctx, []string{"app"}, &layout, nil)
	check(t, err)
	again := load("again", layout.Bytes())
	if again.Digest != app.Digest || !slices.Equal(again.Parents, app.Parents) {
		t.Errorf("exported and imported again: %+v, want %+v", again, app)
	}
	if _, seen := run("again"); seen != want {
		t.Errorf("a sandbox of what was imported again sees %q", seen)
	}
	// All of it is there for as long as anything refers to it.
	stored := func() (digests []string) {
		t.Helper()
		all, _, err := c.CollectLayers(ctx, 0, true)
		check(t, err)
		for _, l := range all {
			digests = append(digests, l.Digest)
		}
		return digests
	}
	check(t, c.RemoveLayer(ctx, "again"))
	check(t, c.RemoveLayer(ctx, "app")) // the sandboxes have it
	if removed, kept, err := c.CollectLayers(ctx, 0, false); err != nil || len(removed) != 0 || kept != 4 {
		t.Errorf("removed %v, kept %d, %v", removed, kept, err)
	}
	if out, _, err := sb.Shell("cat /etc/passwd /dir/top").Output(ctx); err != nil || !strings.HasSuffix(string(out), "dir/top") {
		t.Errorf("%q, %v", out, err)
	}
	for live, err := range c.Sandboxes(ctx, client.ListOptions{}) {
		check(t, err)
		check(t, c.Sandbox(string(live.ID)).Kill(ctx))
	}
	if got := stored(); !slices.Equal(got, []string{app.Digest}) {
		t.Errorf("would be removed: %v, want %s alone: the other image goes on the rest", got, app.Digest)
	}
	if removed, kept, err := c.CollectLayers(ctx, 0, false); err != nil || len(removed) != 1 || kept != 3 {
		t.Errorf("removed %v, kept %d, %v", removed, kept, err)
	}
	check(t, c.RemoveLayer(ctx, "other"))
	if removed, kept, err := c.CollectLayers(ctx, 0, false); err != nil || len(removed) != 0 || kept != 0 {
		t.Errorf("the last name left %v and %d", removed, kept)
	}
	_, err = c.CreateSandbox(ctx, client.SandboxOptions{Layers: []string{"other"}})
	wantCode(t, err, dsec.CodeNotFound)
}

// Where nothing is said, an image of little is one layer.
func TestSmallImageIsOneLayer(t *testing.T) {
	s := up(t)
	l, _, err := s.client(t).ImportLayer(t.Context(), "app", client.ImportOptions{}, bytes.NewReader(ociLayoutOf(t, "{}", tarOfOne(t, "a", "1"), tarOfOne(t, "b", "2"))))
	check(t, err)
	if l.Parents != nil || l.Files != 2 {
		t.Errorf("%+v", l)
	}
}
