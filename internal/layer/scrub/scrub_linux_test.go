package scrub

import (
	"bytes"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec/internal/testutil"
)

func TestMain(m *testing.M) {
	if len(os.Args) > 1 {
		switch os.Args[1] {
		case Verb:
			if err := Main(); err != nil {
				fmt.Fprintln(os.Stderr, err)
				os.Exit(1)
			}
			os.Exit(0)
		case "liar":
			fmt.Println(`{"Sums":["AAAA"]}`)
			os.Exit(0)
		case "dies":
			os.Exit(1)
		}
	}
	os.Exit(m.Run())
}

// blobs is a directory with the blob "a/b", and what that has.
func blobs(t *testing.T, size int) (root *os.File, b []byte) {
	t.Helper()
	dir := t.TempDir()
	b = make([]byte, size)
	_, _ = rand.NewChaCha8([32]byte{}).Read(b)
	err := errors.Join(os.Mkdir(filepath.Join(dir, "a"), 0o700), os.WriteFile(filepath.Join(dir, "a/b"), b, 0o600),
		os.Symlink("b", filepath.Join(dir, "a/link")), unix.Mkfifo(filepath.Join(dir, "a/pipe"), 0o600))
	if err != nil {
		t.Fatal(err)
	}
	root, err = os.Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { root.Close() })
	return root, b
}

func start(t *testing.T, root *os.File, verb string) *Reader {
	t.Helper()
	r, err := Start([]string{"/proc/self/exe", verb}, root, testutil.Logger(t))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { r.Kill(); <-r.Ended() })
	return r
}

func TestSums(t *testing.T) {
	root, b := blobs(t, 10<<12)
	r := start(t, root, Verb)
	for _, fresh := range []bool{false, true, false} {
		for _, tt := range []struct{ off, length, chunk, want int64 }{
			{0, 8 << 12, 1 << 12, 8}, {0, 10 << 12, 4 << 12, 3}, {8 << 12, 2 << 12, 4 << 12, 1}, {9 << 12, 2 << 12, 1 << 12, 1}, {20 << 12, 1 << 12, 1 << 12, 0},
		} {
			sums, dead, err := r.Sums(t.Context(), Request{"a/b", tt.off, tt.length, tt.chunk, fresh}, time.Minute)
			if err != nil || dead || int64(len(sums)) != tt.want {
				t.Fatalf("%+v: %d sums, %v", tt, len(sums), err)
			}
			for i, sum := range sums {
				at := tt.off + int64(i)*tt.chunk
				if want := sha256.Sum256(b[at:min(at+tt.chunk, tt.off+tt.length, int64(len(b)))]); !bytes.Equal(sum, want[:]) {
					t.Errorf("%+v: sum %d is not that of the chunk", tt, i)
				}
			}
		}
	}
}

// What is no blob, and no request, is an error after which it goes on.
func TestUnusableRequests(t *testing.T) {
	root, _ := blobs(t, 1<<12)
	r := start(t, root, Verb)
	for _, tt := range []struct {
		q    Request
		gone bool
	}{
		{Request{Key: "a/none", Length: 1 << 12, Chunk: 1 << 12}, true},
		{Request{Key: "a/b/c", Length: 1 << 12, Chunk: 1 << 12}, true},
		{Request{Key: "a/link", Length: 1 << 12, Chunk: 1 << 12}, false},
		{Request{Key: "a/pipe", Length: 1 << 12, Chunk: 1 << 12}, false},
		{Request{Key: "../a/b", Length: 1 << 12, Chunk: 1 << 12}, false},
		{Request{Key: "a/b", Length: MaxRead + 1, Chunk: 1 << 12}, false},
		{Request{Key: "a/b", Length: 1 << 12}, false},
		{Request{Key: "a/b", Offset: -1, Length: 1 << 12, Chunk: 1 << 12}, false},
	} {
		sums, dead, err := r.Sums(t.Context(), tt.q, time.Minute)
		if err == nil || dead || len(sums) > 0 || errors.Is(err, ErrGone) != tt.gone {
			t.Errorf("%+v: %v, %v", tt.q, err, dead)
		}
	}
	if _, _, err := r.Sums(t.Context(), Request{Key: "a/b", Length: 1 << 12, Chunk: 1 << 12}, time.Minute); err != nil {
		t.Error(err)
	}
}

// A process that does not answer as it must is found out.
func TestBadProcesses(t *testing.T) {
	root, _ := blobs(t, 1<<12)
	for _, verb := range []string{"liar", "dies"} {
		r := start(t, root, verb)
		if _, dead, err := r.Sums(t.Context(), Request{Key: "a/b", Length: 1 << 12, Chunk: 1 << 12}, time.Minute); err == nil || !dead {
			t.Errorf("%s: %v, %v", verb, err, dead)
		}
	}
	r := start(t, root, Verb)
	if err := r.cmd.Process.Signal(unix.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	if _, dead, err := r.Sums(t.Context(), Request{Key: "a/b", Length: 1 << 12, Chunk: 1 << 12}, time.Millisecond); !errors.Is(err, ErrStuck) || !dead {
		t.Errorf("%v, %v", err, dead)
	}
	r.Kill()
	<-r.Ended()
}

// Where a file cannot be read past the page cache, what a read brought there goes
// again, and what was there stays.
func TestPageCacheWithoutDirectReads(t *testing.T) {
	testutil.Require(t, testutil.Kernel(6, 5))
	root, b := blobs(t, 8<<12)
	buf, err := unix.Mmap(-1, 0, MaxRead, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_ANON|unix.MAP_PRIVATE)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Munmap(buf)
	p := &process{root: root, buf: buf[1:]} // not aligned: no O_DIRECT
	defer p.close()
	f, err := os.OpenFile(filepath.Join(root.Name(), "a/b"), os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	q := &Request{Key: "a/b", Length: 4 << 12, Chunk: 1 << 12}
	if err := errors.Join(f.Sync(), unix.Fadvise(int(f.Fd()), 0, 0, unix.FADV_DONTNEED), p.open(q.Key, 0)); err != nil {
		t.Fatal(err)
	}
	if p.cached(q) {
		t.Skip("this file system keeps files in memory")
	}
	p.close()
	for _, used := range []bool{false, true} {
		if used {
			if _, err := f.ReadAt(make([]byte, 10), 1<<12); err != nil {
				t.Fatal(err)
			}
		}
		sums, err := p.sums(q)
		want := sha256.Sum256(b[:1<<12])
		if err != nil || len(sums) != 4 || !bytes.Equal(sums[0], want[:]) || p.direct {
			t.Fatalf("%d sums, %v", len(sums), err)
		}
		whole := &Request{Length: int64(len(b))} // with what would be read ahead
		if got := p.cached(whole); got != used {
			t.Errorf("in the page cache: %v, want %v", got, used)
		}
	}
}

// The process has no right but reading.
func TestTheProcessIsHumble(t *testing.T) {
	testutil.Require(t, testutil.Root)
	root, _ := blobs(t, 1<<12)
	r := start(t, root, Verb)
	if _, _, err := r.Sums(t.Context(), Request{Key: "a/b", Length: 1 << 12, Chunk: 1 << 12}, time.Minute); err != nil {
		t.Fatal(err)
	}
	pid := r.cmd.Process.Pid
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	for _, want := range []string{"CapEff:\t0000000000000004\n", "CapPrm:\t0000000000000004\n", "NoNewPrivs:\t1\n"} {
		if err != nil || !strings.Contains(string(status), want) {
			t.Errorf("want %q in\n%s%v", want, status, err)
		}
	}
	if nice, err := unix.Getpriority(unix.PRIO_PROCESS, pid); err != nil || nice != 1 { // 20 less 19, as the call has it
		t.Errorf("priority %d, %v", nice, err)
	}
	fds, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", pid))
	var files []string
	for _, fd := range fds {
		to, _ := os.Readlink(fmt.Sprintf("/proc/%d/fd/%s", pid, fd.Name()))
		if strings.HasPrefix(to, "/") && !strings.HasPrefix(to, "/dev/") && !strings.HasPrefix(to, "/sys/") {
			files = append(files, to)
		}
	}
	if want := []string{root.Name(), root.Name() + "/a/b"}; err != nil || !slices.Equal(files, want) {
		t.Errorf("open files %q, %v; want %q", files, err, want)
	}
}

func FuzzAnswer(f *testing.F) {
	root, err := os.Open(f.TempDir())
	if err != nil {
		f.Fatal(err)
	}
	defer root.Close()
	f.Add([]byte(`{"Key":"a","Length":4096,"Chunk":1}`))
	f.Add([]byte(`{"Key":"../x","Length":-1,"Chunk":0,"Fresh":true}`))
	p := &process{root: root, buf: make([]byte, MaxRead)}
	f.Fuzz(func(t *testing.T, b []byte) {
		var q Request
		if json.Unmarshal(b, &q) != nil {
			return
		}
		if a := p.answer(&q); !a.Gone && a.Error == "" {
			t.Errorf("%+v of nothing: %+v", q, a)
		}
	})
}
