// Package publicip tells which addresses are the internet's. What users name may be
// connected to there only, or a server would reach for them what they cannot.
package publicip

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"syscall"
	"time"
)

// ErrNotPublic is why no connection was made; who asked learns no address.
var ErrNotPublic = errors.New("its address is not public")

const dialTimeout = 10 * time.Second

// Dialer connects to addresses that are public, or that allow allows, which may be nil.
// The address is looked at after it was resolved, right before it is connected to.
func Dialer(allow func(netip.Addr) bool) *net.Dialer {
	return &net.Dialer{Timeout: dialTimeout, ControlContext: func(_ context.Context, _, address string, _ syscall.RawConn) error {
		to, err := netip.ParseAddrPort(address)
		if err == nil && (Is(to.Addr()) || allow != nil && allow(to.Addr().Unmap())) {
			return nil
		}
		return ErrNotPublic
	}}
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

// Is reports whether an address is one of the internet's.
func Is(a netip.Addr) bool {
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
