// Package s3server runs an S3 server that is not ours, versitygw, on a directory.
// It is for tests and measurements, from inside the repository.
package s3server

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"fmt"
	"math/big"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"time"
)

// Server is a running server.
type Server struct {
	Addr       string // host:port on loopback
	ID, Secret string // of the user who may do all
	Bucket     string
	CAFile     string // where it speaks TLS

	dir  string
	args []string
	cmd  *exec.Cmd
	done chan struct{} // closed once it has ended, as exit says
	exit error
}

// Options of a server.
type Options struct {
	TLS bool
	// Domain has buckets be hosts below it: bucket.Domain.
	Domain string
}

const (
	bucket = "dsec-test"
	id     = "DSECTESTID"
	secret = "a-secret-of-the-tests-0123456789"
)

// Start starts a server whose objects are files in dir/objects; dir is a directory
// that is there, on a file system with extended attributes. Where the server was not
// built before, that takes minutes.
func Start(ctx context.Context, dir string, opt Options) (*Server, error) {
	bin, err := build(ctx)
	if err != nil {
		return nil, err
	}
	s := &Server{ID: id, Secret: secret, Bucket: bucket, dir: dir}
	objects := filepath.Join(dir, "objects")
	if err := os.MkdirAll(filepath.Join(objects, bucket), 0o700); err != nil {
		return nil, err
	}
	if s.Addr, err = freeAddr(); err != nil {
		return nil, err
	}
	s.args = []string{bin, "--port", s.Addr, "--quiet", "--keep-alive"}
	if opt.Domain != "" {
		s.args = append(s.args, "--virtual-domain", opt.Domain)
	}
	if opt.TLS {
		s.CAFile = filepath.Join(dir, "cert.pem")
		key := filepath.Join(dir, "key.pem")
		if err := writeCert(s.CAFile, key); err != nil {
			return nil, err
		}
		s.args = append(s.args, "--cert", s.CAFile, "--key", key)
	}
	s.args = append(s.args, "posix", objects)
	return s, s.Restart(ctx)
}

// build returns the path of the server's binary, which the go command caches.
func build(ctx context.Context) (string, error) {
	mod, err := output(ctx, "go", "env", "GOMOD")
	if err != nil {
		return "", err
	}
	file := filepath.Join(filepath.Dir(mod), "tools", "s3server", "go.mod")
	return output(ctx, "go", "tool", "-modfile="+file, "-n", "versitygw")
}

func output(ctx context.Context, name string, args ...string) (string, error) {
	out, err := exec.CommandContext(ctx, name, args...).Output()
	if exit, ok := errors.AsType[*exec.ExitError](err); ok {
		return "", fmt.Errorf("%s %s: %s", name, strings.Join(args, " "), exit.Stderr)
	}
	return strings.TrimSpace(string(out)), err
}

func freeAddr() (string, error) {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return "", err
	}
	return ln.Addr().String(), ln.Close()
}

// Kill ends the server without a warning.
func (s *Server) Kill() error {
	if s.cmd == nil {
		return nil
	}
	err := s.cmd.Process.Kill()
	<-s.done
	s.cmd = nil
	return err
}

// Close is Kill.
func (s *Server) Close() error { return s.Kill() }

// Restart starts a server that was killed, with the objects that it had.
func (s *Server) Restart(ctx context.Context) error {
	log, err := os.Create(filepath.Join(s.dir, "log"))
	if err != nil {
		return err
	}
	defer log.Close()
	s.cmd = exec.Command(s.args[0], s.args[1:]...) // it outlives ctx
	s.cmd.Env = append(os.Environ(), "ROOT_ACCESS_KEY_ID="+id, "ROOT_SECRET_ACCESS_KEY="+secret)
	s.cmd.Stdout, s.cmd.Stderr = log, log
	// It ends with this process; the signal is of the thread, which therefore stays.
	s.cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	done := make(chan struct{})
	s.done = done
	started := make(chan error, 1)
	go func() {
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		cmd := s.cmd
		err := cmd.Start()
		started <- err
		if err == nil {
			s.exit = cmd.Wait()
			close(done)
		}
	}()
	if err := <-started; err != nil {
		s.cmd = nil
		return err
	}
	return s.ready(ctx)
}

// ready waits until the server answers anything.
func (s *Server) ready(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, 30*time.Second)
	defer cancel()
	for {
		conn, err := (&net.Dialer{}).DialContext(ctx, "tcp", s.Addr)
		if err == nil {
			return conn.Close()
		}
		select {
		case <-s.done:
			log, _ := os.ReadFile(filepath.Join(s.dir, "log"))
			return fmt.Errorf("the S3 server ended: %w: %s", s.exit, log)
		case <-ctx.Done():
			return errors.Join(ctx.Err(), s.Kill())
		case <-time.After(5 * time.Millisecond):
		}
	}
}

// Endpoint is the URL of the server, or of what is before it at addr.
func (s *Server) Endpoint(addr string) string {
	if s.CAFile != "" {
		return "https://" + addr
	}
	return "http://" + addr
}

// Object is the file of an object.
func (s *Server) Object(key string) string {
	return filepath.Join(s.dir, "objects", bucket, filepath.FromSlash(key))
}

// writeCert makes a certificate that is its own authority, for loopback.
func writeCert(certFile, keyFile string) error {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return err
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "dsec test"}, NotAfter: time.Now().Add(24 * time.Hour),
		IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageDigitalSignature | x509.KeyUsageCertSign,
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth}, IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)},
	}
	cert, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	if err != nil {
		return err
	}
	private, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		return err
	}
	return errors.Join(
		os.WriteFile(certFile, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: cert}), 0o600),
		os.WriteFile(keyFile, pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: private}), 0o600),
	)
}
