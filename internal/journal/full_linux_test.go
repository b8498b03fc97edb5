package journal

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"github.com/opendsec/dsec/internal/testutil"
)

// TestFullDisk fills the file system of the journal: records of what lives
// still go through, Reserved tells the owner to stop, and both recover.
func TestFullDisk(t *testing.T) {
	testutil.Require(t, testutil.Root)
	dir := testutil.SmallDisk(t, "size=8m,nr_inodes=16")
	j, _ := open(t, Options{Dir: filepath.Join(dir, "state")})
	put(t, j, "a", 1)
	if !j.Reserved() {
		t.Fatal("not reserved on an empty disk")
	}
	fill := testutil.Fill(t, dir)
	for i := range 1300 {
		put(t, j, fmt.Sprintf("sandbox-%04d", i), map[string]any{"state": "stopped", "pad": string(bytes.Repeat([]byte{'x'}, 400))})
	}
	if j.Reserved() {
		t.Error("reserved on a full disk after 1,300 records")
	}
	for err := error(nil); err == nil; {
		err = j.Put("more", string(bytes.Repeat([]byte{'x'}, 4000)))
	}
	if err := os.Remove(fill); err != nil {
		t.Fatal(err)
	}
	if !j.Reserved() {
		t.Error("not reserved after space came back")
	}
	put(t, j, "a", 2)
	_ = j.Close()
	_, r := open(t, Options{Dir: filepath.Join(dir, "state")})
	if len(r.Values) != 1302 || string(r.Values["a"]) != "2" || len(r.Damaged)+r.Unclaimed != 0 {
		t.Errorf("%d values, a=%s, damaged %v, unclaimed %d", len(r.Values), r.Values["a"], r.Damaged, r.Unclaimed)
	}
}
