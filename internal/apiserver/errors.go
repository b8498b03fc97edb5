package apiserver

import (
	"bytes"
	"cmp"
	"encoding/base64"
	"encoding/json"
	"net/http"
	"regexp"
	"strconv"
	"strings"

	"connectrpc.com/connect"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/apierr"
	dsecv1 "github.com/opendsec/dsec/proto/dsec/v1"
)

// typedErrors makes every error answer a typed one. Handlers type their own;
// what the protocol library answers by itself, before a handler runs (no such
// route, a body that does not decode), is typed here.
func typedErrors(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		t := &typedWriter{ResponseWriter: w}
		next.ServeHTTP(t, r)
		t.finish()
	})
}

// typedWriter holds an error answer back until it is whole.
type typedWriter struct {
	http.ResponseWriter
	wrote  bool
	status int // of an error answer that is held back, or 0
	body   bytes.Buffer
}

func (w *typedWriter) WriteHeader(status int) {
	if w.wrote {
		return
	}
	if status >= 200 {
		w.wrote = true
	}
	if status >= 400 {
		w.status = status
		return
	}
	typeTrailers(w.Header())
	w.ResponseWriter.WriteHeader(status)
}

func (w *typedWriter) Write(b []byte) (int, error) {
	if !w.wrote {
		w.WriteHeader(http.StatusOK)
	}
	if w.status != 0 {
		return w.body.Write(b)
	}
	return w.ResponseWriter.Write(b)
}

// Unwrap is for http.ResponseController.
func (w *typedWriter) Unwrap() http.ResponseWriter { return w.ResponseWriter }

// Flush implements http.Flusher, which the protocol library asks for.
func (w *typedWriter) Flush() {
	if w.status == 0 {
		if !w.wrote {
			w.WriteHeader(http.StatusOK)
		}
		_ = http.NewResponseController(w.ResponseWriter).Flush()
	}
}

var detailType = string((&dsecv1.ErrorDetail{}).ProtoReflect().Descriptor().FullName())

func (w *typedWriter) finish() {
	if w.status == 0 {
		return
	}
	var wire struct {
		Code    connect.Code `json:"code"`
		Message string       `json:"message"`
		Details []struct {
			Type string `json:"type"`
		} `json:"details"`
	}
	body := w.body.Bytes()
	// A body from http.Error or a compressed one does not decode, and needs
	// the same answer as one without a detail.
	_ = json.Unmarshal(body, &wire)
	for _, d := range wire.Details {
		if d.Type == detailType {
			w.ResponseWriter.WriteHeader(w.status)
			_, _ = w.ResponseWriter.Write(body)
			return
		}
	}
	e := fromDecoder(wire.Code, wire.Message)
	if wire.Code == 0 {
		e = fromStatus(w.status)
	}
	status, body := connectJSON(e)
	h := w.Header()
	h.Set("Content-Type", "application/json")
	h.Set("Content-Length", strconv.Itoa(len(body)))
	h.Del("Content-Encoding")
	w.ResponseWriter.WriteHeader(status)
	_, _ = w.ResponseWriter.Write(body)
}

// connectJSON is e as the Connect protocol writes it for a unary call.
func connectJSON(e *dsec.Error) (status int, body []byte) {
	ce := apierr.Encode(e)
	type detail struct {
		Type  string              `json:"type"`
		Value string              `json:"value"`
		Debug *dsecv1.ErrorDetail `json:"debug"`
	}
	wire := struct {
		Code    string   `json:"code"`
		Message string   `json:"message"`
		Details []detail `json:"details"`
	}{Code: ce.Code().String(), Message: ce.Message()}
	for _, d := range ce.Details() {
		wire.Details = append(wire.Details, detail{d.Type(), base64.RawStdEncoding.EncodeToString(d.Bytes()), apierr.Detail(e)})
	}
	body, err := json.Marshal(wire)
	if err != nil {
		panic(err) // strings only
	}
	return dsec.Codes[e.Code].HTTP, body
}

func fromStatus(status int) *dsec.Error {
	switch status {
	case http.StatusNotFound:
		return dsec.Errorf(dsec.CodeNotFound, "no such route")
	case http.StatusMethodNotAllowed:
		return dsec.Errorf(dsec.CodeInvalid, "method: want POST")
	case http.StatusUnsupportedMediaType:
		return dsec.Errorf(dsec.CodeInvalid, "Content-Type: want application/json or application/proto, and application/connect+json or +proto for streams")
	case http.StatusHTTPVersionNotSupported:
		return dsec.Errorf(dsec.CodeUnsupported, "a stream that sends both ways needs HTTP/2")
	}
	if status < 500 {
		return dsec.Errorf(dsec.CodeInvalid, "the request is not well formed")
	}
	return dsec.Errorf(dsec.CodeInternal, "internal error")
}

// What protojson says of a bad request, after its prefix with the position.
var (
	jsonPrefix   = regexp.MustCompile(`^unmarshal message: (?:proto:[\s\x{a0}]*)?`)
	unknownField = regexp.MustCompile(`unknown field "([A-Za-z0-9_.]+)"`)
	badValue     = regexp.MustCompile(`invalid value for ([a-z0-9]+) (?:field|type)(?: ([A-Za-z0-9_]+))?: (.*)`)
	duplicate    = regexp.MustCompile(`duplicate field "?([A-Za-z0-9_.]+)`)
	position     = regexp.MustCompile(`\(line (\d+:\d+)\)`)
	fieldAt      = regexp.MustCompile(`; at field "((?:[^"\\]|\\.)*)"$`)
)

// fromDecoder types what the protocol library found wrong with a request. Of
// its text only what is about the request itself goes back to the caller.
func fromDecoder(code connect.Code, message string) *dsec.Error {
	switch code {
	case connect.CodeInvalidArgument:
		return undecodable(message)
	case connect.CodeResourceExhausted:
		return dsec.Errorf(dsec.CodeInvalid, "the message is larger than %d bytes", MaxMessage)
	case connect.CodeUnimplemented:
		if strings.Contains(message, "compression") {
			return dsec.Errorf(dsec.CodeUnsupported, "Content-Encoding: want gzip or identity")
		}
		return dsec.Errorf(dsec.CodeInvalid, "want exactly one message")
	case connect.CodeUnknown, connect.CodeDeadlineExceeded, connect.CodeCanceled:
		return dsec.Errorf(dsec.CodeInvalid, "the request broke off, or took too long to arrive")
	case connect.CodeInternal, connect.CodeUnavailable, connect.CodeDataLoss:
		return dsec.Errorf(dsec.CodeInternal, "internal error")
	}
	return dsec.Errorf(dsec.CodeInvalid, "the request is not well formed")
}

func undecodable(message string) *dsec.Error {
	if !strings.HasPrefix(message, "unmarshal message") {
		return dsec.Errorf(dsec.CodeInvalid, "the request is not well formed")
	}
	text := jsonPrefix.ReplaceAllString(message, "")
	at := ""
	if m := position.FindStringSubmatch(text); m != nil {
		at = " at " + m[1]
	}
	if m := unknownField.FindStringSubmatch(text); m != nil {
		return dsec.Invalid(snake(m[1]), "no such field%s", at)
	}
	field := ""
	if m := fieldAt.FindStringSubmatch(text); m != nil {
		field = m[1]
	}
	if m := badValue.FindStringSubmatch(text); m != nil {
		return dsec.Invalid(cmp.Or(field, snake(m[2])), "want a value of type %s%s", m[1], at)
	}
	if strings.Contains(text, "invalid UTF-8") { // the decoder does not tell where
		return dsec.Errorf(dsec.CodeInvalid, "a text field is not valid UTF-8")
	}
	if m := duplicate.FindStringSubmatch(text); m != nil {
		return dsec.Invalid(snake(m[1]), "given twice%s", at)
	}
	return dsec.Invalid(field, "a value of another type than the field has, or no JSON%s", at)
}

// snake turns a JSON name into the field's own: memoryBytes, memory_bytes.
func snake(name string) string {
	var b strings.Builder
	for _, r := range name {
		if 'A' <= r && r <= 'Z' {
			b.WriteByte('_')
			r += 'a' - 'A'
		}
		b.WriteRune(r)
	}
	return b.String()
}
