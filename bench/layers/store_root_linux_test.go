package main

import (
	"bytes"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/opendsec/dsec/internal/testutil"
)

// TestPlaceCountsAndPaces: a rate that is a hundredth takes longer, however fast
// the machine is.
func TestPlaceCountsAndPaces(t *testing.T) {
	testutil.Require(t, testutil.Root)
	p, err := newPlace(testutil.Dir(t))
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := p.Close(); err != nil {
			t.Error(err)
		}
	}()
	const size = 1 << 20
	name := filepath.Join(p.backing, "file")
	if err := os.WriteFile(name, bytes.Repeat([]byte("x"), size), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := p.forget(); err != nil {
		t.Fatal(err)
	}
	p.pace(2 * size)
	before, begin := p.BytesRead(), time.Now()
	if b, err := os.ReadFile(filepath.Join(p.Dir(), "file")); err != nil || len(b) != size {
		t.Fatalf("%d bytes, %v", len(b), err)
	}
	if got := p.BytesRead() - before; got != size {
		t.Errorf("%d bytes are counted, %d were read", got, size)
	}
	// The last reads may be under way together, and the first waits for none.
	if took := time.Since(begin); took < 250*time.Millisecond {
		t.Errorf("1 MiB at 2 MiB a second took %v", took)
	}
}
