package envd

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"

	"golang.org/x/sys/unix"
)

// A launch from a snapshot finds connections whose other ends are gone: what they were connected through was another
// machine. Programs that only read from one would wait for ever, so the kernel is told to abort each of them: they see
// an error at once and connect anew.

const (
	diagIDLen   = 48
	diagReqLen  = 8 + diagIDLen
	diagMsgLen  = 4 + diagIDLen + 20
	netlinkHead = 16
	// ESTABLISHED, SYN_SENT, SYN_RECV, FIN_WAIT1, FIN_WAIT2, CLOSE_WAIT, LAST_ACK, CLOSING: all with an other end.
	diagStates = 1<<1 | 1<<2 | 1<<3 | 1<<4 | 1<<5 | 1<<8 | 1<<9 | 1<<11
)

// connection is one TCP socket as the kernel lists it; id names it to the kernel.
type connection struct {
	family        uint8
	local, remote netip.AddrPort
	id            [diagIDLen]byte
}

// stale says which connections lead out of this machine, but for the one that carries our order.
func stale(all []connection, own [2]netip.AddrPort, isLocal func(netip.Addr) bool) []connection {
	var out []connection
	for _, c := range all {
		remote := c.remote.Addr()
		if remote.IsLoopback() || isLocal(remote) || (c.local == own[0] && c.remote == own[1]) {
			continue
		}
		out = append(out, c)
	}
	return out
}

// abortStale aborts every TCP connection out of this machine but `own`.
func abortStale(own net.Conn) error {
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.NETLINK_SOCK_DIAG)
	if err != nil {
		return fmt.Errorf("sock_diag: %w", err)
	}
	defer unix.Close(fd)
	// The kernel answers at once; a lost answer must not hold a launch up.
	_ = unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &unix.Timeval{Sec: 1})
	var keep [2]netip.AddrPort
	if own != nil {
		keep = [2]netip.AddrPort{addrPortOf(own.LocalAddr()), addrPortOf(own.RemoteAddr())}
	}
	local := localAddresses()
	var errs []error
	for _, family := range []uint8{unix.AF_INET, unix.AF_INET6} {
		all, err := listConnections(fd, family)
		errs = append(errs, err)
		for _, c := range stale(all, keep, func(a netip.Addr) bool { return local[a] }) {
			// One that ended meanwhile is as good as aborted.
			if err := abort(fd, c); err != nil && !errors.Is(err, unix.ENOENT) {
				errs = append(errs, fmt.Errorf("abort %s: %w", c.remote, err))
			}
		}
	}
	return errors.Join(errs...)
}

func addrPortOf(a net.Addr) netip.AddrPort {
	tcp, ok := a.(*net.TCPAddr)
	if !ok {
		return netip.AddrPort{}
	}
	at := tcp.AddrPort()
	return netip.AddrPortFrom(at.Addr().Unmap().WithZone(""), at.Port())
}

func localAddresses() map[netip.Addr]bool {
	out := map[netip.Addr]bool{}
	addrs, err := net.InterfaceAddrs()
	if err != nil {
		return out
	}
	for _, a := range addrs {
		if p, err := netip.ParsePrefix(a.String()); err == nil {
			out[p.Addr().WithZone("")] = true
		}
	}
	return out
}

// diagMessage builds a netlink message with an inet_diag_req_v2.
func diagMessage(kind, flags uint16, family uint8, states uint32, id []byte) []byte {
	m := make([]byte, netlinkHead+diagReqLen)
	binary.NativeEndian.PutUint32(m, uint32(len(m)))
	binary.NativeEndian.PutUint16(m[4:], kind)
	binary.NativeEndian.PutUint16(m[6:], unix.NLM_F_REQUEST|flags)
	body := m[netlinkHead:]
	body[0], body[1] = family, unix.IPPROTO_TCP
	binary.NativeEndian.PutUint32(body[4:], states)
	copy(body[8:], id)
	return m
}

func listConnections(fd int, family uint8) ([]connection, error) {
	ask := diagMessage(unix.SOCK_DIAG_BY_FAMILY, unix.NLM_F_DUMP, family, diagStates, nil)
	if err := unix.Sendto(fd, ask, 0, &unix.SockaddrNetlink{Family: unix.AF_NETLINK}); err != nil {
		return nil, fmt.Errorf("sock_diag: %w", err)
	}
	var out []connection
	buf := make([]byte, 64<<10)
	for {
		n, _, err := unix.Recvfrom(fd, buf, 0)
		if err != nil {
			return out, fmt.Errorf("sock_diag: %w", err)
		}
		done, err := eachMessage(buf[:n], func(body []byte) {
			if c, ok := parseConnection(body); ok {
				out = append(out, c)
			}
		})
		if done || err != nil {
			return out, err
		}
	}
}

// eachMessage walks the netlink messages of one datagram. done: the answer is complete.
func eachMessage(b []byte, found func(body []byte)) (done bool, err error) {
	for len(b) >= netlinkHead {
		size := int(binary.NativeEndian.Uint32(b))
		if size < netlinkHead || size > len(b) {
			return true, errors.New("sock_diag: a broken message")
		}
		body := b[netlinkHead:size]
		switch binary.NativeEndian.Uint16(b[4:]) {
		case unix.NLMSG_DONE:
			return true, nil
		case unix.NLMSG_ERROR:
			if len(body) >= 4 {
				if code := int32(binary.NativeEndian.Uint32(body)); code != 0 {
					return true, fmt.Errorf("sock_diag: %w", unix.Errno(-code))
				}
			}
			return true, nil
		case unix.SOCK_DIAG_BY_FAMILY:
			found(body)
		}
		b = b[min((size+3)&^3, len(b)):]
	}
	return false, nil
}

// parseConnection reads an inet_diag_msg.
func parseConnection(body []byte) (connection, bool) {
	if len(body) < diagMsgLen {
		return connection{}, false
	}
	c := connection{family: body[0]}
	id := body[4 : 4+diagIDLen]
	copy(c.id[:], id)
	at := func(port, addr int) (netip.AddrPort, bool) {
		p := binary.BigEndian.Uint16(id[port:])
		switch c.family {
		case unix.AF_INET:
			return netip.AddrPortFrom(netip.AddrFrom4([4]byte(id[addr:addr+4])), p), true
		case unix.AF_INET6:
			return netip.AddrPortFrom(netip.AddrFrom16([16]byte(id[addr:addr+16])).Unmap(), p), true
		}
		return netip.AddrPort{}, false
	}
	var ok1, ok2 bool
	c.local, ok1 = at(0, 4)
	c.remote, ok2 = at(2, 20)
	return c, ok1 && ok2
}

func abort(fd int, c connection) error {
	ask := diagMessage(unix.SOCK_DESTROY, unix.NLM_F_ACK, c.family, diagStates, c.id[:])
	if err := unix.Sendto(fd, ask, 0, &unix.SockaddrNetlink{Family: unix.AF_NETLINK}); err != nil {
		return err
	}
	buf := make([]byte, 4<<10)
	n, _, err := unix.Recvfrom(fd, buf, 0)
	if err != nil {
		return err
	}
	_, err = eachMessage(buf[:n], func([]byte) {})
	return err
}
