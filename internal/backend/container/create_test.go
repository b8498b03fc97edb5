package container

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec"
)

// Whatever goes wrong, a user reads no word of the kernel and no path of the host.
func TestErrorsOfACreateTellNothingOfTheHost(t *testing.T) {
	kernel := fmt.Errorf("/var/lib/dsec/volumes: %w", unix.EUCLEAN)
	for _, c := range []struct {
		err   error
		code  dsec.Code
		field string
		kept  bool // the message
	}{
		{kernel, dsec.CodeInternal, "", false},
		{dsec.Errorf(dsec.CodeUnsupported, "cgroup: memory cannot be turned on: %w", kernel), dsec.CodeUnsupported, "", false},
		{fmt.Errorf("root: %w", dsec.Errorf(dsec.CodeInternal, "made of %w", kernel)), dsec.CodeInternal, "", false},
		{&dsec.Error{Code: dsec.CodeInternal, Field: "layers", Message: "the image cannot be mounted", Err: kernel}, dsec.CodeInternal, "layers", true},
		{&dsec.Error{Code: dsec.CodeInternal, Field: "layers", Message: "of " + kernel.Error(), Err: kernel}, dsec.CodeInternal, "layers", false},
		{&dsec.Error{Code: dsec.CodeInternal, Message: "the image cannot be mounted", Err: kernel}, dsec.CodeInternal, "", false},
		{&dsec.Error{Code: dsec.CodeExhausted, Field: "limits.disk_bytes", Message: "no room", Err: kernel}, dsec.CodeExhausted, "limits.disk_bytes", true},
		{dsec.Invalid("layers", "want 1"), dsec.CodeInvalid, "layers", true},
	} {
		err := typed(c.err)
		var e *dsec.Error
		if !errors.As(err, &e) || e.Code != c.code || e.Field != c.field {
			t.Errorf("%v became %+v", c.err, err)
			continue
		}
		if strings.Contains(e.Message, "/var") || strings.Contains(e.Message, unix.EUCLEAN.Error()) {
			t.Errorf("a user reads %q", e.Message)
		}
		if kept := strings.Contains(c.err.Error(), e.Message); kept != c.kept {
			t.Errorf("the message of %v became %q", c.err, e.Message)
		}
		if !errors.Is(err, kernel) && errors.Is(c.err, kernel) {
			t.Errorf("the log does not learn of %v", c.err)
		}
	}
	if err := typed(fmt.Errorf("x: %w", context.Canceled)); !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
}
