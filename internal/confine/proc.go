package confine

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path"
	"slices"
	"strings"
	"syscall"
)

// ProcKeep are the entries of /proc that programs inside see, beside those of
// processes. Whatever else a kernel shows there, now or in a later version, is
// covered, or can be opened by the host's root alone, who is nobody inside.
var ProcKeep = []string{
	"cgroups", "cpuinfo", "filesystems", "loadavg", "meminfo", "mounts", "net", "self", "stat",
	"sys", "sysvipc", "thread-self", "uptime", "version",
}

// ProcReadOnly are the kept ones that are remounted read-only.
var ProcReadOnly = []string{"sys"}

// sysKeep are the kept directories of /proc/sys; programs read limits there.
var sysKeep = []string{"fs", "kernel", "net", "user", "vm"}

// sysRefused are files and directories below those that name things of the
// host or its helpers. All are read-only in any case.
var sysRefused = []string{
	"fs/binfmt_misc", "kernel/core_pattern", "kernel/firmware_config", "kernel/hotplug", "kernel/keys",
	"kernel/kexec_load_disabled", "kernel/modprobe", "kernel/poweroff_cmd", "kernel/usermodehelper",
}

// Mask is one entry of /proc to be covered: a directory by an empty read-only
// one, a file by an empty file.
type Mask struct {
	Path string // below /proc
	Dir  bool
}

// ProcMasks lists what must be covered of the proc file system at dir, a fresh
// mount or the host's own: which entries there are depends on the kernel, not
// on the mount. It fails on an entry that cannot be covered.
func ProcMasks(dir string) ([]Mask, error) {
	root, err := os.OpenRoot(dir)
	if err != nil {
		return nil, err
	}
	defer root.Close()
	masks, err := masksOf(root.FS(), ".", func(name string) bool {
		return slices.Contains(ProcKeep, name) || strings.Trim(name, "0123456789") == ""
	})
	if err != nil {
		return nil, err
	}
	sys, err := masksOf(root.FS(), "sys", func(name string) bool { return slices.Contains(sysKeep, name) })
	if err != nil {
		return nil, err
	}
	masks = append(masks, sys...)
	for _, name := range sysRefused {
		info, err := root.Lstat("sys/" + name)
		if err != nil {
			continue // this kernel has none
		}
		masks = append(masks, Mask{Path: "sys/" + name, Dir: info.IsDir()})
	}
	return masks, nil
}

func masksOf(fsys fs.FS, dir string, keep func(name string) bool) ([]Mask, error) {
	entries, err := fs.ReadDir(fsys, dir)
	if err != nil {
		return nil, err
	}
	var masks []Mask
	for _, e := range entries {
		if keep(e.Name()) {
			continue
		}
		own, err := rootsOwn(e)
		if errors.Is(err, fs.ErrNotExist) { // of a module that went meanwhile
			continue
		}
		if err != nil {
			return nil, err
		}
		if own {
			continue
		}
		if !e.IsDir() && !e.Type().IsRegular() {
			return nil, fmt.Errorf("proc: %s is a %v, which nothing can be mounted over", path.Join(dir, e.Name()), e.Type())
		}
		masks = append(masks, Mask{Path: path.Join(dir, e.Name()), Dir: e.IsDir()})
	}
	return masks, nil
}

// rootsOwn reports whether only its owner may open a file, and that is the host's
// root: the kernel lets no capability of another user namespace count for a file
// whose owner that namespace has no ID for. A cover costs each create 20 us.
func rootsOwn(e fs.DirEntry) (bool, error) {
	if !e.Type().IsRegular() {
		return false, nil
	}
	info, err := e.Info()
	if err != nil {
		return false, err
	}
	st, ok := info.Sys().(*syscall.Stat_t)
	return ok && st.Uid == 0 && st.Gid == 0 && info.Mode().Perm()&0o077 == 0, nil
}
