// Package blobtest is the suite that every blob.Store passes.
package blobtest

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"strings"
	"testing"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/layer/blob"
)

// Run tests the stores that open makes. Each call of open gives an empty one,
// whose end t.Cleanup may care for.
func Run(t *testing.T, open func(t *testing.T) blob.Store) {
	for _, test := range []struct {
		name string
		run  func(*testing.T, blob.Store)
	}{
		{"reads what was put", testRead},
		{"empty blob", testEmpty},
		{"no such blob", testNotFound},
		{"a blob is not put twice", testPutTwice},
		{"another blob of the same key", testOtherSize},
		{"nothing is seen of a put that fails", testFailedPut},
		{"a context that is over", testCancelled},
		{"puts of one key at once", testConcurrentPuts},
		{"deleted", testDelete},
		{"lists by prefix and in order", testList},
		{"keys that are none", testBadKeys},
		{"arguments that are none", testBadArguments},
		{"files", testOpener},
		{"files taken over", testLinker},
	} {
		t.Run(test.name, func(t *testing.T) { test.run(t, open(t)) })
	}
}

// Bytes are n bytes that are the same for the same n.
func Bytes(n int) []byte {
	b := make([]byte, n)
	_, _ = rand.NewChaCha8([32]byte{byte(n), byte(n >> 8), byte(n >> 16)}).Read(b)
	return b
}

// MustPut puts a blob.
func MustPut(t testing.TB, s blob.Store, key string, b []byte) {
	t.Helper()
	if err := s.Put(t.Context(), key, bytes.NewReader(b), int64(len(b))); err != nil {
		t.Fatalf("put %s: %v", key, err)
	}
}

// WantCode fails the test unless err is a *dsec.Error of the code, and of the field.
func WantCode(t testing.TB, what string, err error, code dsec.Code, field string) {
	t.Helper()
	e, ok := errors.AsType[*dsec.Error](err)
	if !ok || e.Code != code || e.Field != field {
		t.Errorf("%s: %v (%#v), want code %s of field %q", what, err, err, code, field)
	}
}

// WantBlob fails the test unless the blob is in s and has exactly these bytes.
func WantBlob(t testing.TB, s blob.Store, key string, want []byte) {
	t.Helper()
	info, err := s.Stat(t.Context(), key)
	if err != nil || info.Key != key || info.Size != int64(len(want)) || info.Created.IsZero() {
		t.Errorf("stat %s: %+v, %v, want %d bytes", key, info, err, len(want))
	}
	got := make([]byte, len(want)+1)
	n, err := s.ReadAt(t.Context(), key, got, 0)
	if err != io.EOF || !bytes.Equal(got[:n], want) {
		t.Errorf("read %s: %d bytes, %v, equal %t; want %d and io.EOF", key, n, err, bytes.Equal(got[:n], want), len(want))
	}
}

// WantNone fails the test unless no blob of that key is to be seen.
func WantNone(t testing.TB, s blob.Store, key string) {
	t.Helper()
	_, err := s.Stat(t.Context(), key)
	WantCode(t, "stat of a blob that is not there", err, dsec.CodeNotFound, "")
	if keys := Keys(t, s, ""); strings.Contains(" "+keys+" ", " "+key+" ") {
		t.Errorf("%s is listed in %s", key, keys)
	}
}

// Keys are the keys that begin with prefix, as they are listed.
func Keys(t testing.TB, s blob.Store, prefix string) string {
	t.Helper()
	var keys []string
	err := s.List(t.Context(), prefix, func(info blob.Info) error {
		keys = append(keys, info.Key)
		return nil
	})
	if err != nil {
		t.Errorf("list %q: %v", prefix, err)
	}
	return strings.Join(keys, " ")
}

// big is more than a driver moves at once, and no multiple of that.
const big = 12<<20 + 4097

func testRead(t *testing.T, s blob.Store) {
	want := Bytes(big)
	MustPut(t, s, "sha256/big.data", want)
	WantBlob(t, s, "sha256/big.data", want)
	for _, r := range []struct{ off, n int }{
		{0, 1}, {1, 4096}, {4095, 2}, {big - 1, 1}, {big - 4097, 4097}, {5<<20 - 7, 6 << 20}, {0, big}, {7, 0},
	} {
		p := make([]byte, r.n)
		n, err := s.ReadAt(t.Context(), "sha256/big.data", p, int64(r.off))
		// At the very end a reader may say so at once, as io.ReaderAt's may.
		if err == io.EOF && r.off+r.n == big {
			err = nil
		}
		if n != r.n || err != nil || !bytes.Equal(p, want[r.off:r.off+r.n]) {
			t.Errorf("%d bytes from %d: %d, %v", r.n, r.off, n, err)
		}
	}
	for _, r := range []struct{ off, n, want int }{{big - 10, 11, 10}, {big - 10, 5 << 20, 10}, {big, 1, 0}, {big + 5<<20, 100, 0}} {
		p := make([]byte, r.n)
		n, err := s.ReadAt(t.Context(), "sha256/big.data", p, int64(r.off))
		if n != r.want || err != io.EOF || !bytes.Equal(p[:n], want[min(r.off, big):min(r.off, big)+n]) {
			t.Errorf("%d bytes from %d, over the end: %d, %v; want %d and io.EOF", r.n, r.off, n, err, r.want)
		}
	}
}

func testEmpty(t *testing.T, s blob.Store) {
	MustPut(t, s, "empty", nil)
	WantBlob(t, s, "empty", nil)
	if keys := Keys(t, s, ""); keys != "empty" {
		t.Errorf("listed %q", keys)
	}
}

func testNotFound(t *testing.T, s blob.Store) {
	MustPut(t, s, "dir/there", []byte("there"))
	for _, key := range []string{"dir/none", "none", "none/none", "dir"} {
		_, err := s.Stat(t.Context(), key)
		WantCode(t, "stat "+key, err, dsec.CodeNotFound, "")
		n, err := s.ReadAt(t.Context(), key, make([]byte, 10), 0)
		WantCode(t, "read "+key, err, dsec.CodeNotFound, "")
		if n != 0 {
			t.Errorf("read %d bytes of nothing", n)
		}
	}
}

// unread fails the test where it is read.
type unread struct{ t *testing.T }

func (r unread) Read([]byte) (int, error) {
	r.t.Error("the source of a blob that is there was read")
	return 0, io.EOF
}

func testPutTwice(t *testing.T, s blob.Store) {
	want := Bytes(5000)
	MustPut(t, s, "a/b", want)
	before, err := s.Stat(t.Context(), "a/b")
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Put(t.Context(), "a/b", unread{t}, int64(len(want))); err != nil {
		t.Errorf("put again: %v", err)
	}
	if after, err := s.Stat(t.Context(), "a/b"); err != nil || after != before {
		t.Errorf("%+v became %+v, %v", before, after, err)
	}
	WantBlob(t, s, "a/b", want)
}

func testOtherSize(t *testing.T, s blob.Store) {
	MustPut(t, s, "a/b", []byte("first"))
	err := s.Put(t.Context(), "a/b", unread{t}, 6)
	WantCode(t, "put with another size", err, dsec.CodeConflict, "")
	WantBlob(t, s, "a/b", []byte("first"))
}

var errSource = errors.New("the source fails")

func testFailedPut(t *testing.T, s blob.Store) {
	for _, size := range []int{100, big} {
		b := Bytes(size)
		key := fmt.Sprint("short/", size)
		err := s.Put(t.Context(), key, bytes.NewReader(b[:size-1]), int64(size))
		WantCode(t, "put of a source that ends early", err, dsec.CodeInvalid, "size")
		WantNone(t, s, key)

		r := io.MultiReader(bytes.NewReader(b[:size-1]), &failing{})
		if err := s.Put(t.Context(), key, r, int64(size)); !errors.Is(err, errSource) {
			t.Errorf("put of a source that fails: %v", err)
		}
		WantNone(t, s, key)
		MustPut(t, s, key, b) // what failed is not in the way
		WantBlob(t, s, key, b)
	}
}

type failing struct{}

func (*failing) Read([]byte) (int, error) { return 0, errSource }

func testCancelled(t *testing.T, s blob.Store) {
	MustPut(t, s, "there", Bytes(100))
	ctx, cancel := context.WithCancel(t.Context())
	// In the middle of a put: its source is what ends the context.
	b := Bytes(big)
	r := io.MultiReader(bytes.NewReader(b[:big-100]), onRead(cancel), bytes.NewReader(b[big-100:]))
	if err := s.Put(ctx, "cancelled", r, big); !errors.Is(err, context.Canceled) {
		t.Errorf("put: %v", err)
	}
	WantNone(t, s, "cancelled")
	_, statErr := s.Stat(ctx, "there")
	n, readErr := s.ReadAt(ctx, "there", make([]byte, 10), 0)
	for what, err := range map[string]error{
		"stat": statErr, "read": readErr, "delete": s.Delete(ctx, "there"),
		"put":  s.Put(ctx, "new", bytes.NewReader(nil), 0),
		"list": s.List(ctx, "", func(blob.Info) error { return nil }),
	} {
		if !errors.Is(err, context.Canceled) {
			t.Errorf("%s: %v, want context.Canceled", what, err)
		}
	}
	if n != 0 {
		t.Errorf("read %d bytes", n)
	}
	WantBlob(t, s, "there", Bytes(100))
}

type onRead func()

func (f onRead) Read([]byte) (int, error) {
	f()
	return 0, io.EOF
}

func testConcurrentPuts(t *testing.T, s blob.Store) {
	want := Bytes(1<<20 + 1)
	const writers = 6
	done := make(chan error, 2*writers)
	for range writers {
		go func() {
			done <- s.Put(t.Context(), "same/key", bytes.NewReader(want), int64(len(want)))
		}()
		go func() {
			got := make([]byte, len(want))
			n, err := s.ReadAt(t.Context(), "same/key", got, 0)
			switch {
			case err != nil && err != io.EOF && dsec.CodeOf(err) == dsec.CodeNotFound:
				err = nil
			case !bytes.Equal(got[:n], want):
				err = fmt.Errorf("a reader sees %d bytes of a blob on its way, %w", n, err)
			default:
				err = nil
			}
			done <- err
		}()
	}
	for range 2 * writers {
		if err := <-done; err != nil {
			t.Errorf("%v: %v", err, errors.Unwrap(err))
		}
	}
	WantBlob(t, s, "same/key", want)
	if keys := Keys(t, s, ""); keys != "same/key" {
		t.Errorf("listed %s", keys)
	}
}

func testDelete(t *testing.T, s blob.Store) {
	MustPut(t, s, "a/b", []byte("b"))
	MustPut(t, s, "a/c", []byte("c"))
	for _, key := range []string{"a/b", "a/b", "none", "none/none", "a"} {
		if err := s.Delete(t.Context(), key); err != nil {
			t.Errorf("delete %s: %v", key, err)
		}
	}
	WantNone(t, s, "a/b")
	WantBlob(t, s, "a/c", []byte("c"))
	MustPut(t, s, "a/b", []byte("again"))
	WantBlob(t, s, "a/b", []byte("again"))
}

func testList(t *testing.T, s blob.Store) {
	if keys := Keys(t, s, ""); keys != "" {
		t.Errorf("a new store lists %s", keys)
	}
	// '-' and '.' sort before '/', '0' behind it.
	in := []string{"a-b", "a.b", "a/b", "a/b-c", "a/c/d", "a0", "aa/b", "b/a", "b/a.x", "b/b"}
	for _, i := range rand.Perm(len(in)) {
		MustPut(t, s, in[i], []byte(in[i]))
	}
	for prefix, want := range map[string]string{
		"": strings.Join(in, " "), "a": "a-b a.b a/b a/b-c a/c/d a0 aa/b", "a/": "a/b a/b-c a/c/d", "a/b": "a/b a/b-c",
		"a/c/d": "a/c/d", "a/c/d/": "", "b/a.": "b/a.x", "c": "", "b/b/c": "", "none/": "",
	} {
		if keys := Keys(t, s, prefix); keys != want {
			t.Errorf("prefix %q: %s, want %s", prefix, keys, want)
		}
	}
	var sizes int64
	stop := errors.New("stop")
	calls := 0
	err := s.List(t.Context(), "a/", func(info blob.Info) error {
		calls++
		sizes += info.Size
		if info.Created.IsZero() {
			t.Errorf("%+v", info)
		}
		if calls == 2 {
			return stop
		}
		return nil
	})
	if !errors.Is(err, stop) || calls != 2 || sizes != int64(len("a/b"+"a/b-c")) {
		t.Errorf("%v after %d calls with %d bytes, want the function's own error after 2", err, calls, sizes)
	}
}

// BadKeys are keys that no store takes.
var BadKeys = []string{
	"", "/", "/a", "a/", "a//b", ".", "..", "../a", "a/..", "a/../b", "a/./b", ".a", "a/.b", "a b", "a\x00b", "a\nb", "ä", `a\b`, "a:b", "a?b", "a%2e",
	strings.Repeat("x", 201), strings.Repeat("xy/", 200) + "x",
}

func testBadKeys(t *testing.T, s blob.Store) {
	for _, key := range BadKeys {
		_, err := s.Stat(t.Context(), key)
		WantCode(t, fmt.Sprintf("stat %q", key), err, dsec.CodeInvalid, "key")
		_, err = s.ReadAt(t.Context(), key, make([]byte, 1), 0)
		WantCode(t, fmt.Sprintf("read %q", key), err, dsec.CodeInvalid, "key")
		WantCode(t, fmt.Sprintf("put %q", key), s.Put(t.Context(), key, unread{t}, 1), dsec.CodeInvalid, "key")
		WantCode(t, fmt.Sprintf("delete %q", key), s.Delete(t.Context(), key), dsec.CodeInvalid, "key")
	}
	for _, prefix := range []string{"/", "..", "../", "a//", ".", "a/.", "*"} {
		err := s.List(t.Context(), prefix, func(blob.Info) error { return nil })
		WantCode(t, fmt.Sprintf("list %q", prefix), err, dsec.CodeInvalid, "key")
	}
}

func testBadArguments(t *testing.T, s blob.Store) {
	MustPut(t, s, "a", []byte("a"))
	_, err := s.ReadAt(t.Context(), "a", make([]byte, 1), -1)
	WantCode(t, "read from before the start", err, dsec.CodeInvalid, "off")
	WantCode(t, "put of less than nothing", s.Put(t.Context(), "b", unread{t}, -1), dsec.CodeInvalid, "size")
}
