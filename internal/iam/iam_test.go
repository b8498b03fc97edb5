package iam

import (
	"context"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/store"
)

func open(t *testing.T, dir string) (*IAM, *store.Store) {
	t.Helper()
	s, err := store.Open(t.Context(), store.Config{Dir: dir, Log: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
	m, err := Open(t.Context(), s, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		m.Close()
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	})
	return m, s
}

func TestKeyLife(t *testing.T) {
	m, s := open(t, t.TempDir())
	k, secret, err := m.Create(t.Context(), "team-a", time.Time{})
	if err != nil {
		t.Fatal(err)
	}
	if !secretForm.MatchString(secret) {
		t.Errorf("secret %q has another form", secret)
	}
	p, err := m.Authenticate(secret)
	if err != nil || p != (Principal{KeyID: k.ID, Project: "team-a"}) {
		t.Fatalf("Authenticate = %+v, %v", p, err)
	}
	docs, err := store.List[map[string]any](t.Context(), s, "")
	if err != nil {
		t.Fatal(err)
	}
	if len(docs) == 0 {
		t.Fatal("nothing in the store")
	}
	for name, doc := range docs {
		for _, v := range doc {
			if str, ok := v.(string); ok && strings.Contains(str, secret) || strings.Contains(name, secret) {
				t.Errorf("the store holds the secret, in %s", name)
			}
		}
	}
	if err := m.Revoke(t.Context(), k.ID, p); dsec.CodeOf(err) != dsec.CodeConflict {
		t.Errorf("a key revoked itself: %v", err)
	}
	if err := m.Revoke(t.Context(), k.ID, Principal{Admin: true}); err != nil {
		t.Fatal(err)
	}
	if _, err := m.Authenticate(secret); err == nil || dsec.CodeOf(err) != dsec.CodeUnauthenticated {
		t.Errorf("revoked key: %v", err)
	}
	if err := m.Revoke(t.Context(), k.ID, Principal{}); err == nil || dsec.CodeOf(err) != dsec.CodeNotFound {
		t.Errorf("second revoke: %v", err)
	}
}

func TestExpiredKeyIsRefused(t *testing.T) {
	m, _ := open(t, t.TempDir())
	k := Key{ID: randomHex(6), Project: "p", Expires: time.Now().Add(-time.Second)}
	if err := m.add(t.Context(), k, "e2b_old"); err != nil {
		t.Fatal(err)
	}
	if _, err := m.Authenticate("e2b_old"); err == nil || dsec.CodeOf(err) != dsec.CodeUnauthenticated {
		t.Errorf("expired key: %v", err)
	}
	if _, _, err := m.Create(t.Context(), "p", time.Now().Add(-time.Hour)); err == nil || dsec.CodeOf(err) != dsec.CodeInvalid {
		t.Errorf("a key that expired before it was made: %v", err)
	}
}

func TestProjectNames(t *testing.T) {
	for name, ok := range map[string]bool{
		"a": true, "team-1": true, strings.Repeat("a", 63): true,
		"": false, "-a": false, "a-": false, "A": false, "a/b": false, "../x": false, "a\x00": false, "é": false,
		strings.Repeat("a", 64): false,
	} {
		if err := CheckProject(name); (err == nil) != ok {
			t.Errorf("CheckProject(%q) = %v", name, err)
		}
	}
}

// TestAdminKeyConverges plays every state that a crash or an operator can leave.
func TestAdminKeyConverges(t *testing.T) {
	m, _ := open(t, t.TempDir())
	path := filepath.Join(t.TempDir(), "admin.key")
	secret := func() string {
		t.Helper()
		if err := m.EnsureAdmin(t.Context(), path); err != nil {
			t.Fatal(err)
		}
		s, err := readSecret(path)
		if err != nil {
			t.Fatal(err)
		}
		if p, err := m.Authenticate(s); err != nil || !p.Admin || p.Project != AdminProject {
			t.Fatalf("Authenticate = %+v, %v", p, err)
		}
		return s
	}
	first := secret()
	if again := secret(); again != first {
		t.Error("a second start changed the key")
	}
	if info, err := os.Stat(path); err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("file: %v, %v", info.Mode(), err)
	}
	// The store forgot the key: the file is registered again.
	for _, k := range m.List() {
		if err := m.Revoke(t.Context(), k.ID, Principal{}); err != nil {
			t.Fatal(err)
		}
	}
	if again := secret(); again != first {
		t.Error("a lost store changed the key")
	}
	// The file went away: a new key is made.
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	if again := secret(); again == first {
		t.Error("the secret came back from a hash")
	}
}

func TestAdminKeyFileThatIsNoSecretIsRefused(t *testing.T) {
	m, _ := open(t, t.TempDir())
	dir := t.TempDir()
	for name, f := range map[string]struct {
		data string
		mode os.FileMode
	}{
		"readable": {newSecret(), 0o644},
		"junk":     {"hello", 0o600},
		"empty":    {"", 0o600},
	} {
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, []byte(f.data), f.mode); err != nil {
			t.Fatal(err)
		}
		if err := m.EnsureAdmin(t.Context(), path); err == nil {
			t.Errorf("%s: accepted", name)
		}
	}
	if n := len(m.List()); n != 0 {
		t.Errorf("%d keys were made", n)
	}
}

func TestKeysSurviveRestart(t *testing.T) {
	dir := t.TempDir()
	ctx := context.Background()
	log := slog.New(slog.DiscardHandler)
	var secret string
	for i := range 2 {
		s, err := store.Open(ctx, store.Config{Dir: dir, Log: log})
		if err != nil {
			t.Fatal(err)
		}
		m, err := Open(ctx, s, log)
		if err != nil {
			t.Fatal(err)
		}
		if i == 0 {
			_, secret, err = m.Create(ctx, "p", time.Time{})
		} else {
			_, err = m.Authenticate(secret)
		}
		if err != nil {
			t.Errorf("start %d: %v", i, err)
		}
		m.Close()
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	}
}

func BenchmarkAuthenticate(b *testing.B) {
	log := slog.New(slog.DiscardHandler)
	s, err := store.Open(b.Context(), store.Config{Dir: b.TempDir(), Log: log})
	if err != nil {
		b.Fatal(err)
	}
	m, err := Open(b.Context(), s, log)
	if err != nil {
		b.Fatal(err)
	}
	_, secret, err := m.Create(b.Context(), "p", time.Time{})
	if err != nil {
		b.Fatal(err)
	}
	for b.Loop() {
		if _, err := m.Authenticate(secret); err != nil {
			b.Fatal(err)
		}
	}
	m.Close()
	_ = s.Close()
}
