package blob

import (
	"errors"
	"io"
	"io/fs"
	"os"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec"
)

// Keys let a store know who asks. They print as nothing.
type Keys struct {
	ID, Secret string
	Token      string // of a session; mostly empty
}

// String implements fmt.Stringer.
func (Keys) String() string { return "(keys)" }

// GoString implements fmt.GoStringer.
func (Keys) GoString() string { return "(keys)" }

// Credentials say where the keys of a store are.
type Credentials struct {
	// File is in the format of AWS's shared credentials file, of which the section
	// [default] counts. Only its owner, who is root or this process's user, may be
	// able to read it.
	File string
	// Env looks up AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and AWS_SESSION_TOKEN where
	// File is empty; nil finds none.
	Env func(string) (string, bool)
}

// credentialsField is what errors name.
const credentialsField = "store_credentials"

// Keys reads them now. The error is invalid where there are none.
func (c Credentials) Keys() (Keys, error) {
	if c.File != "" {
		return readKeys(c.File)
	}
	var k Keys
	if c.Env != nil {
		k.ID, _ = c.Env("AWS_ACCESS_KEY_ID")
		k.Secret, _ = c.Env("AWS_SECRET_ACCESS_KEY")
		k.Token, _ = c.Env("AWS_SESSION_TOKEN")
	}
	if k.ID == "" || k.Secret == "" {
		return Keys{}, dsec.Invalid(credentialsField, "the store needs keys: want a file, or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY in the environment")
	}
	return k, nil
}

const maxCredentials = 64 << 10 // bytes of a file

func readKeys(path string) (Keys, error) {
	f, err := os.OpenFile(path, os.O_RDONLY|unix.O_NONBLOCK, 0)
	if err != nil {
		return Keys{}, noFile(err)
	}
	defer f.Close()
	var st unix.Stat_t
	if err := unix.Fstat(int(f.Fd()), &st); err != nil {
		return Keys{}, noFile(err)
	}
	switch {
	case st.Mode&unix.S_IFMT != unix.S_IFREG:
		return Keys{}, dsec.Invalid(credentialsField, "is no file")
	case st.Mode&0o077 != 0:
		return Keys{}, dsec.Invalid(credentialsField, "has mode %#o, which others than its owner can use: want 0600", st.Mode&0o777)
	case st.Uid != 0 && int(st.Uid) != os.Geteuid():
		return Keys{}, dsec.Invalid(credentialsField, "belongs to user %d: want root, or the user that dsec runs as", st.Uid)
	}
	b, err := io.ReadAll(io.LimitReader(f, maxCredentials+1))
	if err != nil {
		return Keys{}, noFile(err)
	}
	if len(b) > maxCredentials {
		return Keys{}, dsec.Invalid(credentialsField, "has more than %d bytes", maxCredentials)
	}
	return parseKeys(string(b))
}

func noFile(err error) error {
	if p, ok := errors.AsType[*fs.PathError](err); ok {
		err = p.Err // without the path
	}
	return &dsec.Error{
		Code: dsec.CodeInvalid, Field: credentialsField, Err: err,
		Message: err.Error() + ": want a file that this process may read, with the keys in its section [default]",
	}
}

// parseKeys reads the section [default], or what stands before any section. No
// error holds a value of the file.
func parseKeys(text string) (Keys, error) {
	var k Keys
	section := "default"
	n := 0
	for line := range strings.Lines(text) {
		n++
		line = strings.TrimSpace(line)
		if line == "" || line[0] == '#' || line[0] == ';' {
			continue
		}
		if line[0] == '[' {
			name, ok := strings.CutSuffix(line[1:], "]")
			if !ok {
				return Keys{}, dsec.Invalid(credentialsField, "line %d: want [section]", n)
			}
			section = strings.TrimSpace(name)
			continue
		}
		name, value, ok := strings.Cut(line, "=")
		if !ok {
			return Keys{}, dsec.Invalid(credentialsField, "line %d: want name = value", n)
		}
		if section != "default" {
			continue
		}
		value = strings.TrimSpace(value)
		switch strings.ToLower(strings.TrimSpace(name)) {
		case "aws_access_key_id":
			k.ID = value
		case "aws_secret_access_key":
			k.Secret = value
		case "aws_session_token":
			k.Token = value
		}
	}
	if k.ID == "" || k.Secret == "" {
		return Keys{}, dsec.Invalid(credentialsField, "want aws_access_key_id and aws_secret_access_key in section [default]")
	}
	for _, v := range []string{k.ID, k.Secret, k.Token} {
		if strings.ContainsFunc(v, func(r rune) bool { return r < ' ' || r > '~' }) {
			return Keys{}, dsec.Invalid(credentialsField, "a key has characters that no key has")
		}
	}
	return k, nil
}
