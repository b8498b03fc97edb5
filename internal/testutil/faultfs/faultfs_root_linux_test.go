package faultfs

import (
	"errors"
	"os"
	"path/filepath"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec/internal/testutil"
)

func mounted(t *testing.T) *FS {
	t.Helper()
	testutil.Require(t, testutil.Root)
	dir := testutil.Dir(t)
	testutil.Ledger(t, filepath.Base(dir))
	backing, at := filepath.Join(dir, "backing"), filepath.Join(dir, "at")
	for _, d := range []string{backing, at} {
		if err := os.Mkdir(d, 0o700); err != nil {
			t.Fatal(err)
		}
	}
	f, err := Mount(at, backing)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := f.Close(); err != nil {
			t.Error(err)
		}
	})
	return f
}

func TestFaults(t *testing.T) {
	f := mounted(t)
	file := filepath.Join(f.Dir(), "file")
	if err := os.WriteFile(file, []byte("bytes"), 0o600); err != nil {
		t.Fatal(err)
	}
	read := func() error {
		b, err := os.ReadFile(file)
		if err == nil && string(b) != "bytes" {
			t.Errorf("read %q", b)
		}
		return err
	}
	if err := read(); err != nil || f.Count(Read) == 0 || f.BytesRead() < 5 {
		t.Errorf("%v, %d reads of %d bytes", err, f.Count(Read), f.BytesRead())
	}
	f.Set(func(op Op) Fault {
		if op == Open {
			return Fault{Errno: unix.EIO}
		}
		return Fault{}
	})
	if err := read(); !errors.Is(err, unix.EIO) {
		t.Errorf("want EIO: %v", err)
	}
	f.Set(func(op Op) Fault {
		if op == Open {
			return Fault{Delay: 20 * time.Millisecond}
		}
		return Fault{}
	})
	begin := time.Now()
	if err := read(); err != nil || time.Since(begin) < 20*time.Millisecond {
		t.Errorf("%v after %v, want 20 ms", err, time.Since(begin))
	}
	f.Set(func(op Op) Fault {
		if op == Unlink {
			return Fault{Errno: unix.ENOENT, Done: true}
		}
		return Fault{}
	})
	if err := os.Remove(file); !errors.Is(err, unix.ENOENT) {
		t.Errorf("want ENOENT: %v", err)
	}
	if _, err := os.Stat(file); !errors.Is(err, unix.ENOENT) {
		t.Errorf("it was to be done all the same: %v", err)
	}
}

func TestHangsUntilSet(t *testing.T) {
	f := mounted(t)
	hung := make(chan struct{}, 1)
	f.Set(func(op Op) Fault {
		if op == Mkdir {
			hung <- struct{}{}
			return Fault{Hang: true}
		}
		return Fault{}
	})
	done := make(chan error, 1)
	go func() { done <- os.Mkdir(filepath.Join(f.Dir(), "d"), 0o700) }()
	<-hung
	select {
	case err := <-done:
		t.Errorf("it did not hang: %v", err)
	default:
	}
	f.Set(nil)
	if err := <-done; err != nil {
		t.Error(err)
	}
}

func TestAbort(t *testing.T) {
	f := mounted(t)
	if err := f.Abort(); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(filepath.Join(f.Dir(), "x")); !errors.Is(err, unix.ENOTCONN) {
		t.Errorf("want ENOTCONN: %v", err)
	}
}
