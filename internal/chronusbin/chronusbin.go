// Package chronusbin holds the static programs of a sandbox: chronus, which is
// its PID 1, and chronus-files, which serves its calls for files. They are built
// by `go generate ./...` and not committed; without them the module still builds
// and vets, and only the start of an edge fails.
package chronusbin

import (
	"embed"
	"errors"
)

//go:generate ../../chronus/build bin/chronus
//go:generate env CGO_ENABLED=0 GOOS=linux go build -trimpath "-ldflags=-s -w" -o bin/chronus-files ../../cmd/chronus-files

//go:embed all:bin
var bin embed.FS

// Binary is chronus as an ELF file.
func Binary() ([]byte, error) { return read("chronus") }

// Files is chronus-files as an ELF file.
func Files() ([]byte, error) { return read("chronus-files") }

func read(name string) ([]byte, error) {
	data, err := bin.ReadFile("bin/" + name)
	if err != nil {
		return nil, errors.New("this dsec was built without " + name + ": run `go generate ./...` and build it again")
	}
	return data, nil
}
