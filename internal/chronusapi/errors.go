package chronusapi

import (
	"errors"
	"strings"

	"github.com/opendsec/dsec"
)

// ErrNeedGroup answers a start that found no free command group. Nothing was
// started: add a group (backend.Grouper) and start again. It crosses the wire
// as itself, so errors.Is finds it on the edge's side.
var ErrNeedGroup error = &dsec.Error{Code: dsec.CodeExhausted, Message: "no free command group"}

// ErrInterrupt is the cause with which the context of RunCommand is canceled
// where the command is to be interrupted, as Interrupt does it, and no other of
// its session: not one that began when it was just over. Any other end of the
// context leaves the command running.
var ErrInterrupt = errors.New("chronusapi: interrupt the command")

const (
	maxErrorField   = 256
	maxErrorMessage = 4096
)

// error encodes err. What is not a *dsec.Error is our bug, and its text
// stays on this side.
func (e *enc) error(err error) {
	var de *dsec.Error
	if !errors.As(err, &de) {
		de = &dsec.Error{Code: dsec.CodeInternal, Message: "internal error in chronus"}
	}
	e.bool(errors.Is(err, ErrNeedGroup))
	e.str(string(de.Code))
	e.str(cut(de.Field, maxErrorField))
	e.str(cut(de.Message, maxErrorMessage))
}

// error decodes an error that came from a sandbox: an unknown code counts as
// internal, and the texts are made valid UTF-8.
func (d *dec) error() error {
	needGroup := d.bool()
	code := dsec.Code(d.str(64))
	field := strings.ToValidUTF8(d.str(maxErrorField), "\uFFFD")
	message := strings.ToValidUTF8(d.str(maxErrorMessage), "\uFFFD")
	if !d.ok() {
		return errMalformed
	}
	if needGroup {
		return ErrNeedGroup
	}
	if _, known := dsec.Codes[code]; !known {
		code = dsec.CodeInternal
	}
	return &dsec.Error{Code: code, Field: field, Message: message}
}

func cut(s string, n int) string {
	if len(s) > n {
		return s[:n]
	}
	return s
}
