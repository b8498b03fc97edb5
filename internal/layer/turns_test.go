package layer

import (
	"context"
	"errors"
	"io"
	"math/rand/v2"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/opendsec/dsec"
)

// Who has many builds waits for them alone.
func TestTurnsAreFair(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		turns := newTurns(1)
		if !turns.take(t.Context(), "a") {
			t.Fatal("no turn")
		}
		var order []string
		next := make(chan struct{})
		if !turns.take(t.Context(), "b") {
			t.Fatal("no turn for who has none")
		}
		for _, project := range []string{"a", "a", "a", "a", "b", "b", "c"} {
			go func() {
				if turns.take(t.Context(), project) {
					order = append(order, project)
					<-next
					turns.give(project)
				}
			}()
			synctest.Wait()
		}
		if len(order) > 0 {
			t.Errorf("%s have turns that there are not", order)
		}
		ctx, cancel := context.WithCancel(t.Context())
		go turns.take(ctx, "d") // gives up
		synctest.Wait()
		cancel()
		synctest.Wait()
		turns.give("b")
		synctest.Wait()
		turns.give("a")
		for range 8 {
			synctest.Wait()
			select {
			case next <- struct{}{}:
			default:
			}
		}
		if got := strings.Join(order, ""); got != "bacbaaa" {
			t.Errorf("the order is %s", got)
		}
		if turns.total != 0 || len(turns.running) > 0 || len(turns.order) > 0 || len(turns.waiting) > 0 {
			t.Errorf("%+v is left", turns)
		}
	})
}

// A turn that is given back may make room for two: the last one is for who has none.
func TestTurnsForTwo(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		turns := newTurns(2)
		var begun atomic.Int64
		for _, project := range []string{"a", "b", "b", "a"} {
			go func() {
				turns.take(t.Context(), project)
				begun.Add(1)
			}()
			synctest.Wait()
		}
		if n := begun.Load(); n != 2 {
			t.Errorf("%d have begun, want one each", n)
		}
		turns.give("a")
		synctest.Wait()
		if n := begun.Load(); n != 4 {
			t.Errorf("%d have begun, want two each", n)
		}
	})
}

// No turn is lost or made, whoever gives up when.
func TestTurnsAreKept(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const most = 3
		turns := newTurns(most)
		var mu sync.Mutex
		running := 0
		var all sync.WaitGroup
		for i := range 500 {
			all.Go(func() {
				time.Sleep(rand.N(time.Second)) //nolint:forbidigo // of the bubble's clock
				ctx, cancel := context.WithTimeout(t.Context(), rand.N(time.Second))
				defer cancel()
				project := string(rune('a' + i%7))
				if !turns.take(ctx, project) {
					return
				}
				mu.Lock()
				if running++; running > most+1 {
					t.Errorf("%d at once", running)
				}
				mu.Unlock()
				time.Sleep(rand.N(20 * time.Millisecond)) //nolint:forbidigo // of the bubble's clock
				mu.Lock()
				running--
				mu.Unlock()
				turns.give(project)
			})
		}
		all.Wait()
		if turns.total != 0 || len(turns.running) > 0 || len(turns.order) > 0 || len(turns.waiting) > 0 {
			t.Errorf("%+v is left", turns)
		}
	})
}

// A build that waits for its turn has all of its time from then on, however long those
// before it took.
func TestTheTimeOfABuildBeginsWithItsTurn(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &Store{opt: Options{}.withDefaults(), builds: newTurns(1)}
		_, first, err := s.turn(t.Context(), "a")
		if err != nil {
			t.Fatal(err)
		}
		time.AfterFunc(3*s.opt.Timeout, first)
		ctx, done, err := s.turn(t.Context(), "b")
		if err != nil {
			t.Fatal(err)
		}
		defer done()
		if deadline, ok := ctx.Deadline(); !ok || time.Until(deadline) != s.opt.Timeout {
			t.Errorf("it has until %s, and that is %s", deadline, time.Until(deadline))
		}
	})
}

// drip gives n bytes at a time, each time after a wait.
type drip struct {
	n    int
	wait time.Duration
}

func (d drip) Read(p []byte) (int, error) {
	time.Sleep(d.wait) //nolint:forbidigo // of the bubble's clock
	return min(d.n, len(p)), nil
}

// An archive has to come at a pace, of which what was sent before is worth no more
// than the patience that there is.
func TestPace(t *testing.T) {
	for name, tc := range map[string]struct {
		source drip
		ends   bool
	}{
		"stalled":               {drip{1, 24 * time.Hour}, true},
		"a byte now and then":   {drip{1, patience / 2}, true},
		"half the least pace":   {drip{leastPace / 2, time.Second}, true},
		"the least pace":        {drip{leastPace, time.Second}, false},
		"bursts":                {drip{leastPace * 60, time.Minute}, false},
		"bursts of longer ago":  {drip{1 << 30, patience + time.Second}, true},
		"as fast as it is read": {drip{1 << 20, 0}, false},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				ctx, cancel := context.WithCancelCause(t.Context())
				defer cancel(nil)
				p := &paced{r: tc.source, most: patience, left: patience, cancel: cancel}
				b := make([]byte, 64<<20)
				for start := time.Now(); time.Since(start) < time.Hour && ctx.Err() == nil; {
					_, _ = p.Read(b)
					if tc.source.wait == 0 {
						time.Sleep(time.Minute) //nolint:forbidigo // whoever reads may take his time, of the bubble's clock
					}
				}
				err := context.Cause(ctx)
				if tc.ends != (err != nil) {
					t.Fatalf("after an hour: %v", err)
				}
				if e, ok := errors.AsType[*dsec.Error](err); tc.ends && (!ok || e.Code != dsec.CodeUnavailable || !strings.Contains(e.Message, "64 KiB a second")) {
					t.Errorf("%v, want unavailable with the pace that is wanted", err)
				}
			})
		})
	}
}

// never is an archive that does not come.
type never struct{ over <-chan struct{} }

func (n never) Read([]byte) (int, error) {
	<-n.over
	return 0, io.ErrUnexpectedEOF
}

// An archive that does not come keeps no other from being imported.
func TestStalledArchive(t *testing.T) {
	s := openStore(t, Options{Builds: 1, Timeout: time.Minute, patience: 20 * time.Millisecond})
	_, _, err := s.Build(t.Context(), BuildOptions{}, never{t.Context().Done()})
	if err == nil || dsec.CodeOf(err) != dsec.CodeUnavailable || !strings.Contains(err.Error(), "comes too slowly") {
		t.Errorf("%v, want unavailable: it comes too slowly", err)
	}
	build(t, s, "content")
}

// Nobody waits for the rest of an archive once the helper is gone or has seen enough.
func TestHelperEndsBeforeTheArchive(t *testing.T) {
	for _, command := range []string{"bad-dies", "bad-oom"} {
		s := openStore(t, Options{Timeout: time.Minute, HelperCommand: []string{"/proc/self/exe", command}})
		if _, _, err := s.Build(t.Context(), BuildOptions{}, never{t.Context().Done()}); err == nil || dsec.CodeOf(err) == dsec.CodeUnavailable {
			t.Errorf("%s: %v, want what became of the helper", command, err)
		}
	}
	s := openStore(t, Options{Timeout: time.Minute})
	_, _, err := s.Build(t.Context(), BuildOptions{}, io.MultiReader(strings.NewReader(strings.Repeat("no archive", headBytes)), never{t.Context().Done()}))
	wantCode(t, err, dsec.CodeInvalid)
}

// headBytes is more than a helper looks at to tell what an archive is.
const headBytes = 64 << 10
