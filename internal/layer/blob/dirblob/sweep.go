package dirblob

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"path"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/hostos"
	"github.com/opendsec/dsec/internal/layer/blob"
)

// staleAfter is the age at which another host's unfinished file has no writer any
// more: a Put writes to its file all the time.
const staleAfter = 24 * time.Hour

// writerName names this process among all that are and were on all hosts: by its
// boot, its PID namespace, its PID there, and when it began.
func writerName() (string, error) {
	boot, err := hostos.BootID()
	if err != nil {
		return "", err
	}
	began, err := beganAt(os.Getpid())
	if err != nil {
		return "", err
	}
	ns, err := pidNamespace()
	return fmt.Sprintf("%s.%d.%d.%s", strings.ReplaceAll(boot, "-", ""), ns, os.Getpid(), began), err
}

func pidNamespace() (uint64, error) {
	var st unix.Stat_t
	err := unix.Stat("/proc/self/ns/pid", &st)
	return st.Ino, err
}

// beganAt is when a process began, in ticks since the boot.
func beganAt(pid int) (string, error) {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return "", err
	}
	// Fields are counted from behind the name, which may hold anything.
	fields := bytes.Fields(b[bytes.LastIndexByte(b, ')')+1:])
	if len(fields) < 20 {
		return "", errors.New("a short /proc/<pid>/stat")
	}
	return string(fields[19]), nil
}

// isDead reports whether the writer of that name is known to be gone; known is
// false where this process cannot see whether it is.
func (s *Store) isDead(name string) (dead, known bool) {
	own := strings.SplitN(s.writer, ".", 4)
	parts := strings.Split(name, ".")
	if len(parts) != 5 || parts[0] != own[0] || parts[1] != own[1] {
		return false, false
	}
	pid, err := strconv.Atoi(parts[2])
	if err != nil || pid <= 0 {
		return false, false
	}
	began, err := beganAt(pid)
	if errors.Is(err, os.ErrNotExist) || errors.Is(err, unix.ESRCH) {
		return true, true
	}
	if err != nil {
		return false, false
	}
	return began != parts[3], true
}

// Sweep removes what a writer or a Delete that did not get to its end has left:
// unfinished files, which Open does too, and empty directories.
func (s *Store) Sweep(ctx context.Context) error {
	if err := s.sweepTemps(ctx); err != nil {
		return err
	}
	now, err := s.now(ctx)
	switch {
	case noRoom(err):
		return nil // another sweep will
	case err != nil:
		return err
	}
	return s.sweepDirs(ctx, ".", now.Add(-staleAfter))
}

// noRoom reports whether nothing can be written here now.
func noRoom(err error) bool {
	return err != nil && (dsec.CodeOf(err) == dsec.CodeUnsupported || dsec.CodeOf(err) == dsec.CodeExhausted)
}

// sweepDirs removes the directories below dir in which no blob is, and none was since
// before: no Put is about to use them.
func (s *Store) sweepDirs(ctx context.Context, dir string, before time.Time) error {
	below, err := call(ctx, &s.calls, s.calls.timeout, func() (below []string, err error) {
		err = s.withDir(func(root *os.File) error {
			d, err := openBeneath(root, dir, unix.O_RDONLY|unix.O_DIRECTORY, 0)
			if err != nil {
				return err
			}
			defer d.Close()
			entries, err := d.ReadDir(-1)
			below = nil
			for _, e := range entries {
				if e.IsDir() && blob.ValidPart(e.Name()) {
					below = append(below, path.Join(dir, e.Name()))
				}
			}
			if err != nil || len(entries) > 0 {
				return err
			}
			fi, err := d.Stat()
			if err == nil && fi.ModTime().Before(before) {
				removeEmpty(root, dir)
			}
			return err
		})
		if errors.Is(err, unix.ENOENT) || errors.Is(err, unix.ENOTDIR) {
			return nil, nil
		}
		return below, storeError(reading, err)
	}, nil)
	for _, d := range below {
		if err == nil {
			err = s.sweepDirs(ctx, d, before)
		}
	}
	return err
}

// sweepTemps removes the unfinished files of writers that are gone: at once of this
// host's processes, of others' once nothing was written to them for a day by the
// file system's own clock.
func (s *Store) sweepTemps(ctx context.Context) error {
	names, err := s.tempNames(ctx)
	if err != nil {
		return err
	}
	var now time.Time
	for _, name := range names {
		dead, known := s.isDead(name)
		if !known {
			if now.IsZero() {
				if now, err = s.now(ctx); err != nil {
					return err
				}
			}
			dead, err = s.isOlder(ctx, name, now.Add(-staleAfter))
		}
		if err == nil && dead {
			err = s.removeTemp(ctx, name)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

func (s *Store) tempNames(ctx context.Context) ([]string, error) {
	return call(ctx, &s.calls, s.calls.timeout, func() (names []string, err error) {
		err = s.withDir(func(root *os.File) error {
			d, err := openBeneath(root, tempDir, unix.O_RDONLY|unix.O_DIRECTORY, 0)
			if errors.Is(err, unix.ENOENT) {
				return nil
			}
			if err != nil {
				return err
			}
			defer d.Close()
			names, err = d.Readdirnames(-1)
			return err
		})
		return names, storeError(reading, err)
	}, nil)
}

// now is what time it is for the file system.
func (s *Store) now(ctx context.Context) (time.Time, error) {
	t, err := s.createTemp(ctx)
	if err != nil {
		return time.Time{}, err
	}
	defer s.discard(ctx, t)
	return call(ctx, &s.calls, s.calls.timeout, func() (time.Time, error) {
		info, err := infoOf(t.f, t.name)
		return info.Created, storeError(reading, err)
	}, nil)
}

func (s *Store) isOlder(ctx context.Context, name string, than time.Time) (bool, error) {
	return call(ctx, &s.calls, s.calls.timeout, func() (older bool, err error) {
		err = s.withDir(func(root *os.File) error {
			info, err := stat(root, path.Join(tempDir, name))
			older = err == nil && info.Created.Before(than)
			return err
		})
		if errors.Is(err, unix.ENOENT) || errors.Is(err, errNotABlob) {
			err = nil
		}
		return older, storeError(reading, err)
	}, nil)
}

func (s *Store) removeTemp(ctx context.Context, name string) error {
	_, err := call(ctx, &s.calls, s.calls.timeout, func() (struct{}, error) {
		err := s.withDir(func(root *os.File) error {
			return retry(func() error { return unix.Unlinkat(int(root.Fd()), path.Join(tempDir, name), 0) })
		})
		err = storeError(writing, err)
		if err != nil && dsec.CodeOf(err) == dsec.CodeNotFound {
			err = nil
		}
		return struct{}{}, err
	}, nil)
	return err
}
