package apiserver

import (
	"bytes"
	"compress/gzip"
	"context"
	"encoding/binary"
	"errors"
	"io"
	"net"
	"net/http"
	"strings"
	"testing"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/proto"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/apierr"
	dsecv1 "github.com/opendsec/dsec/proto/dsec/v1"
	"github.com/opendsec/dsec/proto/dsec/v1/dsecv1connect"
)

const (
	jsonType   = "application/json"
	createPath = dsecv1connect.SandboxServiceCreateProcedure
)

func TestUndecodableRequestsNameTheField(t *testing.T) {
	r := newRig(t, newStub("fake"))
	for _, tc := range []struct {
		name, body, field string
	}{
		{"empty", ``, ""},
		{"text for a list", "{\n \"layers\": \"base\"}", "layers"},
		{"number in a list of texts", `{"env": {"A": "b"}, "layers": ["base", 3]}`, "layers[1]"},
		{"no unit", `{"idleTimeout": "5"}`, "idle_timeout"},
		{"text for a message", `{"limits": "big"}`, "limits"},
		{"cut", `{"limits":`, ""},
		{"no object", `[]`, ""},
		{"junk", `hello`, ""},
		{"unknown field", `{"bogusName": 1}`, "bogus_name"},
		{"unknown nested field", `{"limits": {"cpu": 1}}`, "cpu"},
		{"2^63", `{"limits": {"memoryBytes": "9223372036854775808"}}`, "limits.memory_bytes"},
		{"1e400", `{"limits": {"milliCpu": 1e400}}`, "limits.milli_cpu"},
		{"NaN", `{"limits": {"pids": "NaN"}}`, "limits.pids"},
		{"unit suffix", `{"limits": {"diskBytes": "1G"}}`, "limits.disk_bytes"},
		{"half", `{"limits": {"diskInodes": 0.5}}`, "limits.disk_inodes"},
		{"wrong type", `{"layers": 7}`, "layers"},
		{"duration", `{"idleTimeout": "never"}`, "idle_timeout"},
		{"twice", `{"user": "a", "user": "b"}`, "user"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			status, e := r.post(createPath, jsonType, r.secret, strings.NewReader(tc.body))
			if status != 400 || e.Code != dsec.CodeInvalid || e.Field != tc.field {
				t.Errorf("%d %+v; want field %q", status, e, tc.field)
			}
		})
	}
	if _, e := r.post(createPath, jsonType, r.secret, strings.NewReader(`{"backend": "fake"}`)); e != nil {
		t.Errorf("control: %v", e)
	}
	binary, err := proto.Marshal(&dsecv1.CreateRequest{User: "x?y"})
	check(t, err)
	binary = bytes.Replace(binary, []byte("?"), []byte{0xff}, 1)
	if _, e := r.post(createPath, "application/proto", r.secret, bytes.NewReader(binary)); e == nil || !strings.Contains(e.Message, "UTF-8") {
		t.Errorf("invalid UTF-8: %+v", e)
	}
	if _, e := r.post(createPath, "application/proto", r.secret, strings.NewReader("\xff\xff")); e == nil || e.Code != dsec.CodeInvalid {
		t.Errorf("junk: %+v", e)
	}
}

// A message that cannot be decoded has the same typed error by every protocol.
func TestUndecodableByEveryProtocol(t *testing.T) {
	r := newRig(t, newStub("fake"))
	h2 := new(http.Protocols)
	h2.SetUnencryptedHTTP2(true)
	tr := &http.Transport{Protocols: h2}
	defer tr.CloseIdleConnections()
	for _, contentType := range []string{"application/grpc", "application/grpc+json", "application/grpc-web", "application/grpc-web+json"} {
		for path, streams := range map[string]bool{createPath: false, dsecv1connect.ProcessServiceStartProcedure: true} {
			for what, body := range map[string]string{"junk": "\xff\xff", "too large": strings.Repeat("x", MaxMessage+1)} {
				msg := append(binary.BigEndian.AppendUint32([]byte{0}, uint32(len(body))), body...)
				req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, r.url+path, bytes.NewReader(msg))
				check(t, err)
				req.Header.Set("Content-Type", contentType)
				req.Header.Set("X-API-Key", r.secret)
				res, err := tr.RoundTrip(req)
				check(t, err)
				rest, err := io.ReadAll(res.Body)
				check(t, err)
				_ = res.Body.Close()
				at := res.Trailer
				if strings.Contains(contentType, "web") {
					at = res.Header
				}
				detail, err := connect.DecodeBinaryHeader(at.Get(grpcDetails))
				if err != nil || at.Get(grpcStatus) != "3" || !bytes.Contains(detail, []byte("dsec.v1.ErrorDetail")) || len(rest) > 0 {
					t.Errorf("%s of %s, stream %v, %s: %v, %v; %q", contentType, path, streams, what, at, err, rest)
				}
			}
		}
	}
}

func TestWhatNoHandlerAnswersIsTyped(t *testing.T) {
	r := newRig(t, newStub("fake"))
	var zipped bytes.Buffer
	zw := gzip.NewWriter(&zipped)
	_, _ = zw.Write(bytes.Repeat([]byte(" "), MaxMessage+1))
	check(t, zw.Close())
	big := `{"user": "` + strings.Repeat("x", MaxMessage) + `"}`
	for _, tc := range []struct {
		name   string
		method string
		path   string
		header map[string]string
		body   io.Reader
		status int
		code   dsec.Code
	}{
		{"no route", "POST", "/dsec.v1.SandboxService/Nothing", nil, nil, 404, dsec.CodeNotFound},
		{"no service", "POST", "/..%2f..%2fetc/passwd", nil, nil, 404, dsec.CodeNotFound},
		{"edge route", "POST", dsecv1connect.EdgeServiceInfoProcedure, nil, strings.NewReader("{}"), 404, dsec.CodeNotFound},
		{"method", "GET", createPath, nil, nil, 400, dsec.CodeInvalid},
		{"content type", "POST", createPath, map[string]string{"Content-Type": "text/xml"}, strings.NewReader("{}"), 400, dsec.CodeInvalid},
		{"compression", "POST", createPath, map[string]string{"Content-Encoding": "br"}, strings.NewReader("{}"), 501, dsec.CodeUnsupported},
		{"bomb", "POST", createPath, map[string]string{"Content-Encoding": "gzip"}, &zipped, 400, dsec.CodeInvalid},
		{"too large", "POST", createPath, nil, strings.NewReader(big), 400, dsec.CodeInvalid},
		{"too large, length unknown", "POST", createPath, nil, io.MultiReader(strings.NewReader(big)), 400, dsec.CodeInvalid},
		{"bad timeout", "POST", createPath, map[string]string{"Connect-Timeout-Ms": "soon"}, strings.NewReader("{}"), 400, dsec.CodeInvalid},
	} {
		t.Run(tc.name, func(t *testing.T) {
			req, err := http.NewRequestWithContext(t.Context(), tc.method, r.url+tc.path, tc.body)
			check(t, err)
			req.Header.Set("Content-Type", jsonType)
			req.Header.Set("X-API-Key", r.secret)
			for k, v := range tc.header {
				req.Header.Set(k, v)
			}
			res, err := http.DefaultClient.Do(req)
			check(t, err)
			defer func() { _ = res.Body.Close() }()
			body, err := io.ReadAll(res.Body)
			check(t, err)
			if e := typedBody(t, body); res.StatusCode != tc.status || e.Code != tc.code {
				t.Errorf("%d %+v; want %d %s", res.StatusCode, e, tc.status, tc.code)
			}
		})
	}
}

// TestUndecodableStreamsAreTyped sends an envelope whose message does not decode.
func TestUndecodableStreamsAreTyped(t *testing.T) {
	r := newRig(t, newStub("fake"))
	for path, body := range map[string]string{
		dsecv1connect.FileServiceWriteProcedure: `{"open": {"sandboxID_": 1}}`,
		dsecv1connect.FileServiceReadProcedure:  `{"nope": 1}`,
	} {
		envelope := append([]byte{0, 0, 0, 0, byte(len(body))}, body...)
		req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, r.url+path, bytes.NewReader(envelope))
		check(t, err)
		req.Header.Set("Content-Type", "application/connect+json")
		req.Header.Set("X-API-Key", r.secret)
		res, err := http.DefaultClient.Do(req)
		check(t, err)
		data, err := io.ReadAll(res.Body)
		check(t, err)
		_ = res.Body.Close()
		if len(data) < 5 || data[0] != 2 {
			t.Fatalf("%s: no end of stream in %q", path, data)
		}
		inner := bytes.TrimSuffix(bytes.TrimPrefix(data[5:], []byte(`{"error":`)), []byte("}\n"))
		inner = bytes.TrimSuffix(inner, []byte("}"))
		if e := typedBody(t, append(inner, balance(inner)...)); e.Code != dsec.CodeInvalid || e.Field == "" {
			t.Errorf("%s: %+v", path, e)
		}
	}
}

// balance is the brace that trimming took too much.
func balance(b []byte) string {
	return strings.Repeat("}", bytes.Count(b, []byte("{"))-bytes.Count(b, []byte("}")))
}

// TestNothingOfAnEdgesFailureLeaksOut is S48: what is not meant for users,
// from an edge that is broken or of another version, stays inside.
func TestNothingOfAnEdgesFailureLeaksOut(t *testing.T) {
	stub := newStub("fake")
	r := newRig(t, stub)
	sb, err := r.client(r.secret).CreateSandbox(t.Context(), options())
	check(t, err)
	const secret = "/var/lib/dsec/edge/journal: goroutine 1 [running]"
	typed := apierr.Encode(dsec.Errorf(dsec.CodeExhausted, "too many calls"))
	for _, tc := range []struct {
		name string
		fail error
		want dsec.Code
	}{
		{"untyped", errors.New(secret), dsec.CodeOutcomeUnknown},
		{"internal", connect.NewError(connect.CodeInternal, errors.New(secret)), dsec.CodeInternal},
		{"unavailable", connect.NewError(connect.CodeUnavailable, errors.New(secret)), dsec.CodeOutcomeUnknown},
		{"unimplemented", connect.NewError(connect.CodeUnimplemented, errors.New(secret)), dsec.CodeUnsupported},
		{"typed", typed, dsec.CodeExhausted},
	} {
		stub.set(func() { stub.fail = tc.fail })
		_, _, err := sb.Command("true").Output(t.Context())
		if codeOf(err) != tc.want {
			t.Errorf("%s: %v (%s), want %s", tc.name, err, codeOf(err), tc.want)
		}
		if err != nil && strings.Contains(err.Error(), "journal") {
			t.Errorf("%s: leaks %q", tc.name, err)
		}
	}
}

func TestSlowBodyIsCutOff(t *testing.T) {
	rule := bodyRules[createPath]
	bodyRules[createPath] = bodyRule{timeout: 20 * time.Millisecond}
	defer func() { bodyRules[createPath] = rule }()
	r := newRig(t, newStub("fake"))
	conn, err := net.Dial("tcp", strings.TrimPrefix(r.url, "http://"))
	check(t, err)
	defer func() { _ = conn.Close() }()
	_, err = io.WriteString(conn, "POST "+createPath+" HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nX-API-Key: "+r.secret+"\r\nContent-Length: 100\r\n\r\n{")
	check(t, err)
	// Without the bound this read would last until the test's own deadline.
	answer, err := io.ReadAll(conn)
	check(t, err)
	if !bytes.HasPrefix(answer, []byte("HTTP/1.1 4")) {
		t.Errorf("answer %q", answer)
	}
}

// TestBodyBoundEndsWithTheBody has a command that runs for longer than its
// request may take to arrive.
func TestBodyBoundEndsWithTheBody(t *testing.T) {
	const path = dsecv1connect.ProcessServiceStartProcedure
	rule := bodyRules[path]
	bodyRules[path] = bodyRule{timeout: 30 * time.Millisecond}
	defer func() { bodyRules[path] = rule }()
	stub := newStub("fake")
	r := newRig(t, stub)
	sb, err := r.client(r.secret).CreateSandbox(t.Context(), options())
	check(t, err)
	ctx, cancel := context.WithCancel(t.Context())
	cmd := sb.Command("sleep", "1")
	check(t, cmd.Start(ctx))
	select {
	case <-stub.wrote:
		t.Error("the edge's call ended by itself")
	case <-time.After(200 * time.Millisecond): // longer than the bound
	}
	cancel()
	<-stub.wrote // where the caller goes away, the edge's call ends
	if _, err := cmd.Wait(); !errors.Is(err, context.Canceled) {
		t.Errorf("Wait: %v", err)
	}
}

func TestEveryRouteHasABodyRule(t *testing.T) {
	n := 0
	for range Routes() {
		n++
	}
	if n < 30 || len(bodyRules) < n-2 {
		t.Errorf("%d routes, %d rules", n, len(bodyRules))
	}
}

func FuzzUndecodable(f *testing.F) {
	for _, s := range []string{
		"", "unmarshal message: proto: (line 1:2): unknown field \"x\"", "unmarshal message: proto:\u00a0(line 1:2): invalid value for int64 field a: 1",
		"unmarshal message: \xff", "read message: x",
	} {
		f.Add(uint32(3), s)
	}
	f.Fuzz(func(t *testing.T, code uint32, message string) {
		e := fromDecoder(connect.Code(code), message)
		if _, ok := dsec.Codes[e.Code]; !ok || len(e.Message) > 200 || strings.ContainsAny(e.Message, "\n\x00") {
			t.Errorf("%+v of %q", e, message)
		}
	})
}

func FuzzPageToken(f *testing.F) {
	f.Add("")
	f.Add(pageToken("abcde", "next"))
	f.Add("!!")
	f.Fuzz(func(t *testing.T, s string) {
		id, token, err := parsePageToken(s)
		if err != nil {
			return
		}
		if s == "" {
			return
		}
		if _, err := dsec.ParseEdgeID(string(id)); err != nil {
			t.Errorf("token %q names edge %q", s, id)
		}
		if again, tok, err := parsePageToken(pageToken(id, token)); err != nil || again != id || tok != token {
			t.Errorf("%q does not round-trip", s)
		}
	})
}
