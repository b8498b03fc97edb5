package chronus

import (
	"os"
	"syscall"

	"github.com/opendsec/dsec/internal/chronusapi"
	"golang.org/x/sys/unix"
)

// output is one pipe or terminal that a process writes to.
type output struct {
	p      *process
	stream chronusapi.Stream
	f      *os.File // not blocking
	raw    syscall.RawConn
	total  uint64 // bytes read; guarded by p.mu
}

func newOutput(p *process, stream chronusapi.Stream, f *os.File) (*output, error) {
	raw, err := f.SyscallConn()
	if err != nil {
		return nil, err
	}
	return &output{p: p, stream: stream, f: f, raw: raw}, nil
}

// pump reads the output into the spool until nobody can write to it any more,
// which descendants may delay for as long as they live.
func (o *output) pump() {
	for {
		eof := false
		err := o.raw.Read(func(fd uintptr) bool {
			var again bool
			again, eof = o.step(int(fd))
			return !again
		})
		if err != nil || eof {
			break
		}
	}
	o.f.Close()
	p := o.p
	p.mu.Lock()
	p.open--
	p.changed.Broadcast()
	p.mu.Unlock()
}

// step moves what one read returns into the spool. again means that there is
// nothing now.
func (o *output) step(fd int) (again, eof bool) {
	p := o.p
	p.mu.Lock()
	defer p.mu.Unlock()
	var scratch []byte
	space := scratch
	for {
		if p.over {
			scratch = make([]byte, minBlock) // read and forget, so that nobody blocks before the kill
			space = scratch
			break
		}
		if space = p.spool.space(o.stream); space != nil {
			break
		}
		p.changed.Wait() // until the reader took something, or gave up
	}
	n, err := syscall.Read(fd, space)
	for err == syscall.EINTR {
		n, err = syscall.Read(fd, space)
	}
	o.total += uint64(max(n, 0))
	if scratch != nil {
		return err == syscall.EAGAIN, err != syscall.EAGAIN && n <= 0
	}
	if n <= 0 {
		p.spool.unused()
		return err == syscall.EAGAIN, err != syscall.EAGAIN // EIO is the end of a terminal
	}
	if p.limit > 0 && p.spool.next+uint64(n) > p.limit {
		n = int(p.limit - p.spool.next)
		p.over = true
		go p.onOver()
	}
	if n > 0 {
		p.spool.wrote(n)
	} else {
		p.spool.unused()
	}
	p.changed.Broadcast()
	return false, false
}

// maxTerminal is what a terminal is drained of at most: more than its buffers hold.
const maxTerminal = 256 << 10

// drain moves what the pipe holds at this moment into the spool. It is called
// when the process that writes has ended: what it wrote is there, and what
// its descendants write later is not waited for.
func (o *output) drain() {
	_ = o.raw.Control(func(fd uintptr) {
		limit := maxTerminal // a terminal does not tell what it holds
		if o.stream != chronusapi.PTY {
			n, err := unix.IoctlGetInt(int(fd), unix.TIOCINQ)
			if err != nil {
				return
			}
			limit = n
		}
		for end := o.read() + uint64(limit); o.read() < end; {
			if again, eof := o.step(int(fd)); again || eof {
				return
			}
		}
	})
}

func (o *output) read() uint64 {
	o.p.mu.Lock()
	defer o.p.mu.Unlock()
	return o.total
}
