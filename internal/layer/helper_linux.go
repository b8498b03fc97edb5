package layer

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"runtime/debug"
	"strconv"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/layer/convert"
)

// HelperMain is the import helper: `dsec import-helper <options as JSON>`,
// started by a store with the archive as standard input and the descriptors from
// fdScratch on. It gives up every right before it reads a byte of the
// archive, converts it, reports, and exits. It never returns.
func HelperMain() {
	if err := helperMain(); err != nil {
		fmt.Fprintln(os.Stderr, "dsec import-helper:", err)
		os.Exit(1)
	}
	os.Exit(0)
}

func helperMain() error {
	if len(os.Args) == 0 {
		return errors.New("no arguments")
	}
	var opt helperOptions
	if err := json.Unmarshal([]byte(os.Args[len(os.Args)-1]), &opt); err != nil {
		return fmt.Errorf("options: %w", err)
	}
	opt.Limits = opt.Limits.WithDefaults()
	// Not from its parent but from a shell: there is nothing to convert.
	if opt.Images < 1 || opt.Images > maxCollapsed {
		return fmt.Errorf("%d images", opt.Images)
	}
	end := fdImages + opt.Images
	for fd := fdScratch; fd < end; fd++ {
		var st unix.Stat_t
		if err := unix.Fstat(fd, &st); err != nil {
			return errors.New("is run by the layer store only")
		}
	}
	findings, err := confineHelper(opt.Limits, end)
	if err != nil {
		return fmt.Errorf("confine: %w", err)
	}
	images := make([]convert.File, opt.Images)
	for i := range images {
		images[i] = &splitFile{f: os.NewFile(uintptr(fdImages+i), "image")}
	}
	res, err := convert.Chain(os.Stdin, images, os.NewFile(fdScratch, "scratch"), opt.Options)
	for i, made := range append(res.Below, res.Image) {
		if err == nil {
			err = images[i].(*splitFile).finish(made.Size)
		}
	}
	rep := report{Result: &res}
	if err != nil {
		var e *dsec.Error
		if !errors.As(err, &e) {
			return err
		}
		rep = report{Error: &dsec.Error{Code: e.Code, Field: e.Field, Message: e.Message}}
	}
	res.Findings = append(findings, res.Findings...)
	doc, err := json.Marshal(rep)
	if err != nil {
		return err
	}
	_, err = os.NewFile(fdReport, "report").Write(doc)
	return err
}

// closeInherited closes what the parent left open by mistake. What survived
// exec has no close-on-exec flag, and all that this process opened has one:
// closing a whole range would take the runtime's poller away too, which is
// open by now in a binary whose other packages start goroutines.
func closeInherited(end int) error {
	entries, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		return err
	}
	for _, e := range entries {
		fd, err := strconv.Atoi(e.Name())
		if err != nil || fd < end {
			continue
		}
		if flags, err := unix.FcntlInt(uintptr(fd), unix.F_GETFD, 0); err == nil && flags&unix.FD_CLOEXEC == 0 {
			_ = unix.Close(fd)
		}
	}
	return nil
}

// helperCPU bounds the processor time of one import, in seconds: an archive at
// every limit takes minutes.
const helperCPU = 3600

// confineHelper takes from this process what converting does not need. On
// error nothing may be read. The findings say what this kernel cannot take. end is the
// first descriptor that is not the helper's.
func confineHelper(l Limits, end int) (findings []string, err error) {
	if os.Geteuid() == 0 {
		return nil, errors.New("runs as root")
	}
	if err := closeInherited(end); err != nil {
		return nil, err
	}
	// A file that grows too large is an error of the write, not a signal.
	signal.Ignore(unix.SIGXFSZ, unix.SIGPIPE)
	// The tree only grows: to look through it often takes an eighth of the time, and
	// finds little.
	debug.SetGCPercent(400)
	debug.SetMemoryLimit(l.MemoryBytes * 9 / 10)
	file := uint64(diskBytes(l)) // of each: see watchDisk
	for _, r := range []struct {
		what     string
		resource int
		value    uint64
	}{
		// Data, not address space: Go's runtime reserves far more than it uses.
		{"data", unix.RLIMIT_DATA, uint64(l.MemoryBytes)},
		{"address space", unix.RLIMIT_AS, uint64(l.MemoryBytes) + 4<<30},
		{"file size", unix.RLIMIT_FSIZE, file},
		{"processor time", unix.RLIMIT_CPU, helperCPU},
		{"core size", unix.RLIMIT_CORE, 0},
		{"descriptors", unix.RLIMIT_NOFILE, uint64(end) + 10},
	} {
		if err := unix.Setrlimit(r.resource, &unix.Rlimit{Cur: r.value, Max: r.value}); err != nil {
			return nil, fmt.Errorf("limit of %s: %w", r.what, err)
		}
	}
	if err := unix.Prctl(unix.PR_SET_DUMPABLE, 0, 0, 0, 0); err != nil {
		return nil, fmt.Errorf("dumpable: %w", err)
	}
	if findings, err = landlockAll(); err != nil {
		return nil, fmt.Errorf("landlock: %w", err)
	}
	if err := seccompAll(); err != nil {
		return nil, fmt.Errorf("seccomp: %w", err)
	}
	// Whatever the above said: a file that opens means that it is not so.
	if f, err := os.Open("/"); err == nil {
		_ = f.Close()
		return nil, errors.New("the root directory can still be opened")
	}
	return findings, nil
}
