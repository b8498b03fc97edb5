package chronusfiles

import (
	"context"
	"errors"
	"net"
	"os"
	"testing"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/chronusapi"
	"golang.org/x/sys/unix"
)

// Tests use files of the host in temporary directories, through the real
// protocol over a socket pair.

func newFixture(t testing.TB) *chronusapi.Client {
	t.Helper()
	files := New()
	ctx, cancel := context.WithCancel(context.Background())
	client := chronusapi.NewClient(func(context.Context) (net.Conn, error) {
		a, b, err := socketPair()
		if err == nil {
			go func() { _ = chronusapi.ServeFiles(ctx, b, files, IdleTime) }()
		}
		return a, err
	})
	t.Cleanup(func() {
		client.Close()
		cancel()
	})
	return client
}

func socketPair() (a, b net.Conn, err error) {
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, nil, err
	}
	var conns [2]net.Conn
	for i, fd := range fds {
		f := os.NewFile(uintptr(fd), "socket")
		defer f.Close()
		if conns[i], err = net.FileConn(f); err != nil {
			return nil, nil, err
		}
	}
	return conns[0], conns[1], nil
}

// wantError checks code and field of an error.
func wantError(t testing.TB, err error, code dsec.Code, field string) {
	t.Helper()
	var de *dsec.Error
	if !errors.As(err, &de) || de.Code != code || de.Field != field {
		t.Errorf("got %v (%T), want %s of %q", err, err, code, field)
	}
}
