// Package bank holds the map from the cases that the platform must pass to the
// tests that show it: coverage.tsv.
package bank

import (
	"errors"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// The cases. S: the bank of security and reliability; U: what users of such
// platforms report; V: variants of both that are tested here too.
const (
	escape  = "S01 S02 S04 S05 S06 S09 S10 S11 S12 S13 S15 S101"
	abuse   = "S17 S19 S20 S22 S23 S25 S26"
	forgery = "S28 S29 S30 S31 S35 S37 S38"
	leak    = "S39 S40 S43 S44 S45 S46 S48"
	network = "S49 S50 S51 S52 S55 S56 S58 S61 S62 S63 S102 S103"
	crash   = "S64 S65 S66 S67 S68 S69 S70 S71 S73 S74 S76 S79"
	api     = "S80 S81 S82 S84 S86 S87 S88"
	image   = "S89 S90 S91 S93 S95 S97 S98 S99 S100"

	reports  = 48
	variants = 14
)

func ids() (all []string) {
	for _, group := range []string{escape, abuse, forgery, leak, network, crash, api, image} {
		all = append(all, strings.Fields(group)...)
	}
	for n := range reports {
		all = append(all, fmt.Sprintf("U%02d", n+1))
	}
	for n := range variants {
		all = append(all, fmt.Sprintf("V%02d", n+1))
	}
	return all
}

// line is one of coverage.tsv.
type line struct {
	id, what, why string
	tests         []string
}

func table(t *testing.T) (all []line) {
	t.Helper()
	text, err := os.ReadFile("coverage.tsv")
	if err != nil {
		t.Fatal(err)
	}
	for s := range strings.Lines(string(text)) {
		if strings.HasPrefix(s, "#") {
			continue
		}
		f := strings.Split(strings.TrimSuffix(s, "\n"), "\t")
		if len(f) < 3 || len(f) > 4 || f[1] == "" {
			t.Errorf("%q: want id, what, tests, why not here", s)
			continue
		}
		l := line{id: f[0], what: f[1], tests: strings.Fields(f[2])}
		if len(f) == 4 {
			l.why = f[3]
		}
		all = append(all, l)
	}
	return all
}

func TestEveryCaseHasATestOrAReason(t *testing.T) {
	seen := map[string]bool{}
	for _, l := range table(t) {
		if seen[l.id] {
			t.Errorf("%s is there twice", l.id)
		}
		seen[l.id] = true
		if (len(l.tests) == 0) == (l.why == "") {
			t.Errorf("%s (%s): want tests, or the reason why there is none", l.id, l.what)
		}
	}
	want := ids()
	for _, id := range want {
		if !seen[id] {
			t.Errorf("%s is missing", id)
		}
		delete(seen, id)
	}
	for id := range seen {
		t.Errorf("%s is no case", id)
	}
}

func TestEveryTestNamedExists(t *testing.T) {
	root := filepath.Join("..", "..")
	s := source{root: root, funcs: map[string]map[string]bool{}}
	checked := 0
	for _, l := range table(t) {
		for _, name := range l.tests {
			checked++
			if err := s.find(name); err != nil {
				t.Errorf("%s: %s: %v", l.id, name, err)
			}
		}
	}
	if checked < 100 {
		t.Errorf("only %d names were looked for", checked)
	}
	// The control: what is not there is not found.
	for _, name := range []string{"internal/edge.TestNothing", "internal/nothing.TestX", "python/tests/test_server.py::test_nothing", "test/testdata/script/none.txtar", "Test"} {
		if s.find(name) == nil {
			t.Errorf("%s is found", name)
		}
	}
}

// source looks for tests in the source.
type source struct {
	root  string
	funcs map[string]map[string]bool // of a directory or file
}

func (s source) find(name string) error {
	if file, ok := strings.CutSuffix(name, ".txtar"); ok {
		_, err := os.Stat(filepath.Join(s.root, file+".txtar"))
		return err
	}
	where, what, python := strings.Cut(name, "::")
	list := pythonFuncs
	if !python {
		dot := strings.LastIndex(name, ".")
		if dot < 0 {
			return errors.New("want package.Function, file.py::function or a file of a story")
		}
		where, what, list = name[:dot], name[dot+1:], goFuncs
	}
	if s.funcs[where] == nil {
		found, err := list(filepath.Join(s.root, where))
		if err != nil {
			return err
		}
		s.funcs[where] = found
	}
	if !s.funcs[where][what] {
		return errors.New("no such function")
	}
	return nil
}

// goFuncs are the tests of a directory, and the parts of a suite, which are in
// files that are no tests by their names.
func goFuncs(dir string) (map[string]bool, error) {
	files, err := filepath.Glob(filepath.Join(dir, "*.go"))
	if err != nil {
		return nil, err
	}
	if len(files) == 0 {
		return nil, errors.New("no such package")
	}
	found := map[string]bool{}
	for _, file := range files {
		f, err := parser.ParseFile(token.NewFileSet(), file, nil, parser.SkipObjectResolution)
		if err != nil {
			return nil, err
		}
		for _, d := range f.Decls {
			if fn, ok := d.(*ast.FuncDecl); ok && fn.Recv == nil && isTest(fn, file) {
				found[fn.Name.Name] = true
			}
		}
	}
	return found, nil
}

// isTest reports whether the go command would run a function, or the suite of
// the backends, whose functions take a *testing.T and more.
func isTest(fn *ast.FuncDecl, file string) bool {
	params := fn.Type.Params.List
	if strings.HasSuffix(file, "_test.go") {
		name := fn.Name.Name
		return len(params) == 1 && (strings.HasPrefix(name, "Test") || strings.HasPrefix(name, "Fuzz"))
	}
	return strings.HasPrefix(fn.Name.Name, "test") && len(params) == 2
}

var pythonDef = regexp.MustCompile(`(?m)^(?:async )?def (test_\w+)\(`)

func pythonFuncs(file string) (map[string]bool, error) {
	text, err := os.ReadFile(file)
	if err != nil {
		return nil, err
	}
	found := map[string]bool{}
	for _, m := range pythonDef.FindAllSubmatch(text, -1) {
		found[string(m[1])] = true
	}
	return found, nil
}
