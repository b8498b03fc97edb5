package main

import (
	"log/slog"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/backend"
	"github.com/opendsec/dsec/internal/backend/fake"
)

// backendKind is a kind of sandbox that this binary can offer.
type backendKind struct {
	kind dsec.Kind
	open func(cfg *Config, log *slog.Logger) (backend.Backend, error)
}

// backends is the list of all of them.
var backends = []backendKind{
	{dsec.KindContainer, openContainer},
	{dsec.KindFake, func(*Config, *slog.Logger) (backend.Backend, error) { return fake.New(fake.Options{}), nil }},
}

func findBackend(name string) (backendKind, bool) {
	for _, b := range backends {
		if string(b.kind) == name {
			return b, true
		}
	}
	return backendKind{}, false
}

func backendNames() []string {
	var names []string
	for _, b := range backends {
		names = append(names, string(b.kind))
	}
	return names
}
