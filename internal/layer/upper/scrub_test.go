package upper

import (
	"path"
	"strings"
	"testing"

	"github.com/opendsec/dsec"
)

func TestPatterns(t *testing.T) {
	for text, want := range map[string]map[string]bool{
		"/a/b":          {"/a/b": true, "/a": false, "/a/b/c": false, "/x/a/b": false},
		"/a/*":          {"/a/b": true, "/a/.b": true, "/a": false, "/a/b/c": false},
		"/**/x":         {"/x": true, "/a/x": true, "/a/b/x": true, "/x/a": false},
		"/**/*.log":     {"/x.log": true, "/a/b/x.log": true, "/x.log/a": false},
		"/a/**/b/c":     {"/a/b/c": true, "/a/b/b/c": true, "/a/x/b/c": true, "/a/b/x/c": false, "/b/c": false},
		"/a/**":         {"/a/b": true, "/a/b/c": true, "/a": false},
		"/**/a/**/b":    {"/a/b": true, "/x/a/y/b": true, "/b/a": false, "/a/a/b/b": true},
		"/h/[a-c]?/\\*": {"/h/ax/*": true, "/h/dx/*": false, "/h/ax/y": false},
	} {
		for name, want := range want {
			if got := mustPatterns(text)[0].match(strings.Split(name[1:], "/")); got != want {
				t.Errorf("%s of %s: %t", text, name, got)
			}
		}
	}
}

func TestScrubCheck(t *testing.T) {
	long := make([]string, maxPatterns+1)
	for field, s := range map[string]Scrub{
		"scrub.remove[1]": {Remove: []string{"/ok", "relative"}},
		"scrub.keep[0]":   {Keep: []string{"/a/../b"}},
		"scrub.remove[0]": {Remove: []string{"/[a"}},
		"scrub.keep[1]":   {Keep: []string{"/a", "/"}},
		"scrub.keep[2]":   {Keep: []string{"/a", "/b", "/**/**/c"}},
		"scrub.remove":    {Remove: long},
		"scrub.secrets":   {Secrets: "hide"},
	} {
		err := s.Check()
		if e, ok := err.(*dsec.Error); !ok || e.Code != dsec.CodeInvalid || e.Field != field {
			t.Errorf("%s: %v", field, err)
		}
	}
	if err := (&Scrub{Remove: []string{"/a/**/b*"}, Keep: []string{"/**/x"}, Secrets: "keep"}).Check(); err != nil {
		t.Error(err)
	}
}

// matchSimply is what a pattern means, without care for time.
func matchSimply(want, have []string) bool {
	switch {
	case len(want) == 0:
		return len(have) == 0
	case want[0] == anyDirectories && len(want) == 1:
		return len(have) > 0
	case want[0] == anyDirectories:
		return matchSimply(want[1:], have) || len(have) > 0 && matchSimply(want, have[1:])
	case len(have) == 0:
		return false
	}
	ok, _ := path.Match(want[0], have[0])
	return ok && matchSimply(want[1:], have[1:])
}

func FuzzPattern(f *testing.F) {
	f.Add("/**/a/**/b", "/a/a/b/b")
	f.Add("/a/**", "/a")
	f.Add("/**/a", "/b/a")
	f.Add("/**/[", "/b/a")
	f.Fuzz(func(t *testing.T, text, name string) {
		p, err := parsePattern(text)
		if err != nil || len(p.parts) > 10 || len(name) > 40 || !strings.HasPrefix(name, "/") || path.Clean(name) != name || name == "/" {
			return
		}
		parts := strings.Split(name[1:], "/")
		if got, want := p.match(parts), matchSimply(p.parts, parts); got != want {
			t.Errorf("%q of %q: %t, want %t", text, name, got, want)
		}
	})
}
