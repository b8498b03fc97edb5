package upper

import (
	"fmt"
	"path"
	"slices"
	"strings"

	"github.com/opendsec/dsec"
)

// What is done with files in which the lint finds secrets.
const (
	SecretsRemove = "remove"
	SecretsKeep   = "keep"
	SecretsRefuse = "refuse"
)

// Scrub says what is not written. A pattern is an absolute path of the sandbox whose
// parts are as of path.Match, and ** for any directories; what is below a directory
// that matches goes with it.
type Scrub struct {
	Remove     []string // beside what is left out by default
	Keep       []string // stays, whatever else says, but for residue of the platform
	NoDefaults bool     // only residue of the platform is left out by default
	Secrets    string   // SecretsRemove where it is empty
}

// Whole leaves all in but residue of the platform.
var Whole = Scrub{NoDefaults: true, Secrets: SecretsKeep}

// IsWhole reports whether nothing else is left out.
func (s *Scrub) IsWhole() bool { return len(s.Remove) == 0 && s.NoDefaults && s.Secrets == SecretsKeep }

// maxPatterns bounds what each file is held against.
const maxPatterns = 256

// Check looks at the patterns. Its errors name the field of a request.
func (s *Scrub) Check() error {
	for field, list := range map[string][]string{"remove": s.Remove, "keep": s.Keep} {
		if len(list) > maxPatterns {
			return dsec.Invalid("scrub."+field, "%d patterns, want at most %d", len(list), maxPatterns)
		}
		for i, text := range list {
			if _, err := parsePattern(text); err != nil {
				return dsec.Invalid(fmt.Sprintf("scrub.%s[%d]", field, i), "%v", err)
			}
		}
	}
	if !slices.Contains([]string{"", SecretsRemove, SecretsKeep, SecretsRefuse}, s.Secrets) {
		return dsec.Invalid("scrub.secrets", "want %s, %s or %s", SecretsRemove, SecretsKeep, SecretsRefuse)
	}
	return nil
}

// Why something is not written.
const (
	reasonPlatform = "platform"
	reasonPath     = "path"
	reasonCache    = "cache"
	reasonHistory  = "history"
	reasonSecret   = "secret"
	reasonSpecial  = "special" // what no layer has: sockets, devices, some attributes
)

// platform is what the platform puts over the layers of every sandbox: what a sandbox
// wrote there is never seen in another.
var platform = mustPatterns("/dev", "/proc", "/sys", "/etc/hostname", "/etc/hosts", "/etc/resolv.conf")

// caches hold what package managers and tools get or make anew. What builds without a
// network need is none: sources and packages that were unpacked.
var caches = slices.Concat(
	mustPatterns("/var/cache/apt/*", "/var/lib/apt/lists/*", "/var/cache/dnf/*", "/var/cache/yum/*", "/var/cache/apk/*", "/var/cache/pacman/pkg/*"),
	inHomes(".cache/pip", ".cache/uv", ".cache/go-build", ".cache/yarn", ".cache/pnpm", ".cache/node-gyp", ".npm/_cacache", ".npm/_logs", ".cargo/registry/cache"),
	anywhere(".pytest_cache", ".mypy_cache", ".ruff_cache"),
)

// histories tell who types at a terminal what was typed before.
var histories = anywhere(".bash_history", ".zsh_history", ".ash_history", ".sh_history", ".history", ".python_history", ".node_repl_history",
	".irb_history", ".lesshst", ".viminfo", ".wget-hsts", ".sqlite_history", ".psql_history", ".mysql_history", ".rediscli_history", ".gdb_history")

func inHomes(names ...string) (list []pattern) {
	for _, name := range names {
		list = append(list, mustPatterns("/root/"+name, "/home/*/"+name)...)
	}
	return list
}

func anywhere(names ...string) (list []pattern) {
	for _, name := range names {
		list = append(list, mustPatterns("/**/"+name)...)
	}
	return list
}

// pattern is one, by its parts. One that asks for nothing but a name is told by it.
type pattern struct {
	parts []string
	name  string // of /**/name without anything special in it
}

func mustPatterns(texts ...string) (list []pattern) {
	for _, text := range texts {
		p, err := parsePattern(text)
		if err != nil {
			panic(err)
		}
		list = append(list, p)
	}
	return list
}

const anyDirectories = "**"

func parsePattern(text string) (p pattern, err error) {
	switch {
	case !strings.HasPrefix(text, "/") || path.Clean(text) != text || text == "/":
		return p, fmt.Errorf("%.200q, want the absolute path of a file, without //, . and .. in it", text)
	case len(text) > 4095 || strings.IndexByte(text, 0) >= 0:
		return p, fmt.Errorf("want at most 4095 bytes, and no NUL")
	}
	p.parts = strings.Split(text[1:], "/")
	for i, part := range p.parts {
		if _, err := path.Match(part, ""); err != nil {
			return p, fmt.Errorf("%.200q is no pattern: %w", part, err)
		}
		if part == anyDirectories && i > 0 && p.parts[i-1] == anyDirectories {
			return p, fmt.Errorf("** twice in a row, want it once")
		}
	}
	if len(p.parts) == 2 && p.parts[0] == anyDirectories && !strings.ContainsAny(p.parts[1], `*?[\`) {
		p.name = p.parts[1]
	}
	return p, nil
}

// match reports whether the parts of a path are what the pattern says. As a last part
// ** is anything below.
func (p pattern) match(parts []string) bool {
	if p.name != "" {
		return parts[len(parts)-1] == p.name
	}
	return matchParts(p.parts, parts)
}

// matchParts goes back to the last ** only: what an earlier one stands for can as well
// be the shortest that fits.
func matchParts(want, have []string) bool {
	backTo, from := -1, 0 // what is behind the last **, and what it is held against
	w, h := 0, 0
	for h < len(have) {
		if w < len(want) {
			if want[w] == anyDirectories {
				if w == len(want)-1 {
					return true
				}
				w++
				backTo, from = w, h
				continue
			}
			if ok, _ := path.Match(want[w], have[h]); ok {
				w, h = w+1, h+1
				continue
			}
		}
		if backTo < 0 {
			return false
		}
		from++
		w, h = backTo, from
	}
	return w == len(want)
}

func matchAny(list []pattern, parts []string) bool {
	return slices.ContainsFunc(list, func(p pattern) bool { return p.match(parts) })
}

// rules are a Scrub that was read.
type rules struct {
	remove, keep []pattern
	defaults     bool
	secrets      string
}

func (s *Scrub) rules() (r rules, err error) {
	if err := s.Check(); err != nil {
		return r, err
	}
	r = rules{remove: mustPatterns(s.Remove...), keep: mustPatterns(s.Keep...), defaults: !s.NoDefaults, secrets: s.Secrets}
	if r.secrets == "" {
		r.secrets = SecretsRemove
	}
	return r, nil
}

// reason tells why a path that is not kept is not written, or nothing.
func (r *rules) reason(parts []string) string {
	switch {
	case matchAny(r.remove, parts):
		return reasonPath
	case r.defaults && matchAny(histories, parts):
		return reasonHistory
	case r.defaults && matchAny(caches, parts):
		return reasonCache
	}
	return ""
}

// maxRemovals bounds the list of a report.
const maxRemovals = 1000

// Report tells what was not written.
type Report struct {
	Removed     []Removal
	RemovedMore int64 // that are not listed
}

// Removal is something that was not written, with what was below it.
type Removal struct {
	Path, Reason string
	Note         string // of a secret: what it looks like
	Files, Bytes int64
}

// Add adds what was not written of another stream.
func (r *Report) Add(o Report) {
	n := min(len(o.Removed), maxRemovals-len(r.Removed))
	r.Removed = append(r.Removed, o.Removed[:n]...)
	r.RemovedMore += o.RemovedMore + int64(len(o.Removed)-n)
}

// begin begins a removal, in the list or beyond it.
func (r *Report) begin(path, reason, note string) *Removal {
	one := Removal{Path: path, Reason: reason, Note: note}
	if len(r.Removed) == maxRemovals {
		r.RemovedMore++
		return &one
	}
	r.Removed = append(r.Removed, one)
	return &r.Removed[len(r.Removed)-1]
}
