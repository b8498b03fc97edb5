package apiserver

import (
	"net/http"
	"testing"

	"github.com/opendsec/dsec"
)

// A key that is not good is not made so by one beside it.
func TestOneKey(t *testing.T) {
	r := newRig(t, newStub("fake"))
	bearer := func(keys ...string) http.Header {
		h := http.Header{}
		for _, k := range keys {
			h.Add("Authorization", "Bearer "+k)
		}
		return h
	}
	both := bearer(r.secret)
	both.Set("X-API-Key", r.secret)
	for name, h := range map[string]http.Header{
		"Authorization": bearer(r.secret), "X-API-Key": {"X-Api-Key": {r.secret}}, "the same twice": bearer(r.secret, r.secret), "in both": both,
	} {
		if _, err := r.server.authenticate(h); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
	other := bearer(r.secret)
	other.Set("X-API-Key", r.other)
	for name, h := range map[string]http.Header{
		"none": {}, "one that is bad behind": bearer(r.secret, "bad"), "one that is bad before": bearer("bad", r.secret), "two projects": bearer(r.secret, r.other),
		"two headers": other, "two X-API-Key": {"X-Api-Key": {r.secret, "bad"}}, "Basic": {"Authorization": {"Basic eDp5"}},
		"Basic beside a good one": {"Authorization": {"Basic eDp5"}, "X-Api-Key": {r.secret}}, "nothing behind Bearer": {"Authorization": {"Bearer "}},
	} {
		if _, err := r.server.authenticate(h); err == nil || dsec.CodeOf(err) != dsec.CodeUnauthenticated {
			t.Errorf("%s: %v, want unauthenticated", name, err)
		}
	}
}
