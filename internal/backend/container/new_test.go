package container

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/disk"
	"github.com/opendsec/dsec/internal/testutil"
)

// What has been made when something else cannot be is taken down again.
func TestNewThatFailsLeavesNothing(t *testing.T) {
	testutil.Require(t, testutil.Root)
	name := testutil.Name(t)
	testutil.Ledger(t, name)
	run := filepath.Join("/run", name)
	t.Cleanup(func() { check(t, os.RemoveAll(run)) })
	_, err := New(Config{
		RunDir: run, Disk: disk.Options{Dir: filepath.Join(run, "disk"), Driver: "floppy"}, Cgroup: name, Exclusive: true, Logger: testutil.Logger(t),
	})
	if dsec.CodeOf(err) != dsec.CodeInvalid {
		t.Errorf("%v, want invalid", err)
	}
}
