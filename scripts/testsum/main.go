// Command testsum reads what `go test -json` prints (and the JUnit files of
// pytest), shows each package as it ends, the full output of each failed test,
// every skipped test with its reason, and a closing line with the counts:
//
//	go test -json ./... | testsum -skips .ci/skips -again build/test/again
//
// -again leaves a pattern for `go test -run` of every test that was skipped,
// wholly or in a part, for whatever reason: what another target that can do
// more must run, since all others passed.
//
// It exits with 1 if a test or a package failed, if nothing ran, or, with
// -skips, if a test was skipped that the file does not list. A test held back
// by DSEC_WITHOUT is not a skip: another target of the same run runs it.
package main

import (
	"bufio"
	"encoding/json"
	"encoding/xml"
	"flag"
	"fmt"
	"io"
	"maps"
	"os"
	"path"
	"slices"
	"strings"
)

// event is one line of `go test -json`; see `go doc test2json`.
type event struct {
	Action  string
	Package string
	Test    string
	Output  string
	Elapsed float64
}

// summary is what a run came to.
type summary struct {
	out                               io.Writer
	passed, failed, skipped, heldBack int
	again                             map[string]bool // top-level tests of which something was skipped
	skips                             []skip
	output                            map[string][]string // of tests that have not ended
	failedIn                          map[string]bool     // packages with a failed test
}

func newSummary(out io.Writer) *summary {
	return &summary{out: out, again: map[string]bool{}, output: map[string][]string{}, failedIn: map[string]bool{}}
}

type skip struct{ pkg, test, reason string }

func main() {
	skipsFile := flag.String("skips", "", "`file` of the only tests that may be skipped")
	again := flag.String("again", "", "write to a `file` the pattern of the tests of which something was skipped")
	junit := flag.String("junit", "", "read a JUnit `file` instead of go test's JSON on standard input")
	flag.Parse()
	s := newSummary(os.Stdout)
	var err error
	if *junit != "" {
		err = s.readJUnit(*junit)
	} else {
		err = s.readGo(os.Stdin)
	}
	ok := s.report(*skipsFile)
	if err == nil && *again != "" {
		err = os.WriteFile(*again, []byte(s.againPattern()+"\n"), 0o644)
	}
	if err != nil {
		fmt.Fprintf(os.Stderr, "testsum: %v\n", err)
	}
	if err != nil || !ok {
		os.Exit(1)
	}
}

// readGo takes lines that are no JSON (the go command's own errors) for output.
func (s *summary) readGo(r io.Reader) error {
	in := bufio.NewReader(r)
	for {
		line, err := in.ReadString('\n')
		if line != "" {
			var e event
			if line[0] != '{' || json.Unmarshal([]byte(line), &e) != nil {
				fmt.Fprint(s.out, line)
			} else {
				s.add(e)
			}
		}
		if err == io.EOF {
			return nil
		} else if err != nil {
			return err
		}
	}
}

func (s *summary) add(e event) {
	key := e.Package + " " + e.Test
	switch e.Action {
	case "output":
		s.output[key] = append(s.output[key], e.Output)
	case "build-output":
		fmt.Fprint(s.out, e.Output)
	case "pass", "fail", "skip":
		s.end(e, key)
		delete(s.output, key)
	}
}

func (s *summary) end(e event, key string) {
	if e.Test == "" {
		s.endPackage(e, key)
		return
	}
	switch e.Action {
	case "pass":
		s.passed++
	case "fail":
		s.failed++
		s.failedIn[e.Package] = true
		for _, line := range s.output[key] {
			fmt.Fprint(s.out, line)
		}
	case "skip":
		s.skip(skip{e.Package, e.Test, reason(s.output[key])})
	}
}

func (s *summary) endPackage(e event, key string) {
	switch e.Action {
	case "pass":
		fmt.Fprintf(s.out, "ok   %s %.1fs\n", e.Package, e.Elapsed)
	case "skip":
		fmt.Fprintf(s.out, "-    %s has no tests\n", e.Package)
	case "fail":
		for _, line := range s.output[key] {
			fmt.Fprint(s.out, line)
		}
		fmt.Fprintf(s.out, "FAIL %s %.1fs\n", e.Package, e.Elapsed)
		// A package can fail with no failed test: it did not build, or its
		// TestMain, a crash or a race report ended it.
		if !s.failedIn[e.Package] {
			s.failed++
		}
	}
}

func (s *summary) skip(k skip) {
	top, _, _ := strings.Cut(k.test, "/")
	s.again[top] = true
	if strings.Contains(k.reason, "held back by DSEC_WITHOUT") {
		s.heldBack++
		return
	}
	s.skipped++
	s.skips = append(s.skips, k)
}

// againPattern matches the names alone: a test of the same name in another
// package runs once more, which harms nothing.
func (s *summary) againPattern() string {
	return "^(" + strings.Join(slices.Sorted(maps.Keys(s.again)), "|") + ")$"
}

// reason is the text of t.Skip: the last line of a test's output that is not
// the frame around it.
func reason(output []string) string {
	for _, line := range slices.Backward(output) {
		line = strings.TrimSpace(line)
		if line == "" || strings.HasPrefix(line, "---") || strings.HasPrefix(line, "===") {
			continue
		}
		if _, text, ok := strings.Cut(line, ".go:"); ok {
			if _, text, ok := strings.Cut(text, ": "); ok {
				return text
			}
		}
		return line
	}
	return "no reason given"
}

// readJUnit reads the counts of another test runner.
func (s *summary) readJUnit(file string) error {
	b, err := os.ReadFile(file)
	if err != nil {
		return err
	}
	type result struct {
		Message string `xml:"message,attr"`
		Text    string `xml:",chardata"`
	}
	var suites struct {
		Cases []struct {
			Class   string  `xml:"classname,attr"`
			Name    string  `xml:"name,attr"`
			Failure *result `xml:"failure"`
			Error   *result `xml:"error"`
			Skipped *result `xml:"skipped"`
		} `xml:"testsuite>testcase"`
	}
	if err := xml.Unmarshal(b, &suites); err != nil {
		return fmt.Errorf("%s: %w", file, err)
	}
	for _, c := range suites.Cases {
		switch {
		case c.Failure != nil, c.Error != nil:
			s.failed++
		case c.Skipped != nil:
			s.skip(skip{c.Class, c.Name, c.Skipped.Message})
		default:
			s.passed++
		}
	}
	return nil
}

// report prints the end and says whether the run is good.
func (s *summary) report(skipsFile string) bool {
	ok := s.failed == 0
	allowed, err := readSkips(skipsFile)
	if err != nil {
		fmt.Fprintf(s.out, "testsum: %v\n", err)
		return false
	}
	for _, k := range s.skips {
		verdict := "SKIP"
		if skipsFile != "" && !allowed.has(k) {
			verdict, ok = "SKIP, not in "+skipsFile+":", false
		}
		fmt.Fprintf(s.out, "%s %s %s: %s\n", verdict, k.pkg, k.test, k.reason)
	}
	if s.passed+s.failed == 0 {
		fmt.Fprintln(s.out, "no test ran")
		ok = false
	}
	if s.heldBack > 0 {
		fmt.Fprintf(s.out, "%d held back for another target\n", s.heldBack)
	}
	fmt.Fprintf(s.out, "%d passed, %d failed, %d skipped\n", s.passed, s.failed, s.skipped)
	return ok
}

// skipList holds the patterns of a skips file.
type skipList [][2]string

// readSkips reads lines of PACKAGE TEST REASON, where PACKAGE is a path or the
// end of one and both may be patterns of path.Match; # starts a comment.
func readSkips(file string) (skipList, error) {
	if file == "" {
		return nil, nil
	}
	b, err := os.ReadFile(file)
	if err != nil {
		return nil, err
	}
	var list skipList
	for n, line := range strings.Split(string(b), "\n") {
		f := strings.Fields(line)
		if len(f) == 0 || strings.HasPrefix(f[0], "#") {
			continue
		}
		if len(f) < 3 {
			return nil, fmt.Errorf("%s:%d: want PACKAGE TEST REASON", file, n+1)
		}
		for _, pattern := range f[:2] {
			if _, err := path.Match(pattern, ""); err != nil {
				return nil, fmt.Errorf("%s:%d: %s: %w", file, n+1, pattern, err)
			}
		}
		list = append(list, [2]string{f[0], f[1]})
	}
	return list, nil
}

func (l skipList) has(k skip) bool {
	for _, p := range l {
		pkg := k.pkg
		if i := len(pkg) - len(p[0]); i > 0 && pkg[i-1] == '/' {
			pkg = pkg[i:]
		}
		pkgOK, _ := path.Match(p[0], pkg)
		testOK, _ := path.Match(p[1], k.test)
		if pkgOK && testOK {
			return true
		}
	}
	return false
}
