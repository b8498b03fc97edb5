// Package iam knows who may call: projects, which own sandboxes and names of
// layers, and the API keys that act for them.
//
// A key's secret is 160 random bits and is shown once; the store holds only
// its SHA-256, under which it is also found, so that a copy of the store lets
// nobody in. Every call is checked against a cache of the store in memory.
package iam

import (
	"cmp"
	"context"
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"log/slog"
	"regexp"
	"slices"
	"strings"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/store"
)

// AdminProject is the project of the operator's own key.
const AdminProject = "default"

// secretPrefix is what existing clients expect of a key.
const secretPrefix = "e2b_"

const prefix = "keys/"

// Key is an API key without its secret.
type Key struct {
	ID      string    `json:"id"`
	Project string    `json:"project"`
	Admin   bool      `json:"admin,omitempty"`
	Created time.Time `json:"created"`
	Expires time.Time `json:"expires,omitzero"` // zero: never
}

// Principal is who a call was authenticated as.
type Principal struct {
	KeyID   string
	Project string
	Admin   bool
}

// IAM authenticates calls and manages keys.
type IAM struct {
	store *store.Store
	keys  *store.Cache[Key] // by hash of the secret; index: ID
	log   *slog.Logger
}

// Open loads the keys and follows their changes until Close.
func Open(ctx context.Context, s *store.Store, log *slog.Logger) (*IAM, error) {
	keys, err := store.NewCache(ctx, s, prefix, func(_ string, k Key) string { return k.ID })
	if err != nil {
		return nil, err
	}
	return &IAM{store: s, keys: keys, log: log.With("component", "iam")}, nil
}

// Close ends following the store.
func (m *IAM) Close() { m.keys.Close() }

// Authenticate returns whose secret this is. Its errors are unauthenticated,
// with one message for an unknown, an expired and a revoked key, and
// unavailable where the keys cannot be trusted to be current.
func (m *IAM) Authenticate(secret string) (Principal, error) {
	if secret == "" {
		return Principal{}, dsec.Errorf(dsec.CodeUnauthenticated, "want an API key in the header Authorization: Bearer <key>, or X-API-Key")
	}
	k, ok, err := m.keys.Get(hash(secret))
	if err != nil {
		return Principal{}, err
	}
	if !ok || !k.Expires.IsZero() && !time.Now().Before(k.Expires) {
		return Principal{}, dsec.Errorf(dsec.CodeUnauthenticated, "the API key is not known, or has expired")
	}
	return Principal{KeyID: k.ID, Project: k.Project, Admin: k.Admin}, nil
}

// Create makes a key for project, which is made if new. A zero expires is never.
func (m *IAM) Create(ctx context.Context, project string, expires time.Time) (Key, string, error) {
	if err := CheckProject(project); err != nil {
		return Key{}, "", err
	}
	if !expires.IsZero() && !expires.After(time.Now()) {
		return Key{}, "", dsec.Invalid("expires", "want a time to come")
	}
	k := Key{ID: randomHex(6), Project: project, Created: time.Now().UTC(), Expires: expires}
	secret := newSecret()
	return k, secret, m.add(ctx, k, secret)
}

func (m *IAM) add(ctx context.Context, k Key, secret string) error {
	rev, err := store.Create(ctx, m.store, prefix+hash(secret), k)
	if err != nil {
		return err
	}
	m.log.Info("key made", "key", k.ID, "project", k.Project, "admin", k.Admin)
	return m.keys.Wait(ctx, rev)
}

// List returns all keys by project, then by age.
func (m *IAM) List() []Key {
	var all []Key
	m.keys.Range("", func(_ string, k Key) bool {
		all = append(all, k)
		return true
	})
	slices.SortFunc(all, func(a, b Key) int {
		return cmp.Or(strings.Compare(a.Project, b.Project), a.Created.Compare(b.Created))
	})
	return all
}

// Revoke ends a key. by is who asks: nobody can revoke the key in use, so one
// admin key remains.
func (m *IAM) Revoke(ctx context.Context, id string, by Principal) error {
	if !keyID.MatchString(id) {
		return dsec.Invalid("id", "want the 12 hex digits of a key's ID")
	}
	if id == by.KeyID {
		return &dsec.Error{Code: dsec.CodeConflict, Field: "id", Message: "a key cannot revoke itself"}
	}
	hashes := m.keys.Keys(id)
	if len(hashes) == 0 {
		return &dsec.Error{Code: dsec.CodeNotFound, Field: "id", Message: "no such key"}
	}
	for _, h := range hashes {
		rev, err := m.store.Delete(ctx, prefix+h)
		if err != nil {
			return err
		}
		if err := m.keys.Wait(ctx, rev); err != nil {
			return err
		}
	}
	m.log.Info("key revoked", "key", id, "by", by.KeyID)
	return nil
}

var (
	keyID   = regexp.MustCompile(`^[0-9a-f]{12}$`)
	project = regexp.MustCompile(`^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$`)
)

// CheckProject reports a name that no project can have.
func CheckProject(name string) error {
	if !project.MatchString(name) {
		return dsec.Invalid("project", "want 1 to 63 characters of a-z, 0-9 and -, with no - at either end")
	}
	return nil
}

func newSecret() string { return secretPrefix + randomHex(20) }

func randomHex(n int) string {
	b := make([]byte, n)
	_, _ = rand.Read(b) // never fails: crypto/rand panics instead
	return hex.EncodeToString(b)
}

// hash needs no salt and no slowness: the secret is random and long.
func hash(secret string) string {
	sum := sha256.Sum256([]byte(secret))
	return hex.EncodeToString(sum[:])
}
