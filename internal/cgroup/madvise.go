package cgroup

import (
	"bufio"
	"context"
	"os"
	"strconv"
	"strings"
	"unsafe"

	"golang.org/x/sys/unix"
)

// memoryRange is a part of a process's memory, as process_madvise(2) takes it.
type memoryRange struct{ start, size uint64 }

// mapping is what is looked at of one of a process's.
type mapping struct {
	memoryRange
	private, file bool
	fixed         bool  // its pages stay where they are
	resident      int64 // bytes
	swapped       int64
}

const (
	maxRanges = 1024     // of one call: UIO_MAXIOV
	maxMoved  = 32 << 20 // bytes of memory that one call is about, so that it can be given up after each
)

// advise gives advice about those mappings of a process of which moved tells how many
// bytes are concerned. Where the process has ended there is none to be given.
func advise(ctx context.Context, pid, pidfd, advice int, moved func(mapping) int64) error {
	if ctx.Err() != nil { // an agent's processes may have many mappings
		return context.Cause(ctx)
	}
	mappings, err := readMappings(pid)
	if err != nil {
		return nil // it has ended
	}
	var ranges []memoryRange
	var sum int64
	for _, m := range mappings {
		n := moved(m)
		if n == 0 {
			continue
		}
		// A large one in pieces that hold as much each, if it is all alike.
		piece := m.size
		if n > maxMoved {
			piece = max(m.size/uint64(n/maxMoved+1), 1<<20) &^ (1<<20 - 1)
		}
		for at, end := m.start, m.start+m.size; at < end; at += piece {
			size := min(piece, end-at)
			ranges = append(ranges, memoryRange{at, size})
			sum += int64(float64(n) * (float64(size) / float64(m.size)))
			if len(ranges) < maxRanges && sum < maxMoved {
				continue
			}
			if err := processMadvise(ctx, pidfd, ranges, advice); err != nil {
				return err
			}
			ranges, sum = ranges[:0], 0
		}
	}
	return processMadvise(ctx, pidfd, ranges, advice)
}

// processMadvise gives advice about ranges. What the kernel refuses of a single
// one, as of a range that is locked, is no error.
func processMadvise(ctx context.Context, pidfd int, ranges []memoryRange, advice int) error {
	for len(ranges) > 0 {
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		n, _, errno := unix.Syscall6(unix.SYS_PROCESS_MADVISE, uintptr(pidfd), uintptr(unsafe.Pointer(&ranges[0])), uintptr(len(ranges)), uintptr(advice), 0, 0)
		switch errno {
		case 0:
			ranges = after(ranges, uint64(n))
		case unix.EINTR:
		case unix.ESRCH:
			return nil
		case unix.ENOSYS, unix.EPERM:
			return errno
		default:
			ranges = ranges[1:]
		}
	}
	return nil
}

// after is what is left of ranges after n bytes: at least one range less where that
// is none, so that it ends.
func after(ranges []memoryRange, n uint64) []memoryRange {
	if n == 0 {
		return ranges[1:]
	}
	for len(ranges) > 0 && n >= ranges[0].size {
		n -= ranges[0].size
		ranges = ranges[1:]
	}
	if n > 0 && len(ranges) > 0 {
		ranges[0].start += n
		ranges[0].size -= n
	}
	return ranges
}

// readMappings reads a process's smaps. No path in it is used.
func readMappings(pid int) ([]mapping, error) {
	f, err := os.Open("/proc/" + strconv.Itoa(pid) + "/smaps")
	if err != nil {
		return nil, err
	}
	defer f.Close()
	var list []mapping
	lines := bufio.NewScanner(f)
	for lines.Scan() {
		line := lines.Text()
		name, rest, _ := strings.Cut(line, " ")
		if !strings.HasSuffix(name, ":") {
			if m, ok := parseMapping(name, rest); ok {
				list = append(list, m)
			}
			continue
		}
		if len(list) == 0 {
			continue
		}
		m := &list[len(list)-1]
		switch name {
		case "Rss:":
			m.resident = kibibytes(rest)
		case "Swap:":
			m.swapped = kibibytes(rest)
		case "VmFlags:":
			for flag := range strings.FieldsSeq(rest) {
				m.fixed = m.fixed || flag == "lo" || flag == "pf" || flag == "io" || flag == "ht"
			}
		}
	}
	return list, lines.Err()
}

// parseMapping reads the first line of a mapping: start-end, and then rights,
// offset, device, inode and name.
func parseMapping(at, rest string) (m mapping, ok bool) {
	from, to, _ := strings.Cut(at, "-")
	start, err := strconv.ParseUint(from, 16, 64)
	if err != nil {
		return m, false
	}
	end, err := strconv.ParseUint(to, 16, 64)
	fields := strings.Fields(rest)
	if err != nil || end <= start || len(fields) < 4 || len(fields[0]) < 4 {
		return m, false
	}
	return mapping{
		memoryRange: memoryRange{start, end - start},
		private:     fields[0][3] == 'p', file: fields[3] != "0",
	}, true
}

// kibibytes reads "  N kB".
func kibibytes(s string) int64 {
	n, _ := strconv.ParseInt(strings.TrimSuffix(strings.TrimSpace(s), " kB"), 10, 64)
	return n << 10
}
