package dsec_test

import (
	"testing"
	"time"

	"github.com/opendsec/dsec"
)

func TestOutcomeOK(t *testing.T) {
	ran := time.Unix(1, 0)
	for _, c := range []struct {
		name string
		o    dsec.Outcome
		want bool
	}{
		{"that of an error", dsec.Outcome{}, false},
		{"success", dsec.Outcome{Started: ran}, true},
		{"a code", dsec.Outcome{Started: ran, Code: 1}, false},
		{"a signal", dsec.Outcome{Started: ran, Signal: 9}, false},
		{"no memory", dsec.Outcome{Started: ran, OOM: true}, false},
		{"no time", dsec.Outcome{Started: ran, TimedOut: true}, false},
		{"too much output", dsec.Outcome{Started: ran, OutputLimit: true}, false},
	} {
		if got := c.o.OK(); got != c.want {
			t.Errorf("%s: %v", c.name, got)
		}
	}
}

// Which errors must not be scored; libdsec's PlatformError is the same list.
func TestPlatformCodes(t *testing.T) {
	platform := map[dsec.Code]bool{dsec.CodeOutcomeUnknown: true, dsec.CodeUnavailable: true, dsec.CodeLost: true, dsec.CodeInternal: true}
	for code := range dsec.Codes {
		if code.Platform() != platform[code] {
			t.Errorf("%s: Platform is %t", code, code.Platform())
		}
	}
}
