package daemon

import (
	"context"
	"net/http"
	"strings"
)

// Answer is where a stream's handler writes. What it writes goes out at each
// flush, unless it holds flushes back: then at Release. The end of an answer
// goes out in any case. Like a ResponseWriter it is for one goroutine at a time;
// a nil Answer does nothing.
type Answer struct {
	http.ResponseWriter
	held    bool
	pending bool
}

type answerKey struct{}

// HoldAnswers has AnswerOf find the answers of Connect's streams.
func HoldAnswers(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if !strings.HasPrefix(r.Header.Get("Content-Type"), "application/connect+") {
			next.ServeHTTP(w, r)
			return
		}
		a := &Answer{ResponseWriter: w}
		next.ServeHTTP(a, r.WithContext(context.WithValue(r.Context(), answerKey{}, a)))
		a.Release()
	})
}

// AnswerOf is the answer of the call with the context, nil where it is no stream.
func AnswerOf(ctx context.Context) *Answer {
	a, _ := ctx.Value(answerKey{}).(*Answer)
	return a
}

// Hold holds flushes back from now on, or no more. What is held back by then
// goes out with the next flush.
func (a *Answer) Hold(on bool) {
	if a != nil {
		a.held = on
	}
}

// Release sends what is held back.
func (a *Answer) Release() {
	if a != nil && a.pending {
		a.pending = false
		_ = http.NewResponseController(a.ResponseWriter).Flush()
	}
}

// Flush implements http.Flusher.
func (a *Answer) Flush() {
	if a.pending = true; !a.held {
		a.Release()
	}
}

// Unwrap is for http.ResponseController.
func (a *Answer) Unwrap() http.ResponseWriter { return a.ResponseWriter }
