package daemon

import (
	"container/list"
	"crypto/tls"
	"net"
	"net/http"
	"sync"

	"golang.org/x/sys/unix"
)

// connBound keeps a server's connections to a number, so that clients who open
// them without end take no descriptor that the rest of the process needs. Past
// it a connection that serves no request is closed, the one that has been so for
// longest: its client may open another, as after any idle timeout.
type connBound struct {
	most int

	mu    sync.Mutex
	conns map[net.Conn]*list.Element // of idle, nil while a request is served
	idle  list.List                  // of net.Conn, those that serve no request
}

// shareOfFiles is the part of a process's descriptors that connections may take.
const shareOfFiles = 4

// boundConns is a bound for the descriptors that this process may have.
func boundConns() *connBound {
	most := 1 << 20
	var l unix.Rlimit
	if unix.Getrlimit(unix.RLIMIT_NOFILE, &l) == nil && l.Cur/shareOfFiles < uint64(most) {
		most = int(l.Cur / shareOfFiles)
	}
	return &connBound{most: max(most, 1), conns: make(map[net.Conn]*list.Element)}
}

// state is an http.Server's ConnState.
func (b *connBound) state(c net.Conn, s http.ConnState) {
	if over := b.note(c, s); over != nil {
		if t, ok := over.(*tls.Conn); ok {
			over = t.NetConn() // no farewell, for which it would wait
		}
		_ = over.Close()
	}
}

// note returns the connection that has to go, or nil. What has to go is counted
// no more, and its end is no news.
func (b *connBound) note(c net.Conn, s http.ConnState) (over net.Conn) {
	b.mu.Lock()
	defer b.mu.Unlock()
	at, known := b.conns[c]
	if !known && s != http.StateNew {
		return nil
	}
	if at != nil {
		b.idle.Remove(at)
	}
	switch s {
	case http.StateNew, http.StateIdle:
		b.conns[c] = b.idle.PushBack(c)
	case http.StateActive:
		b.conns[c] = nil
	default:
		delete(b.conns, c)
	}
	if len(b.conns) <= b.most {
		return nil
	}
	oldest := b.idle.Front() // at least c, which is new
	over = b.idle.Remove(oldest).(net.Conn)
	delete(b.conns, over)
	return over
}
