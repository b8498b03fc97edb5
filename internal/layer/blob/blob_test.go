package blob_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/layer/blob"
	"github.com/opendsec/dsec/internal/layer/blob/blobtest"
	"github.com/opendsec/dsec/internal/layer/blob/dirblob"
	"github.com/opendsec/dsec/internal/layer/blob/s3blob"
)

var drivers = []blob.Driver{dirblob.Driver, s3blob.Driver}

func TestWrappedSuite(t *testing.T) {
	blobtest.Run(t, func(t *testing.T) blob.Store {
		s, err := blob.Open(t.Context(), drivers, t.TempDir(), blob.Credentials{}, blob.Options{Requests: 1, Metrics: prometheus.NewRegistry()})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = s.(io.Closer).Close() })
		return s
	})
}

func TestOpenTakes(t *testing.T) {
	for _, raw := range []string{"%s", "dir:%s", "dir://%s", "dir:%s/sub/dir"} {
		dir := filepath.Join(t.TempDir(), "a b%20c") // as it is in a path, and escaped in a URL
		want := dir
		if raw != "%s" {
			dir = (&url.URL{Path: dir}).EscapedPath()
		}
		s, err := blob.Open(t.Context(), drivers, fmt.Sprintf(raw, dir), blob.Credentials{}, blob.Options{})
		if err != nil {
			t.Errorf("%s: %v", raw, err)
			continue
		}
		blobtest.MustPut(t, s, "a", []byte("a"))
		if strings.Contains(raw, "sub") {
			want += "/sub/dir"
		}
		if _, err := os.Stat(filepath.Join(want, "a")); err != nil {
			t.Errorf("%s: %v", raw, err)
		}
		if err := s.(blob.Sweeper).Sweep(t.Context()); err != nil {
			t.Error(err)
		}
	}
}

func TestOpenRefuses(t *testing.T) {
	keys := blob.Credentials{Env: func(string) (string, bool) { return "key", true }}
	for _, test := range []struct {
		raw         string
		credentials blob.Credentials
		field, text string
	}{
		{"", keys, "store", "want a path"},
		{"relative/path", keys, "store", "want a path"},
		{"ftp://host/path", keys, "store", "want a path"},
		{"S4://bucket", keys, "store", "want a path"},
		{"dir:", keys, "store", "absolute path"},
		{"dir:relative", keys, "store", "absolute path"},
		{"dir://host/path", keys, "store", "absolute path"},
		{"dir:/path?x=1", keys, "store", "want none"},
		{"dir:/path#x", keys, "store", "#"},
		{"dir:/pa%zzth", keys, "store", "no URL"},
		{"s3:", keys, "store", "want s3://bucket/prefix, the bucket of 3 to 63"},
		{"s3:///prefix", keys, "store", "want s3://bucket/prefix, the bucket of 3 to 63"},
		{"s3://Bucket", keys, "store", "want s3://bucket/prefix, the bucket of 3 to 63"},
		{"s3://bucket--x-s3", keys, "store", "no order"},
		{"s3://bucket/a/../b", keys, "store", "prefix"},
		{"s3://bucket?endpiont=x", keys, "store", `no parameter "endpiont": want endpoint, region, path_style, ca_file`},
		{"s3://bucket?region=a&region=b", keys, "store", "twice"},
		{"s3://bucket?path_style=maybe", keys, "store", "path_style"},
		{"s3://bucket?endpoint=host:80", keys, "store", "endpoint"},
		{"s3://bucket?endpoint=http%3A%2F%2Fhost%2Fpath", keys, "store", "endpoint"},
		{"s3://id:password@bucket", keys, "store", "keys belong into"},
		{"s3://bucket", blob.Credentials{}, "store_credentials", "AWS_ACCESS_KEY_ID"},
		{"s3://bucket", blob.Credentials{File: "/no/such/file"}, "store_credentials", "no such file"},
	} {
		_, err := blob.Open(t.Context(), drivers, test.raw, test.credentials, blob.Options{})
		blobtest.WantCode(t, test.raw, err, dsec.CodeInvalid, test.field)
		if err == nil || !strings.Contains(err.Error(), test.text) || strings.Contains(err.Error(), "password") {
			t.Errorf("%s: %v, want a text with %s", test.raw, err, test.text)
		}
	}
}

func TestCredentials(t *testing.T) {
	const good = "# of the store\n[other]\naws_access_key_id = OTHER\n[default]\naws_access_key_id=ID\nAWS_Secret_Access_Key = a=b/c+d \n\n; and\naws_session_token = T\nregion = x\n"
	dir := t.TempDir()
	for name, test := range map[string]struct {
		text string
		mode os.FileMode
		want blob.Keys
		err  string // empty is none
	}{
		"good":             {good, 0o600, blob.Keys{ID: "ID", Secret: "a=b/c+d", Token: "T"}, ""},
		"without sections": {"aws_access_key_id=ID\r\naws_secret_access_key=S\r\n", 0o400, blob.Keys{ID: "ID", Secret: "S"}, ""},
		"others can read":  {good, 0o640, blob.Keys{}, "mode 0640"},
		"others can write": {good, 0o602, blob.Keys{}, "mode 0602"},
		"empty":            {"", 0o600, blob.Keys{}, "want aws_access_key_id"},
		"another section":  {"[prod]\naws_access_key_id=ID\naws_secret_access_key=S3CRET\n", 0o600, blob.Keys{}, "[default]"},
		"half":             {"aws_access_key_id=ID\n", 0o600, blob.Keys{}, "want aws_access_key_id and"},
		"no pairs":         {"S3CRET\n", 0o600, blob.Keys{}, "line 1: want name = value"},
		"no section":       {"\n[default\nS3CRET", 0o600, blob.Keys{}, "line 2: want [section]"},
		"a control":        {"aws_access_key_id=ID\naws_secret_access_key=S3CRET\x01x\n", 0o600, blob.Keys{}, "characters"},
		"too long":         {"#" + strings.Repeat("x", 70_000), 0o600, blob.Keys{}, "65536"},
	} {
		t.Run(name, func(t *testing.T) {
			file := filepath.Join(dir, strings.ReplaceAll(name, " ", "-"))
			if err := os.WriteFile(file, []byte(test.text), 0o600); err != nil {
				t.Fatal(err)
			}
			if err := os.Chmod(file, test.mode); err != nil {
				t.Fatal(err)
			}
			got, err := blob.Credentials{File: file}.Keys()
			if got != test.want {
				t.Error("other keys than in the file")
			}
			if test.err == "" {
				if err != nil {
					t.Error(err)
				}
				return
			}
			blobtest.WantCode(t, "keys", err, dsec.CodeInvalid, "store_credentials")
			if err == nil || !strings.Contains(err.Error(), test.err) || strings.Contains(err.Error(), "S3CRET") {
				t.Errorf("%v, want a text with %s and no secret", err, test.err)
			}
		})
	}
	if text := fmt.Sprintf("%v %+v %#v %s", blob.Keys{ID: "ID"}, blob.Keys{Secret: "S3"}, blob.Keys{Token: "T3"}, blob.Keys{ID: "ID"}); strings.ContainsAny(text, "I3") {
		t.Errorf("keys print as %s", text)
	}
	blobtest.WantCode(t, "a directory", second(blob.Credentials{File: dir}.Keys()), dsec.CodeInvalid, "store_credentials")
}

func second[T any](_ T, err error) error { return err }

// FuzzCredentials has any text be keys, or an error that does not repeat it.
func FuzzCredentials(f *testing.F) {
	for _, text := range []string{"", "[default]\naws_access_key_id=a\naws_secret_access_key=b", "[", "=", "[]\n=\n", "aws_access_key_id=\naws_secret_access_key=\x00"} {
		f.Add(text)
	}
	file := filepath.Join(f.TempDir(), "keys")
	f.Fuzz(func(t *testing.T, text string) {
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		k, err := blob.Credentials{File: file}.Keys()
		if err != nil {
			blobtest.WantCode(t, "keys", err, dsec.CodeInvalid, "store_credentials")
		} else if k.ID == "" || k.Secret == "" || !strings.Contains(text, k.ID) || !strings.Contains(text, k.Secret) {
			t.Errorf("keys of %q that it does not hold", text)
		}
	})
}

// failing is a store whose calls fail some times.
type failing struct {
	blob.Store
	mu   sync.Mutex
	left int
	err  error
	busy func()
}

func (f *failing) fail() error {
	if f.busy != nil {
		f.busy()
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.left > 0 {
		f.left--
		return f.err
	}
	return nil
}

func (f *failing) ReadAt(ctx context.Context, key string, p []byte, off int64) (int, error) {
	if err := f.fail(); err != nil {
		return 0, err
	}
	return f.Store.ReadAt(ctx, key, p, off)
}

// List fails after each key it tells of.
func (f *failing) List(ctx context.Context, prefix string, tell func(blob.Info) error) error {
	return f.Store.List(ctx, prefix, func(info blob.Info) error {
		if err := tell(info); err != nil {
			return err
		}
		return f.fail()
	})
}

func newFailing(t *testing.T, times int, code dsec.Code) *failing {
	t.Helper()
	dir, err := dirblob.Open(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	for _, key := range []string{"a", "b", "c"} {
		blobtest.MustPut(t, dir, key, []byte(key))
	}
	return &failing{Store: dir, left: times, err: dsec.Errorf(code, "as the test says")}
}

func TestRepeats(t *testing.T) {
	backoff := blob.Backoff{Attempts: 4, Base: time.Millisecond, Max: 2 * time.Millisecond, Total: time.Minute}
	for _, test := range []struct {
		times   int
		code    dsec.Code
		fails   bool
		retries float64
	}{
		{0, dsec.CodeUnavailable, false, 0}, {3, dsec.CodeUnavailable, false, 3}, {4, dsec.CodeUnavailable, true, 3},
		{1, dsec.CodeInternal, true, 0}, {1, dsec.CodeNotFound, true, 0}, {1, dsec.CodeExhausted, true, 0},
	} {
		reg := prometheus.NewRegistry()
		w := blob.Wrap(newFailing(t, test.times, test.code), blob.Options{Backoff: backoff, Metrics: reg})
		p := make([]byte, 1)
		n, err := w.ReadAt(t.Context(), "b", p, 0)
		result := "ok"
		if test.fails {
			result = string(test.code)
			blobtest.WantCode(t, "read", err, test.code, "")
		} else if n != 1 || p[0] != 'b' || err != nil && err != io.EOF {
			t.Errorf("%+v: %d, %v", test, n, err)
		}
		if got := metrics(t, reg); got["dsec_blob_requests_total read "+result] != 1 || got["dsec_blob_retries_total"] != test.retries {
			t.Errorf("%+v: %v", test, got)
		}
	}
}

// metrics are the counters, by name and the values of their labels.
func metrics(t *testing.T, reg *prometheus.Registry) map[string]float64 {
	t.Helper()
	families, err := reg.Gather()
	if err != nil {
		t.Fatal(err)
	}
	got := map[string]float64{}
	for _, f := range families {
		for _, m := range f.GetMetric() {
			name := f.GetName()
			for _, l := range slices.Backward(m.GetLabel()) {
				name += " " + l.GetValue()
			}
			got[name] = m.GetCounter().GetValue()
		}
	}
	return got
}

func TestAListThatIsRepeatedTellsOnce(t *testing.T) {
	w := blob.Wrap(newFailing(t, 3, dsec.CodeUnavailable), blob.Options{Backoff: blob.Backoff{Attempts: 9, Base: 1, Max: 1, Total: time.Minute}})
	if keys := blobtest.Keys(t, w, ""); keys != "a b c" {
		t.Errorf("told of %s", keys)
	}
	own := dsec.Errorf(dsec.CodeUnavailable, "of the function")
	calls := 0
	err := w.List(t.Context(), "", func(blob.Info) error { calls++; return own })
	if !errors.Is(err, own) || calls != 1 {
		t.Errorf("%v after %d calls", err, calls)
	}
}

func TestBackoffEnds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		unavailable := dsec.Errorf(dsec.CodeUnavailable, "still")
		start, calls := time.Now(), 0
		b := blob.Backoff{Attempts: 1 << 30, Base: time.Second, Max: 8 * time.Second, Total: time.Minute}
		err := b.Do(t.Context(), func() error { calls++; return unavailable })
		if took := time.Since(start); !errors.Is(err, unavailable) || took < time.Minute || took > 70*time.Second || calls < 8 {
			t.Errorf("%v after %v and %d calls", err, took, calls)
		}
		ctx, cancel := context.WithTimeout(t.Context(), time.Second/2)
		defer cancel()
		b.Base = time.Hour
		b.Max = time.Hour
		start = time.Now()
		if err := b.Do(ctx, func() error { return unavailable }); !errors.Is(err, context.DeadlineExceeded) || time.Since(start) != time.Second/2 {
			t.Errorf("%v after %v", err, time.Since(start))
		}
	})
}

func TestRequestsAreBounded(t *testing.T) {
	arrived, release := make(chan struct{}), make(chan struct{})
	f := newFailing(t, 0, "")
	f.busy = func() { arrived <- struct{}{}; <-release }
	w := blob.Wrap(f, blob.Options{Requests: 2})
	done := make(chan error, 3)
	for range 3 {
		go func() {
			_, err := w.ReadAt(context.Background(), "a", make([]byte, 1), 0)
			done <- err
		}()
	}
	<-arrived
	<-arrived
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := w.Stat(ctx, "a"); !errors.Is(err, context.Canceled) {
		t.Errorf("stat while all slots are taken: %v", err)
	}
	select {
	case <-arrived:
		t.Error("a third read, of two that may be")
	default:
	}
	// Writes have slots of their own, and a list none.
	if err := w.Put(t.Context(), "new", bytes.NewReader(nil), 0); err != nil {
		t.Error(err)
	}
	close(release)
	<-arrived
	for range 3 {
		if err := <-done; err != nil && err != io.EOF {
			t.Error(err)
		}
	}
}
