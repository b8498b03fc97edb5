package convert

import (
	"cmp"
	"path"
	"slices"
	"strconv"
	"strings"
	"unicode"

	v1 "github.com/google/go-containerregistry/pkg/v1"

	"github.com/opendsec/dsec"
)

// Config is what an image says about the processes made of it. It is data for
// processes inside a sandbox; nothing on the host ever runs with it.
type Config struct {
	Env        []string `json:"env,omitempty"` // KEY=VALUE
	User       string   `json:"user,omitempty"`
	Workdir    string   `json:"workdir,omitempty"` // absolute, clean
	Entrypoint []string `json:"entrypoint,omitempty"`
	Cmd        []string `json:"cmd,omitempty"`
}

// Under is what a sandbox of both is told, where over is of the layer above.
func (c Config) Under(over Config) Config {
	c.Env = MergeEnv(c.Env, over.Env)
	c.User, c.Workdir = cmp.Or(over.User, c.User), cmp.Or(over.Workdir, c.Workdir)
	if len(over.Entrypoint)+len(over.Cmd) > 0 {
		c.Entrypoint, c.Cmd = over.Entrypoint, over.Cmd
	}
	return c
}

// MergeEnv is base with what over says; both have no name twice, and the
// result shares memory with base where over is empty.
func MergeEnv(base, over []string) []string {
	if len(over) == 0 {
		return base
	}
	if len(base) == 0 {
		return over
	}
	out := make([]string, 0, len(base)+len(over))
	for _, kv := range base {
		name := kv[:strings.IndexByte(kv, '=')+1]
		if name == "" || !slices.ContainsFunc(over, func(o string) bool { return strings.HasPrefix(o, name) }) {
			out = append(out, kv)
		}
	}
	return append(out, over...)
}

// Bounds of a configuration; execve(2) would refuse more.
const (
	maxConfigStrings = 4096
	maxConfigBytes   = 1 << 20
	maxConfigString  = 128 << 10
)

func newConfig(c v1.Config) (Config, error) {
	cfg := Config{Env: c.Env, User: c.User, Workdir: c.WorkingDir, Entrypoint: c.Entrypoint, Cmd: c.Cmd}
	if cfg.Workdir != "" {
		// Images write a slash at the end; it means nothing.
		if w := strings.TrimRight(cfg.Workdir, "/"); w != "" {
			cfg.Workdir = w
		} else {
			cfg.Workdir = "/"
		}
	}
	return cfg, cfg.Validate()
}

// Validate checks what came from an image or from a file of the store. Its
// errors are invalid and name the field as the image's configuration does.
func (c Config) Validate() error {
	total := 0
	for _, list := range []struct {
		field  string
		values []string
	}{{"config.Env", c.Env}, {"config.Entrypoint", c.Entrypoint}, {"config.Cmd", c.Cmd}} {
		if len(list.values) > maxConfigStrings {
			return dsec.Invalid(list.field, "%d strings, want at most %d", len(list.values), maxConfigStrings)
		}
		for i, v := range list.values {
			field := list.field + "[" + strconv.Itoa(i) + "]"
			if len(v) > maxConfigString || strings.IndexByte(v, 0) >= 0 {
				return dsec.Invalid(field, "want at most %d bytes and no NUL", maxConfigString)
			}
			if total += len(v); total > maxConfigBytes {
				return dsec.Invalid(field, "the configuration has more than %d bytes", maxConfigBytes)
			}
			if list.field == "config.Env" && strings.IndexByte(v, '=') < 1 {
				return dsec.Invalid(field, "want NAME=VALUE")
			}
		}
	}
	if err := validateWorkdir(c.Workdir); err != nil {
		return err
	}
	return validateUser(c.User)
}

func validateWorkdir(dir string) error {
	const field = "config.WorkingDir"
	switch {
	case dir == "":
		return nil
	case len(dir) > maxPath || strings.IndexByte(dir, 0) >= 0:
		return dsec.Invalid(field, "want at most %d bytes and no NUL", maxPath)
	case dir[0] != '/' || path.Clean(dir) != dir:
		return dsec.Invalid(field, "%s, want an absolute path without \".\", \"..\" and double slashes", quote(dir))
	}
	// A path into these can mean another place for every process.
	for _, top := range []string{"/proc", "/sys", "/dev"} {
		if dir == top || strings.HasPrefix(dir, top+"/") {
			return dsec.Invalid(field, "%s, want a directory of the image, not below %s", quote(dir), top)
		}
	}
	return nil
}

func validateUser(user string) error {
	const field = "config.User"
	if user == "" {
		return nil
	}
	if len(user) > 256 {
		return dsec.Invalid(field, "%d bytes, want at most 256", len(user))
	}
	name, group, both := strings.Cut(user, ":")
	if name == "" || both && group == "" || strings.Contains(group, ":") {
		return dsec.Invalid(field, "%s, want user, or user:group", quote(user))
	}
	for _, part := range []string{name, group} {
		digits := part != "" && strings.Trim(strings.TrimPrefix(part, "-"), "0123456789") == "" // as chronus tells
		if n, err := strconv.ParseUint(part, 10, 32); digits && (err != nil || n == 1<<32-1) {
			return dsec.Invalid(field, "%s, want numbers from 0 to %d", quote(user), int64(1<<32-2))
		}
		if strings.ContainsFunc(part, func(r rune) bool {
			return r == '/' || r == ',' || r == unicode.ReplacementChar || unicode.IsSpace(r) || !unicode.IsGraphic(r)
		}) {
			return dsec.Invalid(field, "%s, want names without slashes, commas, spaces and control characters", quote(user))
		}
	}
	return nil
}
