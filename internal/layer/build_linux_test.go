package layer

import (
	"archive/tar"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/layer/convert"
	"github.com/opendsec/dsec/internal/testutil"
)

// badHelpers are what a helper could become in the hands of an archive.
var badHelpers = map[string]func(){
	"bad-dies":         func() { panic("out of luck") },
	"bad-hangs":        func() { select {} },
	"bad-oom":          func() { fmt.Fprintln(os.Stderr, "fatal error: runtime: out of memory"); os.Exit(2) },
	"bad-says-nothing": func() { _, _ = io.Copy(io.Discard, os.Stdin) },
	"bad-lies": func() {
		say(report{Result: &convert.Result{Source: SourceRootFS, Image: convert.Image{Size: 1 << 40}}})
	},
	"bad-empty": func() { say(report{Result: &convert.Result{Source: SourceRootFS}}) },
	"bad-many": func() {
		say(report{Result: &convert.Result{Source: SourceRootFS, Below: make([]convert.Image, maxCollapsed)}})
	},
	"bad-both": func() { say(report{Result: &convert.Result{}, Error: &dsec.Error{}}) },
	"bad-config": func() {
		say(report{Result: &convert.Result{Source: SourceRootFS, Config: Config{Workdir: "/proc/self/fd/8"}}})
	},
	"bad-floods": func() {
		block := bytes.Repeat([]byte("x"), 1<<20)
		for f := os.NewFile(fdReport, "report"); ; {
			if _, err := f.Write(block); err != nil {
				return
			}
		}
	},
	"bad-fills": func() { // no file too much by itself
		for fd := fdScratch; fd < fdImages+maxCollapsed; fd++ {
			if fd != fdReport {
				_, _ = os.NewFile(uintptr(fd), "file").Write(bytes.Repeat([]byte("x"), 1<<20))
			}
		}
		say(report{Result: &convert.Result{Source: SourceRootFS}})
	},
	"bad-fills-on": func() {
		for f := os.NewFile(fdImages, "image"); ; {
			if _, err := f.Write(bytes.Repeat([]byte("x"), 1<<20)); err != nil {
				return
			}
			if at, err := f.Seek(0, io.SeekCurrent); err != nil || at > 512<<20 { // slower than any disk
				return
			}
		}
	},
	"probe":         func() { probe(true) },
	"probe-control": func() { probe(false) },
	"builder": func() {
		s, err := Open(os.Args[2], Options{})
		if err != nil {
			panic(err)
		}
		_, _, err = s.Build(context.Background(), BuildOptions{}, os.Stdin)
		panic(err)
	},
	"confined-waits": func() {
		if _, err := confineHelper(Limits{}.WithDefaults(), fdImages+1); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		say(report{Result: &convert.Result{}}) // before the end: the parent looks now
		_, _ = io.Copy(io.Discard, os.Stdin)
	},
}

func say(rep report) {
	doc, err := json.Marshal(rep)
	if err != nil {
		panic(err)
	}
	f := os.NewFile(fdReport, "report")
	_, _ = f.Write(doc)
	_ = f.Close()
}

func badStore(t *testing.T, verb string, opt Options) *Store {
	opt.HelperCommand = []string{"/proc/self/exe", verb}
	return openStore(t, opt)
}

// Whatever a helper does, nothing of it becomes visible.
func TestBadHelpers(t *testing.T) {
	for verb, code := range map[string]dsec.Code{
		"bad-dies": dsec.CodeInternal, "bad-oom": dsec.CodeInvalid, "bad-says-nothing": dsec.CodeInternal, "bad-lies": dsec.CodeInternal,
		"bad-empty": dsec.CodeInternal, "bad-many": dsec.CodeInternal, "bad-both": dsec.CodeInternal, "bad-config": dsec.CodeInternal, "bad-floods": dsec.CodeInternal,
	} {
		t.Run(verb, func(t *testing.T) {
			s := badStore(t, verb, Options{})
			_, _, err := s.Build(t.Context(), BuildOptions{}, bytes.NewReader(archive(t, "x")))
			wantCode(t, err, code)
			wantFiles(t, s)
		})
	}
	for _, verb := range []string{"bad-fills", "bad-fills-on"} {
		t.Run(verb, func(t *testing.T) {
			s := badStore(t, verb, Options{CollapseBytes: 1 << 20, Limits: Limits{ArchiveBytes: 2 << 20, ContentBytes: 2 << 20}})
			_, _, err := s.Build(t.Context(), BuildOptions{}, bytes.NewReader(archive(t, "x")))
			if wantCode(t, err, dsec.CodeInvalid); !strings.Contains(fmt.Sprint(err), "of disk") {
				t.Errorf("%v", err)
			}
			wantFiles(t, s)
		})
	}
	t.Run("missing", func(t *testing.T) {
		s := openStore(t, Options{HelperCommand: []string{"/nonexistent/dsec"}})
		_, _, err := s.Build(t.Context(), BuildOptions{}, bytes.NewReader(archive(t, "x")))
		wantCode(t, err, dsec.CodeUnavailable)
		wantFiles(t, s)
	})
}

func TestTimeout(t *testing.T) {
	s := badStore(t, "bad-hangs", Options{Timeout: 50 * time.Millisecond})
	_, _, err := s.Build(t.Context(), BuildOptions{}, bytes.NewReader(archive(t, "x")))
	wantCode(t, err, dsec.CodeUnavailable)
	if err == nil || !strings.Contains(err.Error(), "took more than 50ms") {
		t.Errorf("%v, want the timeout named", err)
	}
	wantFiles(t, s)
}

// blocked is a stream whose sender went silent.
type blocked struct {
	first []byte
	once  sync.Once
	began chan struct{} // closed when the second read begins
	end   chan struct{}
}

func (b *blocked) Read(p []byte) (int, error) {
	if n := copy(p, b.first); n > 0 {
		b.first = b.first[n:]
		return n, nil
	}
	b.once.Do(func() { close(b.began) })
	<-b.end
	return 0, io.EOF
}

func TestCancel(t *testing.T) {
	s := openStore(t, Options{})
	r := &blocked{first: archive(t, "x")[:700], began: make(chan struct{}), end: make(chan struct{})}
	ctx, cancel := context.WithCancel(t.Context())
	go func() { <-r.began; cancel() }()
	_, _, err := s.Build(ctx, BuildOptions{}, r)
	wantCode(t, err, dsec.CodeUnavailable)
	wantFiles(t, s)
	close(r.end)
	build(t, s, "after")
}

// A helper that has seen enough answers while the sender still has more.
func TestEarlyRefusal(t *testing.T) {
	s := openStore(t, Options{})
	r := &blocked{first: bytes.Repeat([]byte("no archive\n"), 100_000), began: make(chan struct{}), end: make(chan struct{})}
	defer close(r.end)
	_, _, err := s.Build(t.Context(), BuildOptions{}, r)
	wantCode(t, err, dsec.CodeInvalid)
	wantFiles(t, s)
}

type errReader struct{ err error }

func (r errReader) Read([]byte) (int, error) { return 0, r.err }

// A stream that broke off is never a layer, even where all of the archive but
// its end was there.
func TestBrokenStream(t *testing.T) {
	whole := archive(t, strings.Repeat("x", 100_000))
	denied := dsec.Errorf(dsec.CodeDenied, "not yours")
	for name, tc := range map[string]struct {
		sent []byte
		err  error
		code dsec.Code
	}{
		"middle":       {whole[:50_000], errors.New("connection reset"), dsec.CodeUnavailable},
		"start":        {nil, errors.New("connection reset"), dsec.CodeUnavailable},
		"after end":    {whole, errors.New("connection reset"), dsec.CodeUnavailable},
		"typed":        {whole[:50_000], denied, dsec.CodeDenied},
		"end too soon": {whole[:50_000], io.EOF, dsec.CodeInvalid},
	} {
		t.Run(name, func(t *testing.T) {
			s := openStore(t, Options{})
			_, _, err := s.Build(t.Context(), BuildOptions{}, io.MultiReader(bytes.NewReader(tc.sent), errReader{tc.err}))
			wantCode(t, err, tc.code)
			wantFiles(t, s)
		})
	}
}

// Errors of the conversion arrive as they are.
func TestErrorsCrossTheHelper(t *testing.T) {
	s := openStore(t, Options{Limits: Limits{Entries: 1}})
	_, _, err := s.Build(t.Context(), BuildOptions{}, bytes.NewReader(archive(t, "x")))
	want := dsec.Invalid("data", "entry 1, \"file\": more than 1 entries")
	var e *dsec.Error
	if !errors.As(err, &e) || *e != *want {
		t.Errorf("%#v, want %#v", err, want)
	}
	_, _, err = s.Build(t.Context(), BuildOptions{Select: "tag"}, bytes.NewReader(make([]byte, 10240)))
	if !errors.As(err, &e) || e.Field != "select" {
		t.Errorf("%v, want invalid select", err)
	}
	wantFiles(t, s)
}

func TestConcurrentBuilds(t *testing.T) {
	s := openStore(t, Options{Builds: 3})
	var wg sync.WaitGroup
	digests := make([]string, 8)
	for i := range digests {
		wg.Go(func() {
			meta, _, err := s.Build(t.Context(), BuildOptions{}, bytes.NewReader(archive(t, fmt.Sprint("content ", i%4))))
			if err != nil {
				t.Error(err)
			}
			digests[i] = meta.Digest
		})
	}
	wg.Wait()
	for i := range 4 {
		if digests[i] != digests[i+4] {
			t.Errorf("build %d and its twin: %s, %s", i, digests[i], digests[i+4])
		}
	}
	if n := len(files(t, s)); n != 32 || len(s.List()) != 4 {
		t.Errorf("%d files, %d layers; want 32 and 4", n, len(s.List()))
	}
}

// A disk that fills is exhausted, leaves nothing, and can be used again. (S69)
func TestFullDisk(t *testing.T) {
	testutil.Require(t, testutil.Root)
	dir := testutil.SmallDisk(t, "size=2m")
	s := openStoreIn(t, dir, Options{})
	content := func(size int) string { return strings.Repeat("x", size) }
	for _, a := range [][]byte{
		archive(t, content(3<<20)), archiveOf(t, "blobs/file", content(3<<20)), archiveOf(t, "blobs/file", content(1200<<10)),
	} { // in the image, in the scratch, in the image
		_, _, err := s.Build(t.Context(), BuildOptions{}, bytes.NewReader(a))
		wantCode(t, err, dsec.CodeExhausted)
		wantFiles(t, s)
	}
	build(t, s, "small")
	_ = s.Close() // before the unmount
}

// On a disk that is full, or has no inodes left, layers are used and removed as ever,
// also after a start; what needs room is exhausted until there is some. (S69)
func TestFullDiskIsUsed(t *testing.T) {
	testutil.Require(t, testutil.Root)
	for what, fill := range map[string]func(t *testing.T, dir string) (empty func() error){
		"full": func(t *testing.T, dir string) func() error {
			file := testutil.Fill(t, dir)
			return func() error { return os.Remove(file) }
		},
		"without inodes": func(t *testing.T, dir string) func() error {
			sub := filepath.Join(dir, "fill")
			if err := os.Mkdir(sub, 0o700); err != nil {
				t.Fatal(err)
			}
			for i := 0; ; i++ {
				if err := os.WriteFile(filepath.Join(sub, fmt.Sprint(i)), nil, 0o600); errors.Is(err, unix.ENOSPC) {
					return func() error { return os.RemoveAll(sub) }
				} else if err != nil {
					t.Fatal(err)
				}
			}
		},
	} {
		t.Run(what, func(t *testing.T) {
			dir := testutil.SmallDisk(t, "size=8m,nr_inodes=200")
			s := openStoreIn(t, dir, Options{})
			kept, gone := build(t, s, "kept"), build(t, s, "gone")
			empty := fill(t, dir)
			for range 2 {
				_, _, err := s.Build(t.Context(), BuildOptions{}, bytes.NewReader(archive(t, strings.Repeat("x", 200_000))))
				wantCode(t, err, dsec.CodeExhausted)
				for _, m := range []Meta{kept, gone} {
					release, err := s.Hold(t.Context(), m.Digest)
					if err != nil {
						t.Fatal(err)
					}
					files, closer, err := s.OpenFS(t.Context(), m.Digest)
					if err != nil {
						t.Fatal(err)
					}
					if b, err := fs.ReadFile(files, "file"); err != nil || len(b) != 4 {
						t.Errorf("%q, %v", b, err)
					}
					_ = closer.Close()
					release()
				}
				_ = s.Close()
				s = openStoreIn(t, dir, Options{})
			}
			if err := s.Remove(t.Context(), gone.Digest); err != nil {
				t.Errorf("a removal: %v", err)
			}
			if stored, err := s.Sweep(t.Context(), 0); err != nil || len(stored) != 1 || stored[0].Digest != kept.Digest {
				t.Errorf("the store has %v, %v", stored, err)
			}
			if err := empty(); err != nil {
				t.Fatal(err)
			}
			other := build(t, s, strings.Repeat("x", 200_000))
			want := append(ofLayer(kept), ofLayer(other)...)
			got := files(t, s)
			slices.Sort(want)
			if slices.Sort(got); !slices.Equal(got, want) {
				t.Errorf("files %q, want %q", got, want)
			}
			_ = s.Close() // before the unmount
		})
	}
}

// Archives that grow, and those that are something else, leave nothing: no file, and no
// room that is taken. (S93)
func TestBombsLeaveNothing(t *testing.T) {
	testutil.Require(t, testutil.Root)
	dir := testutil.SmallDisk(t, "size=64m")
	s := openStoreIn(t, dir, Options{Limits: Limits{ContentBytes: 48 << 20}})
	free := func() uint64 {
		var st unix.Statfs_t
		if err := unix.Statfs(dir, &st); err != nil {
			t.Fatal(err)
		}
		return st.Bfree
	}
	before := free()
	zeros := func(name string, n int) []byte { return archiveOf(t, name, strings.Repeat("\x00", n)) }
	noise := make([]byte, 40<<20)
	_, _ = rand.NewChaCha8([32]byte{}).Read(noise)
	half := archiveOf(t, "noise", string(noise))
	for name, a := range map[string][]byte{
		"gzip of zeros": testutil.Gzip(t, zeros("a", 50<<20)), "in the scratch": testutil.Gzip(t, zeros("blobs/a", 50<<20)),
		"cut": half[:30<<20], "more than the disk has": append(half[:len(half)-1024], half...),
		"xz": []byte("\xfd7zXZ\x00" + strings.Repeat("x", 1000)), "text": []byte(strings.Repeat("text ", 1000)),
	} {
		_, _, err := s.Build(t.Context(), BuildOptions{}, bytes.NewReader(a))
		if err == nil || dsec.CodeOf(err) != dsec.CodeInvalid && dsec.CodeOf(err) != dsec.CodeExhausted {
			t.Errorf("%s: %v", name, err)
		}
		wantFiles(t, s)
		if now := free(); now != before {
			t.Errorf("%s: %d blocks are free, were %d", name, now, before)
		}
	}
	_ = s.Close() // before the unmount
}

// When the store's process is killed, its helper dies with it, and what it had
// made goes with the next Open.
func TestKilledStore(t *testing.T) {
	dir := t.TempDir()
	cmd := exec.Command("/proc/self/exe", "builder", dir)
	stdin, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() { _ = cmd.Process.Kill(); _ = cmd.Wait() }()
	// More than the pipes hold: the helper has read some when this returns.
	if _, err := stdin.Write(archive(t, strings.Repeat("x", 8<<20))[:4<<20]); err != nil {
		t.Fatal(err)
	}
	var helper int
	if _, err := fmt.Sscan(string(allChildren(t, cmd.Process.Pid)), &helper); err != nil {
		t.Fatalf("no helper: %v", err)
	}
	pidfd, err := unix.PidfdOpen(helper, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(pidfd)
	if err := cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = cmd.Wait()
	poll := []unix.PollFd{{Fd: int32(pidfd), Events: unix.POLLIN}}
	if n, err := unix.Poll(poll, 10_000); n != 1 {
		t.Errorf("the helper outlived its store: %v", err)
	}
	s := openStoreIn(t, dir, Options{})
	wantFiles(t, s)
}

// allChildren are the children that all threads of a process made.
func allChildren(t *testing.T, pid int) (list []byte) {
	t.Helper()
	tasks, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/children", pid))
	if err != nil {
		t.Fatal(err)
	}
	for _, task := range tasks {
		b, err := os.ReadFile(task)
		if err == nil {
			list = append(list, b...)
		}
	}
	return list
}

// An archive whose tree does not fit the memory allowed is refused; the store
// and its process go on.
func TestMemory(t *testing.T) {
	if testutil.Race {
		testutil.Require(t, testutil.Root) // `make root-test` runs it, without the race detector
		t.Skip("the race detector's own memory does not fit the limit")
	}
	s := openStore(t, Options{Limits: Limits{MemoryBytes: 192 << 20}})
	pr, pw := io.Pipe()
	go func() {
		w := tar.NewWriter(pw)
		target := strings.Repeat("t", 4000)
		for i := range 40_000 { // names and targets are kept in memory
			if err := w.WriteHeader(&tar.Header{Name: fmt.Sprint("l", i), Typeflag: tar.TypeSymlink, Linkname: target}); err != nil {
				return
			}
		}
		_ = pw.CloseWithError(w.Close())
	}()
	_, _, err := s.Build(t.Context(), BuildOptions{}, pr)
	_ = pr.Close()
	wantCode(t, err, dsec.CodeInvalid)
	if err == nil || !strings.Contains(err.Error(), "memory") {
		t.Errorf("%v, want memory named", err)
	}
	wantFiles(t, s)
	build(t, s, "small")
}
