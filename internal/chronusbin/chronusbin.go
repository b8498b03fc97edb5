// Package chronusbin holds the static chronus that every sandbox starts as its
// PID 1. It is built by `go generate ./...` and not committed; without it the
// module still builds and vets, and only the start of an edge fails.
package chronusbin

import (
	"embed"
	"errors"
)

//go:generate env CGO_ENABLED=0 GOOS=linux go build -trimpath "-ldflags=-s -w" -o bin/chronus ../../cmd/chronus

//go:embed all:bin
var bin embed.FS

// Binary is chronus as an ELF file.
func Binary() ([]byte, error) {
	data, err := bin.ReadFile("bin/chronus")
	if err != nil {
		return nil, errors.New("this dsec was built without chronus: run `go generate ./...` and build it again")
	}
	return data, nil
}
