package container

import (
	"os"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec/internal/testutil"
)

// Kernels before 6.12 mount images through a loop device, which goes with the mount.
func TestImageOnLoopDevice(t *testing.T) {
	testutil.Require(t, testutil.Root, testutil.EROFS)
	img := image(t, nil)
	testutil.Ledger(t, imagePath(img))
	f, err := os.Open(imagePath(img))
	check(t, err)
	defer f.Close()
	loop, path, err := attachLoop(int(f.Fd()))
	check(t, err)
	m, err := newMount("erofs", attrReadOnly, option{Key: "source", Value: path}, option{Key: "ro"})
	check(t, unix.Close(loop))
	check(t, err)
	defer unix.Close(m)
	var st unix.Stat_t
	check(t, unix.Fstatat(m, "etc/shared", &st, 0))
	if st.Size != int64(len("the layer's bytes\n")*1000) {
		t.Errorf("the file has %d bytes", st.Size)
	}
}
