package chronus

import (
	"os"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/rawexec"
	"golang.org/x/sys/unix"
)

// Descriptors of a session's shell. Bash takes any number; other shells know
// numbers of one digit only. Both are such that scripts seldom use them.
const (
	bashFD = 250
	shFD   = 6
)

// The loops that the shells run, with the descriptors of control, status and
// text in this order. The text is sourced by a path that opens it anew, at its
// start. The function gives a command the $? of the one before. "command"
// keeps a POSIX shell alive where the text has a syntax error.
const (
	bashLoop = `__dsec_status() { return "$1"; }
__dsec_s=0
while IFS= read -r -u 250 __dsec_n; do
__dsec_status "$__dsec_s"
. /proc/self/fd/252
__dsec_s=$?
printf '%s %s\n' "$__dsec_n" "$__dsec_s" >&251
done`
	shLoop = `__dsec_status() { return "$1"; }
__dsec_s=0
while IFS= read -r __dsec_n <&6; do
__dsec_status "$__dsec_s"
command . /proc/self/fd/8
__dsec_s=$?
printf '%s %s\n' "$__dsec_n" "$__dsec_s" >&7
done`
)

// sessionFiles are both ends of what a session's shell is driven by.
type sessionFiles struct {
	text                      *os.File // in memory
	control, status           *os.File // ours
	childControl, childStatus *os.File
}

func (f *sessionFiles) open() error {
	fd, err := unix.MemfdCreate("command", unix.MFD_CLOEXEC)
	if err != nil {
		return &dsec.Error{Code: dsec.CodeExhausted, Message: "no file for the session: " + err.Error(), Err: err}
	}
	f.text = os.NewFile(uintptr(fd), "command")
	if f.childControl, f.control, err = pipe(false); err != nil {
		return err
	}
	f.status, f.childStatus, err = pipe(true)
	return err
}

// closeChild closes the shell's ends, once it has them.
func (f *sessionFiles) closeChild() {
	closeFile(&f.childControl)
	closeFile(&f.childStatus)
}

func (f *sessionFiles) closeAll() {
	f.closeChild()
	for _, fl := range []*os.File{f.text, f.control, f.status} {
		if fl != nil {
			fl.Close() // stays set: others may be using it
		}
	}
}

func (f *sessionFiles) setText(text string) error {
	if err := f.text.Truncate(0); err != nil {
		return err
	}
	_, err := f.text.WriteAt([]byte(text), 0)
	return err
}

// clearText gives the memory back.
func (f *sessionFiles) clearText() {
	if f.text != nil {
		_ = f.text.Truncate(0)
	}
}

// buildSession appends the execs of a session's shell.
func (l *launch) buildSession(path string, env rawexec.Arg) {
	// By way of higher numbers, since one of ours may be where another goes.
	var high [3]int
	for i, f := range []*os.File{l.shell.childControl, l.shell.childStatus, l.shell.text} {
		high[i] = l.prog.Call("dup", unix.SYS_FCNTL, rawexec.Int(fdOf(f)), rawexec.Int(unix.F_DUPFD_CLOEXEC), rawexec.Int(bashFD+3))
	}
	for i, call := range high {
		l.prog.Call("dup", unix.SYS_DUP3, rawexec.Result(call), rawexec.Int(bashFD+i), rawexec.Int(0))
	}
	if len(l.c.shells) == 0 {
		l.searchShell("bash", path, rawexec.Strs([]string{"bash", "--noprofile", "--norc", "-c", bashLoop}), env)
		l.prog.Ignore(l.tries[len(l.tries)-1].call)
	}
	// There is no bash.
	for i := range 3 {
		l.prog.Call("dup", unix.SYS_DUP3, rawexec.Int(bashFD+i), rawexec.Int(shFD+i), rawexec.Int(0))
	}
	l.prog.Call("close", unix.SYS_CLOSE_RANGE, rawexec.Int(bashFD), rawexec.Int(bashFD+2), rawexec.Int(0))
	argv := rawexec.Strs([]string{"sh", "-c", shLoop})
	for _, sh := range l.c.shells {
		l.try(sh, argv, env)
		return
	}
	l.searchShell("sh", path, argv, env)
}
