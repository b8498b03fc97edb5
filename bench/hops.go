package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"slices"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec/bench/internal/measure"
)

// What this program is run with to be a process of floorHops.
const (
	relayCommand = "relay" // hands on
	echoCommand  = "echo"  // answers
)

// relay hands what comes on descriptor 3 on to 4 and the answer back; echo is
// the answer. Their system calls block, and nothing waits for the Go scheduler.
func relay(command string) {
	buf := make([]byte, 256)
	move := func(from, to int) {
		n, err := unix.Read(from, buf)
		if n <= 0 || err != nil {
			os.Exit(0) // the bench has ended
		}
		if _, err := unix.Write(to, buf[:n]); err != nil {
			os.Exit(0)
		}
	}
	for {
		if command == echoCommand {
			move(3, 3)
		} else {
			move(3, 4)
			move(4, 3)
		}
	}
}

// floorHops is what the kernel alone takes for the way of a session's command,
// from a client over loopback through a server and a sandbox's first process to
// a shell, and of its answer back: one write and one blocking read at each.
func floorHops() (c measure.Contestant, stop func(), err error) {
	var started []*exec.Cmd
	var files []*os.File
	stop = func() {
		for _, f := range files {
			_ = f.Close()
		}
		for _, cmd := range started {
			_ = cmd.Wait() // its descriptor 3 has ended
		}
	}
	defer func() {
		for _, f := range slices.Backward(files[min(1, len(files)):]) {
			_ = f.Close() // the processes have theirs
		}
		files = files[:min(1, len(files))]
		if err != nil {
			stop()
		}
	}()
	client, server, err := loopback()
	if err != nil {
		return c, stop, err
	}
	files = append(files, client, server)
	for up, left := server, 2; left >= 0; left-- {
		cmd := exec.Command("/proc/self/exe", echoCommand)
		cmd.ExtraFiles = []*os.File{up}
		if left > 0 {
			sp, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
			if err != nil {
				return c, stop, err
			}
			here, there := os.NewFile(uintptr(sp[0]), "here"), os.NewFile(uintptr(sp[1]), "there")
			files = append(files, here, there)
			cmd.Args[1], cmd.ExtraFiles = relayCommand, append(cmd.ExtraFiles, here)
			up = there
		}
		if err := cmd.Start(); err != nil {
			return c, stop, err
		}
		started = append(started, cmd)
	}
	fd, buf := int(client.Fd()), make([]byte, 64)
	return measure.Contestant{Name: "floor", Per: 100, Once: func(context.Context) (time.Duration, error) {
		return measure.Timed(func() error {
			if _, err := unix.Write(fd, buf); err != nil {
				return err
			}
			n, err := unix.Read(fd, buf)
			if err == nil && n != len(buf) {
				err = fmt.Errorf("%d bytes of the hops' %d came back", n, len(buf))
			}
			return err
		})
	}}, stop, nil
}

// loopback is a TCP connection over 127.0.0.1 whose ends block.
func loopback() (client, server *os.File, err error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return nil, nil, err
	}
	defer l.Close()
	ours, err := net.Dial("tcp", l.Addr().String())
	if err != nil {
		return nil, nil, err
	}
	defer ours.Close()
	theirs, err := l.Accept()
	if err != nil {
		return nil, nil, err
	}
	defer theirs.Close()
	if client, err = ours.(*net.TCPConn).File(); err != nil {
		return nil, nil, err
	}
	if server, err = theirs.(*net.TCPConn).File(); err != nil {
		return nil, nil, errors.Join(err, client.Close())
	}
	return client, server, errors.Join(syscall.SetNonblock(int(client.Fd()), false), syscall.SetNonblock(int(server.Fd()), false))
}
