package chronusfiles

import (
	"bytes"
	"io"
	"strconv"
	"strings"
	"syscall"

	"github.com/opendsec/dsec"
)

// account is whom a file belongs to.
type account struct{ uid, gid uint32 }

// maxAccounts bounds what is read of /etc/passwd and /etc/group.
const maxAccounts = 4 << 20

// lookupAccount finds user, which is name, uid, name:group or uid:gid; empty is
// root. A uid or gid need not be in the sandbox's files. field names the
// request's field in errors.
func lookupAccount(user, field string) (account, error) {
	if user == "" {
		// Root needs no file, so a sandbox without any still works.
		return account{}, nil
	}
	name, group, hasGroup := strings.Cut(user, ":")
	if name == "" || hasGroup && group == "" {
		return account{}, dsec.Invalid(field, "want name, uid, name:group or uid:gid, got %q", user)
	}
	a, err := lookupUser(name, field)
	if err == nil && hasGroup {
		a.gid, err = lookupGroup(group, field)
	}
	return a, err
}

func lookupUser(name, field string) (account, error) {
	uid, numeric, err := parseID(name, field)
	if err != nil {
		return account{}, err
	}
	a := account{uid: uid}
	found := false
	err = eachLine("/etc/passwd", field, func(f [][]byte) bool {
		same := len(f) >= 7 && (string(f[0]) == name || numeric && string(f[2]) == strconv.FormatUint(uint64(uid), 10))
		if !same {
			return false
		}
		u, ok1 := id32(f[2])
		g, ok2 := id32(f[3])
		if found = ok1 && ok2; found {
			a = account{u, g}
		}
		return found
	})
	if err == nil && !found && !numeric {
		err = &dsec.Error{Code: dsec.CodeNotFound, Field: field, Message: "no user " + strconv.Quote(name) + " in the sandbox's /etc/passwd"}
	}
	return a, err
}

func lookupGroup(name, field string) (uint32, error) {
	gid, numeric, err := parseID(name, field)
	if err != nil || numeric {
		return gid, err
	}
	found := false
	err = eachLine("/etc/group", field, func(f [][]byte) bool {
		if len(f) < 3 || string(f[0]) != name {
			return false
		}
		gid, found = id32(f[2])
		return found
	})
	if err == nil && !found {
		err = &dsec.Error{Code: dsec.CodeNotFound, Field: field, Message: "no group " + strconv.Quote(name) + " in the sandbox's /etc/group"}
	}
	return gid, err
}

// parseID reads a decimal id. What looks like a number and is none that an id
// can be is refused, and never taken for a name.
func parseID(s, field string) (id uint32, numeric bool, err error) {
	if strings.Trim(strings.TrimPrefix(s, "-"), "0123456789") != "" {
		return 0, false, nil
	}
	v, err := strconv.ParseUint(s, 10, 32)
	if err != nil || v == 1<<32-1 {
		return 0, false, dsec.Invalid(field, "want an id from 0 to 4294967294, got %q", s)
	}
	return uint32(v), true, nil
}

func id32(b []byte) (uint32, bool) {
	v, err := strconv.ParseUint(string(b), 10, 32)
	return uint32(v), err == nil && v != 1<<32-1
}

// eachLine calls f with the fields of each line, until it returns true. A file
// that is not there has no lines.
func eachLine(path, field string, f func([][]byte) bool) error {
	fl, err := openRegular(path, syscall.O_RDONLY)
	if err == syscall.ENOENT {
		return nil
	}
	if err != nil {
		return fileError(err, field, path)
	}
	defer fl.Close()
	text, err := io.ReadAll(io.LimitReader(fl, maxAccounts+1))
	if err != nil {
		return fileError(err, field, path)
	}
	if len(text) > maxAccounts {
		return dsec.Invalid(field, "the sandbox's %s is larger than %d bytes", path, maxAccounts)
	}
	for line := range bytes.Lines(text) {
		if f(bytes.Split(bytes.TrimRight(line, "\n"), []byte{':'})) {
			return nil
		}
	}
	return nil
}
