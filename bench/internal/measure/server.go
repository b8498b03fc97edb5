package measure

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/opendsec/dsec/client"
)

// Server is a `dsec up` of our own, with directories of its own.
type Server struct {
	*client.Client
	Dir      string // data, run and log are below it
	URL, Key string

	cmd    *exec.Cmd
	exited chan error
}

// StartServer starts the program with data and run directories below dir and what
// env adds to the environment, and returns when it answers.
func StartServer(ctx context.Context, binary, dir string, env ...string) (*Server, error) {
	binary, err := filepath.Abs(binary)
	if err != nil {
		return nil, err
	}
	address, err := freeAddress()
	if err != nil {
		return nil, err
	}
	log, err := os.OpenFile(filepath.Join(dir, "log"), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return nil, err
	}
	defer func() { _ = log.Close() }()
	cmd := exec.Command(binary, "up")
	cmd.Env = append(os.Environ(),
		"DSEC_DATA_DIR="+filepath.Join(dir, "data"),
		"DSEC_RUN_DIR="+filepath.Join(dir, "run"),
		"DSEC_API_LISTEN="+address,
		"DSEC_LOG_LEVEL=warn",
	)
	cmd.Env = append(cmd.Env, env...)
	cmd.Stdout, cmd.Stderr = log, log
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true} // ^C is ours to handle
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	s := &Server{cmd: cmd, Dir: dir, URL: "http://" + address, exited: make(chan error, 1)}
	go func() { s.exited <- cmd.Wait() }()
	if err := s.ready(ctx); err != nil {
		return nil, errors.Join(err, s.End(), fmt.Errorf("its log ends with: %s", s.LogEnd()))
	}
	return s, nil
}

// ready waits until the server answers.
func (s *Server) ready(ctx context.Context) error {
	deadline := time.NewTimer(time.Minute)
	defer deadline.Stop()
	for !answers(s.URL + "/healthz") {
		select {
		case err := <-s.exited:
			s.exited <- err
			return fmt.Errorf("dsec up ended: %w", cmp.Or(err, errors.New("status 0")))
		case <-deadline.C:
			return errors.New("dsec up does not answer after a minute")
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(20 * time.Millisecond): // a server that is not there yet sends no event
		}
	}
	var err error
	s.Key = strings.TrimSpace(ReadFile(filepath.Join(s.Dir, "data", "admin.key")))
	s.Client, err = client.New(client.Options{URL: s.URL, APIKey: s.Key})
	return err
}

// PID of the server.
func (s *Server) PID() int { return s.cmd.Process.Pid }

// Get reads what the server serves beside its API to whom has its key.
func (s *Server) Get(ctx context.Context, path string) ([]byte, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, s.URL+path, nil)
	if err != nil {
		return nil, err
	}
	req.Header.Set("Authorization", "Bearer "+s.Key)
	res, err := http.DefaultClient.Do(req)
	if err != nil {
		return nil, err
	}
	defer func() { _ = res.Body.Close() }()
	if res.StatusCode != http.StatusOK {
		return nil, fmt.Errorf("%s: %s", path, res.Status)
	}
	return io.ReadAll(res.Body)
}

// End ends the server as a person would, and reports one that cannot. Its
// directories stay, for a next start.
func (s *Server) End() error {
	if s.Client != nil {
		s.Close()
	}
	_ = s.cmd.Process.Signal(syscall.SIGTERM)
	select {
	case err := <-s.exited:
		return err
	case <-time.After(time.Minute):
		_ = s.cmd.Process.Kill()
		return errors.New("dsec up did not end within a minute of SIGTERM")
	}
}

// Remove takes away all that the server left below its directory.
func (s *Server) Remove() error {
	UnmountBelow(s.Dir)
	return os.RemoveAll(s.Dir)
}

func freeAddress() (string, error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return "", err
	}
	return l.Addr().String(), l.Close()
}

func answers(url string) bool {
	res, err := http.Get(url) //nolint:gosec,noctx // our own server on loopback
	if err != nil {
		return false
	}
	_ = res.Body.Close()
	return res.StatusCode == http.StatusOK
}

// LogEnd is the end of what the server said.
func (s *Server) LogEnd() string {
	text := ReadFile(filepath.Join(s.Dir, "log"))
	return text[max(0, len(text)-2000):]
}
