package test

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"math/big"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/opendsec/dsec/internal/testutil"
)

// TestTLS serves beyond loopback, which only TLS allows, and runs a
// command over it.
func TestTLS(t *testing.T) {
	dir := testutil.Dir(t)
	cert, key := certificate(t, dir)
	p := startEnv(t, []string{"DSEC_API_TLS_CERT=" + cert, "DSEC_API_TLS_KEY=" + key}, "up", "--backend", "fake",
		"--listen", "0.0.0.0:0", "--data-dir", filepath.Join(dir, "data"), "--run-dir", filepath.Join(dir, "run"))
	_, port, err := net.SplitHostPort(strings.TrimPrefix(p.ready, "https://"))
	check(t, err)
	run := func(args ...string) (string, error) {
		cmd := exec.Command(dsecBinary, args...)
		cmd.Env = append(environ(), "DSEC_URL=https://127.0.0.1:"+port, "DSEC_KEY_FILE="+filepath.Join(dir, "data", "admin.key"), "SSL_CERT_FILE="+cert)
		out, err := cmd.CombinedOutput()
		return strings.TrimSpace(string(out)), err
	}
	id, err := run("sandbox", "create", "--backend", "fake")
	if err != nil {
		t.Fatal(id)
	}
	if out, err := run("exec", "-n", id, "echo", "over TLS"); err != nil || out != "over TLS" {
		t.Errorf("%q, %v", out, err)
	}
	// Without the certificate's authority nothing is sent, and so no key.
	cmd := exec.Command(dsecBinary, "sandbox", "list")
	cmd.Env = append(environ(), "DSEC_URL=https://127.0.0.1:"+port, "DSEC_API_KEY=x")
	if out, err := cmd.CombinedOutput(); err == nil {
		t.Errorf("an unknown authority was trusted: %s", out)
	}
}

func certificate(t *testing.T, dir string) (cert, key string) {
	t.Helper()
	k, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	check(t, err)
	tmpl := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "dsec test"}, NotAfter: time.Now().Add(time.Hour),
		IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)}, IsCA: true, BasicConstraintsValid: true,
		KeyUsage: x509.KeyUsageDigitalSignature | x509.KeyUsageCertSign,
	}
	der, err := x509.CreateCertificate(rand.Reader, tmpl, tmpl, &k.PublicKey, k)
	check(t, err)
	raw, err := x509.MarshalPKCS8PrivateKey(k)
	check(t, err)
	cert, key = filepath.Join(dir, "cert.pem"), filepath.Join(dir, "key.pem")
	check(t, os.WriteFile(cert, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}), 0o600))
	check(t, os.WriteFile(key, pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: raw}), 0o600))
	return cert, key
}
