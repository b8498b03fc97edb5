package main

import (
	"encoding/json"
	"strings"
	"testing"

	"github.com/opendsec/dsec"
)

// TestStatsSayWhatIsNotCounted: a number that the node does not know is not 0.
func TestStatsSayWhatIsNotCounted(t *testing.T) {
	for files, want := range map[int64]string{dsec.NotCounted: "-", 0: "0", 12: "12"} {
		if row := usageRow("x", dsec.Usage{DiskInodes: files}); row[5] != want {
			t.Errorf("%d: %q, want %q", files, row, want)
		}
		text, err := json.Marshal(viewUsage("x", dsec.Usage{DiskInodes: files}))
		if err != nil || strings.Contains(string(text), "disk_inodes") == (files == dsec.NotCounted) {
			t.Errorf("%d: %s, %v", files, text, err)
		}
	}
}
