package blob

import (
	"strings"

	"github.com/opendsec/dsec"
)

// MaxKey is the length of the longest key in bytes.
const MaxKey = 512

// maxPart is the longest name that every file system takes, less what a driver may add.
const maxPart = 200

// CheckKey reports what is wrong with a key. A key is parts of letters, digits,
// '_', '-' and '.' between single slashes; no part begins with a dot, so that it
// neither leaves a directory nor meets what a driver keeps for itself. No key may
// be the directory of another one.
func CheckKey(key string) error {
	if len(key) == 0 || len(key) > MaxKey {
		return dsec.Invalid("key", "a blob's key has 1 to %d bytes, this one %d", MaxKey, len(key))
	}
	for part := range strings.SplitSeq(key, "/") {
		if !ValidPart(part) {
			return dsec.Invalid("key", "%.64q in a blob's key: want 1 to %d letters, digits, '_', '-' and '.', not first a dot", part, maxPart)
		}
	}
	return nil
}

// CheckPrefix reports what is wrong with a prefix of keys; the empty one has all.
func CheckPrefix(prefix string) error {
	if prefix == "" {
		return nil
	}
	if strings.HasSuffix(prefix, "/") {
		prefix += "x"
	}
	return CheckKey(prefix)
}

// ValidPart reports whether a name can stand between two slashes of a key.
func ValidPart(name string) bool {
	if len(name) == 0 || len(name) > maxPart || name[0] == '.' {
		return false
	}
	for _, c := range []byte(name) {
		switch {
		case 'a' <= c && c <= 'z', 'A' <= c && c <= 'Z', '0' <= c && c <= '9', c == '_', c == '-', c == '.':
		default:
			return false
		}
	}
	return true
}
