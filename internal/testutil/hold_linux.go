package testutil

import (
	"bufio"
	"fmt"
	"math/rand/v2"
	"os"
	"syscall"

	"golang.org/x/sys/unix"
)

// HoldMemory is a program that has so much memory, of which a third cannot be
// compressed and a MiB is locked, where it may, and so many children that share it. It says "true" once it
// has it, and again for each line that it reads, if it is all as it was.
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
	for range forks {
		// Nothing of Go's runtime is there in the child but this thread.
		if pid, _, _ := syscall.RawSyscall(unix.SYS_CLONE, uintptr(unix.SIGCHLD), 0, 0); pid == 0 {
			sum(memory)
			for {
				_, _, _ = syscall.RawSyscall6(unix.SYS_PPOLL, 0, 0, 0, 0, 0, 0)
			}
		}
	}
	want := sum(memory)
	for in := bufio.NewReader(os.Stdin); ; {
		fmt.Println(sum(memory) == want)
		if _, err := in.ReadString('\n'); err != nil {
			return
		}
	}
}

func sum(memory []byte) (sum int) {
	for at := 0; at < len(memory); at += 64 {
		sum += int(memory[at])
	}
	return sum
}
