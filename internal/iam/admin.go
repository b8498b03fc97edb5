package iam

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/hostos"
)

var secretForm = regexp.MustCompile(`^e2b_[0-9a-f]{40}$`)

// EnsureAdmin makes sure that the file at path holds the secret of a valid
// admin key, and makes both where they are missing. The file is written before
// the store, so that a crash between the two leaves a file that the next start
// registers, and never a key whose secret nobody has.
func (m *IAM) EnsureAdmin(ctx context.Context, path string) error {
	secret, err := readSecret(path)
	if errors.Is(err, fs.ErrNotExist) {
		secret = newSecret()
		err = writeSecret(path, secret)
	}
	if err != nil {
		return err
	}
	p, err := m.Authenticate(secret)
	switch {
	case err == nil && p.Admin:
		return nil
	case err == nil:
		return fmt.Errorf("%s holds a key that is not an admin key; move the file away", path)
	case dsec.CodeOf(err) != dsec.CodeUnauthenticated:
		return err
	}
	return m.add(ctx, Key{ID: randomHex(6), Project: AdminProject, Admin: true, Created: time.Now().UTC()}, secret)
}

// readSecret refuses a file that others may read: its key is no secret.
func readSecret(path string) (string, error) {
	f, err := os.Open(path)
	if err != nil {
		return "", err
	}
	defer func() { _ = f.Close() }()
	info, err := f.Stat()
	if err != nil {
		return "", err
	}
	if info.Mode().Perm()&0o077 != 0 {
		return "", fmt.Errorf("%s may be read by others; want mode 0600", path)
	}
	buf := make([]byte, 256)
	n, _ := f.Read(buf)
	secret := strings.TrimSpace(string(buf[:n]))
	if !secretForm.MatchString(secret) {
		return "", fmt.Errorf("%s does not hold an API key; move the file away", path)
	}
	return secret, nil
}

func writeSecret(path, secret string) error {
	dir := filepath.Dir(path)
	f, err := os.CreateTemp(dir, ".admin.key-*") // mode 0600
	if err != nil {
		return err
	}
	defer func() { _ = os.Remove(f.Name()) }()
	_, err = f.WriteString(secret + "\n")
	if err := errors.Join(err, f.Sync(), f.Close()); err != nil {
		return err
	}
	if err := os.Rename(f.Name(), path); err != nil {
		return err
	}
	return hostos.SyncDir(dir)
}
