package main

import (
	"bytes"
	"io"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/opendsec/dsec"
)

func TestProgressLines(t *testing.T) {
	for _, tt := range []struct {
		bytes, size int64
		took        time.Duration
		want        string
	}{
		{0, 100, time.Second, ""},
		{3 << 20, 0, 2 * time.Second, "3 MiB, 1.5 MiB/s"},
		{25 << 20, 100 << 20, 5 * time.Second, "[######------------------] 25% of 100 MiB, 5 MiB/s, 15s left"},
		{100, 100, time.Second, "100 bytes sent, being converted"},
		{1, 1 << 40, 0, "[------------------------] 0% of 1 TiB, 1000 bytes/s, "},
	} {
		m := &meter{}
		m.set(tt.bytes, tt.size)
		if got := m.line(tt.took); got != tt.want && (tt.took != 0 || !strings.HasPrefix(got, tt.want)) {
			t.Errorf("%d of %d after %s: %q, want %q", tt.bytes, tt.size, tt.took, got, tt.want)
		}
	}
}

// Where standard error is no terminal there is nothing to be seen unless it is asked
// for, and what reads through no meter reads the same.
func TestProgressIsForTerminals(t *testing.T) {
	var stderr bytes.Buffer
	pipe, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _, _ = pipe.Close(), w.Close() }()
	for _, e := range []*env{{stderr: &stderr}, {stderr: w}} {
		for _, how := range []string{"auto", "none"} {
			if m, err := startMeter(e, how); m != nil || err != nil {
				t.Errorf("%s: %v, %v", how, m, err)
			}
		}
	}
	if _, err := startMeter(&env{stderr: &stderr}, "loud"); dsec.CodeOf(err) != dsec.CodeInvalid {
		t.Errorf("loud: %v", err)
	}
	m, err := startMeter(&env{stderr: &stderr}, "plain")
	if err != nil || m == nil {
		t.Fatal(err)
	}
	for _, meter := range []*meter{nil, m} {
		b, err := io.ReadAll(meter.reader(strings.NewReader("text"), 4))
		if err != nil || string(b) != "text" {
			t.Errorf("%q, %v", b, err)
		}
		meter.stop()
	}
	if m.bytes != 4 || m.size != 4 {
		t.Errorf("counted %d of %d", m.bytes, m.size)
	}
}
