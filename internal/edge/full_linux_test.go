package edge_test

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/backend/fake"
	"github.com/opendsec/dsec/internal/edge"
	"github.com/opendsec/dsec/internal/testutil"
	dsecv1 "github.com/opendsec/dsec/proto/dsec/v1"
)

// TestFullDiskAndInodes: on a full disk, and with no inode left, creates are
// refused, kills work and are remembered, and all recovers without a restart.
func TestFullDiskAndInodes(t *testing.T) {
	testutil.Require(t, testutil.Root)
	dir := testutil.SmallDisk(t, "size=16m,nr_inodes=64")
	n := newNode(t, func(c *edge.Config, _ *fake.Options) {
		c.StateDir, c.RunDir = dir, ""
		c.MinFreeBytes, c.MinFreeInodes = 1<<20, 8
	})
	t.Cleanup(n.close) // before the unmount
	var ids []string
	for range 20 {
		ids = append(ids, n.create(&dsecv1.CreateRequest{}))
	}
	fill := testutil.Fill(t, dir)
	_, err := n.tryCreate(&dsecv1.CreateRequest{})
	wantError(t, err, dsec.CodeExhausted, "")
	if got := n.shell(ids[0], "echo works"); string(got.Stdout) != "works\n" {
		t.Errorf("a running one says %q", got.Stdout)
	}
	for _, id := range ids[:10] {
		if got := n.kill(id); got != "stopped" {
			t.Errorf("killed on a full disk: %s", got)
		}
	}
	if err := os.Remove(fill); err != nil {
		t.Fatal(err)
	}
	for i := 0; ; i++ {
		if err := os.WriteFile(filepath.Join(dir, "inode"+string(rune('a'+i%26))+string(rune('a'+i/26))), nil, 0o600); err != nil {
			break
		}
	}
	_, err = n.tryCreate(&dsecv1.CreateRequest{})
	wantError(t, err, dsec.CodeExhausted, "")
	for _, id := range ids[10:15] {
		if got := n.kill(id); got != "stopped" {
			t.Errorf("killed without inodes: %s", got)
		}
	}
	left, err := filepath.Glob(filepath.Join(dir, "inode*"))
	if err != nil || len(left) == 0 {
		t.Fatal(left, err)
	}
	for _, name := range left {
		if err := os.Remove(name); err != nil {
			t.Fatal(err)
		}
	}
	n.kill(n.create(&dsecv1.CreateRequest{}))
	n.restart()
	for i, id := range ids {
		want := "running"
		if i < 15 {
			want = "stopped"
		}
		if s := n.get(id); s.State != want {
			t.Errorf("after the restart sandbox %d is %s, want %s", i, s.State, want)
		}
	}
}
