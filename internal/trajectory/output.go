package trajectory

import (
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec"
)

// outputs is a directory of what was too long for its entry, output and input:
//
//	objects/DIGEST         the content, compressed
//	of/SANDBOX/SEQ-DIGEST  another name of it, for the action that began with entry SEQ
//	new/                   what is being written
//
// So the kernel counts who needs an object, and no crash makes that wrong: one
// that has but the first name is nobody's.
type outputs struct {
	dir   string
	group *group
	bytes atomic.Int64
	names sync.Mutex // of objects: who looks at their links and changes them
}

func openOutputs(dir string, has func(dsec.SandboxID) bool, g *group) (*outputs, error) {
	o := &outputs{dir: dir, group: g}
	if err := os.RemoveAll(o.path("new")); err != nil {
		return nil, err
	}
	for _, name := range []string{"objects", "of", "new"} {
		if err := os.MkdirAll(o.path(name), 0o700); err != nil {
			return nil, err
		}
	}
	owners, err := os.ReadDir(o.path("of"))
	if err != nil {
		return nil, err
	}
	for _, d := range owners {
		if !has(dsec.SandboxID(d.Name())) {
			if err := os.RemoveAll(o.path("of", d.Name())); err != nil {
				return nil, err
			}
		}
	}
	objects, err := os.ReadDir(o.path("objects"))
	if err != nil {
		return nil, err
	}
	for _, d := range objects {
		path := o.path("objects", d.Name())
		var st unix.Stat_t
		if err := unix.Lstat(path, &st); err != nil {
			return nil, err
		}
		if st.Nlink > 1 {
			o.bytes.Add(st.Size)
		} else if err := os.Remove(path); err != nil {
			return nil, err
		}
	}
	return o, nil
}

func (o *outputs) path(names ...string) string {
	return filepath.Join(append([]string{o.dir}, names...)...)
}

// objectName is the name of what an action wrote or was given within its sandbox's directory.
func objectName(seq uint64, digest []byte) string {
	return fmt.Sprintf("%d-%s", seq, hex.EncodeToString(digest))
}

// keep gives a finished object its names.
func (o *outputs) keep(w *object, id dsec.SandboxID, seq uint64, digest []byte) error {
	defer w.abandon()
	dir := o.path("of", string(id))
	object, name := o.path("objects", hex.EncodeToString(digest)), filepath.Join(dir, objectName(seq, digest))
	o.names.Lock()
	defer o.names.Unlock()
	if err := os.Mkdir(dir, 0o700); err != nil && !errors.Is(err, fs.ErrExist) {
		return err
	}
	info, err := w.f.Stat()
	if err != nil {
		return err
	}
	if !wholeObject(object, w.n) { // none, or one that lost power
		if err := os.Rename(w.f.Name(), object); err != nil {
			return err
		}
		o.bytes.Add(info.Size())
	}
	err = os.Link(object, name)
	if errors.Is(err, unix.EMLINK) {
		// The most names there can be: the next ones are of this object.
		if err = os.Rename(w.f.Name(), object); err == nil {
			o.bytes.Add(info.Size())
			err = os.Link(object, name)
		}
	}
	if err != nil && !errors.Is(err, fs.ErrExist) { // an end that was not noted, after a restart
		return err
	}
	if f, err := os.Open(name); err == nil {
		o.group.handOver(f, dir, o.path("of"), o.path("objects"))
	}
	return nil
}

// open opens an object that is kept.
func (o *outputs) open(id dsec.SandboxID, seq uint64, digest []byte) (*os.File, error) {
	return os.Open(o.path("of", string(id), objectName(seq, digest)))
}

// drop lets go of the outputs of a sandbox's actions that began with one of the
// entries that gone tells, and of those objects that nobody else needs.
func (o *outputs) drop(id dsec.SandboxID, gone func(seq uint64, name string) bool) error {
	dir := o.path("of", string(id))
	entries, err := os.ReadDir(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	} else if err != nil {
		return err
	}
	left := len(entries)
	for _, d := range entries {
		number, digest, _ := strings.Cut(d.Name(), "-")
		if seq, err := strconv.ParseUint(number, 10, 64); err == nil && !gone(seq, d.Name()) {
			continue
		}
		if err := o.unlink(filepath.Join(dir, d.Name()), o.path("objects", digest)); err != nil {
			return err
		}
		left--
	}
	if left == 0 {
		o.names.Lock()
		defer o.names.Unlock()
		err := os.Remove(dir)
		if errors.Is(err, unix.ENOTEMPTY) { // one more came meanwhile
			err = nil
		}
		return err
	}
	return nil
}

// all is for drop.
func all(uint64, string) bool { return true }

func (o *outputs) unlink(name, object string) error {
	o.names.Lock()
	defer o.names.Unlock()
	var st, of unix.Stat_t
	if err := unix.Lstat(name, &of); err != nil {
		return err
	}
	if err := os.Remove(name); err != nil {
		return err
	}
	switch err := unix.Lstat(object, &st); {
	case err == nil && st.Ino == of.Ino && st.Nlink == 1:
		o.bytes.Add(-st.Size)
		return os.Remove(object)
	case (err != nil || st.Ino != of.Ino) && of.Nlink == 1: // another took the object's name
		o.bytes.Add(-of.Size)
	}
	return nil
}
