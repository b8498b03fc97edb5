package registry

import (
	"bufio"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/base64"
	"encoding/pem"
	"fmt"
	"math/big"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/golang-jwt/jwt/v5"
	"github.com/google/go-containerregistry/pkg/authn"
	"github.com/google/go-containerregistry/pkg/name"
	"github.com/google/go-containerregistry/pkg/v1/remote"
	"golang.org/x/crypto/bcrypt"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/testutil"
)

// authority is a certificate authority of this test alone, with one certificate for
// this machine.
type authority struct {
	dir  string
	key  *ecdsa.PrivateKey // of the leaf
	leaf []byte            // DER
	pool *x509.CertPool
}

func newAuthority(t *testing.T) *authority {
	t.Helper()
	a := &authority{dir: t.TempDir(), pool: x509.NewCertPool()}
	root, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	check(t, err)
	ca := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "test authority"}, NotAfter: time.Now().Add(time.Hour),
		IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign,
	}
	der, err := x509.CreateCertificate(rand.Reader, ca, ca, &root.PublicKey, root)
	check(t, err)
	ca, err = x509.ParseCertificate(der)
	check(t, err)
	a.pool.AddCert(ca)
	a.key, err = ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	check(t, err)
	a.leaf, err = x509.CreateCertificate(rand.Reader, &x509.Certificate{
		SerialNumber: big.NewInt(2), Subject: pkix.Name{CommonName: "localhost"}, NotAfter: time.Now().Add(time.Hour),
		DNSNames: []string{"localhost"}, IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)}, KeyUsage: x509.KeyUsageDigitalSignature,
	}, ca, &a.key.PublicKey, root)
	check(t, err)
	key, err := x509.MarshalECPrivateKey(a.key)
	check(t, err)
	for file, block := range map[string]*pem.Block{
		"ca.pem": {Type: "CERTIFICATE", Bytes: der}, "cert.pem": {Type: "CERTIFICATE", Bytes: a.leaf}, "key.pem": {Type: "EC PRIVATE KEY", Bytes: key},
	} {
		check(t, os.WriteFile(a.file(file), pem.EncodeToMemory(block), 0o600))
	}
	return a
}

func (a *authority) file(name string) string { return filepath.Join(a.dir, name) }

// distribution runs the registry that most others are made of, as Debian packages
// it, with TLS and the given way to know who asks. It returns its host.
func distribution(t *testing.T, a *authority, auth string) string {
	t.Helper()
	testutil.Require(t, testutil.Program("docker-registry"))
	free, err := net.Listen("tcp", "127.0.0.1:0")
	check(t, err)
	host := free.Addr().String()
	check(t, free.Close())
	config := fmt.Sprintf(`version: 0.1
log: {level: info, accesslog: {disabled: true}}
storage:
  filesystem: {rootdirectory: %q}
http:
  addr: %s
  secret: x
  tls: {certificate: %q, key: %q}
auth:
%s`, t.TempDir(), host, a.file("cert.pem"), a.file("key.pem"), auth)
	check(t, os.WriteFile(a.file("config.yml"), []byte(config), 0o600))
	cmd := exec.Command("docker-registry", "serve", a.file("config.yml"))
	out, err := cmd.StderrPipe()
	check(t, err)
	check(t, cmd.Start())
	said := make(chan string, 1)
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		var all strings.Builder
		for lines := bufio.NewScanner(out); lines.Scan(); {
			if all.WriteString(lines.Text() + "\n"); strings.Contains(lines.Text(), "listening on") {
				select {
				case said <- "":
				default:
				}
			}
		}
		_ = cmd.Wait()
		select {
		case said <- all.String():
		default:
		}
	}()
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		<-ended
	})
	if text := <-said; text != "" {
		t.Fatalf("docker-registry ended: %s", text)
	}
	return host
}

// pushAndPull pushes with the library and pulls with a client.
func pushAndPull(t *testing.T, a *authority, host string) {
	t.Helper()
	ref, err := name.ParseReference(host + "/team/app:v1")
	check(t, err)
	img := image(t, noise(200_000, 1), noise(100, 2))
	check(t, remote.Write(ref, img, remote.WithAuth(&authn.Basic{Username: "user", Password: "word"}),
		remote.WithTransport(&http.Transport{TLSClientConfig: &tls.Config{RootCAs: a.pool, MinVersion: tls.VersionTLS12}})))
	c, err := New(Config{Private: []string{host, "localhost"}, CAFile: a.file("ca.pem"), Logger: testutil.Logger(t), times: times{backoff: time.Millisecond}})
	check(t, err)
	req := Request{Ref: host + "/team/app:v1", Credentials: &Credentials{Username: "user", Password: "word"}}
	wantImage(t, c, req, img)
	req.Ref = host + "/team/app@" + digest(t, img)
	wantImage(t, c, req, img)
	req.Ref = host + "/team/app:none"
	_, err = c.Resolve(t.Context(), req)
	wantError(t, err, dsec.CodeNotFound, "ref")
	req.Credentials.Password = "another"
	_, err = c.Resolve(t.Context(), req)
	wantError(t, err, dsec.CodeUnauthenticated, "ref")
	req.Credentials = nil
	_, err = c.Resolve(t.Context(), req)
	wantError(t, err, dsec.CodeUnauthenticated, "ref")
}

func TestDistributionWithPasswords(t *testing.T) {
	a := newAuthority(t)
	hash, err := bcrypt.GenerateFromPassword([]byte("word"), bcrypt.MinCost)
	check(t, err)
	check(t, os.WriteFile(a.file("htpasswd"), append([]byte("user:"), hash...), 0o600))
	pushAndPull(t, a, distribution(t, a, fmt.Sprintf("  htpasswd: {realm: x, path: %q}\n", a.file("htpasswd"))))
}

func TestDistributionWithTokens(t *testing.T) {
	a := newAuthority(t)
	tokens := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		user, password, ok := r.BasicAuth()
		if ok && (user != "user" || password != "word") {
			http.Error(w, "", http.StatusUnauthorized)
			return
		}
		var access []map[string]any
		for _, scope := range r.URL.Query()["scope"] {
			part := strings.Split(scope, ":")
			if ok && len(part) == 3 { // the others have a token for nothing
				access = append(access, map[string]any{"type": part[0], "name": part[1], "actions": strings.Split(part[2], ",")})
			}
		}
		now := time.Now()
		token := jwt.NewWithClaims(jwt.SigningMethodES256, jwt.MapClaims{
			"iss": "test", "aud": "registry", "sub": user, "exp": now.Add(time.Minute).Unix(), "nbf": now.Add(-time.Minute).Unix(),
			"iat": now.Unix(), "jti": "1", "access": access,
		})
		token.Header["x5c"] = []string{base64.StdEncoding.EncodeToString(a.leaf)}
		text, err := token.SignedString(a.key)
		if err != nil {
			t.Error(err)
		}
		_, _ = fmt.Fprintf(w, `{"token":%q}`, text)
	}))
	pair, err := tls.LoadX509KeyPair(a.file("cert.pem"), a.file("key.pem"))
	check(t, err)
	tokens.TLS = &tls.Config{Certificates: []tls.Certificate{pair}, MinVersion: tls.VersionTLS12}
	tokens.StartTLS()
	t.Cleanup(tokens.Close)
	_, port, err := net.SplitHostPort(tokens.Listener.Addr().String())
	check(t, err)
	pushAndPull(t, a, distribution(t, a, fmt.Sprintf("  token: {realm: \"https://localhost:%s/token\", service: registry, issuer: test, rootcertbundle: %q}\n", port, a.file("ca.pem"))))
}
