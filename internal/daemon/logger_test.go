package daemon

import (
	"os"
	"os/exec"
	"testing"
)

// A process that logs lives through the reader of its log.
func TestLoggerWithoutAReader(t *testing.T) {
	if os.Getenv("DSEC_TEST_LOGS") != "" {
		log, err := Logger(os.Stderr, "info")
		if err != nil {
			os.Exit(2)
		}
		log.Info("nobody reads this")
		os.Exit(7)
	}
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	_ = r.Close()
	cmd := exec.Command(os.Args[0], "-test.run=^TestLoggerWithoutAReader$")
	cmd.Env, cmd.Stderr = append(os.Environ(), "DSEC_TEST_LOGS=1"), w
	err = cmd.Run()
	_ = w.Close()
	if cmd.ProcessState == nil || cmd.ProcessState.ExitCode() != 7 {
		t.Errorf("it ended with %v, want code 7", err)
	}
}
