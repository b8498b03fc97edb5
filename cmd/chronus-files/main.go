//go:build linux

// Chronus-files serves the calls for files of one sandbox. The node's launcher
// starts it when the first such call comes, as root of the sandbox, in its root
// and beside its PID namespace, with an empty environment but for the settings of
// Go's runtime. Descriptor 3 is a socket through which the edge hands over the
// connections of such calls. It ends when there were none for a while.
//
// Every path that it opens may have been made by an agent. No process of the
// sandbox has a number for it, to signal, stop or trace it.
package main

import (
	"os"
	"runtime"

	"github.com/opendsec/dsec/internal/chronusfiles"
)

const controlFD = 3

func main() {
	runtime.MemProfileRate = 0 // its tables cost memory, and nobody reads them
	control := os.NewFile(controlFD, "control")
	err := chronusfiles.New().ServeHandOvers(control, chronusfiles.IdleTime)
	if err != nil {
		println("chronus-files:", err.Error()) // nobody reads that but a test
		os.Exit(1)
	}
}
