package ahead

import (
	"bytes"
	"context"
	"errors"
	"io"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"
	"testing/iotest"
	"testing/synctest"
)

func noise(n int) []byte {
	b := make([]byte, n)
	_, _ = rand.NewChaCha8([32]byte{byte(n), byte(n >> 8)}).Read(b)
	return b
}

var small = Options{Piece: 64, Pieces: 3}

// at is At of bytes.
func at(ctx context.Context, opt Options, b []byte) *Reader {
	return At(ctx, opt, func(context.Context) (int64, error) { return int64(len(b)), nil },
		func(_ context.Context, p []byte, off int64) (int, error) { return bytes.NewReader(b).ReadAt(p, off) })
}

// All bytes come in their order, however source and reader divide them.
func TestOrder(t *testing.T) {
	for _, size := range []int{0, 1, 3, 4, 63, 64, 65, 127, 128, 129, 1000, 64 * 40} {
		want := noise(size)
		for name, r := range map[string]func() *Reader{
			"stream":         func() *Reader { return Stream(t.Context(), small, bytes.NewReader(want)) },
			"slow stream":    func() *Reader { return Stream(t.Context(), small, iotest.OneByteReader(bytes.NewReader(want))) },
			"end with bytes": func() *Reader { return Stream(t.Context(), small, iotest.DataErrReader(bytes.NewReader(want))) },
			"at":             func() *Reader { return at(t.Context(), small, want) },
		} {
			for how, read := range map[string]func(r io.Reader) ([]byte, error){
				"all":     io.ReadAll,
				"by byte": func(r io.Reader) ([]byte, error) { return io.ReadAll(iotest.OneByteReader(r)) },
				"copied": func(r io.Reader) ([]byte, error) {
					var b bytes.Buffer
					_, err := io.Copy(&b, r)
					return b.Bytes(), err
				},
			} {
				r := r()
				if got, err := read(r); err != nil || !bytes.Equal(got, want) {
					t.Errorf("%s of %d bytes, %s: %d bytes, %v", name, size, how, len(got), err)
				}
				if n, err := r.Read(make([]byte, 1)); n != 0 || err != io.EOF {
					t.Errorf("%s of %d bytes, %s: %d, %v behind the end", name, size, how, n, err)
				}
				_ = r.Close()
			}
		}
	}
}

// An error of the source comes where it is, after all bytes before it, and stays.
func TestErrors(t *testing.T) {
	broken := errors.New("broken")
	want := noise(200)
	short := func(_ context.Context, p []byte, off int64) (int, error) { return bytes.NewReader(want).ReadAt(p, off) }
	for name, tc := range map[string]struct {
		r    *Reader
		want error
	}{
		"stream": {Stream(t.Context(), small, io.MultiReader(bytes.NewReader(want), iotest.ErrReader(broken))), broken},
		"an unexpected end of the source's own": {
			Stream(t.Context(), small, io.MultiReader(bytes.NewReader(want), iotest.ErrReader(io.ErrUnexpectedEOF))), io.ErrUnexpectedEOF,
		},
		"shorter than its size": {At(t.Context(), small, func(context.Context) (int64, error) { return 201, nil }, short), io.ErrUnexpectedEOF},
		"a piece": {At(t.Context(), small, func(context.Context) (int64, error) { return 1000, nil }, func(ctx context.Context, p []byte, off int64) (int, error) {
			if off >= 192 {
				return copy(p, want[192:]), broken
			}
			return short(ctx, p, off)
		}), broken},
	} {
		got, err := io.ReadAll(tc.r)
		if !bytes.Equal(got, want) || !errors.Is(err, tc.want) {
			t.Errorf("%s: %d bytes, %v; want %d and %v", name, len(got), err, len(want), tc.want)
		}
		if _, err := tc.r.Read(make([]byte, 1)); !errors.Is(err, tc.want) {
			t.Errorf("%s: then %v", name, err)
		}
		_ = tc.r.Close()
	}
	r := At(t.Context(), small, func(context.Context) (int64, error) { return 0, broken }, short)
	if got, err := io.ReadAll(r); len(got) != 64 || !errors.Is(err, broken) {
		t.Errorf("no size: %d bytes, %v", len(got), err)
	}
	_ = r.Close()
}

// So many pieces are in memory, and no more, whoever is slow.
func TestBound(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var asked atomic.Int64
		r := At(t.Context(), small, func(context.Context) (int64, error) { return 6400, nil }, func(_ context.Context, p []byte, _ int64) (int, error) {
			asked.Add(1)
			return len(p), nil
		})
		defer r.Close()
		for n := range int64(5) {
			synctest.Wait()
			if got := asked.Load(); got != max(n-1, 0)+int64(small.Pieces) {
				t.Errorf("%d pieces were read once %d are in use or done", got, n)
			}
			if _, err := io.ReadFull(r, make([]byte, small.Piece)); err != nil {
				t.Fatal(err)
			}
		}
	})
}

// Pieces are asked for at once, and the one that is late holds up none of the others.
func TestAtOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var now, most int
		var mu sync.Mutex
		late := make(chan struct{})
		r := At(t.Context(), small, func(context.Context) (int64, error) { return 64 * 3, nil }, func(_ context.Context, p []byte, off int64) (int, error) {
			if off == 0 {
				return len(p), nil
			}
			mu.Lock()
			now++
			most = max(most, now)
			mu.Unlock()
			<-late
			return len(p), nil
		})
		defer r.Close()
		if _, err := io.ReadFull(r, make([]byte, 64)); err != nil {
			t.Fatal(err)
		}
		synctest.Wait()
		mu.Lock()
		if most != 2 {
			t.Errorf("%d pieces at once, want 2", most)
		}
		mu.Unlock()
		close(late)
		if n, err := io.Copy(io.Discard, r); n != 128 || err != nil {
			t.Errorf("%d bytes, %v", n, err)
		}
	})
}

// Close returns when nothing reads the source any more, wherever its readers are.
func TestClose(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var reading atomic.Int64
		r := At(t.Context(), small, func(context.Context) (int64, error) { return 1 << 20, nil }, func(ctx context.Context, p []byte, off int64) (int, error) {
			if off == 0 {
				return len(p), nil
			}
			reading.Add(1)
			defer reading.Add(-1)
			<-ctx.Done()
			return 0, ctx.Err()
		})
		synctest.Wait()
		if n := reading.Load(); n == 0 {
			t.Error("nothing is read ahead")
		}
		_ = r.Close()
		if n := reading.Load(); n != 0 {
			t.Errorf("%d reads go on", n)
		}
		full := Stream(t.Context(), small, bytes.NewReader(noise(1000))) // waits for room
		synctest.Wait()
		_ = full.Close()
		_ = full.Close()
	})
}

// The end of the context is told, with its cause.
func TestContext(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		cause := errors.New("enough")
		ctx, cancel := context.WithCancelCause(t.Context())
		r := Stream(ctx, small, zeros{})
		defer r.Close()
		synctest.Wait()
		cancel(cause)
		n, err := io.Copy(io.Discard, r)
		if !errors.Is(err, cause) || n > int64(small.Piece*small.Pieces) {
			t.Errorf("%d bytes, %v", n, err)
		}
	})
}

type zeros struct{}

func (zeros) Read(p []byte) (int, error) {
	clear(p)
	return len(p), nil
}
