// Package scrub reads blobs of a directory and tells what they hash to, in a
// process of its own: one whose file system never answers can be left behind with
// it, where a thread of the node agent would hold the agent's end up.
//
// It reads past the page cache, which is for those who use the layers: by O_DIRECT
// where the file system has it, else what came into the cache by a read, and by
// nothing else, is dropped from it.
package scrub

import (
	"context"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"syscall"
	"time"

	"github.com/opendsec/dsec/internal/layer/blob"
)

// Verb is the argument by which the program is asked to be the reading process.
const Verb = "scrub-reader"

// MaxRead is the most bytes of one read: the largest chunk.
const MaxRead = 4 << 20

// Request is a range of a blob.
type Request struct {
	Key    string
	Offset int64 // bytes; a multiple of 4096, as are all lengths but the blob's own
	Length int64 // bytes, at most MaxRead
	Chunk  int64 // bytes of each chunk, the last may be shorter
	// Fresh has the blob opened anew, and dropped from the page cache: what the
	// kernel gives its readers from then on is what is stored.
	Fresh bool
}

// answer is what the process says to a request.
type answer struct {
	Sums  [][]byte `json:",omitempty"` // SHA-256 of each chunk; fewer where the blob ends before
	Gone  bool     `json:",omitempty"` // there is no such blob
	Error string   `json:",omitempty"`
}

// The errors of a read beside what the file system says.
var (
	ErrGone  = errors.New("there is no such blob any more")
	ErrStuck = errors.New("its file system does not answer")
)

// Reader is a running process. It has one caller.
type Reader struct {
	in    *os.File // requests
	out   *os.File // answers
	dec   *json.Decoder
	cmd   *exec.Cmd
	ended chan struct{}
}

// Start starts a process that reads below root, which stays the caller's. command
// runs Main.
func Start(command []string, root *os.File, log *slog.Logger) (*Reader, error) {
	theirIn, in, err := os.Pipe()
	if err != nil {
		return nil, err
	}
	defer theirIn.Close()
	out, theirOut, err := os.Pipe()
	if err != nil {
		_ = in.Close()
		return nil, err
	}
	defer theirOut.Close()
	cmd := exec.Command(command[0], command[1:]...)
	cmd.Dir, cmd.Env = "/", []string{"GOMAXPROCS=1"}
	cmd.Stdin, cmd.Stdout, cmd.Stderr = theirIn, theirOut, said{log}
	cmd.ExtraFiles = []*os.File{root}
	cmd.WaitDelay = time.Second
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true, Pdeathsig: syscall.SIGKILL}
	r := &Reader{in: in, out: out, dec: json.NewDecoder(out), cmd: cmd, ended: make(chan struct{})}
	started := make(chan error)
	go func() {
		defer close(r.ended)
		// It is killed when the thread that made it ends: this one lives as long as it.
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		err := cmd.Start()
		started <- err
		if err == nil {
			_ = cmd.Wait()
		}
	}()
	if err := <-started; err != nil {
		_, _ = in.Close(), out.Close()
		return nil, fmt.Errorf("start %s: %w", Verb, err)
	}
	return r, nil
}

// said has what a process says before it dies in the log.
type said struct{ log *slog.Logger }

// Write implements io.Writer.
func (s said) Write(p []byte) (int, error) {
	s.log.Warn("the reader of the scrub", "said", strings.TrimSpace(string(p[:min(len(p), 1000)])))
	return len(p), nil
}

// Kill ends the process, and does not wait for that: it ends once its file system
// answers.
func (r *Reader) Kill() {
	_ = r.cmd.Process.Kill()
	_, _ = r.in.Close(), r.out.Close()
}

// Ended is closed once the process is gone.
func (r *Reader) Ended() <-chan struct{} { return r.ended }

// Sums returns the SHA-256 of each chunk of a range, of fewer where the blob ends
// before. After ErrStuck, which is that of no answer within timeout, an error of
// the context, and one of the process itself, nothing more can be asked of it.
func (r *Reader) Sums(ctx context.Context, q Request, timeout time.Duration) (sums [][]byte, dead bool, err error) {
	if err := ctx.Err(); err != nil {
		return nil, false, err
	}
	if err := r.out.SetReadDeadline(time.Now().Add(timeout)); err != nil {
		return nil, true, err
	}
	defer context.AfterFunc(ctx, func() { _ = r.out.SetReadDeadline(time.Unix(1, 0)) })()
	if err := json.NewEncoder(r.in).Encode(&q); err != nil {
		return nil, true, err
	}
	var a answer
	switch err := r.dec.Decode(&a); {
	case ctx.Err() != nil:
		return nil, true, ctx.Err()
	case errors.Is(err, os.ErrDeadlineExceeded):
		return nil, true, ErrStuck
	case err == io.EOF:
		return nil, true, errors.New("the reading process died")
	case err != nil:
		return nil, true, err
	case a.Gone:
		return nil, false, ErrGone
	case a.Error != "":
		return nil, false, errors.New(a.Error)
	}
	for _, s := range a.Sums {
		if len(s) != sha256.Size {
			return nil, true, errors.New("an answer of the reading process that is none")
		}
	}
	return a.Sums, false, nil
}

// check holds a request against what the process can do.
func (q *Request) check() error {
	if q.Offset < 0 || q.Length < 0 || q.Length > MaxRead || q.Chunk < 1 {
		return errors.New("a request that is none")
	}
	return blob.CheckKey(q.Key)
}
