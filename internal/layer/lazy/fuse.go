package lazy

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"slices"
	"strconv"
	"sync"
	"time"
	"unsafe"

	"github.com/hanwen/go-fuse/v2/fuse"
	"golang.org/x/sys/unix"
)

// The FUSE file system is one directory with a file for each image. Its server is
// our own, with go-fuse's types: go-fuse's server begins with a mount, and a
// layerd that takes over has a connection on which much was said already. So there
// is no state of the connection here: a file's node is made of its name, and the
// kernel is asked to send again what a dead process did not answer.

// The operations that are answered with more than ENOSYS.
const (
	opLookup      = 1
	opForget      = 2
	opGetattr     = 3
	opOpen        = 14
	opRead        = 15
	opStatfs      = 17
	opRelease     = 18
	opInit        = 26
	opInterrupt   = 36
	opDestroy     = 38
	opBatchForget = 42
)

const (
	fuseRoot      = 1
	fuseInitExt   = 1 << 30
	fuseMaxWrite  = 4096 // nothing is written; the kernel's minimum
	fuseBuffer    = 8192 // the least that the kernel takes for a read of requests
	fuseMaxRead   = 1 << 20
	fuseForever   = 1 << 40 // seconds: nothing ever changes
	fuseReadAhead = 1 << 20 // bytes that the kernel reads ahead
)

// mountFUSE makes the file system, attached nowhere, and returns the connection
// and the mount. Its files are opened below the mount's descriptor.
func mountFUSE() (dev, mnt *os.File, err error) {
	fd, err := unix.Open("/dev/fuse", unix.O_RDWR|unix.O_CLOEXEC|unix.O_NONBLOCK, 0)
	if err != nil {
		return nil, nil, fmt.Errorf("/dev/fuse: %w", err)
	}
	dev = os.NewFile(uintptr(fd), "fuse")
	defer func() {
		if err != nil {
			_ = dev.Close()
		}
	}()
	fs, err := unix.Fsopen("fuse", unix.FSOPEN_CLOEXEC)
	if err != nil {
		return nil, nil, fmt.Errorf("fuse: %w", err)
	}
	defer unix.Close(fs)
	for _, o := range [][2]string{{"source", "dsec"}, {"fd", strconv.Itoa(fd)}, {"rootmode", "40000"}, {"user_id", "0"},
		{"group_id", "0"}, {"max_read", strconv.Itoa(fuseMaxRead)}, {"subtype", "dsec"}} {
		if err := unix.FsconfigSetString(fs, o[0], o[1]); err != nil {
			return nil, nil, fmt.Errorf("fuse option %s: %w", o[0], err)
		}
	}
	// The bytes are read by whoever reads a file of an image that is mounted on this.
	if err := unix.FsconfigSetFlag(fs, "allow_other"); err != nil {
		return nil, nil, fmt.Errorf("fuse option allow_other: %w", err)
	}
	if err := unix.FsconfigCreate(fs); err != nil {
		return nil, nil, fmt.Errorf("fuse: %w", err)
	}
	m, err := unix.Fsmount(fs, unix.FSMOUNT_CLOEXEC, unix.MOUNT_ATTR_RDONLY|unix.MOUNT_ATTR_NODEV|unix.MOUNT_ATTR_NOSUID|unix.MOUNT_ATTR_NOEXEC)
	if err != nil {
		return nil, nil, fmt.Errorf("fuse mount: %w", err)
	}
	return dev, os.NewFile(uintptr(m), "fuse mount"), nil
}

// setReadAhead raises how far the kernel reads ahead in the file system, as far as
// it can: the default of 128 KiB makes eight requests of what one could be.
func setReadAhead(mnt *os.File) error {
	var st unix.Statx_t
	// Of what the kernel knows: nobody answers its questions yet.
	if err := unix.Statx(int(mnt.Fd()), "", unix.AT_EMPTY_PATH|unix.AT_STATX_DONT_SYNC, 0, &st); err != nil {
		return err
	}
	path := fmt.Sprintf("/sys/class/bdi/%d:%d/read_ahead_kb", st.Dev_major, st.Dev_minor)
	return os.WriteFile(path, []byte(strconv.Itoa(fuseReadAhead>>10)), 0)
}

// fuseServer answers the requests of one connection.
type fuseServer struct {
	cache *cache
	log   *slog.Logger
	dev   *os.File
	gone  func() // called where the connection was ended by the kernel

	mu    sync.Mutex
	calls map[uint64]context.CancelCauseFunc // reads under way, by the request's number

	buffers sync.Pool

	ctx     context.Context //nolint:containedctx // of the goroutines
	end     context.CancelFunc
	running sync.WaitGroup
}

var errInterrupted = errors.New("the reader was interrupted")

// newFUSEServer begins to answer. With again, another process answered before:
// what it left unanswered is sent again. The error is then errCutOff where the
// kernel, before 6.9, cannot do that, or has ended the connection.
func newFUSEServer(c *cache, dev *os.File, again bool, gone func(*fuseServer)) (*fuseServer, error) {
	s := makeFUSEServer(c, dev)
	s.gone = func() { gone(s) }
	if again {
		p := []unix.PollFd{{Fd: int32(dev.Fd())}}
		if n, err := unix.Poll(p, 0); err == nil && n > 0 && p[0].Revents&unix.POLLERR != 0 {
			return nil, errCutOff
		}
		h := fuse.OutHeader{Length: uint32(unsafe.Sizeof(fuse.OutHeader{})), Status: -int32(fuse.NOTIFY_RESEND)}
		switch _, err := unix.Write(int(dev.Fd()), bytesOf(&h)); err {
		case nil:
		case unix.EPERM: // the kernel has not even begun: there was no answer to its greeting
		case unix.EINVAL:
			return nil, errCutOff
		default:
			return nil, fmt.Errorf("fuse: send again: %w", err)
		}
	}
	s.running.Go(s.serve)
	return s, nil
}

func makeFUSEServer(c *cache, dev *os.File) *fuseServer {
	s := &fuseServer{cache: c, log: c.log, dev: dev, calls: map[uint64]context.CancelCauseFunc{}}
	s.buffers.New = func() any { b := make([]byte, fuseMaxRead); return &b }
	s.ctx, s.end = context.WithCancel(context.Background())
	return s
}

var errCutOff = errors.New("the FUSE connection cannot be taken over")

// bytesOf shows a structure of the protocol as its bytes.
func bytesOf[T any](v *T) []byte { return unsafe.Slice((*byte)(unsafe.Pointer(v)), unsafe.Sizeof(*v)) }

// requestAs reads a structure of the protocol; ok is false if the request is too short.
func requestAs[T any](b []byte) (v T, ok bool) {
	return v, copy(bytesOf(&v), b) == int(unsafe.Sizeof(v))
}

func (s *fuseServer) serve() {
	raw, err := s.dev.SyscallConn()
	if err != nil {
		s.log.Error("fuse connection cannot be read", "error", err)
		return
	}
	b := make([]byte, fuseBuffer)
	for {
		var n int
		var errno error
		err := raw.Read(func(fd uintptr) bool {
			n, errno = unix.Read(int(fd), b)
			return errno != unix.EAGAIN
		})
		switch {
		case s.ctx.Err() != nil:
			return
		case err != nil: // of the poller: the connection reports an error of its own
			s.log.Error("fuse connection ends", "error", err)
			s.gone()
			return
		case errno == unix.EINTR || errno == unix.ENOENT: // a request that was given up
		case errno != nil:
			s.log.Error("fuse connection ends", "error", errno) // ENODEV: it was cut off
			s.gone()
			return
		default:
			s.cache.crash("fuse.taken")
			s.handle(b[:n])
		}
	}
}

// handle answers one request; a read on a goroutine of its own.
func (s *fuseServer) handle(b []byte) {
	h, ok := requestAs[fuse.InHeader](b)
	if !ok {
		return
	}
	switch h.Opcode {
	case opForget, opBatchForget:
	case opInterrupt:
		if in, ok := requestAs[fuse.InterruptIn](b); ok {
			s.mu.Lock()
			if cancel := s.calls[in.Unique]; cancel != nil {
				cancel(errInterrupted)
			}
			s.mu.Unlock()
		}
	case opRead:
		in, ok := requestAs[fuse.ReadIn](b)
		if !ok {
			s.reply(h.Unique, unix.EINVAL)
			return
		}
		ctx, cancel := context.WithCancelCause(s.ctx)
		s.mu.Lock()
		s.calls[h.Unique] = cancel
		s.mu.Unlock()
		s.running.Go(func() {
			s.read(ctx, in)
			s.mu.Lock()
			delete(s.calls, h.Unique)
			s.mu.Unlock()
			cancel(nil)
		})
	default:
		s.answer(h, b)
	}
}

// answer answers what needs no waiting.
func (s *fuseServer) answer(h fuse.InHeader, b []byte) {
	switch h.Opcode {
	case opInit:
		in, _ := requestAs[fuse.InitIn](padded(b, unsafe.Sizeof(fuse.InitIn{})))
		out := greet(&in)
		_, limits := s.cache.settings()
		out.RequestTimeout = requestTimeout(limits.RetryFor)
		s.reply(h.Unique, 0, bytesOf(&out))
	case opLookup:
		im := s.byName(cString(b[unsafe.Sizeof(h):]))
		if h.NodeId != fuseRoot || im == nil {
			s.reply(h.Unique, unix.ENOENT)
			return
		}
		attr := attrOf(im)
		out := fuse.EntryOut{NodeId: attr.Ino, EntryValid: fuseForever, AttrValid: fuseForever, Attr: attr}
		s.reply(h.Unique, 0, bytesOf(&out))
	case opGetattr:
		out := fuse.AttrOut{AttrValid: fuseForever}
		if h.NodeId == fuseRoot {
			out.Attr = fuse.Attr{Ino: fuseRoot, Mode: unix.S_IFDIR | 0o500, Nlink: 2, Blksize: 4096}
		} else if im := s.byNode(h.NodeId); im != nil {
			out.Attr = attrOf(im)
		} else {
			s.reply(h.Unique, unix.ESTALE)
			return
		}
		s.reply(h.Unique, 0, bytesOf(&out))
	case opStatfs:
		s.reply(h.Unique, 0, bytesOf(&fuse.StatfsOut{Bsize: 4096, Frsize: 4096, NameLen: 255}))
	case opOpen:
		// The kernel may answer by itself from now on, with its cache kept.
		s.reply(h.Unique, unix.ENOSYS)
	case opRelease, opDestroy:
		s.reply(h.Unique, 0)
	default:
		s.reply(h.Unique, unix.ENOSYS)
	}
}

// greet is the answer to the kernel's first request.
func greet(in *fuse.InitIn) fuse.InitOut {
	const want = fuse.CAP_ASYNC_READ | fuse.CAP_PARALLEL_DIROPS | fuse.CAP_NO_OPEN_SUPPORT | fuse.CAP_NO_OPENDIR_SUPPORT |
		fuse.CAP_MAX_PAGES | fuse.CAP_HAS_RESEND | fuse.CAP_REQUEST_TIMEOUT | fuseInitExt
	offered := uint64(in.Flags)
	if offered&fuseInitExt != 0 {
		offered |= uint64(in.Flags2) << 32
	}
	flags := offered & want
	return fuse.InitOut{
		Major: 7, Minor: min(in.Minor, 40), MaxReadAhead: min(in.MaxReadAhead, fuseReadAhead),
		Flags: uint32(flags), Flags2: uint32(flags >> 32),
		MaxBackground: 128, CongestionThreshold: 96, MaxWrite: fuseMaxWrite, TimeGran: 1,
		MaxPages: fuseMaxRead / 4096,
	}
}

// requestTimeout is after how many seconds without an answer the kernel, from 6.14
// on, ends the connection: no process is to wait for ever for one that nobody
// serves, see openApart. It is far more than a fetch and a restart take.
func requestTimeout(retryFor time.Duration) uint16 {
	return uint16(min(max(120*time.Second, 4*retryFor)/time.Second, 1<<16-1))
}

func padded(b []byte, n uintptr) []byte {
	if uintptr(len(b)) >= n {
		return b
	}
	return append(slices.Clip(b), make([]byte, n-uintptr(len(b)))...)
}

func cString(b []byte) string {
	for i, c := range b {
		if c == 0 {
			return string(b[:i])
		}
	}
	return string(b)
}

// nodeOf is the node of an image: no less than 2, the same in every process.
func nodeOf(im *image) uint64 { return nameHash(im.name)>>1 | 1<<62 }

func attrOf(im *image) fuse.Attr {
	return fuse.Attr{Ino: nodeOf(im), Size: uint64(im.Size), Blocks: uint64(im.Size+511) / 512,
		Mode: unix.S_IFREG | 0o400, Nlink: 1, Blksize: 4096}
}

func (s *fuseServer) byName(name string) *image {
	s.cache.mu.Lock()
	defer s.cache.mu.Unlock()
	return s.cache.images[name]
}

func (s *fuseServer) byNode(node uint64) *image {
	s.cache.mu.Lock()
	defer s.cache.mu.Unlock()
	return s.cache.nodes[node]
}

// read answers a read once its bytes are there, its time is over, or its reader
// gave up: then it can be killed.
func (s *fuseServer) read(ctx context.Context, in fuse.ReadIn) {
	im := s.byNode(in.NodeId)
	if im == nil {
		s.reply(in.Unique, unix.ESTALE)
		return
	}
	if in.Size > fuseMaxRead || in.Offset > maxImage {
		s.reply(in.Unique, unix.EINVAL)
		return
	}
	buffer := s.buffers.Get().(*[]byte)
	defer s.buffers.Put(buffer)
	off := min(int64(in.Offset), im.Size)
	p := (*buffer)[:min(int64(in.Size), im.Size-off)]
	err := s.cache.readAt(ctx, im, p, off)
	switch {
	case err == nil:
		s.cache.crash("fuse.filled")
		s.reply(in.Unique, 0, p)
		s.cache.crash("fuse.answered")
	case errors.Is(err, errInterrupted):
		s.reply(in.Unique, unix.EINTR)
	case s.ctx.Err() != nil: // the next process is sent it again
	default:
		s.reply(in.Unique, unix.EIO)
	}
}

func (s *fuseServer) reply(unique uint64, errno unix.Errno, parts ...[]byte) {
	h := fuse.OutHeader{Unique: unique, Status: -int32(errno), Length: uint32(unsafe.Sizeof(fuse.OutHeader{}))}
	for _, p := range parts {
		h.Length += uint32(len(p))
	}
	_, err := unix.Writev(int(s.dev.Fd()), append([][]byte{bytesOf(&h)}, parts...))
	if err != nil && err != unix.ENOENT { // its reader is gone
		s.log.Error("a fuse request was not answered", "error", err)
	}
}

// close stops answering. What was not answered the next process is sent again.
func (s *fuseServer) close() {
	s.end()
	_ = s.dev.SetReadDeadline(time.Unix(1, 0))
	s.running.Wait()
}
