package registry

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"strings"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/publicip"
)

// policy says which hosts may be spoken to and how.
type policy struct {
	insecure map[string]bool // without TLS
	private  map[string]bool // at any address
}

// dial connects to addr, a host and a port, by whatever name it got here:
// what a redirect or a token server names comes by the same way. The address is
// looked at after it was resolved, right before it is connected to.
func (p *policy) dial(ctx context.Context, network, addr string) (net.Conn, error) {
	d := publicip.Dialer(nil)
	if p.mayBePrivate(addr) {
		d.ControlContext = nil
	}
	return d.DialContext(ctx, network, addr)
}

// mayBePrivate reports whether the operator named the host, with or without its
// port.
func (p *policy) mayBePrivate(addr string) bool {
	addr = strings.ToLower(addr)
	host, port, err := net.SplitHostPort(addr)
	if err != nil {
		return false
	}
	if strings.Contains(host, ":") {
		host = "[" + host + "]"
	}
	for _, set := range []map[string]bool{p.private, p.insecure} {
		if set[host] || set[host+":"+port] {
			return true
		}
	}
	return false
}

// guard refuses requests that would not be of a kind that the operator allows,
// whoever makes them: the library's own, redirects, tokens.
type guard struct {
	p    *policy
	next http.RoundTripper
}

// RoundTrip implements http.RoundTripper.
func (g guard) RoundTrip(req *http.Request) (*http.Response, error) {
	host := strings.ToLower(req.URL.Host)
	switch {
	case req.URL.Scheme == "https":
	case req.URL.Scheme != "http":
		return nil, dsec.Errorf(dsec.CodeDenied, "the registry leads to a URL that is not of https")
	case !g.p.insecure[host] && !g.p.insecure[strings.ToLower(req.URL.Hostname())]:
		return nil, &dsec.Error{Code: dsec.CodeDenied, Message: fmt.Sprintf("%.100q is spoken to by https only; its operator may name it in registry.insecure", req.URL.Host)}
	}
	res, err := g.next.RoundTrip(req)
	if errors.Is(err, publicip.ErrNotPublic) {
		return nil, &dsec.Error{Code: dsec.CodeDenied, Message: fmt.Sprintf("%.100q is at an address that is not public; its operator may name it in registry.private_hosts", req.URL.Host), Err: err}
	}
	return res, err
}
