package apiserver

import (
	"context"
	"net"
	"net/http"
	"net/netip"
	"slices"
	"syscall"
	"time"

	"github.com/opendsec/dsec"
)

// guard keeps requests that users ask for away from what only the server can reach: it looks at
// the address that a connection is made to, whatever name led there.
type guard struct{ allow []netip.Prefix }

// notPublic are networks that netip has no word for.
var notPublic = func() (list []netip.Prefix) {
	for _, p := range []string{
		"0.0.0.0/8", "100.64.0.0/10", "192.0.0.0/24", "192.0.2.0/24", "192.88.99.0/24", "198.18.0.0/15", "198.51.100.0/24", "203.0.113.0/24", "240.0.0.0/4",
		"64:ff9b::/96", "64:ff9b:1::/48", "100::/64", "2001::/23", "2001:db8::/32", "2002::/16", "3fff::/20", "fec0::/10",
	} {
		list = append(list, netip.MustParsePrefix(p))
	}
	return list
}()

// allows reports whether an address may be connected to.
func (g guard) allows(ip netip.Addr) bool {
	ip = ip.Unmap().WithZone("")
	in := func(p netip.Prefix) bool { return p.Contains(ip) }
	if slices.ContainsFunc(g.allow, in) {
		return true
	}
	return ip.IsGlobalUnicast() && !ip.IsPrivate() && !slices.ContainsFunc(notPublic, in)
}

// errNotPublic is of an address that is refused.
var errNotPublic = dsec.Errorf(dsec.CodeDenied, "its host leads to an address that is not public")

// client makes requests by the guard. It follows no redirect, for that would be another
// address, and no proxy.
func (g guard) client(timeout time.Duration) *http.Client {
	dialer := &net.Dialer{Timeout: timeout, Control: func(_, address string, _ syscall.RawConn) error {
		to, err := netip.ParseAddrPort(address)
		if err != nil || !g.allows(to.Addr()) {
			return errNotPublic
		}
		return nil
	}}
	return &http.Client{
		Timeout: timeout,
		Transport: &http.Transport{
			DialContext: func(ctx context.Context, network, address string) (net.Conn, error) {
				return dialer.DialContext(ctx, network, address)
			},
			TLSHandshakeTimeout: timeout, MaxIdleConnsPerHost: 2, IdleConnTimeout: time.Minute, MaxResponseHeaderBytes: 64 << 10, DisableCompression: true,
		},
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	}
}
