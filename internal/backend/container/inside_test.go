package container

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec/internal/testutil"
)

// insideMain is what tests of the container backend run in a sandbox, and on
// the host as the control that shows that a refusal is the sandbox's doing: the
// test binary under the name inside. Each verb prints lines "<what> <result>";
// a result is "ok" or the name of an errno.
//
//	fds               every descriptor and the links cwd, root and exe
//	mounts            mount calls, each tried once
//	open PATH...      each opened for writing, nothing written
//	icmp              sockets that ping uses
//	endpoints         what can be connected to: sockets of files, abstract names, vsock
//	forks N           children that wait, until N or a failure; then all end
//	threads N         so many threads, until the input ends
//	hold MIB N        memory that N children share; see testutil.HoldMemory
//	alter PATH...     ways to change a file's bytes where it lies
func insideMain() {
	if len(os.Args) < 2 {
		os.Exit(2)
	}
	args := os.Args[2:]
	switch os.Args[1] {
	case "fds":
		fds()
	case "mounts":
		mounts()
	case "open":
		for _, path := range args {
			fd, err := unix.Open(path, unix.O_WRONLY|unix.O_CLOEXEC, 0)
			say("open "+path, err)
			if err == nil {
				unix.Close(fd)
			}
		}
	case "icmp":
		_, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM, unix.IPPROTO_ICMP)
		say("icmp datagram", err)
		_, err = unix.Socket(unix.AF_INET, unix.SOCK_RAW, unix.IPPROTO_ICMP)
		say("icmp raw", err)
	case "endpoints":
		endpoints()
	case "forks":
		n, _ := strconv.Atoi(args[0])
		forks(n)
	case "threads":
		n, _ := strconv.Atoi(args[0])
		threads(n)
	case "hold":
		mib, _ := strconv.Atoi(args[0])
		n, _ := strconv.Atoi(args[1])
		testutil.HoldMemory(mib, n)
	case "alter":
		for _, path := range args {
			alter(path)
		}
	default:
		try, ok := tries[os.Args[1]]
		if !ok {
			os.Exit(2)
		}
		try(args)
	}
}

func say(what string, err error) {
	var errno syscall.Errno
	switch {
	case err == nil:
		fmt.Println(what, "ok")
	case errors.As(err, &errno):
		fmt.Println(what, unix.ErrnoName(errno))
	default:
		fmt.Println(what, "error")
	}
}

func fds() {
	dir, err := os.Open("/proc/self/fd")
	if err != nil {
		say("fds", err)
		return
	}
	self := strconv.Itoa(int(dir.Fd()))
	names, _ := dir.Readdirnames(-1)
	for _, name := range names {
		link, _ := os.Readlink("/proc/self/fd/" + name)
		// The list's own descriptor, and those of Go's poller.
		if name == self || strings.HasPrefix(link, "anon_inode:[event") {
			continue
		}
		fmt.Println("fd", name, link)
	}
	for _, name := range []string{"cwd", "root", "exe"} {
		link, err := os.Readlink("/proc/self/" + name)
		fmt.Println(name, link, err)
	}
}

func mounts() {
	_, err := unix.Fsopen("tmpfs", 0)
	say("fsopen", err)
	say("mount", unix.Mount("x", "/tmp", "tmpfs", 0, ""))
	_, err = unix.OpenTree(unix.AT_FDCWD, "/tmp", unix.OPEN_TREE_CLONE)
	say("open_tree", err)
	say("move_mount", unix.MoveMount(unix.AT_FDCWD, "/proc", unix.AT_FDCWD, "/tmp", 0))
	say("mount_setattr", unix.MountSetattr(unix.AT_FDCWD, "/proc", 0, &unix.MountAttr{Attr_clr: unix.MOUNT_ATTR_RDONLY}))
	say("umount2", unix.Unmount("/proc/kallsyms", unix.MNT_DETACH))
	say("remount", unix.Mount("", "/proc/sys", "", unix.MS_REMOUNT|unix.MS_BIND, ""))
	say("pivot_root", unix.PivotRoot("/tmp", "/tmp"))
	say("unshare_user", unix.Unshare(unix.CLONE_NEWUSER))
	say("unshare_mnt", unix.Unshare(unix.CLONE_NEWNS))
}

// endpoints prints only what a connection was made to.
func endpoints() {
	connect := func(name string) {
		for _, kind := range []int{unix.SOCK_STREAM, unix.SOCK_SEQPACKET, unix.SOCK_DGRAM} {
			s, err := unix.Socket(unix.AF_UNIX, kind|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
			if err != nil {
				continue
			}
			if unix.Connect(s, &unix.SockaddrUnix{Name: name}) == nil {
				fmt.Printf("connected unix %q\n", name)
			}
			unix.Close(s)
		}
	}
	seen := 0
	_ = filepath.WalkDir("/", func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return nil
		}
		seen++
		if d.Type() == fs.ModeSocket {
			connect(path)
		}
		return nil
	})
	f, err := os.Open("/proc/net/unix")
	if err == nil {
		for s := bufio.NewScanner(f); s.Scan(); {
			if fields := strings.Fields(s.Text()); len(fields) == 8 {
				connect(fields[7])
			}
		}
		f.Close()
	}
	for cid := uint32(0); cid <= 5; cid++ {
		s, err := unix.Socket(unix.AF_VSOCK, unix.SOCK_STREAM|unix.SOCK_NONBLOCK, 0)
		if err != nil {
			say("vsock", err)
			break
		}
		err = unix.Connect(s, &unix.SockaddrVM{CID: cid, Port: 1024})
		say(fmt.Sprintf("vsock %d", cid), err)
		unix.Close(s)
	}
	for _, name := range []string{"tcp", "tcp6", "udp", "udp6"} {
		b, _ := os.ReadFile("/proc/net/" + name)
		fmt.Println("listeners", name, max(strings.Count(string(b), "\n")-1, 0))
	}
	fmt.Println("walked", seen > 50)
}

func forks(n int) {
	var pids []int
	var failed syscall.Errno
	for len(pids) < n {
		pid, _, errno := syscall.RawSyscall6(syscall.SYS_CLONE, uintptr(syscall.SIGCHLD), 0, 0, 0, 0, 0)
		if errno != 0 {
			failed = errno
			break
		}
		if pid == 0 {
			for {
				syscall.RawSyscall(syscall.SYS_PAUSE, 0, 0, 0)
			}
		}
		pids = append(pids, int(pid))
	}
	fmt.Println("forked", len(pids))
	if failed != 0 {
		say("fork", failed)
	}
	for _, pid := range pids {
		_ = unix.Kill(pid, unix.SIGKILL)
		_, _ = unix.Wait4(pid, nil, 0, nil)
	}
}

func threads(n int) {
	started := make(chan bool)
	for range n {
		go func() {
			runtime.LockOSThread()
			started <- true
			select {}
		}()
	}
	for range n {
		<-started
	}
	fmt.Println("ready")
	_, _ = io.Copy(io.Discard, os.Stdin)
}

// alter tries to change a file's bytes. Where the file is a layer's, what is
// changed is the sandbox's own copy, so that the oracle is on the host.
func alter(path string) {
	_ = unix.Setxattr(path, "user.x", []byte("x"), 0)
	if fd, err := unix.Open(path, unix.O_RDONLY, 0); err == nil {
		if b, err := unix.Mmap(fd, 0, 4096, unix.PROT_READ, unix.MAP_SHARED); err == nil {
			say("mprotect "+path, unix.Mprotect(b, unix.PROT_READ|unix.PROT_WRITE))
			if mem, err := os.OpenFile("/proc/self/mem", os.O_RDWR, 0); err == nil {
				_, err := mem.WriteAt([]byte("XXXX"), int64(uintptr(unsafe.Pointer(&b[0]))))
				say("proc_mem "+path, err)
			}
		}
		say("fallocate "+path, unix.Fallocate(fd, unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, 0, 4096))
		_, err := unix.IoctlGetInt(fd, unix.FS_IOC_GETFLAGS)
		say("getflags "+path, err)
		say("setflags "+path, unix.IoctlSetPointerInt(fd, unix.FS_IOC_SETFLAGS, 0x10))
	}
	if fd, err := unix.Open(path, unix.O_RDWR, 0); err == nil {
		_, err := unix.Pwrite(fd, []byte("XXXX"), 0)
		say("write "+path, err)
		r, w, _ := os.Pipe()
		_, _ = w.WriteString("YYYY")
		off := int64(8)
		_, err = unix.Splice(int(r.Fd()), nil, fd, &off, 4, 0)
		say("splice "+path, err)
	} else {
		say("open "+path, err)
	}
	say("truncate "+path, unix.Truncate(path, 10))
	say("chmod "+path, unix.Chmod(path, 0o777))
	say("rename "+path, unix.Rename(path, path+".moved"))
	say("create "+path, os.WriteFile(path, []byte("ZZZZ"), 0o644))
}
