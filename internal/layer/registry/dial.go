package registry

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/netip"
	"strings"
	"syscall"
	"time"

	"github.com/opendsec/dsec"
)

// policy says which hosts may be spoken to and how.
type policy struct {
	insecure map[string]bool // without TLS
	private  map[string]bool // at any address
}

const dialTimeout = 10 * time.Second

// errPrivate is why no connection was made; who asked learns no address.
var errPrivate = errors.New("its address is not public")

// dial connects to addr, a host and a port, by whatever name it got here:
// what a redirect or a token server names comes by the same way. The address is
// looked at after it was resolved, right before it is connected to.
func (p *policy) dial(ctx context.Context, network, addr string) (net.Conn, error) {
	d := net.Dialer{Timeout: dialTimeout}
	if !p.mayBePrivate(addr) {
		d.ControlContext = func(_ context.Context, _, address string, _ syscall.RawConn) error {
			to, err := netip.ParseAddrPort(address)
			if err != nil || !public(to.Addr()) {
				return errPrivate
			}
			return nil
		}
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

// notPublic are the addresses that mean something else on each machine or site, or
// that carry such an address in them.
var notPublic = func() (list []netip.Prefix) {
	for _, s := range []string{
		"0.0.0.0/8", "10.0.0.0/8", "100.64.0.0/10", "127.0.0.0/8", "169.254.0.0/16", "172.16.0.0/12", "192.0.0.0/24",
		"192.0.2.0/24", "192.88.99.0/24", "192.168.0.0/16", "198.18.0.0/15", "198.51.100.0/24", "203.0.113.0/24", "224.0.0.0/3",
		"168.63.129.16/32", // what a cloud's machines ask about themselves
		"::/96", "64:ff9b::/96", "64:ff9b:1::/48", "100::/64", "2001::/23", "2001:db8::/32", "2002::/16", "3fff::/20", "5f00::/16",
		"fc00::/7", "fe80::/10", "fec0::/10", "ff00::/8",
	} {
		list = append(list, netip.MustParsePrefix(s))
	}
	return list
}()

// public reports whether an address is one of the internet's.
func public(a netip.Addr) bool {
	if !a.IsValid() || a.Zone() != "" {
		return false
	}
	a = a.Unmap()
	for _, p := range notPublic {
		if p.Contains(a) {
			return false
		}
	}
	return a.IsGlobalUnicast()
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
	if errors.Is(err, errPrivate) {
		return nil, &dsec.Error{Code: dsec.CodeDenied, Message: fmt.Sprintf("%.100q is at an address that is not public; its operator may name it in registry.private_hosts", req.URL.Host), Err: err}
	}
	return res, err
}
