package apiserver

import (
	"net/http"
	"net/netip"
	"slices"
	"time"

	"github.com/opendsec/dsec/internal/publicip"
)

// guard keeps requests that users ask for away from what only the server can reach: it looks at
// the address that a connection is made to, whatever name led there.
type guard struct{ allow []netip.Prefix }

// allows reports whether an address may be connected to.
func (g guard) allows(ip netip.Addr) bool { return publicip.Is(ip) || g.inside(ip.Unmap()) }

// inside reports whether the operator allows an address.
func (g guard) inside(ip netip.Addr) bool {
	return slices.ContainsFunc(g.allow, func(p netip.Prefix) bool { return p.Contains(ip) })
}

// client makes requests by the guard. It follows no redirect, for that would be another
// address, and no proxy.
func (g guard) client(timeout time.Duration) *http.Client {
	return &http.Client{
		Timeout: timeout,
		Transport: &http.Transport{
			DialContext: publicip.Dialer(g.inside).DialContext, TLSHandshakeTimeout: timeout,
			MaxIdleConnsPerHost: 2, IdleConnTimeout: time.Minute, MaxResponseHeaderBytes: 64 << 10, DisableCompression: true,
		},
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	}
}
