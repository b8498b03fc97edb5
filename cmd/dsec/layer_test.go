package main

import (
	"errors"
	"testing"

	"github.com/opendsec/dsec"
)

// TestImportNamesWhatWasGiven: who imports knows of a file, a name and a flag, and
// not of the fields of the call.
func TestImportNamesWhatWasGiven(t *testing.T) {
	for field, want := range map[string]string{
		"archive": "a.tar: bad (invalid)", "name": "NAME: bad (invalid)", "select": "--select: bad (invalid)",
		"manifest": "a.tar: manifest: bad (invalid)", "": "bad (invalid)",
	} {
		if got := line(ofImport(dsec.Invalid(field, "bad"), "a.tar")); got != want {
			t.Errorf("%s: %q, want %q", field, got, want)
		}
	}
	if got := line(ofImport(dsec.Invalid("archive", "bad"), "-")); got != "standard input: bad (invalid)" {
		t.Error(got)
	}
	if err := errors.New("of the disk"); ofImport(err, "a.tar") != err {
		t.Error("an error of this machine is changed")
	}
}
