package chronus

import (
	"errors"
	"os"
	"strconv"
	"strings"
	"syscall"
	"time"
	"unsafe"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/chronusapi"
	"github.com/opendsec/dsec/internal/rawexec"
	"golang.org/x/sys/unix"
)

// Names of the calls whose failure is the caller's.
const (
	callChdir  = "chdir"
	callExec   = "exec"
	callUser   = "set user"
	callSilent = "" // never seen: the failure is ignored
)

// launch is one start on its way.
type launch struct {
	c     *Chronus
	p     *process
	cmd   *chronusapi.Command
	who   account
	env   []string
	files *childFiles
	pty   bool
	shell *sessionFiles // of a session, else nil

	prog  rawexec.Program
	tries []try // the execs, in order
}

// try is one exec of the search for the program.
type try struct {
	call int
	path string
}

// build lists what the child does between clone and exec.
func (l *launch) build() {
	p := &l.prog
	if g := l.p.group; g != nil {
		for _, fd := range g.Procs {
			p.Call("join group", unix.SYS_WRITE, rawexec.Int(fd), rawexec.Str("0"), rawexec.Int(1))
		}
	}
	if cpus := l.c.setup.cpus; len(cpus) > 0 {
		p.Call("affinity", unix.SYS_SCHED_SETAFFINITY, rawexec.Int(0), rawexec.Int(len(cpus)), rawexec.Bytes(cpus))
	}
	p.Call("setsid", unix.SYS_SETSID)
	p.Call("umask", unix.SYS_UMASK, rawexec.Int(0o022)) // that of chronus is 0
	l.buildFiles()
	for i := range l.c.setup.rlimits {
		r := &l.c.setup.rlimits[i]
		lim := &unix.Rlimit{Cur: r.Soft, Max: r.Hard}
		p.Call("rlimit "+strconv.Itoa(int(r.Resource)), unix.SYS_PRLIMIT64, rawexec.Int(0), rawexec.Int(r.Resource),
			rawexec.Ptr(unsafe.Pointer(lim)), rawexec.Int(0))
	}
	l.buildUser()
	cwd := l.cmd.Cwd
	if cwd == "" {
		cwd = "/"
	}
	// Not chdir: the path may lead through a symlink that the agent made to
	// /proc/self/fd, where chronus's own descriptors, such as those of cgroups on
	// the host, still are.
	how := &unix.OpenHow{Flags: unix.O_PATH | unix.O_DIRECTORY | unix.O_CLOEXEC, Resolve: unix.RESOLVE_NO_MAGICLINKS}
	dir := p.Call(callChdir, unix.SYS_OPENAT2, rawexec.Int(unix.AT_FDCWD), rawexec.Str(cwd), rawexec.Ptr(unsafe.Pointer(how)), rawexec.Int(unix.SizeofOpenHow))
	p.Call(callChdir, unix.SYS_FCHDIR, rawexec.Result(dir))
	p.Call("close on exec", unix.SYS_CLOSE_RANGE, rawexec.Int(3), rawexec.Int(^uint32(0)), rawexec.Int(unix.CLOSE_RANGE_CLOEXEC))
	if f := l.c.setup.filter; len(f) > 0 {
		prog := &unix.SockFprog{Len: uint16(len(f)), Filter: &f[0]}
		p.Call("seccomp", unix.SYS_SECCOMP, rawexec.Int(unix.SECCOMP_SET_MODE_FILTER), rawexec.Int(0), rawexec.Ptr(unsafe.Pointer(prog)))
	}
	p.UnblockSignals()
	l.buildExec()
}

func (l *launch) buildFiles() {
	p := &l.prog
	dup := func(f *os.File, to int) {
		p.Call("dup", unix.SYS_DUP3, rawexec.Int(fdOf(f)), rawexec.Int(to), rawexec.Int(0))
	}
	if l.pty {
		for fd := range 3 {
			dup(l.files.stdin, fd)
		}
		p.Call("set terminal", unix.SYS_IOCTL, rawexec.Int(0), rawexec.Int(unix.TIOCSCTTY), rawexec.Int(0))
		return
	}
	stdin := l.files.stdin
	if stdin == nil {
		stdin = l.c.null
	}
	dup(stdin, 0)
	dup(l.files.stdout, 1)
	dup(l.files.stderr, 2)
}

func (l *launch) buildUser() {
	if !l.c.asRoot && int(l.who.uid) == os.Geteuid() {
		return // a test without privileges, as itself
	}
	if !l.c.asRoot && l.cmd.User == "" {
		return
	}
	p := &l.prog
	groups := rawexec.Int(0)
	if n := len(l.who.groups); n > 0 {
		list := append([]uint32(nil), l.who.groups...)
		groups = rawexec.Ptr(unsafe.Pointer(&list[0]))
	}
	p.Call(callUser, unix.SYS_SETGROUPS, rawexec.Int(len(l.who.groups)), groups)
	p.Call(callUser, unix.SYS_SETRESGID, rawexec.Int(l.who.gid), rawexec.Int(l.who.gid), rawexec.Int(l.who.gid))
	p.Call(callUser, unix.SYS_SETRESUID, rawexec.Int(l.who.uid), rawexec.Int(l.who.uid), rawexec.Int(l.who.uid))
}

// buildExec appends one exec for each place where the program may be, as
// execvp looks for it. Only the last one's failure is one.
func (l *launch) buildExec() {
	env := rawexec.Strs(l.env)
	path := defaultPath
	for _, kv := range l.env {
		if v, ok := strings.CutPrefix(kv, "PATH="); ok {
			path = v
			break
		}
	}
	if l.shell != nil {
		l.buildSession(path, env)
		return
	}
	if l.cmd.Shell == "" {
		l.search(l.cmd.Argv[0], path, rawexec.Strs(l.cmd.Argv), env)
		return
	}
	for _, shell := range []string{"bash", "sh"} {
		l.searchShell(shell, path, rawexec.Strs([]string{shell, "-c", l.cmd.Shell}), env)
	}
}

// searchShell looks for a shell in PATH, and where every system has it: a
// command's PATH need not lead to one.
func (l *launch) searchShell(name, path string, argv, env rawexec.Arg) {
	l.search(name, path, argv, env)
	for _, dir := range []string{"/bin/", "/usr/bin/"} {
		l.try(dir+name, argv, env)
	}
}

func (l *launch) search(name, path string, argv, env rawexec.Arg) {
	if strings.Contains(name, "/") {
		l.try(name, argv, env)
		return
	}
	for dir := range strings.SplitSeq(path, ":") {
		if dir == "" {
			dir = "."
		}
		if len(dir)+len(name) < chronusapi.MaxPath && len(l.tries) < 256 {
			l.try(dir+"/"+name, argv, env)
		}
	}
}

func (l *launch) try(path string, argv, env rawexec.Arg) {
	if n := len(l.tries); n > 0 {
		l.prog.Ignore(l.tries[n-1].call)
	}
	l.tries = append(l.tries, try{l.prog.Call(callExec, unix.SYS_EXECVE, rawexec.Str(path), argv, env), path})
}

// run starts the child and makes its process known.
func (l *launch) run() error {
	p, r := l.p, l.c.reaper
	if len(l.tries) == 0 {
		return l.execError()
	}
	p.started = time.Now()
	r.begin()
	o := rawexec.Options{Flags: unix.CLONE_VM | unix.CLONE_VFORK, PID: &p.pid}
	if p.group != nil {
		o.Cgroup = p.group.Dir
	}
	child, err := l.prog.Start(o)
	if err != nil {
		r.end(0, nil)
		return &dsec.Error{Code: dsec.CodeExhausted, Message: "no process can be started: " + err.Error(), Err: err}
	}
	if err := child.Wait(); err != nil {
		r.end(child.PID, nil)
		return l.startError(err)
	}
	l.c.publish(p)
	r.end(child.PID, p.childEnded)
	return nil
}

// startError is the error of a command whose child gave up.
func (l *launch) startError(err error) error {
	var e *rawexec.Error
	if !errors.As(err, &e) {
		return err
	}
	switch e.Call {
	case callChdir:
		return fileError(e.Errno, "command.cwd", l.cmd.Cwd)
	case callUser:
		return &dsec.Error{Code: dsec.CodeInvalid, Field: "command.user", Err: err,
			Message: "the sandbox has no user or group of this number: " + e.Errno.Error()}
	case callExec:
		return l.execError()
	case "join group":
		l.c.mu.Lock()
		l.p.group.bad = true
		l.c.mu.Unlock()
	}
	return &dsec.Error{Code: dsec.CodeInternal, Message: "command not started: " + err.Error(), Err: err}
}

// execError tells why no exec worked, by the one that came nearest.
func (l *launch) execError() error {
	field, name := "command.shell", "bash or sh"
	if l.cmd.Shell == "" && l.shell == nil {
		field, name = "command.argv", l.cmd.Argv[0]
	}
	quoted := strconv.Quote(name[:min(len(name), 200)])
	var worst syscall.Errno
	at := ""
	for _, t := range l.tries {
		errno := l.prog.Errno(t.call)
		if errno == unix.ENOENT || errno == unix.ENOTDIR {
			if worst == 0 && lexists(t.path, l.cmd.Cwd) {
				worst, at = unix.ENOENT, t.path
			}
			continue
		}
		if worst == 0 || worst == unix.ENOENT || worst == unix.EACCES {
			worst, at = errno, t.path
		}
	}
	at = strconv.Quote(at[:min(len(at), 200)])
	bad := func(code dsec.Code, text string) error {
		return &dsec.Error{Code: code, Field: field, Message: text, Err: worst}
	}
	switch worst {
	case 0:
		return &dsec.Error{Code: dsec.CodeNotFound, Field: field, Message: "no program " + quoted + " in the sandbox"}
	case unix.ENOENT:
		return bad(dsec.CodeNotFound, at+" needs an interpreter (#! line or ELF loader) that is not in the sandbox")
	case unix.EACCES, unix.EPERM:
		return bad(dsec.CodeInvalid, at+" is not executable for this user")
	case unix.ENOEXEC:
		return bad(dsec.CodeInvalid, at+" is not a program; a script needs a #! line")
	case unix.E2BIG:
		return bad(dsec.CodeInvalid, "argv and env are larger than the kernel takes (128 KiB for one string)")
	case unix.EAGAIN, unix.ENOMEM, unix.EMFILE, unix.ENFILE:
		return bad(dsec.CodeExhausted, at+" cannot be started now: "+worst.Error())
	case unix.ETXTBSY:
		return bad(dsec.CodeConflict, at+" is open for writing")
	case unix.EIO:
		return bad(dsec.CodeUnavailable, at+" cannot be read: "+worst.Error())
	}
	return bad(dsec.CodeInvalid, at+" cannot be started: "+worst.Error())
}

// lexists reports whether a program's file is there, for the message only.
func lexists(path, cwd string) bool {
	if !strings.HasPrefix(path, "/") {
		path = cwd + "/" + path
	}
	var st unix.Stat_t
	return unix.Lstat(path, &st) == nil
}

// fdOf is a file's descriptor, which stays in non-blocking mode (os.File.Fd
// would change that).
func fdOf(f *os.File) int {
	fd := -1
	if raw, err := f.SyscallConn(); err == nil {
		_ = raw.Control(func(n uintptr) { fd = int(n) })
	}
	return fd
}
