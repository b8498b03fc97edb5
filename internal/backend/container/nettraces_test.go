package container

import (
	"encoding/binary"
	"errors"
	"fmt"

	"golang.org/x/sys/unix"
)

// What a program can do in a network slot, and whether another sandbox may have
// the slot after it. Each is done with every right of root, on the slot's thread.
var slotTraces = []struct {
	name string
	kept bool
	do   func() error
}{
	{"nothing", true, func() error { return nil }},
	{"Unix sockets", true, func() error {
		pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_DGRAM, 0)
		if err == nil {
			_, err = unix.Write(pair[0], []byte("x"))
			closeAll(pair[:])
		}
		return err
	}},
	{"abstract name", true, func() error {
		return withSocket(unix.AF_UNIX, unix.SOCK_STREAM, 0, func(fd int) error {
			return errors.Join(unix.Bind(fd, &unix.SockaddrUnix{Name: "@trace"}), unix.Listen(fd, 1))
		})
	}},
	{"rtnetlink", true, func() error {
		return withSocket(unix.AF_NETLINK, unix.SOCK_RAW, unix.NETLINK_ROUTE, func(fd int) error {
			return unix.Bind(fd, &unix.SockaddrNetlink{Family: unix.AF_NETLINK})
		})
	}},
	{"IPv4 route", true, func() error {
		return askRoute(unix.AF_INET, loopback4[:])
	}},
	{"IPv6 route", false, func() error {
		return askRoute(unix.AF_INET6, loopback6[:])
	}},
	{"no such protocol", true, func() error {
		if _, err := unix.Socket(unix.AF_INET6, unix.SOCK_STREAM, unix.IPPROTO_UDP); err != unix.EPROTONOSUPPORT {
			return fmt.Errorf("want no socket, have %v", err)
		}
		return nil
	}},
	{"TCP listener", true, func() error {
		return withSocket(unix.AF_INET, unix.SOCK_STREAM, 0, func(fd int) error {
			return errors.Join(unix.Bind(fd, &unix.SockaddrInet4{Addr: loopback4}), unix.Listen(fd, 1))
		})
	}},
	{"TCP connection", false, func() error {
		l, err := rawListener()
		if err != nil {
			return err
		}
		defer unix.Close(l)
		to, err := unix.Getsockname(l)
		if err != nil {
			return err
		}
		return withSocket(unix.AF_INET, unix.SOCK_STREAM, 0, func(fd int) error { return unix.Connect(fd, to) })
	}},
	{"UDP datagram", false, func() error {
		return withSocket(unix.AF_INET, unix.SOCK_DGRAM, 0, func(fd int) error {
			return unix.Sendto(fd, []byte("x"), 0, &unix.SockaddrInet4{Addr: loopback4, Port: 9})
		})
	}},
	{"UDP datagram over IPv6", false, func() error {
		return withSocket(unix.AF_INET6, unix.SOCK_DGRAM, 0, func(fd int) error {
			return unix.Sendto(fd, []byte("x"), 0, &unix.SockaddrInet6{Addr: loopback6, Port: 9})
		})
	}},
	{"no route", false, func() error {
		return withSocket(unix.AF_INET, unix.SOCK_STREAM, 0, func(fd int) error {
			if err := unix.Connect(fd, &unix.SockaddrInet4{Addr: [4]byte{10, 1, 2, 3}, Port: 9}); err != unix.ENETUNREACH {
				return fmt.Errorf("want no route, have %v", err)
			}
			return nil
		})
	}},
	{"multicast group", false, func() error {
		return withSocket(unix.AF_INET, unix.SOCK_DGRAM, 0, func(fd int) error {
			return unix.SetsockoptIPMreq(fd, unix.IPPROTO_IP, unix.IP_ADD_MEMBERSHIP, &unix.IPMreq{Multiaddr: [4]byte{239, 1, 2, 3}, Interface: loopback4})
		})
	}},
	{"multicast group over IPv6", false, func() error {
		return withSocket(unix.AF_INET6, unix.SOCK_DGRAM, 0, func(fd int) error {
			return unix.SetsockoptIPv6Mreq(fd, unix.IPPROTO_IPV6, unix.IPV6_JOIN_GROUP,
				&unix.IPv6Mreq{Multiaddr: [16]byte{0xff, 2, 14: 0x12, 15: 0x34}, Interface: 1})
		})
	}},
	{"flow label", false, func() error {
		return withSocket(unix.AF_INET6, unix.SOCK_DGRAM, 0, func(fd int) error {
			// struct in6_flowlabel_req: a label of any user, got and created, that lingers for 10 s.
			req := append(loopback6[:], 0, 1, 0x23, 0x45, 0, 255, 1, 0, 10, 0, 10, 0, 0, 0, 0, 0)
			const flowlabelMgr = 32 // IPV6_FLOWLABEL_MGR
			return unix.SetsockoptString(fd, unix.IPPROTO_IPV6, flowlabelMgr, string(req))
		})
	}},
	{"fast open", false, func() error {
		return withSocket(unix.AF_INET, unix.SOCK_STREAM, 0, func(fd int) error {
			return errors.Join(
				unix.SetsockoptInt(fd, unix.IPPROTO_TCP, unix.TCP_FASTOPEN, 5),
				unix.Bind(fd, &unix.SockaddrInet4{Addr: loopback4}), unix.Listen(fd, 1))
		})
	}},
	{"open socket", false, func() error {
		_, err := unix.Socket(unix.AF_UNIX, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0) // for as long as the test runs
		return err
	}},
}

var (
	loopback4 = [4]byte{127, 0, 0, 1}
	loopback6 = [16]byte{15: 1}
)

// askRoute asks rtnetlink how an address is reached.
func askRoute(family int, to []byte) error {
	const attr = 4 // bytes of a struct rtattr
	msg := make([]byte, unix.SizeofNlMsghdr+unix.SizeofRtMsg, 64)
	msg[unix.SizeofNlMsghdr] = byte(family)
	msg[unix.SizeofNlMsghdr+1] = byte(8 * len(to)) // rtm_dst_len
	msg = binary.NativeEndian.AppendUint16(msg, uint16(attr+len(to)))
	msg = binary.NativeEndian.AppendUint16(msg, unix.RTA_DST)
	msg = append(msg, to...)
	binary.NativeEndian.PutUint32(msg, uint32(len(msg)))
	binary.NativeEndian.PutUint16(msg[4:], unix.RTM_GETROUTE)
	binary.NativeEndian.PutUint16(msg[6:], unix.NLM_F_REQUEST)
	return withSocket(unix.AF_NETLINK, unix.SOCK_RAW, unix.NETLINK_ROUTE, func(fd int) error {
		if _, err := unix.Write(fd, msg); err != nil {
			return err
		}
		answer := make([]byte, 4096)
		n, err := unix.Read(fd, answer)
		if err != nil {
			return err
		}
		if n < unix.SizeofNlMsghdr || binary.NativeEndian.Uint16(answer[4:]) != unix.RTM_NEWROUTE {
			return fmt.Errorf("no route: %x", answer[:n])
		}
		return nil
	})
}

func withSocket(family, kind, proto int, f func(fd int) error) error {
	fd, err := unix.Socket(family, kind|unix.SOCK_CLOEXEC, proto)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	return f(fd)
}

func rawListener() (int, error) {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return -1, err
	}
	return fd, errors.Join(unix.Bind(fd, &unix.SockaddrInet4{Addr: loopback4}), unix.Listen(fd, 1))
}
