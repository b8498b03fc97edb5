package upper

import (
	"archive/tar"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec/internal/layer/tardir"
)

const (
	xattrPAX = "SCHILY.xattr."
	// Marks of overlayfs are of the overlay that wrote them.
	overlayMarks = "trusted.overlay."
	opaqueMark   = overlayMarks + "opaque"
	// An overlay of a sandbox's own, in one that has rights in it, reads these: they mean
	// nothing to ours.
	sandboxMarks = "user.overlay."
	// Some machines' word on the file, and nothing that was put there.
	ofMachine = "security.selinux"
)

// elsewhere are marks by which a file's content or name is not where it seems to be. Our
// overlays do not make them; what has one would not be understood.
var elsewhere = []string{"redirect", "metacopy", "whiteout"}

// attributes takes those of an open file into its header. Whoever reads the stream decides which
// it takes, and tells of the others.
func (w *writer) attributes(f *os.File, parts []string, hdr *tar.Header) (opaque bool, err error) {
	names, err := tardir.Sized(func(b []byte) (int, error) { return unix.Flistxattr(int(f.Fd()), b) })
	if errors.Is(err, unix.ENOTSUP) || len(names) == 0 && err == nil {
		return false, nil
	}
	if err != nil {
		return false, &fs.PathError{Op: "listxattr", Path: quote(parts), Err: err}
	}
	records := map[string]string{}
	for name := range strings.SplitSeq(strings.TrimSuffix(string(names), "\x00"), "\x00") {
		if name == ofMachine || strings.HasPrefix(name, sandboxMarks) {
			continue
		}
		value, err := tardir.Sized(func(b []byte) (int, error) { return unix.Fgetxattr(int(f.Fd()), name, b) })
		if err != nil {
			return false, &fs.PathError{Op: "getxattr", Path: quote(parts), Err: err}
		}
		if mark, ok := strings.CutPrefix(name, overlayMarks); ok {
			if slices.Contains(elsewhere, mark) {
				return false, fmt.Errorf("%s has overlayfs's mark %s, want a file that is where it seems to be", quote(parts), mark)
			}
			if name != opaqueMark || len(parts) == 0 {
				continue
			}
			if string(value) != "y" {
				return false, fmt.Errorf("%s has whiteouts that are attributes, want device nodes", quote(parts))
			}
			opaque = true
		}
		if strings.Contains(name, "=") { // no header can have it
			w.Report.begin(plain(parts), reasonSpecial, fmt.Sprintf("the attribute %+.100q", name))
			continue
		}
		records[xattrPAX+name] = string(value)
	}
	hdr.PAXRecords = records
	return opaque, nil
}
