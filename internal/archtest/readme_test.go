package archtest

import (
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/pelletier/go-toml/v2"

	"github.com/opendsec/dsec"
)

// rows returns the cells of the README's table whose header starts with first.
func rows(t *testing.T, first string) [][]string {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(moduleRoot(t), "README.md"))
	if err != nil {
		t.Fatal(err)
	}
	_, table, ok := strings.Cut(string(text), "\n| "+first+" |")
	if !ok {
		t.Fatalf("the README has no table that starts with %q", first)
	}
	table, _, _ = strings.Cut(table, "\n\n")
	var cells [][]string
	for _, line := range strings.Split(table, "\n")[2:] {
		var row []string
		for cell := range strings.SplitSeq(strings.Trim(line, "|"), "|") {
			row = append(row, strings.Trim(cell, " `"))
		}
		cells = append(cells, row)
	}
	return cells
}

func TestTheReadmeListsEveryErrorAsItIs(t *testing.T) {
	seen := map[dsec.Code]bool{}
	for _, row := range rows(t, "code") {
		code := dsec.Code(row[0])
		info, ok := dsec.Codes[code]
		if !ok {
			t.Errorf("README: no such code: %s", code)
			continue
		}
		seen[code] = true
		retry := map[bool]string{true: "yes", false: "no"}[info.Retry]
		want := fmt.Sprint([]string{fmt.Sprint(info.HTTP), info.Connect, info.Python, fmt.Sprint(info.Exit), retry})
		if got := fmt.Sprint(row[1:6]); got != want {
			t.Errorf("README: %s is %s, error.go says %s", code, got, want)
		}
	}
	for code := range dsec.Codes {
		if !seen[code] {
			t.Errorf("README: %s is missing", code)
		}
	}
}

func TestTheReadmeListsTheDefaultsAsTheyAre(t *testing.T) {
	text, err := os.ReadFile(filepath.Join(moduleRoot(t), "cmd/dsec/dsec.toml"))
	if err != nil {
		t.Fatal(err)
	}
	var config map[string]any
	if err := toml.Unmarshal(text, &config); err != nil {
		t.Fatal(err)
	}
	defaults := map[string]string{}
	flatten("", config, defaults)
	for _, row := range rows(t, "key") {
		want, ok := defaults[row[0]]
		if !ok {
			t.Errorf("README: dsec.toml has no %s", row[0])
		} else if row[1] != want {
			t.Errorf("README: %s is %s, dsec.toml says %s", row[0], row[1], want)
		}
		delete(defaults, row[0])
	}
	// These say where other machines and the upper bounds are: the file explains them.
	for key, value := range defaults {
		if value != "" && !strings.HasPrefix(key, "edge.max_limits.") {
			t.Errorf("README: %s = %s is missing", key, value)
		}
	}
}

func flatten(prefix string, values map[string]any, into map[string]string) {
	for key, value := range values {
		switch v := value.(type) {
		case map[string]any:
			flatten(prefix+key+".", v, into)
		case []any:
			into[prefix+key] = strings.Trim(fmt.Sprint(v), "[]")
		default:
			into[prefix+key] = fmt.Sprint(v)
		}
	}
}

var link = regexp.MustCompile(`\]\(([^)#:]+)(#[^)]*)?\)`)

func TestEveryLinkInTheDocsLeadsSomewhere(t *testing.T) {
	checked := 0
	eachFile(t, func(path string, text []byte) {
		if filepath.Ext(path) != ".md" {
			return
		}
		for _, m := range link.FindAllStringSubmatch(string(text), -1) {
			checked++
			if _, err := os.Stat(filepath.Join(moduleRoot(t), filepath.Dir(path), m[1])); err != nil {
				t.Errorf("%s: link to %s: %v", path, m[1], err)
			}
		}
	})
	if checked == 0 {
		t.Error("no link found in any document")
	}
}
