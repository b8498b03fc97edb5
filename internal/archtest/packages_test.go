package archtest

import (
	"encoding/json"
	"errors"
	"io"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
)

const modulePath = "github.com/opendsec/dsec"

// pkg is what `go list -json` says about one package.
type pkg struct {
	ImportPath   string
	Dir          string
	Doc          string
	Standard     bool
	Imports      []string
	Deps         []string
	GoFiles      []string
	TestImports  []string
	XTestImports []string
}

// rel is the package's path in the module; "." is the root package.
func (p pkg) rel() string { return rel(p.ImportPath) }

func rel(importPath string) string {
	if importPath == modulePath {
		return "."
	}
	return strings.TrimPrefix(importPath, modulePath+"/")
}

func inModule(importPath string) bool {
	return importPath == modulePath || strings.HasPrefix(importPath, modulePath+"/")
}

// isStd reports whether a path is of the standard library: it has no dot in
// its first element.
func isStd(importPath string) bool {
	first, _, _ := strings.Cut(importPath, "/")
	return !strings.Contains(first, ".")
}

var load = sync.OnceValues(func() ([]pkg, error) {
	cmd := exec.Command("go", "list", "-e", "-json=ImportPath,Dir,Doc,Standard,Imports,Deps,GoFiles,TestImports,XTestImports", modulePath+"/...")
	out, err := cmd.Output()
	if err != nil {
		return nil, err
	}
	var pkgs []pkg
	for d := json.NewDecoder(strings.NewReader(string(out))); ; {
		var p pkg
		if err := d.Decode(&p); errors.Is(err, io.EOF) {
			return pkgs, nil
		} else if err != nil {
			return nil, err
		}
		pkgs = append(pkgs, p)
	}
})

// packages lists the module, sorted by path.
func packages(t *testing.T) []pkg {
	t.Helper()
	pkgs, err := load()
	if err != nil {
		t.Fatalf("go list: %v", err)
	}
	return pkgs
}

// find returns one package. Its absence is a failure: a test that looks at
// nothing passes.
func find(t *testing.T, rel string) pkg {
	t.Helper()
	for _, p := range packages(t) {
		if p.rel() == rel {
			return p
		}
	}
	t.Fatalf("go list found no package %s", rel)
	return pkg{}
}

func moduleRoot(t *testing.T) string { return filepath.Clean(find(t, ".").Dir) }
