package s3blob

import (
	"context"
	"crypto/rand"
	"fmt"
	"net/url"
	"os"
	"path"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/opendsec/dsec/internal/layer/blob"
	"github.com/opendsec/dsec/internal/layer/blob/blobtest"
	"github.com/opendsec/dsec/internal/testutil/s3server"
)

// The server of all tests but those that end it; started at first use.
var (
	shared struct {
		sync.Once
		server *s3server.Server
		dir    string
		err    error
	}
	prefixes atomic.Int64
)

func TestMain(m *testing.M) {
	code := m.Run()
	if shared.server != nil {
		_ = shared.server.Close()
	}
	if shared.dir != "" {
		_ = os.RemoveAll(shared.dir)
	}
	os.Exit(code)
}

func server(t testing.TB) *s3server.Server {
	t.Helper()
	shared.Do(func() {
		if shared.dir, shared.err = os.MkdirTemp("", "dsec-t-s3-"); shared.err == nil { //nolint:usetesting // of all tests
			shared.server, shared.err = s3server.Start(context.Background(), shared.dir, s3server.Options{})
		}
	})
	if shared.err != nil {
		t.Fatal(shared.err)
	}
	return shared.server
}

func keys(id, secret string) blob.Credentials {
	return blob.Credentials{Env: func(name string) (string, bool) {
		v, ok := map[string]string{"AWS_ACCESS_KEY_ID": id, "AWS_SECRET_ACCESS_KEY": secret}[name]
		return v, ok
	}}
}

// quick repeats without pauses that a test would feel.
var quick = blob.Backoff{Attempts: 4, Base: time.Millisecond, Max: 5 * time.Millisecond, Total: time.Minute}

// config is of a prefix of its own in the server's bucket.
func config(t testing.TB) Config {
	srv := server(t)
	return Config{
		Bucket: srv.Bucket, Prefix: fmt.Sprint("p/", prefixes.Add(1)), Endpoint: srv.Endpoint(srv.Addr), PathStyle: true,
		Credentials: keys(srv.ID, srv.Secret), PartSize: 5 << 20, PageSize: 3, Backoff: quick,
	}
}

func mustOpen(t testing.TB, cfg Config) *Store {
	t.Helper()
	s, err := Open(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = s.Close() })
	return s
}

func TestSuite(t *testing.T) {
	blobtest.Run(t, func(t *testing.T) blob.Store { return mustOpen(t, config(t)) })
}

func TestModel(t *testing.T) {
	blobtest.RunModel(t, mustOpen(t, config(t)))
}

// TestSuiteOnGivenServer runs the suite on the store that DSEC_TEST_S3 names, as
// [layers] store does, below a prefix of its own. Keys are in the environment.
func TestSuiteOnGivenServer(t *testing.T) {
	raw := os.Getenv("DSEC_TEST_S3")
	if raw == "" {
		return // there is none; TestSuite has one
	}
	u, err := url.Parse(raw)
	if err != nil {
		t.Fatal(err)
	}
	given, err := parse(u)
	if err != nil {
		t.Fatal(err)
	}
	open := func(t *testing.T) blob.Store {
		cfg := given
		cfg.Prefix = path.Join(cfg.Prefix, "dsec-test-"+rand.Text())
		cfg.Credentials.Env, cfg.PartSize, cfg.PageSize = os.LookupEnv, 5<<20, 3
		s := mustOpen(t, cfg)
		t.Cleanup(func() {
			err := s.List(context.Background(), "", func(info blob.Info) error { return s.Delete(context.Background(), info.Key) })
			if err != nil {
				t.Error(err)
			}
		})
		return s
	}
	blobtest.Run(t, open)
	blobtest.RunModel(t, open(t))
}
