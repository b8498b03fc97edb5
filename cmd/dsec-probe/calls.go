//go:build linux && amd64

package main

import (
	"encoding/binary"
	"fmt"
	"os"
	"strconv"
	"unsafe"

	"golang.org/x/sys/unix"
)

func syscalls(args []string) (any, error) {
	from, to := 0, 600
	if len(args) == 2 {
		var err error
		if from, err = strconv.Atoi(args[0]); err != nil {
			return nil, err
		}
		if to, err = strconv.Atoi(args[1]); err != nil {
			return nil, err
		}
	} else if len(args) != 0 {
		return nil, fmt.Errorf("want FROM and TO, or nothing")
	}
	results := map[string]string{}
	for nr := from; nr <= to; nr++ {
		r, err := try(uintptr(nr))
		if err != nil {
			return nil, fmt.Errorf("call %d: %w", nr, err)
		}
		results[strconv.Itoa(nr)] = r
	}
	return map[string]any{"results": results}, nil
}

// maxFamily is one more than the last family of Linux 6.18.
const maxFamily = 46

func sockets([]string) (any, error) {
	native := map[string]string{}
	for family := range uintptr(maxFamily + 1) {
		best := ""
		for _, kind := range []uintptr{unix.SOCK_STREAM, unix.SOCK_DGRAM, unix.SOCK_SEQPACKET, unix.SOCK_RAW} {
			r, err := try(unix.SYS_SOCKET, family, kind, 0)
			if err != nil {
				return nil, err
			}
			if best == "" || r == "ok" {
				best = r
			}
		}
		native[strconv.Itoa(int(family))] = best
	}
	netlink := map[string]string{}
	for protocol := range uintptr(23) {
		r, err := try(unix.SYS_SOCKET, unix.AF_NETLINK, unix.SOCK_RAW, protocol)
		if err != nil {
			return nil, err
		}
		netlink[strconv.Itoa(int(protocol))] = r
	}
	// What a 32-bit program would do: AF_UNIX, which is allowed natively, so
	// that a refusal is one of the architecture.
	page, err := shared()
	if err != nil {
		return nil, err
	}
	at := page[64:]
	for i, v := range []uint32{unix.AF_UNIX, unix.SOCK_STREAM, 0} {
		binary.LittleEndian.PutUint32(at[4*i:], v)
	}
	const i386Socketcall, i386Socket, callSocket = 102, 359, 1
	socketcall, err := tryWith(forkInt80, i386Socketcall, []uintptr{callSocket, uintptr(unsafe.Pointer(&at[0]))})
	if err != nil {
		return nil, err
	}
	socket, err := tryWith(forkInt80, i386Socket, []uintptr{unix.AF_UNIX, unix.SOCK_STREAM, 0})
	if err != nil {
		return nil, err
	}
	const x32Socket = 0x40000000 | unix.SYS_SOCKET
	x32, err := try(x32Socket, unix.AF_UNIX, unix.SOCK_STREAM, 0)
	if err != nil {
		return nil, err
	}
	return map[string]any{
		"native": native, "netlink": netlink,
		"i386_socketcall": socketcall, "i386_socket": socket, "x32_socket": x32,
	}, nil
}

// refusedIoctls reach the file system below a writable file, or other
// terminals. The values are those of the kernel's headers.
var refusedIoctls = map[string]uintptr{
	"XFS_IOC_SWAPEXT": 0xc0c0586d, "XFS_IOC_EXCHANGE_RANGE": 0x40285881, "XFS_IOC_START_COMMIT": 0x80585882,
	"XFS_IOC_COMMIT_RANGE": 0x40585883, "XFS_IOC_GOINGDOWN": 0x8004587d, "XFS_IOC_OPEN_BY_HANDLE": 0x4038586b,
	"XFS_IOC_PATH_TO_HANDLE": 0xc0385869, "XFS_IOC_SCRUB_METADATA": 0xc040583c,
	"EXT4_IOC_MOVE_EXT": 0xc028660f, "EXT4_IOC_SWAP_BOOT": 0x6611, "EXT4_IOC_GROUP_EXTEND": 0x40086607,
	"EXT4_IOC_GROUP_ADD": 0x40286608, "EXT4_IOC_RESIZE_FS": 0x40086610, "EXT4_IOC_MIGRATE": 0x6609,
	"EXT4_IOC_CHECKPOINT": 0x4004662b, "BTRFS_IOC_SUBVOL_CREATE": 0x5000940e, "BTRFS_IOC_SNAP_DESTROY": 0x5000940f,
	"BTRFS_IOC_QUOTA_CTL": 0xc0109428, "BTRFS_IOC_TREE_SEARCH": 0xd0009411, "F2FS_IOC_MOVE_RANGE": 0xc020f509,
	"FITRIM": 0xc0185879, "FIFREEZE": 0xc0045877, "FITHAW": 0xc0045878, "FS_IOC_GETFSMAP": 0xc0c0583b,
	"FS_IOC_FSSETXATTR": 0x401c5820, "FS_IOC_ENABLE_VERITY": 0x40806685, "FIBMAP": 1,
	"TIOCSTI": 0x5412, "TIOCLINUX": 0x541c, "TIOCSETD": 0x5423, "TIOCCONS": 0x541d,
}

// controls must work on a regular file, or the refusals above show nothing.
var controls = map[string]uintptr{"FS_IOC_GETFLAGS": unix.FS_IOC_GETFLAGS, "FIGETBSZ": 2}

func ioctls(args []string) (any, error) {
	if len(args) != 1 {
		return nil, fmt.Errorf("want a file to try them on")
	}
	f, err := os.OpenFile(args[0], os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	page, err := shared()
	if err != nil {
		return nil, err
	}
	arg := uintptr(unsafe.Pointer(&page[1024])) // zeros: a command that gets through does nothing
	both := func(commands map[string]uintptr) (map[string]map[string]string, error) {
		results := map[string]map[string]string{}
		for name, cmd := range commands {
			clear(page[1024:])
			plain, err := try(unix.SYS_IOCTL, f.Fd(), cmd, arg)
			if err != nil {
				return nil, err
			}
			high, err := try(unix.SYS_IOCTL, f.Fd(), 1<<32|cmd, arg)
			if err != nil {
				return nil, err
			}
			results[name] = map[string]string{"plain": plain, "bit32": high}
		}
		return results, nil
	}
	refused, err := both(refusedIoctls)
	if err != nil {
		return nil, err
	}
	control, err := both(controls)
	return map[string]any{"results": refused, "controls": control}, err
}

// mountCalls tries every way to change the mount tree.
func mountCalls([]string) (any, error) {
	page, err := shared()
	if err != nil {
		return nil, err
	}
	// Strings for the calls, in memory that a child has at the same address.
	text := func(offset int, s string) uintptr {
		copy(page[offset:], s+"\x00")
		return uintptr(unsafe.Pointer(&page[offset]))
	}
	tmpfs, tmp, mask, empty := text(64, "tmpfs"), text(80, "/tmp"), text(96, "/proc/kcore"), text(112, "")
	at := uintptr(unix.AT_FDCWD & (1<<64 - 1))
	results := map[string]string{}
	// In an order: where pivot_root is not refused, it is the last that works.
	for _, row := range []struct {
		name string
		call []uintptr
	}{
		{"mount", []uintptr{unix.SYS_MOUNT, tmpfs, tmp, tmpfs, 0, 0}},
		{"mount_remount", []uintptr{unix.SYS_MOUNT, 0, tmp, 0, unix.MS_REMOUNT | unix.MS_BIND, 0}},
		{"mount_bind", []uintptr{unix.SYS_MOUNT, tmp, tmp, 0, unix.MS_BIND, 0}},
		{"umount2_mask", []uintptr{unix.SYS_UMOUNT2, mask, 0}},
		{"umount2_detach", []uintptr{unix.SYS_UMOUNT2, mask, unix.MNT_DETACH}},
		{"fsopen", []uintptr{unix.SYS_FSOPEN, tmpfs, 0}},
		{"fspick", []uintptr{unix.SYS_FSPICK, at, tmp, 0}},
		{"open_tree", []uintptr{unix.SYS_OPEN_TREE, at, tmp, 0}},
		{"open_tree_clone", []uintptr{unix.SYS_OPEN_TREE, at, tmp, unix.OPEN_TREE_CLONE}},
		{"move_mount", []uintptr{unix.SYS_MOVE_MOUNT, at, mask, at, tmp, 0}},
		{"mount_setattr", []uintptr{unix.SYS_MOUNT_SETATTR, at, tmp, 0, uintptr(unsafe.Pointer(&page[128])), 32}},
		{"unshare_mount", []uintptr{unix.SYS_UNSHARE, unix.CLONE_NEWNS}},
		{"unshare_user", []uintptr{unix.SYS_UNSHARE, unix.CLONE_NEWUSER}},
		{"clone_user", []uintptr{unix.SYS_CLONE, unix.CLONE_NEWUSER | uintptr(unix.SIGCHLD)}},
		{"setns", []uintptr{unix.SYS_SETNS, 0, 0}},
		{"sethostname", []uintptr{unix.SYS_SETHOSTNAME, empty, 0}},
		{"chroot", []uintptr{unix.SYS_CHROOT, tmp}}, // allowed: it gives nothing
		{"pivot_root", []uintptr{unix.SYS_PIVOT_ROOT, tmp, tmp}},
	} {
		if results[row.name], err = try(row.call[0], row.call[1:]...); err != nil {
			return nil, fmt.Errorf("%s: %w", row.name, err)
		}
	}
	return results, nil
}
