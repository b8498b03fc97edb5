// Package faultnet is a TCP proxy that makes the network between a client and a
// server a bad one: slow, narrow, cut, or silent. It is for tests and measurements.
package faultnet

import (
	"context"
	"errors"
	"io"
	"net"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/time/rate"
)

// Fault is what the proxy does to each connection; the zero value nothing.
type Fault struct {
	// Delay is put before all that clients send: each question takes so much longer.
	Delay time.Duration
	// BytesPerSecond bounds what the server sends, over all connections together.
	BytesPerSecond int64
	// CutAfter resets a connection once the server has sent so many bytes more on it.
	CutAfter int64
	// Hang passes nothing on, in either direction, and answers no new connection.
	Hang bool
	// Refuse resets new connections, and those that are there.
	Refuse bool
}

// Proxy is a listener on loopback, whose connections go on to a server.
type Proxy struct {
	target string
	ln     net.Listener
	stop   context.CancelFunc
	work   sync.WaitGroup

	mu      sync.Mutex
	fault   Fault
	limit   *rate.Limiter
	changed chan struct{} // closed by Set

	fromServer, connections atomic.Int64
}

const chunk = 32 << 10

// Listen starts a proxy to target, a host:port.
func Listen(target string) (*Proxy, error) {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return nil, err
	}
	ctx, stop := context.WithCancel(context.Background())
	p := &Proxy{target: target, ln: ln, stop: stop, changed: make(chan struct{})}
	p.work.Go(func() { p.accept(ctx) })
	return p, nil
}

// Addr is the host:port where clients reach the proxy.
func (p *Proxy) Addr() string { return p.ln.Addr().String() }

// FromServer is how many bytes servers have sent to clients.
func (p *Proxy) FromServer() int64 { return p.fromServer.Load() }

// Connections is how many connections clients have made.
func (p *Proxy) Connections() int64 { return p.connections.Load() }

// Set has all connections, also those that are there, meet f from now on.
func (p *Proxy) Set(f Fault) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.fault = f
	p.limit = nil
	if f.BytesPerSecond > 0 {
		p.limit = rate.NewLimiter(rate.Limit(f.BytesPerSecond), chunk)
	}
	close(p.changed)
	p.changed = make(chan struct{})
}

// Close ends the proxy and its connections.
func (p *Proxy) Close() error {
	p.stop()
	err := p.ln.Close()
	p.work.Wait()
	return err
}

func (p *Proxy) now() (Fault, *rate.Limiter, <-chan struct{}) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.fault, p.limit, p.changed
}

func (p *Proxy) accept(ctx context.Context) {
	for {
		client, err := p.ln.Accept()
		if err != nil {
			return
		}
		p.connections.Add(1)
		p.work.Go(func() { p.serve(ctx, client.(*net.TCPConn)) })
	}
}

// serve ends both connections as soon as one direction is over or is cut.
func (p *Proxy) serve(ctx context.Context, client *net.TCPConn) {
	defer client.Close()
	if p.passing(ctx) != nil {
		reset(client)
		return
	}
	var dialer net.Dialer
	conn, err := dialer.DialContext(ctx, "tcp", p.target)
	if err != nil {
		reset(client)
		return
	}
	server := conn.(*net.TCPConn)
	defer server.Close()
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	context.AfterFunc(ctx, func() {
		if context.Cause(ctx) != io.EOF {
			reset(client)
		}
		_ = client.Close()
		_ = server.Close()
	})
	var both sync.WaitGroup
	both.Go(func() { cancel(p.pass(ctx, server, client, p.toServer())) })
	both.Go(func() { cancel(p.pass(ctx, client, server, p.toClient())) })
	both.Go(func() { p.watch(ctx, cancel) })
	both.Wait()
}

var errCut = errors.New("cut")

// watch cuts a connection that is idle when connections become refused.
func (p *Proxy) watch(ctx context.Context, cancel context.CancelCauseFunc) {
	for {
		fault, _, changed := p.now()
		if fault.Refuse {
			cancel(errCut)
			return
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return
		}
	}
}

// reset makes the close of a connection a reset, not an orderly end.
func reset(c *net.TCPConn) { _ = c.SetLinger(0) }

// passing waits while connections hang. The error says that they are to be cut.
func (p *Proxy) passing(ctx context.Context) error {
	for {
		fault, _, changed := p.now()
		if fault.Refuse {
			return errCut
		}
		if !fault.Hang {
			return nil
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// A hold is called before n bytes are passed on that arrived at a time. It returns how many may be.
type hold func(ctx context.Context, n int, arrived time.Time) (int, error)

func (p *Proxy) toServer() hold {
	return func(ctx context.Context, n int, arrived time.Time) (int, error) {
		fault, _, changed := p.now()
		if fault.Delay > 0 {
			timer := time.NewTimer(time.Until(arrived.Add(fault.Delay)))
			defer timer.Stop()
			select {
			case <-timer.C:
			case <-changed:
			case <-ctx.Done():
			}
		}
		return n, p.passing(ctx)
	}
}

func (p *Proxy) toClient() hold {
	var sent int64
	var since <-chan struct{}
	return func(ctx context.Context, n int, _ time.Time) (int, error) {
		if err := p.passing(ctx); err != nil {
			return 0, err
		}
		fault, limit, changed := p.now()
		if since != changed { // counted anew for each Set
			since, sent = changed, 0
		}
		var cut error
		if fault.CutAfter > 0 && sent+int64(n) >= fault.CutAfter {
			n, cut = int(fault.CutAfter-sent), errCut
		}
		sent += int64(n)
		if limit != nil && n > 0 {
			if err := limit.WaitN(ctx, n); err != nil {
				return 0, err
			}
		}
		p.fromServer.Add(int64(n))
		return n, cut
	}
}

type arrival struct {
	b  []byte
	at time.Time
}

// pass copies from one connection to the other. What is delayed does not keep what
// follows from arriving: a delay makes no connection narrow.
func (p *Proxy) pass(ctx context.Context, to, from *net.TCPConn, hold hold) error {
	queue := make(chan arrival, 64)
	go func() {
		defer close(queue)
		for {
			b := make([]byte, chunk)
			n, err := from.Read(b)
			if n > 0 {
				select {
				case queue <- arrival{b[:n], time.Now()}:
				case <-ctx.Done():
					return
				}
			}
			if err != nil {
				return
			}
		}
	}()
	for a := range queue {
		n, err := hold(ctx, len(a.b), a.at)
		if n > 0 {
			if _, err := to.Write(a.b[:n]); err != nil {
				return err
			}
		}
		if err != nil {
			return err
		}
	}
	return io.EOF
}
