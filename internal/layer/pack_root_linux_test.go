package layer

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"math/rand/v2"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec/internal/layer/tardir"
	"github.com/opendsec/dsec/internal/testutil"
)

// overlaid calls f with a place where the layers are mounted, lowest first, and upper over
// them if there is one, in a mount namespace that only f's thread is in.
func overlaid(t *testing.T, s *Store, layers []string, upper string, f func(dir string)) {
	t.Helper()
	dir := t.TempDir()
	done := make(chan struct{})
	go func() {
		defer close(done)
		runtime.LockOSThread() // for good: see mounted
		must := func(what string, err error) {
			if err != nil {
				t.Errorf("%s: %v", what, err)
				runtime.Goexit()
			}
		}
		must("unshare", unix.Unshare(unix.CLONE_NEWNS))
		must("make private", unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""))
		var lower []string
		for i, digest := range layers {
			from := devices(t, s, digest)
			options := ""
			if len(from) > 1 {
				options = "device=" + from[1]
			}
			at := filepath.Join(dir, fmt.Sprint(i))
			must("mkdir", os.Mkdir(at, 0o755))
			must("mount "+digest, unix.Mount(from[0], at, "erofs", unix.MS_RDONLY, options))
			lower = append([]string{at}, lower...)
		}
		at := filepath.Join(dir, "merged")
		must("mkdir", os.Mkdir(at, 0o755))
		if upper != "" {
			must("mkdir", os.MkdirAll(upper+".work", 0o755))
			must("mkdir", os.MkdirAll(upper, 0o755))
			must("mount", unix.Mount("overlay", at, "overlay", 0, "lowerdir="+strings.Join(lower, ":")+",upperdir="+upper+",workdir="+upper+".work"))
		} else {
			nothing := filepath.Join(dir, "nothing")
			must("mkdir", os.Mkdir(nothing, 0o755))
			must("mount", unix.Mount("overlay", at, "overlay", unix.MS_RDONLY, "lowerdir="+strings.Join(append(lower, nothing), ":")))
		}
		f(at)
	}()
	<-done
}

// change is what an agent may do with the names of a small tree, whatever is there.
func change(r *rand.Rand, dir string) string {
	names := []string{"a", "b", "c", ".wh.a", "d\xff e"}
	pick := func() string {
		parts := []string{dir}
		for range 1 + r.IntN(3) {
			parts = append(parts, names[r.IntN(len(names))])
		}
		return filepath.Join(parts...)
	}
	one, two := pick(), pick()
	var what string
	var err error
	switch r.IntN(12) {
	case 0, 1:
		what, err = "write", os.WriteFile(one, []byte(fmt.Sprint(r.Uint64())), 0o600+fs.FileMode(r.IntN(0o200)))
	case 2, 3:
		what, err = "mkdir", os.MkdirAll(one, 0o755)
	case 4:
		what, err = "remove", os.RemoveAll(one)
	case 5:
		what, err = "rename", os.Rename(one, two)
	case 6:
		what, err = "link", os.Link(one, two)
	case 7:
		what, err = "symlink", os.Symlink(two, one)
	case 8:
		what, err = "chown", os.Lchown(one, r.IntN(3), r.IntN(3))
	case 9:
		what, err = "setxattr", unix.Lsetxattr(one, "user.x", []byte(fmt.Sprint(r.IntN(3))), 0)
	case 10:
		what, err = "replace", errors.Join(os.RemoveAll(one), os.MkdirAll(one, 0o755))
	case 11:
		what, err = "chmod", os.Chmod(one, 0o700|fs.FileMode(r.IntN(0o100)))
	}
	return fmt.Sprintf("%s %q %q: %v", what, one[len(dir):], two[len(dir):], err)
}

// TestPackIsWhatTheSandboxSaw: what the kernel shows of a layer over those of a sandbox
// is what it showed of the sandbox, whatever was done in it, any number of packs later, also
// where they became one.
func TestPackIsWhatTheSandboxSaw(t *testing.T) {
	testutil.Require(t, testutil.Root, testutil.EROFS)
	for seed := range uint64(4) {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			t.Parallel()
			s := openStore(t, Options{})
			r := rand.New(rand.NewPCG(seed, 0))
			tree := t.TempDir()
			for range 40 {
				change(r, tree)
			}
			pr, pw := io.Pipe()
			go func() { _, err := tardir.Write(pw, tree); _ = pw.CloseWithError(err) }()
			base, _, err := s.Build(t.Context(), BuildOptions{}, pr)
			if err != nil {
				t.Fatal(err)
			}
			layers, collapsed := []string{base.Digest}, 0
			for round := range collapseRun + 3 {
				upper := filepath.Join(t.TempDir(), "upper")
				var want map[string]string
				var log []string
				overlaid(t, s, layers, upper, func(dir string) {
					for range 12 {
						log = append(log, change(r, dir))
					}
					if want, err = snapshot(dir, true); err != nil {
						t.Error(err)
					}
				})
				d, err := os.Open(upper)
				if err != nil {
					t.Fatal(err)
				}
				meta, report, err := s.Pack(t.Context(), PackOptions{Parents: layers}, d, 0)
				_ = d.Close()
				if err != nil {
					t.Fatalf("round %d: %v\n%s", round, err, strings.Join(log, "\n"))
				}
				layers = meta.Chain()
				collapsed += report.Collapsed
				overlaid(t, s, layers, "", func(dir string) {
					got, err := snapshot(dir, true)
					if err != nil {
						t.Error(err)
					}
					if diff := cmp.Diff(want, got); diff != "" {
						t.Errorf("round %d, %d collapsed: sandbox and pack differ (-want +got):\n%.4000s\nafter\n%s", round, report.Collapsed, diff, strings.Join(log, "\n"))
					}
				})
				if t.Failed() {
					return
				}
			}
			if collapsed != collapseRun || len(layers) != 1+3 {
				t.Errorf("%d were collapsed, %d layers, want %d and 4", collapsed, len(layers), collapseRun)
			}
		})
	}
}

// TestPackScrubs: what is to stay and what to go, with what hides layers below.
func TestPackScrubs(t *testing.T) {
	testutil.Require(t, testutil.Root, testutil.EROFS)
	s := openStore(t, Options{})
	base := build(t, s, "base")
	upper := filepath.Join(t.TempDir(), "upper")
	write := func(dir, name, content string) {
		t.Helper()
		name = filepath.Join(dir, name)
		if err := errors.Join(os.MkdirAll(filepath.Dir(name), 0o755), os.WriteFile(name, []byte(content), 0o644)); err != nil {
			t.Error(err)
		}
	}
	key := "-----BEGIN OPENSSH PRIVATE KEY-----\nb3Bl\n"
	overlaid(t, s, []string{base.Digest}, upper, func(dir string) {
		for name, content := range map[string]string{
			"etc/hosts": "x", "etc/passwd": "root", "root/.bash_history": "ls", "root/.cache/pip/http/1": "12345", "root/.cache/pip/wheels/w": "123",
			"root/.cache/huggingface/m": "model", "srv/app/.pytest_cache/v": "v", "srv/app/secret": key, "srv/app/kept.key": key, "srv/app/main": "m",
			"data/out/1": "1", "data/out/keep/2": "2", "data/in": "in", "home/u/.npmrc": "//x/:_authToken=abcdef",
		} {
			write(dir, name, content)
		}
		if err := errors.Join(os.Remove(filepath.Join(dir, "file")), unix.Mkfifo(filepath.Join(dir, "pipe"), 0o600),
			unix.Mknod(filepath.Join(dir, "socket"), unix.S_IFSOCK|0o600, 0)); err != nil {
			t.Error(err)
		}
	})
	pack := func(scrub Scrub) (Meta, PackReport, error) {
		d, err := os.Open(upper)
		if err != nil {
			t.Fatal(err)
		}
		defer d.Close()
		return s.Pack(t.Context(), PackOptions{Parents: []string{base.Digest}, Scrub: scrub}, d, 0)
	}
	meta, report, err := pack(Scrub{Remove: []string{"/data/**", "/file"}, Keep: []string{"/data/out/keep", "/**/kept.*", "/etc/hosts"}})
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, x := range report.Removed {
		got = append(got, fmt.Sprint(x))
	}
	slices.Sort(got)
	want := []string{
		"{/data/in path  1 2}", "{/data/out path  1 1}", "{/etc/hosts platform  1 1}",
		"{/home/u/.npmrc secret credentials 1 22}", "{/root/.bash_history history  1 2}", "{/root/.cache/pip cache  5 8}",
		"{/socket special a socket or a device 1 0}", "{/srv/app/.pytest_cache cache  2 1}", "{/srv/app/secret secret what looks like a private key 1 41}",
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("removed (-want +got):\n%s", diff)
	}
	overlaid(t, s, meta.Chain(), "", func(dir string) {
		found, err := names(dir)
		if err != nil {
			t.Error(err)
		}
		for name := range found {
			if fi, err := os.Lstat(dir + name); err != nil || fi.IsDir() {
				delete(found, name)
			}
		}
		want := map[string]string{"/data/out/keep/2": "", "/etc/passwd": "", "/pipe": "", "/root/.cache/huggingface/m": "", "/srv/app/kept.key": "", "/srv/app/main": ""}
		if diff := cmp.Diff(want, found); diff != "" {
			t.Errorf("files (-want +got):\n%s", diff)
		}
	})
	_, _, err = pack(Scrub{Secrets: "refuse"})
	wantCode(t, err, "invalid")
	if meta, report, err = pack(Scrub{NoDefaults: true, Secrets: "keep"}); err != nil || len(report.Removed) != 2 {
		t.Errorf("%v, removed %v, want the residue of the platform and the socket", err, report.Removed)
	}
}

// TestPackScrubsWhatForksKept: what a fork or a migration took along as it was is looked at
// again where a pack of that leaves something out, as the sandbox has it by then, and packs
// that have a name are not.
func TestPackScrubsWhatForksKept(t *testing.T) {
	testutil.Require(t, testutil.Root, testutil.EROFS)
	s := openStore(t, Options{})
	key := "-----BEGIN OPENSSH PRIVATE KEY-----\nb3Bl\n"
	layers := []string{build(t, s, "base").Digest}
	pack := func(opt PackOptions, script ...string) (Meta, []string, error) {
		t.Helper()
		upper := filepath.Join(t.TempDir(), "upper")
		overlaid(t, s, layers, upper, func(dir string) {
			for _, line := range script {
				verb, name, _ := strings.Cut(line, " ")
				name = filepath.Join(dir, name)
				err := os.MkdirAll(filepath.Dir(name), 0o755)
				switch verb {
				case "rm":
					err = os.RemoveAll(name)
				case "key":
					err = errors.Join(err, os.WriteFile(name, []byte(key), 0o600))
				case "ln":
					err = os.Link(name, name+".again")
				default:
					err = errors.Join(err, os.WriteFile(name, []byte(verb), 0o600))
				}
				if err != nil {
					t.Errorf("%s: %v", line, err)
				}
			}
		})
		d, err := os.Open(upper)
		if err != nil {
			t.Fatal(err)
		}
		defer d.Close()
		opt.Parents = layers
		meta, report, err := s.Pack(t.Context(), opt, d, 0)
		var removed []string
		for _, x := range report.Removed {
			removed = append(removed, x.Path+" "+x.Reason)
		}
		slices.Sort(removed)
		return meta, removed, err
	}
	fork := PackOptions{Scrub: Scrub{NoDefaults: true, Secrets: "keep"}, Unnamed: true}
	must := func(opt PackOptions, script ...string) (Meta, []string) {
		t.Helper()
		meta, removed, err := pack(opt, script...)
		if err != nil {
			t.Fatal(err)
		}
		return meta, removed
	}
	want := func(meta Meta, list ...string) {
		t.Helper()
		overlaid(t, s, meta.Chain(), "", func(dir string) {
			found, err := names(dir)
			if err != nil {
				t.Error(err)
			}
			var files []string
			for name := range found {
				if fi, err := os.Lstat(dir + name); err == nil && fi.Mode().IsRegular() {
					files = append(files, name)
				}
			}
			slices.Sort(files)
			if diff := cmp.Diff(list, files); diff != "" {
				t.Errorf("files (-want +got):\n%s", diff)
			}
		})
	}
	named, _ := must(PackOptions{Scrub: Scrub{Secrets: "keep"}}, "key srv/asked.for")
	layers = named.Chain()
	first, removed := must(fork, "key srv/key", "ln srv/key", "h root/.bash_history", "ln root/.bash_history", "key srv/old", "1 root/.cache/pip/1", "a srv/a", "rm file")
	if len(removed) > 0 || len(first.Parents) != 2 {
		t.Fatalf("a fork is without %v, on %d", removed, len(first.Parents))
	}
	layers = first.Chain()
	again, _ := must(fork, "2 root/.cache/pip/2", "b srv/b", "rm srv/old")
	layers = again.Chain()
	if _, _, err := pack(PackOptions{Scrub: Scrub{Secrets: "refuse"}}, "c srv/c"); err == nil || !strings.Contains(err.Error(), "/srv/key") {
		t.Errorf("a key that forks kept is not refused: %v", err)
	}
	clean, removed := must(PackOptions{}, "c srv/c")
	if diff := cmp.Diff([]string{"/root/.bash_history history", "/root/.cache/pip cache", "/srv/key secret", "/srv/key.again secret"}, removed); diff != "" {
		t.Errorf("removed (-want +got):\n%s", diff)
	}
	if !slices.Equal(clean.Parents, named.Chain()) || clean.Unnamed {
		t.Errorf("it goes on %v, want what has a name", clean.Parents)
	}
	want(clean, "/root/.bash_history.again", "/srv/a", "/srv/asked.for", "/srv/b", "/srv/c")
	if _, _, err := pack(PackOptions{Scrub: Scrub{Secrets: "refuse"}}, "rm srv/key", "rm srv/key.again"); err != nil {
		t.Errorf("after the key was removed: %v", err)
	}
	whole, removed := must(PackOptions{Scrub: fork.Scrub}, "c srv/c")
	if len(removed) > 0 || len(whole.Parents) != len(layers) {
		t.Errorf("with all left in it is without %v, on %v", removed, whole.Parents)
	}
}

// BenchmarkPack packs 100 MB that were just written.
func BenchmarkPack(b *testing.B) {
	s := openStore(b, Options{})
	base := build(b, s, "base")
	dir := b.TempDir()
	data := make([]byte, 1<<20)
	for i := range 100 {
		for j := range data {
			data[j] = byte(rand.Uint32())
		}
		if err := os.WriteFile(filepath.Join(dir, fmt.Sprint(i)), data, 0o644); err != nil {
			b.Fatal(err)
		}
	}
	var times []time.Duration
	for i := 0; b.Loop(); i++ {
		begun := time.Now()
		if err := os.WriteFile(filepath.Join(dir, "n"), fmt.Append(nil, i), 0o644); err != nil {
			b.Fatal(err)
		}
		d, err := os.Open(dir)
		if err != nil {
			b.Fatal(err)
		}
		meta, _, err := s.Pack(b.Context(), PackOptions{Parents: []string{base.Digest}}, d, uint32(os.Getuid()))
		if err = errors.Join(err, d.Close()); err != nil {
			b.Fatal(err)
		}
		times = append(times, time.Since(begun))
		b.StopTimer()
		if err := s.Remove(b.Context(), meta.Digest); err != nil {
			b.Fatal(err)
		}
		b.StartTimer()
	}
	slices.Sort(times)
	b.ReportMetric(times[len(times)/2].Seconds()*1e3, "p50-ms")
}
