package main

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strconv"
	"strings"
)

// swap makes a zram device of so many bytes the host's swap, where it has none, and
// returns what takes that back.
func swap(bytes int64) (off func(), err error) {
	swaps, err := os.ReadFile("/proc/swaps")
	if err != nil {
		return nil, err
	}
	if strings.Count(string(swaps), "\n") > 1 {
		return func() {}, nil
	}
	raw, err := os.ReadFile("/sys/class/zram-control/hot_add")
	if err != nil {
		return nil, err
	}
	n := strings.TrimSpace(string(raw))
	device, sys := "/dev/zram"+n, "/sys/block/zram"+n
	off = func() {
		_ = exec.Command("swapoff", device).Run()
		_ = os.WriteFile(sys+"/reset", []byte("1"), 0)
		_ = os.WriteFile("/sys/class/zram-control/hot_remove", []byte(n), 0)
	}
	err = os.WriteFile(sys+"/disksize", []byte(strconv.FormatInt(bytes, 10)), 0)
	for _, command := range [][]string{{"mkswap", device}, {"swapon", device}} {
		if err == nil {
			var out []byte
			if out, err = exec.Command(command[0], command[1:]...).CombinedOutput(); err != nil {
				err = fmt.Errorf("%s: %w: %s", command[0], err, out)
			}
		}
	}
	if err != nil {
		off()
		return nil, errors.Join(err)
	}
	return off, nil
}
