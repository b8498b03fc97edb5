package lazy

import (
	"fmt"
	"os"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec/internal/testutil"
)

func TestLayerdHoldsNoMoreThanItNeeds(t *testing.T) {
	testutil.Require(t, testutil.Root, testutil.Kernel(6, 14))
	f := newFixture(t, 1<<20, MinChunk)
	c := connect(t, f.config(t, ""))
	raw, err := c.conn.c.SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	pid := 0
	_ = raw.Control(func(fd uintptr) {
		cred, err := unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED)
		if err == nil {
			pid = int(cred.Pid)
		}
	})
	tasks, err := os.ReadDir(fmt.Sprintf("/proc/%d/task", pid))
	if err != nil || len(tasks) == 0 {
		t.Fatal(err)
	}
	for _, task := range tasks {
		b, err := os.ReadFile(fmt.Sprintf("/proc/%d/task/%s/status", pid, task.Name()))
		if err != nil {
			t.Fatal(err)
		}
		for _, want := range []string{"CapEff:\t0000000000000004\n", "CapPrm:\t0000000000000004\n", "CapInh:\t0000000000000000\n", "NoNewPrivs:\t1\n"} {
			if !strings.Contains(string(b), want) {
				t.Errorf("thread %s: want %q in\n%s", task.Name(), want, b)
			}
		}
	}
	for _, secret := range []string{"cmdline", "environ"} {
		b, err := os.ReadFile(fmt.Sprintf("/proc/%d/%s", pid, secret))
		if err != nil || strings.Contains(string(b), "of the test") || strings.Contains(string(b), f.store.dir) {
			t.Errorf("%s: %q, %v", secret, b, err)
		}
	}
}
