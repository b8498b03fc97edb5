// Package client is the Go SDK of DSec. Commands have the shape of os/exec:
//
//	c, err := client.New(client.Options{})         // finds the server and the key by itself
//	sb, err := c.CreateSandbox(ctx, client.SandboxOptions{Layers: []string{"base"}})
//	defer sb.Kill(ctx)
//	out, outcome, err := sb.Command("python3", "-c", "print(6*7)").Output(ctx)
//
// An error means that the platform failed, and nothing may be concluded about
// the command; what the command did is in its [dsec.Outcome]. Every error that
// the platform reports is a [*dsec.Error], found with errors.As or
// [dsec.CodeOf]. The client sends a request again only where it was provably
// not accepted, and a command only where the server was being restarted.
//
// A Client is safe for concurrent use, and so is everything made from it
// unless its comment says otherwise.
package client

import (
	"cmp"
	"context"
	crand "crypto/rand"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"net/http"
	"net/url"
	"os"
	"strings"
	"sync/atomic"
	"syscall"
	"time"

	"connectrpc.com/connect"
	"golang.org/x/sync/singleflight"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/h1"
	"github.com/opendsec/dsec/proto/dsec/v1/dsecv1connect"
)

// Defaults of Options.
const (
	DefaultURL     = "http://127.0.0.1:7321"
	DefaultKeyFile = "/var/lib/dsec/admin.key"
)

// Options say where the server is and who calls. Zero values are found in the
// environment, and then at the places where `dsec up` puts them.
type Options struct {
	// URL of the API: $DSEC_URL, else DefaultURL.
	URL string
	// APIKey: $DSEC_API_KEY, else the contents of KeyFile.
	APIKey string
	// KeyFile is read where there is no APIKey: $DSEC_KEY_FILE, else DefaultKeyFile.
	KeyFile string
	// Attempts is how often a request that was not accepted is sent at most; 0 is 5.
	Attempts int
	// TLS transports and proxies are the caller's to configure: where set,
	// Transport makes all calls. It must speak HTTP/2 for sessions.
	Transport http.RoundTripper
}

// Client calls one server. While one that it has reached before refuses
// connections, or says that it is being restarted, calls wait for a minute.
type Client struct {
	url      string
	attempts int
	name     string                                // random: what it names begins with it
	tags     atomic.Uint64                         // given so far
	lists    singleflight.Group                    // of processes, by sandbox
	idle     []interface{ CloseIdleConnections() } // none where the caller brought a transport

	sandbox    dsecv1connect.SandboxServiceClient
	process    dsecv1connect.ProcessServiceClient
	session    dsecv1connect.SessionServiceClient
	file       dsecv1connect.FileServiceClient
	layer      dsecv1connect.LayerServiceClient
	job        dsecv1connect.JobServiceClient
	trajectory dsecv1connect.TrajectoryServiceClient
	webhook    dsecv1connect.WebhookServiceClient
	event      dsecv1connect.EventServiceClient
	snapshot   dsecv1connect.SnapshotServiceClient
	admin      dsecv1connect.AdminServiceClient
}

// New makes a client. It makes no call, and its errors are invalid (a URL that
// is none) or unauthenticated (no key found).
func New(o Options) (*Client, error) {
	o.URL = cmp.Or(o.URL, os.Getenv("DSEC_URL"), DefaultURL)
	u, err := url.Parse(o.URL)
	if err != nil || u.Host == "" || u.Scheme != "http" && u.Scheme != "https" {
		return nil, dsec.Invalid("url", "want http://host:port or https://host:port")
	}
	key, err := findKey(o)
	if err != nil {
		return nil, err
	}
	c := &Client{url: strings.TrimRight(o.URL, "/"), attempts: o.Attempts, name: crand.Text()}
	if c.attempts <= 0 {
		c.attempts = 5
	}
	one, two := o.Transport, o.Transport
	if o.Transport == nil {
		one, two = c.transports(u)
	}
	opts := connect.WithClientOptions(
		connect.WithInterceptors(keyHeader("Bearer "+key)),
		connect.WithAcceptCompression("gzip", nil, nil),
	)
	calls, streams := caller{one}, caller{two}
	c.sandbox = dsecv1connect.NewSandboxServiceClient(calls, c.url, opts)
	c.process = dsecv1connect.NewProcessServiceClient(calls, c.url, opts)
	c.file = dsecv1connect.NewFileServiceClient(calls, c.url, opts)
	c.layer = dsecv1connect.NewLayerServiceClient(calls, c.url, opts)
	c.trajectory = dsecv1connect.NewTrajectoryServiceClient(calls, c.url, opts)
	c.snapshot = dsecv1connect.NewSnapshotServiceClient(calls, c.url, opts)
	c.event = dsecv1connect.NewEventServiceClient(calls, c.url, opts)
	c.webhook = dsecv1connect.NewWebhookServiceClient(calls, c.url, opts)
	c.job = dsecv1connect.NewJobServiceClient(calls, c.url, opts)
	c.admin = dsecv1connect.NewAdminServiceClient(calls, c.url, opts)
	c.session = dsecv1connect.NewSessionServiceClient(streams, c.url, opts)
	return c, nil
}

// transports: HTTP/1.1 on kept connections costs less per call and per byte
// than HTTP/2. Where nothing stands between this client and the server, calls
// are made by a transport of our own, and a session's stream, which sends both
// ways at once, is HTTP/1.1 too; where a proxy or TLS does, it is HTTP/2.
func (c *Client) transports(u *url.URL) (calls, streams http.RoundTripper) {
	dialer := &dialer{Dialer: net.Dialer{Timeout: 10 * time.Second, KeepAlive: 30 * time.Second}, pause: pause}
	one := &http.Transport{
		Proxy: http.ProxyFromEnvironment, DialContext: dialer.DialContext,
		MaxIdleConnsPerHost: 256, IdleConnTimeout: idleTimeout,
		DisableCompression: true, Protocols: new(http.Protocols),
	}
	one.Protocols.SetHTTP1(true)
	c.idle = append(c.idle, one)
	if proxy, err := http.ProxyFromEnvironment(&http.Request{URL: u}); u.Scheme == "http" && proxy == nil && err == nil {
		address := u.Host
		if u.Port() == "" {
			address = net.JoinHostPort(u.Hostname(), "80")
		}
		dial := func(ctx context.Context) (net.Conn, error) { return dialer.DialContext(ctx, "tcp", address) }
		direct := &h1.Transport{Dial: dial, IdleTimeout: idleTimeout, Other: one}
		both := &h1.Transport{Dial: dial, IdleTimeout: idleTimeout, Other: one, Duplex: true}
		c.idle = append(c.idle, direct, both)
		return direct, both
	}
	two := one.Clone()
	two.Protocols = new(http.Protocols)
	two.Protocols.SetHTTP2(true)
	two.Protocols.SetUnencryptedHTTP2(true)
	c.idle = append(c.idle, two)
	return one, two
}

// dialer waits for a server that was there before and refuses connections now:
// it is being started again. Nothing of a call is sent before there is one, so
// that this is right for any call.
type dialer struct {
	net.Dialer
	pause   func(ctx context.Context, attempt int) error
	reached atomic.Bool
}

// outOfReach is for how long.
const outOfReach = time.Minute

// DialContext makes a connection.
func (d *dialer) DialContext(ctx context.Context, network, address string) (net.Conn, error) {
	end := time.Now().Add(outOfReach)
	for attempt := 1; ; attempt++ {
		conn, err := d.Dialer.DialContext(ctx, network, address)
		if err == nil {
			d.reached.Store(true)
			return conn, nil
		}
		if !errors.Is(err, syscall.ECONNREFUSED) || !d.reached.Load() {
			return nil, err
		}
		if time.Now().After(end) || d.pause(ctx, min(attempt, 4)) != nil {
			return nil, outOfReachError{err}
		}
	}
}

// outOfReachError is that of a server that was waited for: a call is not to wait
// as often as it may be sent.
type outOfReachError struct{ error }

// Unwrap returns what the last attempt failed with.
func (e outOfReachError) Unwrap() error { return e.error }

// idleTimeout is how long a connection is kept without a call; a server keeps
// it longer.
const idleTimeout = time.Minute

// caller makes calls by a transport alone: the API has no redirects and no cookies.
type caller struct{ http.RoundTripper }

// Do implements connect.HTTPClient.
func (c caller) Do(req *http.Request) (*http.Response, error) { return c.RoundTrip(req) }

// Close closes connections that are not in use.
func (c *Client) Close() {
	for _, t := range c.idle {
		t.CloseIdleConnections()
	}
}

func findKey(o Options) (string, error) {
	if key := cmp.Or(o.APIKey, os.Getenv("DSEC_API_KEY")); key != "" {
		return key, nil
	}
	path := cmp.Or(o.KeyFile, os.Getenv("DSEC_KEY_FILE"), DefaultKeyFile)
	data, err := os.ReadFile(path)
	if err != nil {
		return "", &dsec.Error{
			Code: dsec.CodeUnauthenticated, Err: err,
			Message: fmt.Sprintf("no API key: set DSEC_API_KEY, or let this user read %s", path),
		}
	}
	return strings.TrimSpace(string(data)), nil
}

// keyHeader is the interceptor that adds the key to every call.
type keyHeader string

// WrapUnary implements connect.Interceptor.
func (k keyHeader) WrapUnary(next connect.UnaryFunc) connect.UnaryFunc {
	return func(ctx context.Context, req connect.AnyRequest) (connect.AnyResponse, error) {
		req.Header().Set("Authorization", string(k))
		return next(ctx, req)
	}
}

// WrapStreamingClient implements connect.Interceptor.
func (k keyHeader) WrapStreamingClient(next connect.StreamingClientFunc) connect.StreamingClientFunc {
	return func(ctx context.Context, spec connect.Spec) connect.StreamingClientConn {
		conn := next(ctx, spec)
		conn.RequestHeader().Set("Authorization", string(k))
		return conn
	}
}

// WrapStreamingHandler implements connect.Interceptor.
func (k keyHeader) WrapStreamingHandler(next connect.StreamingHandlerFunc) connect.StreamingHandlerFunc {
	return next
}

// call makes a unary call, and makes it again after a while as long as the
// server says that it did not accept it.
func call[Req, Res any](
	ctx context.Context, c *Client, f func(context.Context, *connect.Request[Req]) (*connect.Response[Res], error), msg *Req, again func(error) bool,
) (*Res, error) {
	for attempt := 1; ; attempt++ {
		var res *connect.Response[Res]
		err := overRestart(ctx, nil, func() (err error) {
			req := connect.NewRequest(msg)
			if res, err = f(ctx, req); err != nil {
				err = c.typed(err, req.Spec().Procedure)
			}
			return err
		})
		if err == nil {
			return res.Msg, nil
		}
		if attempt >= c.attempts || !again(err) || restarting(err) || errors.As(err, new(outOfReachError)) {
			return nil, err
		}
		if werr := pause(ctx, attempt); werr != nil {
			return nil, errors.Join(err, werr)
		}
	}
}

// never is for calls that must not be made twice.
func never(error) bool { return false }

func pause(ctx context.Context, attempt int) error {
	d := 50 * time.Millisecond << min(attempt-1, 6)
	t := time.NewTimer(d/2 + rand.N(d))
	defer t.Stop()
	select {
	case <-t.C:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}
