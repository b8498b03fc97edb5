package scrub

import (
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"

	"github.com/landlock-lsm/go-landlock/landlock"
	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec/internal/hostos"
	"github.com/opendsec/dsec/internal/layer/blob/dirblob"
)

// rootFD is the descriptor of the directory that Start hands over.
const rootFD = 3

// Main is the reading process: it answers requests until there are no more.
func Main() error {
	if _, err := unix.FcntlInt(rootFD, unix.F_SETFD, unix.FD_CLOEXEC); err != nil {
		return errors.New("is started by the edge only")
	}
	buf, err := unix.Mmap(-1, 0, MaxRead, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_ANON|unix.MAP_PRIVATE)
	if err != nil {
		return err
	}
	if err := humble(); err != nil {
		return err
	}
	p := &process{root: os.NewFile(rootFD, "root"), buf: buf}
	dec, enc := json.NewDecoder(os.Stdin), json.NewEncoder(os.Stdout)
	for {
		var q Request
		if err := dec.Decode(&q); err == io.EOF {
			return nil
		} else if err != nil {
			return err
		}
		if err := enc.Encode(p.answer(&q)); err != nil {
			return nil //nolint:nilerr // nobody listens any more
		}
	}
}

// humble puts this process behind all others, and takes from it what it does not
// need: all capabilities but the one for a store whose files are others', and, where
// the kernel has Landlock, all but reading files.
func humble() error {
	if err := unix.Setpriority(unix.PRIO_PROCESS, 0, 19); err != nil {
		return fmt.Errorf("priority: %w", err)
	}
	const idleClass, ofProcess = 3 << 13, 1
	_, _, _ = unix.Syscall(unix.SYS_IOPRIO_SET, ofProcess, 0, idleClass) // where the disk's scheduler knows it
	if err := landlock.V11.BestEffort().Restrict(landlock.PathAccess(unix.LANDLOCK_ACCESS_FS_READ_FILE, "/")); err != nil {
		return fmt.Errorf("landlock: %w", err)
	}
	return hostos.KeepCapabilities(1 << unix.CAP_DAC_READ_SEARCH)
}

// process has one blob open.
type process struct {
	root   *os.File
	buf    []byte // aligned to pages, as O_DIRECT wants it
	key    string
	file   *os.File
	direct bool
}

func (p *process) answer(q *Request) answer {
	sums, err := p.sums(q)
	switch {
	case errors.Is(err, unix.ENOENT), errors.Is(err, unix.ENOTDIR), errors.Is(err, unix.ESTALE):
		p.close()
		return answer{Gone: true}
	case err != nil:
		p.close()
		return answer{Error: err.Error()}
	}
	return answer{Sums: sums}
}

func (p *process) close() {
	if p.file != nil {
		_ = p.file.Close()
	}
	p.file, p.key = nil, ""
}

// open opens a blob for reads past the page cache, where that can be.
func (p *process) open(key string, flags int) (err error) {
	p.close()
	p.file, err = dirblob.OpenIn(p.root, key, flags)
	p.key, p.direct = key, flags != 0
	if err == nil && !p.direct {
		// Nothing is read ahead: it could not be told from what others use.
		_ = unix.Fadvise(int(p.file.Fd()), 0, 0, unix.FADV_RANDOM)
	}
	return err
}

func (p *process) sums(q *Request) ([][]byte, error) {
	if err := q.check(); err != nil {
		return nil, err
	}
	if p.key != q.Key || q.Fresh {
		err := p.open(q.Key, unix.O_DIRECT)
		if err == unix.EINVAL {
			err = p.open(q.Key, 0)
		}
		if err != nil {
			return nil, err
		}
	}
	if q.Fresh {
		p.drop(q)
	}
	cached := p.cached(q)
	n, err := p.file.ReadAt(p.buf[:q.Length], q.Offset)
	if p.direct && errors.Is(err, unix.EINVAL) { // it was opened so, and cannot be read so
		if err := p.open(q.Key, 0); err != nil {
			return nil, err
		}
		n, err = p.file.ReadAt(p.buf[:q.Length], q.Offset)
	}
	if err != nil && err != io.EOF {
		return nil, err
	}
	if q.Fresh || !cached && p.cached(q) {
		p.drop(q)
	}
	return sumsOf(p.buf[:n], q), nil
}

// sumsOf are those of the chunks that are whole in what was read.
func sumsOf(b []byte, q *Request) (sums [][]byte) {
	for off := int64(0); off < q.Length; off += q.Chunk {
		end := min(off+q.Chunk, q.Length)
		if end > int64(len(b)) {
			break
		}
		sum := sha256.Sum256(b[off:end])
		sums = append(sums, sum[:])
	}
	return sums
}

// cached reports whether some of a range is in the page cache. A kernel before 6.5
// cannot tell: then all is left there, for somebody may use it.
func (p *process) cached(q *Request) bool {
	var st unix.Cachestat_t
	err := unix.Cachestat(uint(p.file.Fd()), &unix.CachestatRange{Off: uint64(q.Offset), Len: uint64(q.Length)}, &st, 0)
	return err != nil || st.Cache > 0
}

func (p *process) drop(q *Request) {
	_ = unix.Fadvise(int(p.file.Fd()), q.Offset, q.Length, unix.FADV_DONTNEED)
}
