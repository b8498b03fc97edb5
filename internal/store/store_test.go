package store

import (
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/goleak"
	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/testutil"
)

func check(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func open(t *testing.T) *Store {
	t.Helper()
	s, err := Open(t.Context(), Config{Dir: t.TempDir(), Log: testutil.Logger(t)})
	check(t, err)
	t.Cleanup(func() {
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	})
	return s
}

type doc struct{ Group, Text string }

func cache(t *testing.T, s *Store) *Cache[doc] {
	t.Helper()
	c, err := NewCache(t.Context(), s, "docs/", func(_ string, d doc) string { return d.Group })
	check(t, err)
	t.Cleanup(c.Close)
	return c
}

func TestWritersReadTheirWrites(t *testing.T) {
	s := open(t)
	c := cache(t, s)
	var wg sync.WaitGroup
	for w := range 8 {
		wg.Go(func() {
			for i := range 50 {
				key, d := fmt.Sprintf("%d-%d", w, i), doc{fmt.Sprint(w), fmt.Sprint(i)}
				rev, err := Put(t.Context(), s, "docs/"+key, d)
				if err == nil {
					err = c.Wait(t.Context(), rev)
				}
				got, ok, gerr := c.Get(key)
				if err != nil || gerr != nil || !ok || got != d {
					t.Errorf("%s: %v %v %v %v", key, got, ok, err, gerr)
				}
			}
		})
	}
	wg.Wait()
	if n := len(c.Keys("3")); n != 50 {
		t.Errorf("index has %d of 50", n)
	}
	rev, err := Put(t.Context(), s, "docs/3-0", doc{"other", "x"})
	check(t, err)
	check(t, c.Wait(t.Context(), rev))
	rev, err = s.Delete(t.Context(), "docs/3-1")
	check(t, err)
	check(t, c.Wait(t.Context(), rev))
	if n := len(c.Keys("3")); n != 48 || len(c.Keys("other")) != 1 {
		t.Errorf("index has %d of 48", n)
	}
	n := 0
	c.Range("3-", func(string, doc) bool { n++; return true })
	if n != 49 {
		t.Errorf("range has %d of 49", n)
	}
}

func TestConditions(t *testing.T) {
	s := open(t)
	_, err := Create(t.Context(), s, "a", doc{Text: "1"})
	check(t, err)
	if _, err := Create(t.Context(), s, "a", doc{Text: "2"}); err == nil || dsec.CodeOf(err) != dsec.CodeConflict {
		t.Errorf("second create: %v", err)
	}
	began, err := s.Revision(t.Context())
	check(t, err)
	_, err = PutIf(t.Context(), s, "b", doc{}, UnchangedSince("a", began), UnchangedSince("never", began))
	check(t, err)
	_, err = PutFor(t.Context(), s, "a", doc{Text: "3"}, time.Hour)
	check(t, err)
	if _, err := PutIf(t.Context(), s, "b", doc{}, UnchangedSince("a", began)); err == nil || dsec.CodeOf(err) != dsec.CodeConflict {
		t.Errorf("changed meanwhile: %v", err)
	}
	if _, err := PutIf(t.Context(), s, "b", doc{}, NoneBelow("a/")); err != nil {
		t.Errorf("none below: %v", err)
	}
	_, err = Put(t.Context(), s, "c/d", doc{})
	check(t, err)
	if _, err := s.DeleteIf(t.Context(), "a", NoneBelow("c/")); err == nil || dsec.CodeOf(err) != dsec.CodeConflict {
		t.Errorf("one below: %v", err)
	}
	_, err = s.DeleteIf(t.Context(), "c/d", NoneBelow("d"))
	check(t, err)
	docs, err := List[doc](t.Context(), s, "")
	if err != nil || len(docs) != 2 || docs["a"].Text != "3" {
		t.Errorf("%v, %v", docs, err)
	}
}

// TestOneLease: what is kept again and again has one lease, of the last time that was asked for.
func TestOneLease(t *testing.T) {
	s := open(t)
	lease := func() clientv3.LeaseStatus {
		t.Helper()
		all, err := s.client.Leases(t.Context())
		check(t, err)
		if len(all.Leases) != 1 {
			t.Fatalf("%d leases, want 1", len(all.Leases))
		}
		return all.Leases[0]
	}
	_, err := PutFor(t.Context(), s, "a", doc{Text: "1"}, time.Hour)
	check(t, err)
	first := lease().ID
	for range 3 {
		_, err := PutFor(t.Context(), s, "a", doc{Text: "2"}, time.Hour)
		check(t, err)
		if got := lease().ID; got != first {
			t.Errorf("lease %x, want %x", got, first)
		}
	}
	_, err = PutFor(t.Context(), s, "a", doc{Text: "3"}, 2*time.Hour)
	check(t, err)
	ttl, err := s.client.TimeToLive(t.Context(), lease().ID, clientv3.WithAttachedKeys())
	check(t, err)
	if ttl.GrantedTTL != 2*60*60 || len(ttl.Keys) != 1 {
		t.Errorf("a lease of %d s with %d documents", ttl.GrantedTTL, len(ttl.Keys))
	}
	_, err = s.client.Revoke(t.Context(), lease().ID) // it is over
	check(t, err)
	_, err = PutFor(t.Context(), s, "a", doc{Text: "4"}, time.Hour)
	check(t, err)
	if got, _, ok, err := Get[doc](t.Context(), s, "a"); err != nil || !ok || got.Text != "4" {
		t.Errorf("%v, %v, %v", got, ok, err)
	}
}

func TestDamagedDocumentHarmsNoOther(t *testing.T) {
	s := open(t)
	_, err := Put(t.Context(), s, "docs/good", doc{Text: "x"})
	check(t, err)
	_, err = Put(t.Context(), s, "docs/bad", []int{1})
	check(t, err)
	c := cache(t, s)
	if _, ok, err := c.Get("good"); !ok || err != nil {
		t.Errorf("good: %v %v", ok, err)
	}
	if _, ok, _ := c.Get("bad"); ok {
		t.Error("bad was read")
	}
	rev, err := Put(t.Context(), s, "docs/good", "damaged later")
	check(t, err)
	check(t, c.Wait(t.Context(), rev))
	if _, ok, _ := c.Get("good"); ok {
		t.Error("a damaged document kept its old value")
	}
}

// TestStaleCacheFailsClosed has a cache that has not heard from the store.
func TestStaleCacheFailsClosed(t *testing.T) {
	s := open(t)
	c := cache(t, s)
	c.mu.Lock()
	c.fresh = time.Now().Add(-2 * staleAfter)
	c.mu.Unlock()
	if _, _, err := c.Get("x"); err == nil || dsec.CodeOf(err) != dsec.CodeUnavailable {
		t.Errorf("%v", err)
	}
}

func TestOneStoreForOneDirectory(t *testing.T) {
	dir := t.TempDir()
	for range 2 {
		s, err := Open(t.Context(), Config{Dir: dir, Log: testutil.Logger(t)})
		check(t, err)
		check(t, s.Close())
	}
	if _, err := Open(t.Context(), Config{Dir: "/proc/nothing", Log: testutil.Logger(t)}); err == nil {
		t.Error("opened a directory that cannot be made")
	}
}

func TestMain(m *testing.M) {
	goleak.VerifyTestMain(m, goleak.IgnoreAnyFunction("go.etcd.io/etcd/client/v3.(*lessor).keepAliveCtxCloser"))
}

// TestLastWords: what etcd ends the process for is told, and what it says else is not.
func TestLastWords(t *testing.T) {
	var out strings.Builder
	log := lastWords(slog.New(slog.NewTextHandler(&out, nil))).WithOptions(zap.WithFatalHook(zapcore.WriteThenPanic))
	log.Warn("slow")
	if out.Len() > 0 {
		t.Errorf("logged %q for a warning", out.String())
	}
	defer func() {
		if recover() == nil || !strings.Contains(out.String(), "failed to purge") || !strings.Contains(out.String(), "too many open files") {
			t.Errorf("logged %q", out.String())
		}
	}()
	log.Fatal("failed to purge wal file", zap.Error(syscall.EMFILE))
}
