package main

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec"
)

// exitInterrupted is the exit code of what a user broke off, as shells have it.
const exitInterrupted = 130

// line is err in one line, with its code.
func line(err error) string {
	e := typed(err)
	return fmt.Sprintf("%s (%s)", strings.Join(strings.Fields(e.Error()), " "), e.Code)
}

func exitCode(err error) int { return dsec.Codes[typed(err).Code].Exit }

// typed gives what this machine refused the code that the platform has for it.
func typed(err error) *dsec.Error {
	if e, ok := errors.AsType[*dsec.Error](err); ok {
		return e
	}
	return ofSystem("", err)
}

// ofSystem is the error of a system call about an argument of the command line;
// field says which, empty if none.
func ofSystem(field string, err error) *dsec.Error {
	text := cause(err)
	if file := fileOf(err); file != "" {
		text = file + ": " + text
	}
	return &dsec.Error{Code: systemCode(err), Field: field, Message: text, Err: err}
}

// fileOf is the file that a system call failed on. What wraps its error says more.
func fileOf(err error) string {
	switch of := err.(type) { //nolint:errorlint // see above
	case *fs.PathError:
		return of.Path
	case *os.LinkError:
		return of.New
	}
	return ""
}

// inSystem is the file that a system call failed on, and why, whatever wraps its error;
// nothing where the platform failed.
func inSystem(err error) (file string, cause error) {
	if _, ok := errors.AsType[*dsec.Error](err); ok {
		return "", nil
	}
	if e, ok := errors.AsType[*fs.PathError](err); ok {
		return e.Path, e.Err
	}
	if e, ok := errors.AsType[*os.LinkError](err); ok {
		return e.New, e.Err
	}
	return "", nil
}

// cause is an error of a system call without the call and its file.
func cause(err error) string {
	if fileOf(err) == "" {
		return err.Error()
	}
	return errors.Unwrap(err).Error()
}

// systemCode is whose fault an error of a system call is.
func systemCode(err error) dsec.Code {
	for _, row := range []struct {
		code   dsec.Code
		errors []error
	}{
		{dsec.CodeNotFound, []error{fs.ErrNotExist}},
		{dsec.CodeDenied, []error{fs.ErrPermission, unix.EROFS}},
		{dsec.CodeConflict, []error{fs.ErrExist, unix.EADDRINUSE, unix.EBUSY, unix.ETXTBSY}},
		{dsec.CodeInvalid, []error{unix.EISDIR, unix.ENOTDIR, unix.ENAMETOOLONG, unix.ELOOP, unix.EINVAL}},
		{dsec.CodeExhausted, []error{unix.ENOSPC, unix.EDQUOT, unix.EFBIG, unix.EMFILE, unix.ENFILE, unix.ENOMEM}},
	} {
		for _, of := range row.errors {
			if errors.Is(err, of) {
				return row.code
			}
		}
	}
	return dsec.CodeInternal
}

// asGiven has an error of a call name what the caller gave: pairs of a field of the
// call and an argument or a flag.
func asGiven(err error, pairs ...string) error {
	de, ok := errors.AsType[*dsec.Error](err)
	if !ok {
		return err
	}
	named := *de
	for i := 0; i < len(pairs); i += 2 {
		if de.Field == pairs[i] {
			named.Field = pairs[i+1]
		}
	}
	return &named
}
