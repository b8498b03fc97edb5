package layer

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/layer/convert"
)

// HelperVerb is the argument with which the program runs HelperMain.
const HelperVerb = "import-helper"

// Descriptors of the helper beside its standard input, which is the archive.
const (
	fdScratch = 3 + iota
	fdReport
	fdImages // the first of them
)

// helperOptions are what the helper is told.
type helperOptions struct {
	convert.Options
	Images int `json:"images"` // descriptors from fdImages on
}

// reportBytes bounds what is read from a helper.
const reportBytes = 8 << 20

// report is what the helper answers.
type report struct {
	Result *convert.Result `json:"result,omitempty"`
	Error  *dsec.Error     `json:"error,omitempty"`
}

// convert runs the helper on the archive. It returns when the helper is gone.
func (s *Store) convert(ctx context.Context, images []*os.File, opt convert.Options, src *sourceReader) (convert.Result, error) {
	scratch, err := s.scratchFile()
	if err != nil {
		return convert.Result{}, storeError("make scratch file", err)
	}
	defer scratch.Close()
	h, err := s.startHelper(images, scratch, opt)
	if err != nil {
		return convert.Result{}, err
	}
	stop := context.AfterFunc(ctx, h.kill)
	defer stop()
	disk := watchDisk(append([]*os.File{scratch}, images...), diskBytes(opt.Limits.WithDefaults()), h.kill)
	defer disk.end()

	read, pumped := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(pumped)
		// EPIPE: the helper has seen enough; its report says why.
		_, _ = io.CopyBuffer(onlyWriter{h.stdin}, src, make([]byte, 1<<20))
		close(read) // before the helper sees the end, which it may report on
		_ = h.stdin.Close()
	}()
	rep, err := h.wait()
	if ctx.Err() != nil {
		return convert.Result{}, canceled(ctx)
	}
	if disk.full() {
		return convert.Result{}, dsec.Invalid("data", "the archive takes more than %d bytes of disk", disk.most)
	}
	if err == nil && rep.Error != nil {
		err = rep.Error
	}
	if err != nil && !sentCut(read, src) { // nobody waits for the rest of the archive
		return convert.Result{}, err
	}
	// The helper has read to the end, or to where its sender broke off.
	select {
	case <-pumped:
	case <-ctx.Done():
		return convert.Result{}, canceled(ctx)
	}
	switch {
	case src.err != nil:
		return convert.Result{}, brokenOff(src.err)
	case err != nil:
		return convert.Result{}, err
	}
	return *rep.Result, checkResult(rep.Result, opt, images)
}

// diskBytes is the most that the files of one import have together: of what the archive
// holds nothing is kept more than twice beside the archive.
func diskBytes(l Limits) int64 { return l.ArchiveBytes + 2*l.ContentBytes }

// diskWatch looks after what a helper writes. The kernel bounds each of its files by
// itself, and they are many.
type diskWatch struct {
	files []*os.File
	most  int64
	ended chan struct{}
	done  sync.WaitGroup
}

// diskLook is how often a helper's files are looked at: a disk takes as much more than
// the most as it can write in that time.
const diskLook = 200 * time.Millisecond

func watchDisk(files []*os.File, most int64, kill func()) *diskWatch {
	w := &diskWatch{files: files, most: most, ended: make(chan struct{})}
	w.done.Go(func() {
		look := time.NewTicker(diskLook)
		defer look.Stop()
		for !w.full() {
			select {
			case <-look.C:
			case <-w.ended:
				return
			}
		}
		kill()
	})
	return w
}

func (w *diskWatch) end() { close(w.ended); w.done.Wait() }

// full reports whether the files have more than they may. Holes are not counted.
func (w *diskWatch) full() bool {
	sum := int64(0)
	for _, f := range w.files {
		var st unix.Stat_t
		if unix.Fstat(int(f.Fd()), &st) == nil {
			sum += st.Blocks * 512
		}
	}
	return sum > w.most
}

// sentCut reports whether the stream was read to where its sender broke off, in
// which case what the helper says of the rest means nothing.
func sentCut(read <-chan struct{}, src *sourceReader) bool {
	select {
	case <-read:
		return src.err != nil
	default:
		return false
	}
}

// checkResult does not trust a process that read a stranger's bytes.
func checkResult(res *convert.Result, opt convert.Options, images []*os.File) error {
	made := append(res.Below, res.Image)
	ok := len(made) <= len(images) && res.Config.Validate() == nil
	for i := 0; ok && i < len(made); i++ {
		fi, err := images[i].Stat()
		if err != nil {
			return err
		}
		ok = fi.Size() == made[i].Size && made[i].Files >= 0
	}
	switch res.Source {
	case SourceRootFS, SourceOCILayout, SourceDockerArchive:
		ok = ok && opt.Diffs == 0
	case SourcePack:
		ok = ok && opt.Diffs > 0
	default:
		ok = false
	}
	if !ok {
		return errors.New("import helper: report does not fit the images")
	}
	return nil
}

// helper is a running import helper.
type helper struct {
	cmd    *exec.Cmd
	stdin  *os.File
	report *os.File
	stderr tail
	done   chan error // of cmd.Wait
	memory int64      // that it may have, in bytes
}

func (s *Store) startHelper(images []*os.File, scratch *os.File, opt convert.Options) (*helper, error) {
	args, err := json.Marshal(helperOptions{opt, len(images)})
	if err != nil {
		return nil, err
	}
	pr, pw, err := os.Pipe()
	if err != nil {
		return nil, err
	}
	defer pw.Close()
	cmd := exec.Command(s.opt.HelperCommand[0], append(s.opt.HelperCommand[1:len(s.opt.HelperCommand):len(s.opt.HelperCommand)], string(args))...)
	h := &helper{cmd: cmd, report: pr, done: make(chan error, 1), memory: opt.Limits.WithDefaults().MemoryBytes}
	cmd.Dir = "/"
	// One for the tar, one for the decompressor.
	cmd.Env = []string{"GOMAXPROCS=2"}
	cmd.Stderr = &h.stderr
	cmd.ExtraFiles = append([]*os.File{scratch, pw}, images...)
	cmd.WaitDelay = killGrace
	cmd.SysProcAttr = helperAttr()
	stdin, w, err := os.Pipe()
	if err != nil {
		_ = pr.Close()
		return nil, err
	}
	defer stdin.Close()
	growPipe(w)
	cmd.Stdin, h.stdin = stdin, w
	started := make(chan error)
	go func() {
		// The helper is killed when the thread that made it ends: this one
		// lives as long as the helper.
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		err := cmd.Start()
		started <- err
		if err == nil {
			h.done <- cmd.Wait()
		}
	}()
	if err := <-started; err != nil {
		_, _ = pr.Close(), w.Close()
		return nil, &dsec.Error{Code: dsec.CodeUnavailable, Message: "the import helper cannot be started", Err: err}
	}
	return h, nil
}

// helperID is the user and the group that the helper runs as where the store's
// owner is root. Nothing else should run as it.
const helperID = 64535

// helperAttr is what the parent can set before the helper's first
// instruction: an owner without rights, and namespaces without anything. There
// is no process namespace: with cgo, the library that puts Landlock on all
// threads looks for them in /proc by the number that getpid gives.
func helperAttr() *syscall.SysProcAttr {
	attr := &syscall.SysProcAttr{
		Cloneflags: unix.CLONE_NEWNET | unix.CLONE_NEWIPC | unix.CLONE_NEWUTS | unix.CLONE_NEWNS,
		Pdeathsig:  syscall.SIGKILL,
		Setsid:     true,
	}
	if os.Geteuid() == 0 {
		attr.Credential = &syscall.Credential{Uid: helperID, Gid: helperID, Groups: []uint32{}}
		return attr
	}
	attr.Cloneflags |= unix.CLONE_NEWUSER
	attr.UidMappings = []syscall.SysProcIDMap{{ContainerID: 1, HostID: os.Geteuid(), Size: 1}}
	attr.GidMappings = []syscall.SysProcIDMap{{ContainerID: 1, HostID: os.Getegid(), Size: 1}}
	return attr
}

// growPipe makes the pipe hold more, for fewer switches; a refusal only costs
// time.
func growPipe(f *os.File) {
	conn, err := f.SyscallConn()
	if err != nil {
		return
	}
	_ = conn.Control(func(fd uintptr) { _, _ = unix.FcntlInt(fd, unix.F_SETPIPE_SZ, 1<<20) })
}

func (h *helper) kill() { _ = h.cmd.Process.Kill() }

// wait reads the report and waits for the helper's end.
func (h *helper) wait() (report, error) {
	doc, readErr := io.ReadAll(io.LimitReader(h.report, reportBytes+1))
	_ = h.report.Close()
	if len(doc) > reportBytes {
		h.kill()
		readErr = errors.New("report too long")
	}
	err := <-h.done
	var rep report
	if err == nil && readErr == nil {
		if err = json.Unmarshal(doc, &rep); err == nil && (rep.Result == nil) == (rep.Error == nil) {
			err = errors.New("report is neither a result nor an error")
		}
		if err == nil {
			return rep, nil
		}
	}
	return report{}, h.died(errors.Join(err, readErr))
}

// died tells why a helper ended without a report.
func (h *helper) died(err error) error {
	said := h.stderr.String()
	state := h.cmd.ProcessState
	if ws, ok := state.Sys().(syscall.WaitStatus); ok && ws.Signaled() && ws.Signal() == syscall.SIGXCPU {
		return dsec.Invalid("data", "the archive takes more processor time than allowed")
	}
	if strings.Contains(said, "out of memory") || strings.Contains(said, "cannot allocate memory") || h.crashedFull(said) {
		return dsec.Invalid("data", "the archive takes more memory than allowed")
	}
	return fmt.Errorf("import helper: %w: %s", err, bytes.TrimSpace([]byte(said)))
}

// crashedFull reports whether the runtime crashed with much of the memory in use that it
// may have: its collector does not look whether it gets what it asks for.
func (h *helper) crashedFull(said string) bool {
	usage, ok := h.cmd.ProcessState.SysUsage().(*syscall.Rusage)
	return ok && usage.Maxrss<<10 > h.memory/2 && strings.Contains(said, "SIGSEGV") && strings.Contains(said, "runtime.gc")
}

// tail keeps the first few KiB of what a helper says.
type tail struct{ b []byte }

func (t *tail) Write(p []byte) (int, error) {
	const most = 4 << 10
	t.b = append(t.b, p[:min(len(p), most-len(t.b))]...)
	return len(p), nil
}

func (t *tail) String() string { return string(t.b) }
