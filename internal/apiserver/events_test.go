package apiserver

import (
	"net/netip"
	"testing"

	"google.golang.org/protobuf/proto"

	"github.com/opendsec/dsec"
	dsecv1 "github.com/opendsec/dsec/proto/dsec/v1"
)

func FuzzCursor(f *testing.F) {
	good, err := encodeCursor(&dsecv1.EventCursor{Jobs: 7, Nodes: map[string]*dsecv1.NodePosition{"aaaaa": {Log: string(dsec.NewSandboxID("aaaaa")), Seq: 3}}})
	if err != nil {
		f.Fatal(err)
	}
	for _, text := range []string{good, good[:len(good)-2], "", "x", "AAAA", good + good} {
		f.Add(text)
	}
	f.Fuzz(func(t *testing.T, text string) {
		c, err := parseCursor(text)
		if err != nil {
			if e := dsec.CodeOf(err); e != dsec.CodeInvalid || c != nil {
				t.Errorf("%q: %v, %v", text, c, err)
			}
			return
		}
		if c == nil {
			return // none was given
		}
		again, err := encodeCursor(c)
		if err != nil {
			t.Fatal(err)
		}
		if same, err := parseCursor(again); err != nil || !proto.Equal(c, same) && again != "" {
			t.Errorf("%q became %q: %v, %v", text, again, same, err)
		}
	})
}

// TestGuard: what only the server can reach is refused, in whatever form it is written.
func TestGuard(t *testing.T) {
	for _, ip := range []string{"8.8.8.8", "2606:4700::1", "::ffff:8.8.8.8"} {
		if !(guard{}).allows(netip.MustParseAddr(ip)) {
			t.Errorf("%s is refused", ip)
		}
	}
	inside := guard{[]netip.Prefix{netip.MustParsePrefix("10.0.0.0/8")}}
	for _, ip := range []string{
		"127.0.0.1", "::1", "0.0.0.0", "::", "10.0.0.1", "172.16.3.4", "192.168.1.1", "169.254.169.254", "100.64.0.1", "fe80::1%eth0", "fd00::1", "224.0.0.1", "ff02::1",
		"255.255.255.255", "240.0.0.1", "198.18.0.1", "192.0.2.1", "::ffff:127.0.0.1", "::ffff:10.0.0.1", "64:ff9b::a00:1", "2002:a00:1::", "2001::1", "fec0::1",
	} {
		if (guard{}).allows(netip.MustParseAddr(ip)) {
			t.Errorf("%s is allowed", ip)
		}
		if got := inside.allows(netip.MustParseAddr(ip)); got != (ip == "10.0.0.1" || ip == "::ffff:10.0.0.1") {
			t.Errorf("%s where 10.0.0.0/8 is allowed: %v", ip, got)
		}
	}
}
