package container

import (
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"path/filepath"
	"runtime"
	"runtime/debug"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec/internal/cgroup"
	"github.com/opendsec/dsec/internal/confine"
)

// launcherEnv marks a process as the launcher, for binaries that have other
// work (tests).
const launcherEnv = "DSEC_LAUNCHER"

// IsLauncher reports whether this process was started as a launcher.
func IsLauncher() bool { return os.Getenv(launcherEnv) != "" } //nolint:forbidigo // it says what this process is

// LauncherMain is the whole life of a launcher process: it serves the socket
// at descriptor 3 until that closes, and never returns.
func LauncherMain() {
	if err := runLauncher(3); err != nil {
		fmt.Fprintln(os.Stderr, "dsec launcher:", err)
		os.Exit(1)
	}
	os.Exit(0)
}

func runLauncher(fd int) error {
	// Its threads are in the kernel nearly always. With one P the runtime takes it
	// back from a call that blocks at the next tick of sysmon; with more it would
	// leave it there for 10 ms, and tick 50 times a millisecond meanwhile.
	runtime.GOMAXPROCS(1)
	debug.SetGCPercent(50)
	conn, err := newPacketSocket(fd)
	if err != nil {
		return err
	}
	if err := reserveLow(); err != nil {
		return err
	}
	var req request
	fds, err := conn.recv(newPacketBuffer(), &req)
	if err != nil {
		return err
	}
	if req.Hello == nil || len(fds) != 2 {
		return errors.New("want hello first")
	}
	chronus, files := os.NewFile(uintptr(fds[0]), "chronus"), os.NewFile(uintptr(fds[1]), "chronus-files")
	s, err := openLauncher(req.Hello, conn, chronus, files)
	_ = chronus.Close()
	_ = files.Close()
	if serr := conn.send(reply{ID: req.ID, Error: toWire(err)}); err == nil {
		err = serr
	}
	if err != nil {
		return err
	}
	go reap(s.slots)
	if err := <-s.ended; !errors.Is(err, io.EOF) && !errors.Is(err, unix.ECONNRESET) {
		return err
	}
	return nil
}

// reserveLow keeps the low descriptors from being used, so that a child can
// arrange its own there (see shellProgram).
func reserveLow() error {
	null, err := unix.Open("/dev/null", unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	for null < lowFDs {
		if null, err = unix.FcntlInt(uintptr(null), unix.F_DUPFD_CLOEXEC, 3); err != nil {
			return err
		}
	}
	return unix.Close(null)
}

func openLauncher(h *helloRequest, conn *packetSocket, chronus, files *os.File) (*shells, error) {
	tree, err := cgroup.Open(cgroup.Options{Name: h.Cgroup})
	if err != nil {
		return nil, err
	}
	watch := watchSockets(filepath.Join(tree.Layout().V2, h.Cgroup))
	err = tree.Join() // what is started from here on needs no move
	if cerr := tree.Close(); err == nil {
		err = cerr
	}
	if err != nil {
		return nil, err
	}
	s, err := openShells(h, conn, watch, chronus, files)
	if err != nil {
		return nil, fmt.Errorf("platform: %w", err)
	}
	return s, nil
}

// watchSockets watches the whole tree for as long as this process lives: its
// slots live no longer. Where the kernel cannot, slots are looked at more
// closely.
func watchSockets(dir string) *confine.SocketWatch {
	fd, err := unix.Open(dir, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err == nil {
		defer unix.Close(fd)
		var watch *confine.SocketWatch
		if watch, err = confine.NewSocketWatch(fd, watchRoom); err == nil {
			return watch
		}
	}
	if !errors.Is(err, errors.ErrUnsupported) {
		fmt.Fprintln(os.Stderr, "dsec launcher:", err)
	}
	return nil
}

// reap waits for children, which are the PID 1s of containers. What became of
// them the backend learns from their pidfds.
func reap(slots *netSlots) {
	ch := make(chan os.Signal, 1)
	signal.Notify(ch, unix.SIGCHLD)
	for range ch {
		for {
			pid, err := unix.Wait4(-1, nil, unix.WNOHANG, nil)
			if err == unix.EINTR {
				continue
			}
			if pid <= 0 || err != nil {
				break
			}
			slots.ended(pid)
		}
	}
}
