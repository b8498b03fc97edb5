package chronus

import (
	"os"
	"strconv"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/chronusapi"
	"golang.org/x/sys/unix"
)

// openPTY makes a terminal of the sandbox's own devpts. The follower is the
// side of the command.
func openPTY(size chronusapi.WindowSize) (leader, follower *os.File, err error) {
	fd, err := unix.Open("/dev/ptmx", unix.O_RDWR|unix.O_NOCTTY|unix.O_CLOEXEC|unix.O_NONBLOCK, 0)
	if err != nil {
		return nil, nil, ptyError(err)
	}
	leader = os.NewFile(uintptr(fd), "ptmx")
	defer func() {
		if err != nil {
			leader.Close()
		}
	}()
	if err := unix.IoctlSetPointerInt(fd, unix.TIOCSPTLCK, 0); err != nil {
		return nil, nil, ptyError(err)
	}
	// By the leader's descriptor, not by a path below /dev/pts.
	peer, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), unix.TIOCGPTPEER, unix.O_RDWR|unix.O_NOCTTY|unix.O_CLOEXEC)
	if errno != 0 {
		return nil, nil, ptyError(errno)
	}
	follower = os.NewFile(peer, "pts")
	if err := setSize(leader, size); err != nil {
		follower.Close()
		return nil, nil, ptyError(err)
	}
	return leader, follower, nil
}

func ptyError(err error) error {
	code := dsec.CodeUnsupported
	if err == unix.ENOSPC || err == unix.EMFILE || err == unix.ENOMEM {
		code = dsec.CodeExhausted
	}
	return &dsec.Error{Code: code, Field: "pty", Message: "no terminal: " + err.Error(), Err: err}
}

func setSize(leader *os.File, size chronusapi.WindowSize) error {
	raw, err := leader.SyscallConn()
	if err != nil {
		return err
	}
	var ierr error
	err = raw.Control(func(fd uintptr) {
		ierr = unix.IoctlSetWinsize(int(fd), unix.TIOCSWINSZ, &unix.Winsize{Row: size.Rows, Col: size.Cols})
	})
	if err != nil {
		return err
	}
	return ierr
}

func utoa(n uint64) string { return strconv.FormatUint(n, 10) }
