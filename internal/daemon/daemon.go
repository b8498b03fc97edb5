// Package daemon is what the long-running verbs of dsec share: logs,
// listeners, liveness and metrics, and a shutdown that runs backwards.
package daemon

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/pprof"
	"os"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/hostos"
	"github.com/opendsec/dsec/internal/rawnet"
)

// Logger writes lines for people to w: level is debug, info, warn or error. From
// then on the process lives through a reader of its output that goes away.
func Logger(w io.Writer, level string) (*slog.Logger, error) {
	var l slog.Level
	if err := l.UnmarshalText([]byte(level)); err != nil {
		return nil, dsec.Invalid("log_level", "want debug, info, warn or error")
	}
	// Not ignored: the children would inherit that, and theirs, down to the commands
	// of sandboxes.
	signal.Notify(make(chan os.Signal, 1), syscall.SIGPIPE)
	return slog.New(slog.NewTextHandler(w, &slog.HandlerOptions{Level: l})), nil
}

// Registry has the process's own metrics.
func Registry() *prometheus.Registry {
	r := prometheus.NewRegistry()
	r.MustRegister(collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	return r
}

// WithStatus adds /healthz and /metrics to h. What is not ready answers 503; the
// reason, which may name paths of the host, and the metrics, which hold no names
// of sandboxes or projects, go to callers that allow admits.
func WithStatus(h http.Handler, reg *prometheus.Registry, ready func() error, allow func(*http.Request) bool) http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /healthz", func(w http.ResponseWriter, r *http.Request) {
		if err := ready(); err != nil {
			why := "not ready"
			if allow(r) {
				why += ": " + err.Error()
			}
			http.Error(w, why, http.StatusServiceUnavailable)
			return
		}
		_, _ = io.WriteString(w, "ok\n")
	})
	mux.Handle("GET /metrics", only(allow, promhttp.HandlerFor(reg, promhttp.HandlerOpts{})))
	mux.Handle("/", h)
	return mux
}

// only serves callers that allow admits.
func only(allow func(*http.Request) bool, h http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if !allow(r) {
			http.Error(w, "denied", http.StatusForbidden)
			return
		}
		h.ServeHTTP(w, r)
	})
}

// WithProfiles adds the Go runtime's profiles, /debug/pprof/, to h, for callers
// that allow admits.
func WithProfiles(h http.Handler, allow func(*http.Request) bool) http.Handler {
	profiles := http.NewServeMux()
	profiles.HandleFunc("GET /debug/pprof/", pprof.Index) // heap, goroutine and the others by their names, too
	profiles.HandleFunc("GET /debug/pprof/profile", pprof.Profile)
	profiles.HandleFunc("GET /debug/pprof/trace", pprof.Trace)
	mux := http.NewServeMux()
	mux.Handle("/debug/pprof/", only(allow, profiles))
	mux.Handle("/", h)
	return mux
}

// Loopback reports whether a request came from this machine.
func Loopback(r *http.Request) bool {
	host, _, err := net.SplitHostPort(r.RemoteAddr)
	if err != nil {
		return true // a Unix socket or memory: no address
	}
	ip := net.ParseIP(host)
	return ip != nil && ip.IsLoopback()
}

// ListenTCP listens on addr.
func ListenTCP(addr string) (net.Listener, error) {
	l, err := net.Listen("tcp", addr)
	if errors.Is(err, syscall.EADDRINUSE) {
		return nil, dsec.Errorf(dsec.CodeConflict, "%s is in use; is another dsec running? choose another address with --listen or api.listen", addr)
	} else if err != nil {
		return nil, fmt.Errorf("listen on %s: %w", addr, err)
	}
	return l, nil
}

// ListenUnix listens on a socket that only this user may connect to. A socket
// that nobody answers on any more is replaced.
func ListenUnix(path string) (net.Listener, error) {
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		return nil, err
	}
	if conn, err := net.DialTimeout("unix", path, time.Second); err == nil {
		_ = conn.Close()
		return nil, fmt.Errorf("%s is in use by another process", path)
	} else if errors.Is(err, syscall.ECONNREFUSED) {
		if err := os.Remove(path); err != nil {
			return nil, err
		}
	}
	// The mode is set before anybody can connect: by umask, which is the
	// process's, so that nothing else may be starting meanwhile.
	old := unix.Umask(0o177)
	l, err := net.Listen("unix", path)
	unix.Umask(old)
	if err != nil {
		return nil, fmt.Errorf("listen on %s: %w", path, err)
	}
	return l, nil
}

// Lock makes dir this process's own for as long as it lives. dir is made if
// missing. key is what of the configuration names it.
func Lock(dir, key string) (io.Closer, error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, err
	}
	f, err := hostos.Lock(filepath.Join(dir, "lock"))
	if errors.Is(err, hostos.ErrLocked) {
		return nil, dsec.Errorf(dsec.CodeConflict, "%s is in use by another dsec; stop that one, or give this one another %s", dir, key)
	} else if err != nil {
		return nil, err // a nil *os.File is not a nil io.Closer
	}
	return f, nil
}

// Notify tells systemd the state of the service, where it asked to be told.
func Notify(state string) {
	path := os.Getenv("NOTIFY_SOCKET") //nolint:forbidigo // systemd gives it in this way alone
	if path == "" {
		return
	}
	if strings.HasPrefix(path, "@") {
		path = "\x00" + path[1:]
	}
	conn, err := net.DialUnix("unixgram", nil, &net.UnixAddr{Name: path, Net: "unixgram"})
	if err != nil {
		return // nobody asks any more
	}
	_, _ = io.WriteString(conn, state)
	_ = conn.Close()
}

// Stack holds what was started, and stops it in reverse order, once.
type Stack struct {
	stops []func(context.Context) error
	turns []func()
}

// Push adds the stop of what was just started.
func (s *Stack) Push(stop func(context.Context) error) { s.stops = append(s.stops, stop) }

// TurnAway has a server take no more connections, and no more calls on those that are
// idle, once all are turned away. Calls in progress go on.
func (s *Stack) TurnAway(srv *http.Server) {
	s.turns = append(s.turns, func() {
		ctx, cancel := context.WithCancel(context.Background())
		cancel() // it waits for nothing
		_ = srv.Shutdown(ctx)
	})
}

// TurnAll turns clients away from the servers that said so. A client that is refused a
// connection waits for the next server; one that got an answer would take that for what
// it is.
func (s *Stack) TurnAll() {
	for _, f := range s.turns {
		f()
	}
	s.turns = nil
}

// Stop stops everything and joins the errors.
func (s *Stack) Stop(ctx context.Context) error {
	var errs []error
	for len(s.stops) > 0 {
		last := s.stops[len(s.stops)-1]
		s.stops = s.stops[:len(s.stops)-1]
		errs = append(errs, last(ctx))
	}
	return errors.Join(errs...)
}

// Serve serves on l in the background and pushes the server's stop. failed
// gets the error of a server that ended by itself.
func (s *Stack) Serve(srv *http.Server, l net.Listener, failed chan<- error) {
	done := make(chan struct{})
	go func() {
		defer close(done)
		var err error
		if srv.TLSConfig != nil {
			err = srv.ServeTLS(rawnet.NewListener(l), "", "")
		} else {
			err = srv.Serve(rawnet.NewListener(l))
		}
		if !errors.Is(err, http.ErrServerClosed) {
			select {
			case failed <- err:
			default:
			}
		}
	}()
	s.Push(func(ctx context.Context) error {
		err := srv.Shutdown(ctx)
		if err != nil { // calls are left at the deadline: they are cut off
			err = srv.Close()
		}
		<-done
		return err
	})
}
