package measure

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func TestTargets(t *testing.T) {
	for _, c := range []struct {
		d         direction
		value     float64
		must, aim float64
		met       string
	}{
		{AtMost, 1, 2, 1, "aim"}, {AtMost, 1.5, 2, 1, "must"}, {AtMost, 3, 2, 1, "no"},
		{AtLeast, 40, 10, 40, "aim"}, {AtLeast, 10, 10, 40, "must"}, {AtLeast, 9, 10, 40, "no"},
	} {
		if got := NewRow("x", "", "", c.value).Target(c.d, c.must, c.aim).Met; got != c.met {
			t.Errorf("%v of %v, %v: met %q, want %q", c.value, c.must, c.aim, got, c.met)
		}
	}
}

func TestReportIsWritten(t *testing.T) {
	dir := t.TempDir()
	p := Report{JSON: filepath.Join(dir, "results", "x.json"), Markdown: filepath.Join(dir, "X.md"), Title: "T", Command: "make x", Notes: "below"}
	r := NewRow("I1_mb_s", "what", "MB/s", 123.456).Target(AtLeast, 100, 200).Against("tar", 50).With([]string{"seccomp"}).Noted("a note")
	if err := p.Write([]Row{r}); err != nil {
		t.Fatal(err)
	}
	b, err := os.ReadFile(p.JSON)
	if err != nil {
		t.Fatal(err)
	}
	var rows []map[string]any
	if err := json.Unmarshal(b, &rows); err != nil || len(rows) != 1 {
		t.Fatalf("%v: %s", err, b)
	}
	for field, want := range map[string]any{"id": "I1_mb_s", "value": 123.5, "unit": "MB/s", "rival": "tar", "rival_value": 50.0, "met": "must"} {
		if rows[0][field] != want {
			t.Errorf("%s is %v, want %v", field, rows[0][field], want)
		}
	}
	text, err := os.ReadFile(p.Markdown)
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"# T", "`make x`", "| I1_mb_s | what | 123.5 MB/s |", "below", "a note"} {
		if !strings.Contains(string(text), want) {
			t.Errorf("%q is not in:\n%s", want, text)
		}
	}

	// A run of some of the rows leaves the others.
	if err := p.Write([]Row{NewRow("I2_ms", "what", "ms", 5)}); err != nil {
		t.Fatal(err)
	}
	if err := p.Write([]Row{NewRow("I2_ms", "what", "ms", 6)}); err != nil {
		t.Fatal(err)
	}
	if b, err = os.ReadFile(p.JSON); err != nil {
		t.Fatal(err)
	}
	if rows = nil; json.Unmarshal(b, &rows) != nil || len(rows) != 2 || rows[0]["value"] != 123.5 || rows[1]["value"] != 6.0 {
		t.Errorf("after a run of one row: %s", b)
	}
	if err := os.WriteFile(p.JSON, []byte("{"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := p.Write([]Row{r}); err == nil {
		t.Error("what cannot be read is replaced")
	}
}
