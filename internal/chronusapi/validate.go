package chronusapi

import (
	"strings"
	"time"

	"github.com/opendsec/dsec"
)

// More limits, of single fields.
const (
	MaxStdin      = 1 << 20             // bytes of first input in a StartRequest
	MaxListedArgv = 4096                // bytes of argv that Processes shows
	MaxList       = 1000                // entries of one ListDir
	MaxTimeout    = 30 * 24 * time.Hour // of a command
	maxUser       = 256
	maxSessionID  = 64
)

// Validate checks what can be checked without the sandbox. Fields are named
// as below "command.".
func (c *Command) Validate() error {
	switch {
	case len(c.Argv) == 0 && c.Shell == "":
		return dsec.Invalid("command.argv", "want a program, or a shell text in command.shell")
	case len(c.Argv) > 0 && c.Shell != "":
		return dsec.Invalid("command.argv", "want argv or shell, not both")
	case len(c.Argv) > 0 && c.Argv[0] == "":
		return dsec.Invalid("command.argv", "want a program as the first element, got an empty string")
	case strings.IndexByte(c.Shell, 0) >= 0:
		return dsec.Invalid("command.shell", "want text without NUL bytes")
	}
	size := len(c.Shell)
	if err := checkList("command.argv", c.Argv, &size); err != nil {
		return err
	}
	if err := checkEnv("command.env", c.Env, &size); err != nil {
		return err
	}
	if err := checkCwd("command.cwd", c.Cwd); err != nil {
		return err
	}
	if err := checkUser("command.user", c.User); err != nil {
		return err
	}
	return checkLimits("command.", c.Timeout, c.OutputLimit)
}

// Validate checks what can be checked without the sandbox.
func (r *StartRequest) Validate() error {
	if err := r.Command.Validate(); err != nil {
		return err
	}
	if r.PTY != nil {
		if err := checkSize(*r.PTY); err != nil {
			return err
		}
	}
	if len(r.Stdin) > MaxStdin {
		return dsec.Invalid("stdin", "want at most %d bytes, got %d: open stdin and write the rest", MaxStdin, len(r.Stdin))
	}
	return nil
}

// Validate checks what can be checked without the sandbox.
func (r *SessionRequest) Validate() error {
	size := 0
	if err := checkEnv("env", r.Env, &size); err != nil {
		return err
	}
	if err := checkCwd("cwd", r.Cwd); err != nil {
		return err
	}
	return checkUser("user", r.User)
}

// Validate checks what can be checked without the sandbox.
func (c *SessionCommand) Validate() error {
	switch {
	case c.Session == "" || len(c.Session) > maxSessionID:
		return dsec.Invalid("session_id", "want the ID of a session")
	case len(c.Command) > MaxArgBytes:
		return dsec.Invalid("command", "want at most %d bytes, got %d", MaxArgBytes, len(c.Command))
	case strings.IndexByte(c.Command, 0) >= 0:
		return dsec.Invalid("command", "want text without NUL bytes")
	}
	return checkLimits("", c.Timeout, c.OutputLimit)
}

// Validate checks what can be checked without the sandbox.
func (r *WriteRequest) Validate() error {
	if r.Mode > 0o7777 {
		return dsec.Invalid("mode", "want permission bits, at most 07777, got 0%o", r.Mode)
	}
	if err := checkPath("path", r.Path); err != nil {
		return err
	}
	return checkUser("user", r.User)
}

// Validate checks what can be checked without the sandbox.
func (r *UploadRequest) Validate() error {
	if err := checkPath("path", r.Path); err != nil {
		return err
	}
	return checkUser("user", r.User)
}

func checkList(field string, list []string, size *int) error {
	if len(list) > MaxArgs {
		return dsec.Invalid(field, "want at most %d elements, got %d", MaxArgs, len(list))
	}
	for i, s := range list {
		if strings.IndexByte(s, 0) >= 0 {
			return dsec.Invalid(field, "want elements without NUL bytes; element %d has one", i)
		}
		*size += len(s)
	}
	if *size > MaxArgBytes {
		return dsec.Invalid(field, "want at most %d bytes of argv and env together, got %d", MaxArgBytes, *size)
	}
	return nil
}

func checkEnv(field string, env []string, size *int) error {
	for i, kv := range env {
		// A value may have new lines, as keys in PEM do; a name may not.
		name, _, ok := strings.Cut(kv, "=")
		if !ok || name == "" || strings.IndexByte(name, '\n') >= 0 {
			return dsec.Invalid(field, "want NAME=VALUE; element %d is not", i)
		}
	}
	return checkList(field, env, size)
}

func checkCwd(field, cwd string) error {
	if cwd == "" {
		return nil
	}
	return checkPath(field, cwd)
}

func checkPath(field, path string) error {
	switch {
	case path == "" || path[0] != '/':
		return dsec.Invalid(field, "want an absolute path")
	case len(path) >= MaxPath:
		return dsec.Invalid(field, "want less than %d bytes, got %d", MaxPath, len(path))
	case strings.IndexByte(path, 0) >= 0:
		return dsec.Invalid(field, "want a path without NUL bytes")
	}
	return nil
}

func checkUser(field, user string) error {
	if len(user) > maxUser || strings.IndexByte(user, 0) >= 0 || strings.IndexByte(user, '\n') >= 0 {
		return dsec.Invalid(field, "want a name or uid, with :group or :gid if wanted, in at most %d bytes", maxUser)
	}
	return nil
}

func checkLimits(prefix string, timeout time.Duration, output int64) error {
	if timeout < 0 || timeout > MaxTimeout {
		return dsec.Invalid(prefix+"timeout", "want 0 (none) to %v, got %v", MaxTimeout, timeout)
	}
	if output < 0 {
		return dsec.Invalid(prefix+"output_limit", "want 0 (none) or a count of bytes, got %d", output)
	}
	return nil
}

func checkSize(w WindowSize) error {
	if w.Rows == 0 || w.Cols == 0 {
		return dsec.Invalid("pty", "want rows and columns of at least 1, got %dx%d", w.Rows, w.Cols)
	}
	return nil
}

func checkSignal(signal int) error {
	if signal < 1 || signal > 64 {
		return dsec.Invalid("signal", "want 1 to 64, got %d", signal)
	}
	return nil
}

func checkTag(tag uint64) error {
	if tag == 0 {
		return dsec.Invalid("tag", "want a number of at least 1, got 0")
	}
	return nil
}

// checkRange checks the range of a Read; length -1 is up to the end.
func checkRange(path string, offset, length int64) error {
	if offset < 0 {
		return dsec.Invalid("offset", "want 0 or more, got %d", offset)
	}
	if length < -1 {
		return dsec.Invalid("length", "want a count of bytes, or -1 for all, got %d", length)
	}
	return checkPath("path", path)
}
