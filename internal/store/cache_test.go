package store

import (
	"errors"
	"testing"
	"time"

	"github.com/opendsec/dsec/internal/testutil"
)

// A store that nobody writes to still answers for its caches: without that
// every key would be refused half a minute after the last write.
func TestACacheOfAQuietStoreStaysFresh(t *testing.T) {
	s, err := Open(t.Context(), Config{Dir: t.TempDir(), Log: testutil.Logger(t)})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = s.Close() }()
	c, err := NewCache[string](t.Context(), s, "quiet/", nil)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	c.mu.RLock()
	loaded := c.fresh
	c.mu.RUnlock()
	testutil.WaitFor(t, 4*progressEvery, "news of the store", func() error {
		c.mu.RLock()
		defer c.mu.RUnlock()
		if c.fresh.After(loaded.Add(progressEvery / 2)) {
			return nil
		}
		return errors.New("none since the cache was loaded, " + time.Since(loaded).String() + " ago")
	})
}
