package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// ran is a run of two packages, as `go test -json` prints it.
const ran = `{"Action":"start","Package":"m/a"}
{"Action":"run","Package":"m/a","Test":"TestGood"}
{"Action":"output","Package":"m/a","Test":"TestGood","Output":"noise of a good test\n"}
{"Action":"pass","Package":"m/a","Test":"TestGood","Elapsed":0}
{"Action":"output","Package":"m/a","Test":"TestRoot","Output":"    a_test.go:7: needs root: running as uid 1000\n"}
{"Action":"output","Package":"m/a","Test":"TestRoot","Output":"--- SKIP: TestRoot (0.00s)\n"}
{"Action":"skip","Package":"m/a","Test":"TestRoot","Elapsed":0}
{"Action":"output","Package":"m/a","Test":"TestHeld","Output":"    a_test.go:9: needs root: held back by DSEC_WITHOUT\n"}
{"Action":"skip","Package":"m/a","Test":"TestHeld","Elapsed":0}
{"Action":"pass","Package":"m/a","Elapsed":0.1}
`

const broke = `{"Action":"output","Package":"m/b","Test":"TestBad","Output":"    b_test.go:3: got 1, want 2\n"}
{"Action":"fail","Package":"m/b","Test":"TestBad","Elapsed":0}
{"Action":"fail","Package":"m/b","Elapsed":0.1}
{"Action":"build-output","Package":"m/c","Output":"c.go:1: undefined: x\n"}
{"Action":"fail","Package":"m/c","Elapsed":0}
`

func sum(t *testing.T, input, skips string) (string, bool) {
	t.Helper()
	file := ""
	if skips != "" {
		file = filepath.Join(t.TempDir(), "skips")
		if err := os.WriteFile(file, []byte(skips), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	var out strings.Builder
	s := newSummary(&out)
	if err := s.readGo(strings.NewReader(input)); err != nil {
		t.Fatal(err)
	}
	ok := s.report(file)
	return out.String(), ok
}

func TestASummaryCountsAndJudges(t *testing.T) {
	for _, tc := range []struct {
		name, input, skips string
		ok                 bool
		want               []string
	}{
		{"skips are shown", ran, "", true, []string{"SKIP m/a TestRoot: needs root: running as uid 1000", "1 held back", "1 passed, 0 failed, 1 skipped\n"}},
		{"a listed skip is allowed", ran, "# why\na TestRo* no root there\n", true, []string{"1 passed, 0 failed, 1 skipped\n"}},
		{"another skip is not", ran, "a TestOther why\n", false, []string{"SKIP, not in"}},
		{"a package's name does not match a part of another's", ran, "/a TestRoot why\n", false, []string{"SKIP, not in"}},
		{"a list with a line cut short is refused", ran, "a TestRoot\n", false, []string{"skips:1: want PACKAGE TEST REASON"}},
		{"failures are shown and counted once", ran + broke, "", false, []string{"b_test.go:3: got 1, want 2", "c.go:1: undefined: x", "FAIL m/c", "1 passed, 2 failed, 1 skipped\n"}},
		{"nothing is no success", "", "", false, []string{"no test ran", "0 passed, 0 failed"}},
		{"the go command's own words pass through", "go: cannot find main module\n" + ran, "", true, []string{"go: cannot find main module\n"}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			out, ok := sum(t, tc.input, tc.skips)
			if ok != tc.ok {
				t.Errorf("good: %v, want %v\n%s", ok, tc.ok, out)
			}
			for _, want := range tc.want {
				if !strings.Contains(out, want) {
					t.Errorf("no %q in:\n%s", want, out)
				}
			}
			if strings.Contains(out, "noise of a good test") {
				t.Errorf("output of a passed test is shown:\n%s", out)
			}
		})
	}
}

// Also of a test that passed but for a part of it.
func TestWhatWasSkippedIsToRunAgain(t *testing.T) {
	s := newSummary(&strings.Builder{})
	const part = `{"Action":"skip","Package":"m/d","Test":"TestShells/dash/old"}
{"Action":"pass","Package":"m/d","Test":"TestShells/bash"}
{"Action":"pass","Package":"m/d","Test":"TestShells"}
`
	if err := s.readGo(strings.NewReader(ran + part)); err != nil {
		t.Fatal(err)
	}
	if got := s.againPattern(); got != "^(TestHeld|TestRoot|TestShells)$" {
		t.Errorf("got %s", got)
	}
}

func TestJUnitIsCountedAlike(t *testing.T) {
	file := filepath.Join(t.TempDir(), "junit.xml")
	const xml = `<?xml version="1.0"?><testsuites><testsuite>
<testcase classname="tests.test_a" name="test_good"/>
<testcase classname="tests.test_a" name="test_bad"><failure message="no">trace</failure></testcase>
<testcase classname="tests.test_a" name="test_error"><error message="setup"/></testcase>
<testcase classname="tests.test_a" name="test_root"><skipped message="needs root"/></testcase>
</testsuite></testsuites>`
	if err := os.WriteFile(file, []byte(xml), 0o600); err != nil {
		t.Fatal(err)
	}
	var out strings.Builder
	s := newSummary(&out)
	if err := s.readJUnit(file); err != nil {
		t.Fatal(err)
	}
	if s.report("") || !strings.Contains(out.String(), "SKIP tests.test_a test_root: needs root\n1 passed, 2 failed, 1 skipped\n") {
		t.Errorf("got:\n%s", out.String())
	}
}
