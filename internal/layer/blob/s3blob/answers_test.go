package s3blob

import (
	"bytes"
	"compress/gzip"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/layer/blob"
	"github.com/opendsec/dsec/internal/layer/blob/blobtest"
)

// answered is a store on a server that answers all but its opening with f.
func answered(t *testing.T, f http.HandlerFunc) *Store {
	t.Helper()
	var opened atomic.Bool
	s := mustOpen(t, between(t, func(w http.ResponseWriter, r *http.Request, on http.Handler) {
		if opened.Load() {
			f(w, r)
			return
		}
		on.ServeHTTP(w, r)
	}))
	opened.Store(true)
	return s
}

const page = `<html><head><title>Please log in</title></head><body>network access</body></html>`

// object answers as a server does, with what is to be wrong in place.
type object struct {
	status     int
	rang, tag  string
	typ, enc   string
	length     string
	body       []byte
	noModified bool
}

func (o object) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	h := w.Header()
	for name, v := range map[string]string{"Content-Range": o.rang, "ETag": o.tag, "Content-Type": o.typ, "Content-Encoding": o.enc, "Content-Length": o.length} {
		if v != "" {
			h.Set(name, v)
		}
	}
	if !o.noModified {
		h.Set("Last-Modified", "Mon, 02 Jan 2006 15:04:05 GMT")
	}
	w.WriteHeader(o.status)
	if o.length == "" {
		_ = http.NewResponseController(w).Flush() // else it would be told
	}
	_, _ = w.Write(o.body)
	if n, err := strconv.Atoi(o.length); err == nil && n != len(o.body) && r.Method != http.MethodHead {
		panic(http.ErrAbortHandler)
	}
}

// TestWrongAnswers has a server, or a proxy in its place, say what is not so: a read
// is an error, never bytes.
func TestWrongAnswers(t *testing.T) {
	var zipped bytes.Buffer
	zw := gzip.NewWriter(&zipped)
	_, _ = zw.Write(make([]byte, 10))
	_ = zw.Close()
	ten := []byte("0123456789")
	right := object{status: 206, rang: "bytes 100-109/1000", tag: `"x"`, typ: "application/octet-stream", body: ten}
	with := func(change func(*object)) object {
		o := right
		change(&o)
		return o
	}
	for name, test := range map[string]struct {
		answer http.Handler
		code   dsec.Code // empty is the ten bytes
	}{
		"right":                    {right, ""},
		"another place":            {with(func(o *object) { o.rang = "bytes 99-108/1000" }), dsec.CodeInternal},
		"fewer in the middle":      {with(func(o *object) { o.rang, o.body = "bytes 100-104/1000", ten[:5] }), dsec.CodeInternal},
		"more than asked for":      {with(func(o *object) { o.rang, o.body = "bytes 100-119/1000", append(ten, ten...) }), dsec.CodeInternal},
		"a range behind the end":   {with(func(o *object) { o.rang = "bytes 100-109/105" }), dsec.CodeInternal},
		"no total":                 {with(func(o *object) { o.rang = "bytes 100-109/*" }), dsec.CodeInternal},
		"another unit":             {with(func(o *object) { o.rang = "items 100-109/1000" }), dsec.CodeInternal},
		"no range":                 {with(func(o *object) { o.rang = "" }), dsec.CodeInternal},
		"all of it":                {with(func(o *object) { o.status, o.rang = 200, "" }), dsec.CodeInternal},
		"fewer than told":          {with(func(o *object) { o.length, o.body = "10", ten[:7] }), dsec.CodeUnavailable},
		"fewer without a length":   {with(func(o *object) { o.body = ten[:7] }), dsec.CodeUnavailable},
		"more without a length":    {with(func(o *object) { o.body = bytes.Repeat(ten, 10_000) }), dsec.CodeInternal},
		"length and range differ":  {with(func(o *object) { o.length, o.body = "11", append(ten, 'x') }), dsec.CodeInternal},
		"packed":                   {with(func(o *object) { o.enc, o.body = "gzip", zipped.Bytes() }), dsec.CodeInternal},
		"no tag":                   {with(func(o *object) { o.tag = "" }), dsec.CodeInternal},
		"a page as the range":      {with(func(o *object) { o.typ = "text/html; charset=utf-8" }), dsec.CodeInternal},
		"a page":                   {object{status: 200, typ: "text/html", body: []byte(page)}, dsec.CodeInternal},
		"a page for not found":     {object{status: 404, typ: "text/html", body: []byte(page)}, dsec.CodeInternal},
		"a page for forbidden":     {object{status: 403, typ: "text/html", body: []byte(page)}, dsec.CodeUnavailable},
		"a page for bad gateway":   {object{status: 502, typ: "text/html", body: []byte(page)}, dsec.CodeUnavailable},
		"nothing, busy":            {object{status: 503}, dsec.CodeUnavailable},
		"busy":                     {object{status: 503, typ: "application/xml", body: []byte(`<Error><Code>SlowDown</Code></Error>`)}, dsec.CodeUnavailable},
		"too many":                 {object{status: 429}, dsec.CodeUnavailable},
		"a redirect":               {http.RedirectHandler("http://127.0.0.1:1/elsewhere", http.StatusTemporaryRedirect), dsec.CodeInternal},
		"an error without an end":  {http.HandlerFunc(endlessError), dsec.CodeUnavailable},
		"an error that is too big": {http.HandlerFunc(hugeError), dsec.CodeUnavailable},
		"not there":                {object{status: 404, typ: "application/xml", body: []byte(`<Error><Code>NoSuchKey</Code></Error>`)}, dsec.CodeNotFound},
		"no bucket any more":       {object{status: 404, typ: "application/xml", body: []byte(`<Error><Code>NoSuchBucket</Code></Error>`)}, dsec.CodeUnavailable},
		"the key expired":          {object{status: 400, typ: "application/xml", body: []byte(`<Error><Code>ExpiredToken</Code></Error>`)}, dsec.CodeUnavailable},
	} {
		t.Run(name, func(t *testing.T) {
			s := answered(t, test.answer.ServeHTTP)
			p := make([]byte, 10)
			n, err := s.ReadAt(t.Context(), "a", p, 100)
			if test.code == "" {
				if n != 10 || err != nil || !bytes.Equal(p, ten) {
					t.Errorf("%d, %v, %q", n, err, p)
				}
				return
			}
			blobtest.WantCode(t, "read", err, test.code, "")
			if !bytes.Equal(p[:n], ten[:n]) {
				t.Errorf("wrong bytes: %q", p[:n])
			}
		})
	}
}

func endlessError(w http.ResponseWriter, _ *http.Request) {
	w.WriteHeader(http.StatusInternalServerError)
	_, _ = io.WriteString(w, `<Error><Code>Cut`)
	panic(http.ErrAbortHandler)
}

func hugeError(w http.ResponseWriter, _ *http.Request) {
	w.WriteHeader(http.StatusInternalServerError)
	line := []byte(strings.Repeat("x", maxError/4))
	_, _ = io.WriteString(w, "<Error><Code>")
	for range 8 * maxError / len(line) {
		if _, err := w.Write(line); err != nil {
			return
		}
	}
}

// TestEndThatIsNone has a server tell of an end where there is none.
func TestEndThatIsNone(t *testing.T) {
	s := answered(t, func(w http.ResponseWriter, r *http.Request) {
		if r.Method == http.MethodHead {
			object{status: 200, tag: `"x"`, length: "1000"}.ServeHTTP(w, r)
			return
		}
		object{status: 416, typ: "application/xml", body: []byte(`<Error><Code>InvalidRange</Code></Error>`)}.ServeHTTP(w, r)
	})
	_, err := s.ReadAt(t.Context(), "a", make([]byte, 10), 999)
	blobtest.WantCode(t, "read", err, dsec.CodeInternal, "")
	if _, err = s.ReadAt(t.Context(), "a", make([]byte, 10), 1000); err != io.EOF {
		t.Errorf("read from the end: %v", err)
	}
}

func TestWrongHeads(t *testing.T) {
	for name, test := range map[string]struct {
		answer object
		code   dsec.Code
	}{
		"a page":                {object{status: 200, tag: `"x"`, typ: "text/html", length: "82"}, dsec.CodeInternal},
		"no tag":                {object{status: 200, length: "10"}, dsec.CodeInternal},
		"no time":               {object{status: 200, tag: `"x"`, length: "10", noModified: true}, dsec.CodeInternal},
		"not there":             {object{status: 404}, dsec.CodeNotFound},
		"a page, and not there": {object{status: 404, typ: "text/html"}, dsec.CodeInternal},
		"busy":                  {object{status: 503}, dsec.CodeUnavailable},
		"forbidden":             {object{status: 403}, dsec.CodeUnavailable},
	} {
		t.Run(name, func(t *testing.T) {
			s := answered(t, test.answer.ServeHTTP)
			_, err := s.Stat(t.Context(), "a")
			blobtest.WantCode(t, "stat", err, test.code, "")
		})
	}
}

// TestWrongPuts has a put answered by what has stored nothing.
func TestWrongPuts(t *testing.T) {
	for name, test := range map[string]struct {
		answer http.Handler
		code   dsec.Code
	}{
		"a page":        {object{status: 200, typ: "text/html", body: []byte(page)}, dsec.CodeInternal},
		"nothing":       {object{status: 200}, dsec.CodeInternal},
		"forbidden":     {object{status: 403, body: []byte(`<Error><Code>AccessDenied</Code></Error>`)}, dsec.CodeUnsupported},
		"a wrong key":   {object{status: 403, body: []byte(`<Error><Code>InvalidAccessKeyId</Code></Error>`)}, dsec.CodeUnavailable},
		"no room":       {object{status: 507, body: []byte(`<Error><Code>XMinioStorageFull</Code></Error>`)}, dsec.CodeExhausted},
		"over a quota":  {object{status: 403, body: []byte(`<Error><Code>QuotaExceeded</Code></Error>`)}, dsec.CodeExhausted},
		"too large":     {object{status: 400, body: []byte(`<Error><Code>EntityTooLarge</Code></Error>`)}, dsec.CodeUnsupported},
		"always before": {object{status: 412, body: []byte(`<Error><Code>PreconditionFailed</Code></Error>`)}, dsec.CodeUnavailable},
	} {
		t.Run(name, func(t *testing.T) {
			s := answered(t, func(w http.ResponseWriter, r *http.Request) {
				if r.Method == http.MethodHead {
					w.WriteHeader(http.StatusNotFound)
					return
				}
				test.answer.ServeHTTP(w, r)
			})
			for _, size := range []int{10, 6 << 20} {
				err := s.Put(t.Context(), "a", bytes.NewReader(make([]byte, size)), int64(size))
				blobtest.WantCode(t, fmt.Sprint("put of ", size), err, test.code, "")
			}
		})
	}
}

func TestWrongLists(t *testing.T) {
	list := func(s *Store, more string, keys ...string) string {
		var b strings.Builder
		fmt.Fprintf(&b, "<ListBucketResult><Name>%s</Name>", s.cfg.Bucket)
		for _, k := range keys {
			fmt.Fprintf(&b, "<Contents><Key>%s</Key><Size>1</Size><LastModified>2006-01-02T15:04:05Z</LastModified></Contents>", k)
		}
		return b.String() + more + "</ListBucketResult>"
	}
	for name, test := range map[string]struct {
		body func(*Store) string
		code dsec.Code
	}{
		"a page":          {func(*Store) string { return page }, dsec.CodeInternal},
		"nothing":         {func(*Store) string { return "" }, dsec.CodeInternal},
		"cut off":         {func(s *Store) string { return list(s, "", *s.object("a"))[:90] }, dsec.CodeInternal},
		"no order":        {func(s *Store) string { return list(s, "", *s.object("b"), *s.object("a")) }, dsec.CodeInternal},
		"twice":           {func(s *Store) string { return list(s, "", *s.object("a"), *s.object("a")) }, dsec.CodeInternal},
		"another prefix":  {func(s *Store) string { return list(s, "", "elsewhere/a") }, dsec.CodeInternal},
		"another bucket":  {func(*Store) string { return "<ListBucketResult><Name>other</Name></ListBucketResult>" }, dsec.CodeInternal},
		"goes on nowhere": {func(s *Store) string { return list(s, "<IsTruncated>true</IsTruncated>", *s.object("a")) }, dsec.CodeInternal},
		"goes on in a circle": {func(s *Store) string {
			return list(s, "<IsTruncated>true</IsTruncated><NextContinuationToken>x</NextContinuationToken>", *s.object("a"))
		}, dsec.CodeInternal},
	} {
		t.Run(name, func(t *testing.T) {
			var s *Store
			s = answered(t, func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, test.body(s)) })
			err := s.List(t.Context(), "", func(blob.Info) error { return nil })
			blobtest.WantCode(t, "list", err, test.code, "")
			if err != nil {
				t.Log(errors.Unwrap(err))
			}
		})
	}
}

// FuzzRange has any Content-Range, of any length told, be refused or be the range that was asked for.
func FuzzRange(f *testing.F) {
	for _, r := range []string{"", "bytes 0-9/10", "bytes 0-9/*", "bytes 5-4/10", "bytes 0-9/9", "bytes 0-9223372036854775807/9223372036854775808", "bytes -1-9/10", "bytes 0-9/10/11", "bytes +0-9/10"} {
		f.Add(r, int64(10), int64(0), int64(10))
	}
	f.Fuzz(func(t *testing.T, header string, length, off, want int64) {
		if off < 0 || want <= 0 || want > 1<<31 || off > 1<<62 {
			return
		}
		n, err := lengthOf(http.Header{"Content-Range": {header}, "Etag": {"x"}}, length, off, want)
		if err != nil {
			return
		}
		first, last, total, ok := parseRange(header)
		if header == "" && off == 0 && int64(n) == length && length <= want {
			return // all of it
		}
		if !ok || first != off || int64(n) != last-first+1 || int64(n) > want || n <= 0 || length >= 0 && length != int64(n) {
			t.Errorf("%q of %d bytes for %d from %d: %d", header, length, want, off, n)
		}
		if int64(n) < want && last+1 != total {
			t.Errorf("%q for %d from %d ends before the end: %d", header, want, off, n)
		}
	})
}

// FuzzURL has any URL be refused by name, or be a configuration that is sound.
func FuzzURL(f *testing.F) {
	for _, raw := range []string{
		"s3://bucket", "s3://bucket/prefix?endpoint=http%3A%2F%2F127.0.0.1%3A7070&region=x&path_style=true", "s3:bucket", "s3://B/x", "s3://a.b/..",
		"s3://bucket/p//q", "s3://bucket?endpoint=ftp://x", "s3://bucket?path_style=maybe", "s3://user:password@bucket", "s3://bucket:80", "s3://bucket?endpoint=http://u:p@h",
	} {
		f.Add(raw)
	}
	f.Fuzz(func(t *testing.T, raw string) {
		u, err := url.Parse(raw)
		if err != nil || u.Scheme != "s3" {
			return
		}
		cfg, err := parse(u)
		if err != nil {
			blobtest.WantCode(t, "parse", err, dsec.CodeInvalid, "store")
			return
		}
		if !bucketName.MatchString(cfg.Bucket) || cfg.Prefix != "" && blob.CheckKey(cfg.Prefix) != nil {
			t.Errorf("%q: %+v", raw, cfg)
		}
	})
}
