package lazy

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"

	"golang.org/x/sys/unix"
)

// served is the record of the images that layerd has been handing out and that
// need it still, one file each in the run directory: written before a mark is
// set, removed after nobody needs it any more. Where layerd and its client died, it
// tells what is lost.
type served struct {
	dir  directory
	boot string
}

// servedEntry is the content of such a file. Of another run of the kernel it says nothing:
// no mount is left of that.
type servedEntry struct {
	Boot     string
	Key      string
	FrontEnd FrontEnd
}

func openServed(run directory, boot string) (*served, error) {
	const dir = "served"
	if err := unix.Mkdirat(int(run.f.Fd()), dir, 0o700); err != nil && err != unix.EEXIST {
		return nil, &fs.PathError{Op: "mkdir", Path: dir, Err: err}
	}
	f, err := run.open(dir, unix.O_RDONLY|unix.O_DIRECTORY)
	if err != nil {
		return nil, err
	}
	return &served{directory{f}, boot}, nil
}

func (s *served) add(im *image, front FrontEnd) error {
	b, err := json.Marshal(servedEntry{s.boot, im.Key, front})
	if err != nil {
		return err
	}
	return s.dir.write(im.name, b)
}

func (s *served) remove(im *image) error { return s.dir.remove(im.name) }

// list returns the entries of this run of the kernel, by the images' names, and
// removes the others. A file that is not whole was never followed by a mark.
func (s *served) list() (map[string]servedEntry, error) {
	names, err := s.dir.list()
	if err != nil {
		return nil, err
	}
	entries := map[string]servedEntry{}
	for _, n := range names {
		b, err := s.dir.read(n, maxPacket)
		if err != nil && !errors.Is(err, os.ErrNotExist) {
			return nil, fmt.Errorf("record of what is served: %w", err)
		}
		var e servedEntry
		if json.Unmarshal(b, &e) == nil && e.Boot == s.boot && name(e.Key) == n {
			entries[n] = e
			continue
		}
		if err := s.dir.remove(n); err != nil {
			return nil, err
		}
	}
	return entries, nil
}
