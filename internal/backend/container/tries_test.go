package container

import (
	"bufio"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/netip"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

// More of what insideMain can do:
//
//	replay FILE       writes the file's bytes into all that can be written or connected to
//	hash FILE NONCE   prints the SHA-256 of the file, the nonce and the environment
//	swap A B          exchanges two names, until the input ends
//	inodes DIR HOW    makes empty files, directories, symlinks or long names until it fails
//	hog BYTES         keeps memory and every processor busy, until the input ends
//	core              asks for a core file and crashes
//	netlink           dumps links, addresses, routes and neighbours
//	network ADDR...   tries to reach addresses with a port, by each way of sending
//	moremounts        mount-like calls that mounts has not
//	overwrite PATH... ways to change a file's bytes that alter has not
var tries = map[string]func(args []string){
	"replay":     replay,
	"hash":       hashFile,
	"swap":       swap,
	"inodes":     inodes,
	"hog":        hog,
	"core":       core,
	"netlink":    netlink,
	"network":    network,
	"moremounts": moreMounts,
	"overwrite":  overwrite,
}

// replay stands for an agent that has seen what the host says to chronus.
func replay(args []string) {
	data, err := os.ReadFile(args[0])
	if err != nil {
		say("replay", err)
		return
	}
	places := 0
	write := func(fd int) {
		_ = unix.SetNonblock(fd, true)
		if n, _ := unix.Write(fd, data); n > 0 {
			places++
		}
	}
	_ = filepath.WalkDir("/", func(path string, d fs.DirEntry, err error) error {
		if err != nil || strings.HasPrefix(path, "/proc/self") || strings.HasPrefix(path, fmt.Sprint("/proc/", os.Getpid())) {
			return nil
		}
		if d.Type()&(fs.ModeNamedPipe|fs.ModeSocket|fs.ModeDevice) == 0 && !strings.Contains(path, "/fd/") {
			return nil
		}
		if fd, err := unix.Open(path, unix.O_WRONLY|unix.O_NONBLOCK|unix.O_NOCTTY|unix.O_CLOEXEC, 0); err == nil {
			write(fd)
			unix.Close(fd)
		}
		return nil
	})
	names := []string{"\x00dsec", "\x00chronus", "/run/dsec/ctl.sock", "/newroot", "\x00"}
	if f, err := os.Open("/proc/net/unix"); err == nil {
		for s := bufio.NewScanner(f); s.Scan(); {
			if fields := strings.Fields(s.Text()); len(fields) == 8 {
				names = append(names, fields[7])
			}
		}
		f.Close()
	}
	for _, name := range names {
		for _, kind := range []int{unix.SOCK_STREAM, unix.SOCK_SEQPACKET, unix.SOCK_DGRAM} {
			s, err := unix.Socket(unix.AF_UNIX, kind|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
			if err != nil {
				continue
			}
			if unix.Connect(s, &unix.SockaddrUnix{Name: name}) == nil {
				fmt.Fprintf(os.Stdout, "connected %q\n", name)
				write(s)
			}
			unix.Close(s)
		}
	}
	for fd := range 3 {
		write(fd)
	}
	fmt.Fprintln(os.Stdout, "\nwritten to", places)
}

func hashFile(args []string) {
	data, err := os.ReadFile(args[0])
	if err != nil {
		say("hash", err)
		return
	}
	fmt.Fprintf(os.Stdout, "%x %s %q\n", sha256.Sum256(data), args[1], os.Environ())
}

// untilInputEnds reports whether to go on.
func untilInputEnds() func() bool {
	done := make(chan bool)
	go func() {
		_, _ = io.Copy(io.Discard, os.Stdin)
		close(done)
	}()
	return func() bool {
		select {
		case <-done:
			return false
		default:
			return true
		}
	}
}

func swap(args []string) {
	more := untilInputEnds()
	fmt.Fprintln(os.Stdout, "ready")
	for more() {
		if err := unix.Renameat2(unix.AT_FDCWD, args[0], unix.AT_FDCWD, args[1], unix.RENAME_EXCHANGE); err != nil {
			say("swap", err)
			return
		}
	}
}

func inodes(args []string) {
	dir, n := args[0], 0
	long := strings.Repeat("n", 200)
	one := map[string]func(string) error{
		"file":    func(p string) error { return unix.Mknod(p, unix.S_IFREG|0o644, 0) },
		"dir":     func(p string) error { return unix.Mkdir(p, 0o755) },
		"symlink": func(p string) error { return unix.Symlink(long, p) },
		"long":    func(p string) error { return unix.Mknod(p+long, unix.S_IFREG|0o644, 0) },
		"xattr": func(p string) error {
			if err := unix.Mknod(p, unix.S_IFREG|0o644, 0); err != nil {
				return err
			}
			return unix.Setxattr(p, "user.x", []byte(long), 0)
		},
	}[args[1]]
	var err error
	for ; err == nil && n < 10_000_000; n++ {
		err = one(dir + "/" + strconv.Itoa(n))
	}
	fmt.Fprintln(os.Stdout, "made", n)
	say("end", err)
}

func hog(args []string) {
	size, _ := strconv.Atoi(args[0])
	b, err := unix.Mmap(-1, 0, size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
	if err != nil {
		say("mmap", err)
		return
	}
	for i := 0; i < size; i += 4096 {
		b[i] = 1
	}
	fmt.Fprintln(os.Stdout, "ready")
	for range 8 {
		go func() {
			runtime.LockOSThread()
			for i := 0; ; i = (i + 4096) % size {
				b[i]++
			}
		}()
	}
	_, _ = io.Copy(io.Discard, os.Stdin)
}

func core([]string) {
	for _, n := range []uint64{unix.RLIM_INFINITY, 1 << 30, 1} {
		say(fmt.Sprint("limit ", n), unix.Setrlimit(unix.RLIMIT_CORE, &unix.Rlimit{Cur: n, Max: n}))
	}
	_ = unix.Prctl(unix.PR_SET_DUMPABLE, 1, 0, 0, 0)
	// Not Go's handler: the kernel's own.
	_, _, _ = syscall.RawSyscall6(syscall.SYS_RT_SIGACTION, uintptr(unix.SIGSEGV), uintptr(unsafe.Pointer(&[4]uint64{})), 0, 8, 0, 0)
	_ = unix.Kill(os.Getpid(), unix.SIGSEGV)
	select {}
}

func netlink([]string) {
	for name, kind := range map[string]int{"link": unix.RTM_GETLINK, "addr": unix.RTM_GETADDR, "route": unix.RTM_GETROUTE, "neigh": unix.RTM_GETNEIGH} {
		dump, err := syscall.NetlinkRIB(kind, unix.AF_UNSPEC)
		say(name, err)
		messages, err := syscall.ParseNetlinkMessage(dump)
		if err != nil {
			say(name, err)
		}
		for _, m := range messages {
			fmt.Fprintf(os.Stdout, "%s message %d: %q\n", name, m.Header.Type, m.Data)
		}
	}
}

// network prints each try that did not fail, and counts those that did.
func network(args []string) {
	failed := 0
	try := func(how string, to netip.AddrPort, f func(unix.Sockaddr) error) {
		if err := f(sockaddr(to)); err != nil {
			failed++
			return
		}
		fmt.Fprintln(os.Stdout, "reached", how, to)
	}
	for _, arg := range args {
		to := netip.MustParseAddrPort(arg)
		family := unix.AF_INET
		if to.Addr().Is6() {
			family = unix.AF_INET6
		}
		for how, kind := range map[string]int{"tcp": unix.SOCK_STREAM, "udp": unix.SOCK_DGRAM, "raw": unix.SOCK_RAW} {
			protocol := 0
			if kind == unix.SOCK_RAW {
				protocol = unix.IPPROTO_UDP
			}
			try(how+" connect", to, func(a unix.Sockaddr) error {
				s, err := unix.Socket(family, kind|unix.SOCK_CLOEXEC, protocol)
				if err != nil {
					return err
				}
				defer unix.Close(s)
				return unix.Connect(s, a)
			})
			try(how+" send", to, func(a unix.Sockaddr) error {
				s, err := unix.Socket(family, kind|unix.SOCK_CLOEXEC, protocol)
				if err != nil {
					return err
				}
				defer unix.Close(s)
				_ = unix.SetsockoptInt(s, unix.SOL_SOCKET, unix.SO_BROADCAST, 1)
				flags := unix.MSG_NOSIGNAL
				if kind == unix.SOCK_STREAM {
					flags |= unix.MSG_FASTOPEN
				}
				return unix.Sendto(s, []byte("hello"), flags, a)
			})
		}
	}
	fmt.Fprintln(os.Stdout, "failed", failed)
}

func sockaddr(a netip.AddrPort) unix.Sockaddr {
	if a.Addr().Is6() {
		return &unix.SockaddrInet6{Addr: a.Addr().As16(), Port: int(a.Port())}
	}
	return &unix.SockaddrInet4{Addr: a.Addr().As4(), Port: int(a.Port())}
}

func moreMounts([]string) {
	bind := func(from, to string, flags uintptr) error { return unix.Mount(from, to, "", unix.MS_BIND|flags, "") }
	say("bind over a mask", bind("/etc/shared", "/proc/kallsyms", 0))
	say("bind a mask away", bind("/proc", "/tmp", unix.MS_REC))
	say("move", unix.Mount("/proc", "/tmp", "", unix.MS_MOVE, ""))
	say("shared", unix.Mount("", "/", "", unix.MS_SHARED|unix.MS_REC, ""))
	say("remount root", unix.Mount("", "/", "", unix.MS_REMOUNT, "upperdir=/tmp"))
	say("new proc", unix.Mount("proc", "/tmp", "proc", 0, ""))
	say("new sysfs", unix.Mount("sysfs", "/tmp", "sysfs", 0, ""))
	say("new cgroup", unix.Mount("cgroup", "/tmp", "cgroup2", 0, ""))
	say("overlay", unix.Mount("overlay", "/tmp", "overlay", 0, "lowerdir=/etc:/bin"))
	for _, mask := range []string{"/proc/kallsyms", "/proc/keys", "/proc/sys", "/sys", "/dev", "/dev/shm", "/"} {
		for name, flags := range map[string]int{"": 0, " detached": unix.MNT_DETACH, " expired": unix.MNT_EXPIRE} {
			say("umount "+mask+name, unix.Unmount(mask, flags))
		}
	}
	_, err := unix.Fspick(unix.AT_FDCWD, "/", 0)
	say("fspick", err)
	_, err = unix.Fsmount(0, 0, 0)
	say("fsmount", err)
	for _, ns := range []string{"mnt", "user", "pid", "net"} {
		if fd, err := unix.Open("/proc/self/ns/"+ns, unix.O_RDONLY|unix.O_CLOEXEC, 0); err == nil {
			say("setns own "+ns, unix.Setns(fd, 0))
			unix.Close(fd)
		}
		_, err := unix.Open("/proc/1/ns/"+ns, unix.O_RDONLY|unix.O_CLOEXEC, 0)
		say("open ns of PID 1 "+ns, err)
	}
	for name, flags := range map[string]uintptr{
		"user": unix.CLONE_NEWUSER, "mnt": unix.CLONE_NEWNS, "pid": unix.CLONE_NEWPID, "net": unix.CLONE_NEWNET,
		"user and mnt": unix.CLONE_NEWUSER | unix.CLONE_NEWNS, "cgroup": unix.CLONE_NEWCGROUP, "ipc": unix.CLONE_NEWIPC,
	} {
		pid, _, errno := syscall.RawSyscall6(syscall.SYS_CLONE, flags|uintptr(syscall.SIGCHLD), 0, 0, 0, 0, 0)
		if errno == 0 && pid == 0 {
			syscall.RawSyscall(syscall.SYS_EXIT_GROUP, 0, 0, 0)
		}
		if errno == 0 {
			_, _ = unix.Wait4(int(pid), nil, 0, nil)
			say("clone "+name, nil)
		} else {
			say("clone "+name, errno)
		}
	}
	_, _, err = unix.NameToHandleAt(unix.AT_FDCWD, "/etc/shared", 0)
	say("name_to_handle_at", err)
	_, err = unix.OpenByHandleAt(unix.AT_FDCWD, unix.NewFileHandle(1, make([]byte, 8)), 0)
	say("open_by_handle_at", err)
}

// overwrite prints only how each try went: the oracle is the layer's file.
func overwrite(args []string) {
	for _, path := range args {
		if err := overwriteOne(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
			say("overwrite "+path, err)
		}
	}
}

func overwriteOne(path string) error {
	fd, err := unix.Open(path, unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	// A pipe whose pages are those of the file's cache, written over.
	r, w, err := os.Pipe()
	if err != nil {
		return err
	}
	off := int64(0)
	_, err = unix.Splice(fd, &off, int(w.Fd()), nil, 1, 0)
	say("splice out "+path, err)
	_, err = w.WriteString("XXXX")
	say("pipe over splice "+path, err)
	_, err = unix.Vmsplice(int(w.Fd()), []unix.Iovec{{Base: &[]byte("XXXX")[0], Len: 4}}, unix.SPLICE_F_GIFT)
	say("vmsplice "+path, err)
	_ = r.Close()
	// A read-only shared mapping, written by calls that may force it.
	if b, err := unix.Mmap(fd, 0, 4096, unix.PROT_READ, unix.MAP_SHARED); err == nil {
		local := []byte("XXXX")
		_, err := unix.ProcessVMWritev(os.Getpid(), []unix.Iovec{{Base: &local[0], Len: 4}},
			[]unix.RemoteIovec{{Base: uintptr(unsafe.Pointer(&b[0])), Len: 4}}, 0)
		say("process_vm_writev "+path, err)
		say("madvise "+path, unix.Madvise(b, unix.MADV_REMOVE))
		n, err := unix.Pread(0, b[:4], 0)
		say(fmt.Sprint("read into it ", n, " ", path), err)
	}
	if b, err := unix.Mmap(fd, 0, 4096, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED); err == nil {
		b[0] = 'X'
		say("mmap for writing "+path, nil)
	}
	// Copies that share blocks, then written.
	copied := filepath.Join("/tmp", filepath.Base(path)+".copy")
	if to, err := unix.Open(copied, unix.O_RDWR|unix.O_CREAT|unix.O_CLOEXEC, 0o644); err == nil {
		say("reflink "+path, unix.IoctlFileClone(to, fd))
		_, err := unix.CopyFileRange(fd, &[]int64{0}[0], to, &[]int64{0}[0], 4096, 0)
		say("copy_file_range "+path, err)
		say("dedupe "+path, unix.IoctlFileDedupeRange(fd, &unix.FileDedupeRange{Src_length: 4096, Info: []unix.FileDedupeRangeInfo{{Dest_fd: int64(to)}}}))
		_, _ = unix.Pwrite(to, []byte("XXXX"), 0)
		unix.Close(to)
	}
	for _, flags := range []int{unix.O_WRONLY | unix.O_DIRECT, unix.O_RDWR | unix.O_TRUNC, unix.O_WRONLY | unix.O_APPEND} {
		if to, err := unix.Open(fmt.Sprint("/proc/self/fd/", fd), flags|unix.O_CLOEXEC, 0); err == nil {
			_, err := unix.Pwrite(to, []byte("XXXX"), 0)
			say(fmt.Sprintf("reopened %#x %s", flags, path), err)
			unix.Close(to)
		}
	}
	say("fallocate "+path, unix.Fallocate(fd, unix.FALLOC_FL_ZERO_RANGE, 0, 4096))
	say("link "+path, unix.Link(path, "/tmp/linked-"+filepath.Base(path)))
	say("xattr "+path, unix.Setxattr(path, "trusted.overlay.redirect", []byte("/etc"), 0))
	return nil
}
