package testutil

import (
	"bufio"
	"math/rand/v2"
	"os"
	"strconv"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

// HoldMemory is a program that has so much memory, of which a third cannot be
// compressed and a MiB is locked, where it may, and so many children that share it.
// It says "true" once it has it, and again for each line that it reads, if it is all
// as it was, for the children too.
func HoldMemory(mib, forks int) {
	memory, err := unix.Mmap(-1, 0, mib<<20, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANON)
	if err != nil {
		panic(err)
	}
	_ = unix.Mlock(memory[:1<<20])
	random := rand.NewChaCha8([32]byte{1})
	for at := 0; at < len(memory); at += 4096 {
		_, _ = random.Read(memory[at : at+1365])
	}
	children := make([]int, forks)
	for i := range children {
		pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM, 0)
		if err != nil {
			panic(err)
		}
		children[i] = pair[0]
		if pid, _, _ := syscall.RawSyscall(unix.SYS_CLONE, uintptr(unix.SIGCHLD), 0, 0); pid == 0 {
			useWhenTold(memory, pair[1])
		}
	}
	want := sum(memory)
	for in := bufio.NewReader(os.Stdin); ; {
		same := sum(memory) == want
		for _, child := range children {
			b := []byte{0}
			_, werr := unix.Write(child, b)
			_, rerr := unix.Read(child, b)
			same = same && werr == nil && rerr == nil && b[0] == byte(want)
		}
		_, _ = os.Stdout.WriteString(strconv.FormatBool(same) + "\n")
		if _, err := in.ReadString('\n'); err != nil {
			return
		}
	}
}

// useWhenTold is the child: nothing of Go's runtime is there but its thread.
func useWhenTold(memory []byte, socket int) {
	var b byte
	for {
		n, _, _ := syscall.RawSyscall(unix.SYS_READ, uintptr(socket), uintptr(unsafe.Pointer(&b)), 1)
		if n != 1 {
			_, _, _ = syscall.RawSyscall(unix.SYS_EXIT_GROUP, 0, 0, 0)
		}
		b = byte(sum(memory))
		_, _, _ = syscall.RawSyscall(unix.SYS_WRITE, uintptr(socket), uintptr(unsafe.Pointer(&b)), 1)
	}
}

func sum(memory []byte) (sum int) {
	for at := 0; at < len(memory); at += 64 {
		sum += int(memory[at])
	}
	return sum
}
