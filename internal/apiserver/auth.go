package apiserver

import (
	"context"
	"net/http"
	"slices"
	"strings"

	"connectrpc.com/connect"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/apierr"
	"github.com/opendsec/dsec/internal/iam"
	"github.com/opendsec/dsec/proto/dsec/v1/dsecv1connect"
)

// projectHeader tells an edge which project a call acts for.
const projectHeader = "Dsec-Project"

// Headers of calls about what is done, for the trajectory: see docs/state.md.
const (
	callerHeader   = "Dsec-Caller"
	actionHeader   = "Dsec-Action-Id"
	syncHeader     = "Dsec-Sync"
	replayedHeader = "Dsec-Replayed"
)

type actionKey struct{}

// action is what a caller says of the call beside what is to be done.
type action struct{ id, sync string }

// withAction has calls to edges carry what the caller said.
func withAction(ctx context.Context, id, sync string) context.Context {
	if id == "" && sync == "" {
		return ctx
	}
	return context.WithValue(ctx, actionKey{}, action{id, sync})
}

// identify says in the header of a call to an edge who makes it.
func identify(ctx context.Context, h http.Header) {
	p := principal(ctx)
	h.Set(projectHeader, p.Project)
	if p.KeyID != "" {
		h.Set(callerHeader, p.KeyID)
	}
	if a, ok := ctx.Value(actionKey{}).(action); ok {
		if a.id != "" {
			h.Set(actionHeader, a.id)
		}
		if a.sync != "" {
			h.Set(syncHeader, a.sync)
		}
	}
}

// markReplayed passes on that an answer is one of an earlier call.
func markReplayed(to, from http.Header) {
	if v := from.Get(replayedHeader); v != "" {
		to.Set(replayedHeader, v)
	}
}

type principalKey struct{}

// gate authenticates a call by its header alone, before a byte of its body is
// read. It stands before every route, so that none can forget it.
func (s *Server) gate(ctx context.Context, spec connect.Spec, _ connect.Peer, h http.Header) (context.Context, error) {
	p, err := s.authenticate(h)
	if err == nil && !p.Admin && strings.HasPrefix(spec.Procedure, "/"+dsecv1connect.AdminServiceName+"/") {
		err = dsec.Errorf(dsec.CodeDenied, "this needs an admin key")
	}
	if err != nil {
		s.metrics.refused(spec.Procedure, err)
		return nil, apierr.Encode(err)
	}
	return withAction(context.WithValue(ctx, principalKey{}, p), h.Get(actionHeader), h.Get(syncHeader)), nil
}

// secret reads the key of a request's header; empty if there is none. Two that
// differ are refused: which of them counts is nothing to guess, and what stands
// before this server may have looked at the other.
func secret(h http.Header) (string, error) {
	keys := slices.Clone(h.Values("X-API-Key"))
	for _, v := range h.Values("Authorization") {
		scheme, key, ok := strings.Cut(v, " ")
		if !ok || !strings.EqualFold(scheme, "Bearer") {
			return "", &dsec.Error{Code: dsec.CodeUnauthenticated, Field: "Authorization", Message: "want Bearer and an API key"}
		}
		keys = append(keys, strings.TrimSpace(key))
	}
	if len(keys) == 0 {
		return "", nil
	}
	for _, k := range keys[1:] {
		if k != keys[0] {
			return "", &dsec.Error{Code: dsec.CodeUnauthenticated, Field: "Authorization", Message: "want one API key, got several that differ"}
		}
	}
	return keys[0], nil
}

// authenticate tells who a request with this header acts for.
func (s *Server) authenticate(h http.Header) (iam.Principal, error) {
	key, err := secret(h)
	if err != nil {
		return iam.Principal{}, err
	}
	return s.iam.Authenticate(key)
}

// principal is who the gate let in. A call that did not pass it has none, and
// panics here rather than act for nobody.
func principal(ctx context.Context) iam.Principal {
	return ctx.Value(principalKey{}).(iam.Principal)
}

// Admin reports whether a request carries an admin key, for what is served
// beside the API.
func (s *Server) Admin(r *http.Request) bool {
	p, err := s.authenticate(r.Header)
	return err == nil && p.Admin
}
