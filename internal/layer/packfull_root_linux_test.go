package layer

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/testutil"
)

// TestPackIntoAFullStore: of a pack that fails in the middle nothing is seen, and what was
// to be packed is there for the next one; so it is where its caller leaves.
func TestPackIntoAFullStore(t *testing.T) {
	testutil.Require(t, testutil.Root)
	s := openStoreIn(t, testutil.SmallDisk(t, "size=4m"), Options{})
	base := build(t, s, "base")
	had := files(t, s)
	upper := t.TempDir()
	write := func(size int) {
		t.Helper()
		if err := os.WriteFile(filepath.Join(upper, "file"), bytes.Repeat([]byte("x"), size), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	pack := func(ctx context.Context, read func() error) (Meta, error) {
		d, err := os.Open(upper)
		if err != nil {
			t.Fatal(err)
		}
		defer d.Close()
		meta, _, err := s.Pack(ctx, PackOptions{Parents: []string{base.Digest}, Read: read}, d, 0)
		return meta, err
	}
	read := 0
	for _, spool := range []func() error{nil, func() error { read++; return nil }} {
		write(8 << 20)
		_, err := pack(t.Context(), spool)
		wantCode(t, err, dsec.CodeExhausted)
		wantFiles(t, s, had...)
	}
	if read != 1 {
		t.Errorf("it was told %d times that nothing is read any more, want 1", read)
	}
	write(1 << 20)
	gone, leave := context.WithCancel(t.Context())
	leave()
	_, err := pack(gone, nil)
	wantCode(t, err, dsec.CodeUnavailable)
	wantFiles(t, s, had...)
	_, err = pack(t.Context(), func() error { return dsec.Errorf(dsec.CodeLost, "the sandbox is gone") })
	wantCode(t, err, dsec.CodeLost)
	wantFiles(t, s, had...)
	meta, err := pack(t.Context(), nil)
	if err != nil {
		t.Fatal(err)
	}
	if got := fmt.Sprint(meta.Parents); got != fmt.Sprint([]string{base.Digest}) {
		t.Errorf("parents %s", got)
	}
	if err := errors.Join(s.Close()); err != nil { // before the unmount
		t.Error(err)
	}
}
