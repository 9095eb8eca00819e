package envd

import (
	"context"
	"encoding/binary"
	"net"
	"net/netip"
	"os"
	"testing"

	"golang.org/x/sys/unix"
)

func t0() context.Context { return context.Background() }

func conn(local, remote string) connection {
	return connection{family: unix.AF_INET, local: netip.MustParseAddrPort(local), remote: netip.MustParseAddrPort(remote)}
}

func TestOnlyConnectionsOutOfTheMachineAreStaleAndNotOurOwn(t *testing.T) {
	own := conn("169.254.0.21:49983", "169.254.0.22:5000")
	all := []connection{
		own,
		conn("169.254.0.21:49983", "169.254.0.22:4000"),
		conn("169.254.0.21:40000", "93.184.216.34:443"),
		conn("127.0.0.1:40001", "127.0.0.1:8000"),
		conn("169.254.0.21:40002", "169.254.0.21:8000"),
	}
	isLocal := func(a netip.Addr) bool { return a == netip.MustParseAddr("169.254.0.21") }
	got := stale(all, [2]netip.AddrPort{own.local, own.remote}, isLocal)
	if len(got) != 2 || got[0].remote.Port() != 4000 || got[1].remote.Port() != 443 {
		t.Fatal(got)
	}
}

// message frames a body as the kernel does.
func message(kind uint16, body []byte) []byte {
	m := make([]byte, netlinkHead, netlinkHead+len(body))
	binary.NativeEndian.PutUint32(m, uint32(netlinkHead+len(body)))
	binary.NativeEndian.PutUint16(m[4:], kind)
	return append(m, body...)
}

func TestAnswersOfTheKernelAreReadWithBounds(t *testing.T) {
	good := make([]byte, diagMsgLen)
	good[0], good[1] = unix.AF_INET6, 1
	binary.BigEndian.PutUint16(good[4:], 49983)
	binary.BigEndian.PutUint16(good[6:], 443)
	copy(good[8:], netip.MustParseAddr("::ffff:169.254.0.21").AsSlice())
	copy(good[24:], netip.MustParseAddr("::ffff:1.2.3.4").AsSlice())
	var got []connection
	collect := func(body []byte) {
		if c, ok := parseConnection(body); ok {
			got = append(got, c)
		}
	}
	dump := append(message(unix.SOCK_DIAG_BY_FAMILY, good), message(unix.NLMSG_DONE, make([]byte, 4))...)
	if done, err := eachMessage(dump, collect); !done || err != nil || len(got) != 1 {
		t.Fatal(done, err, got)
	}
	if got[0].local.String() != "169.254.0.21:49983" || got[0].remote.String() != "1.2.3.4:443" {
		t.Fatal(got[0])
	}
	for cut := range len(dump) {
		_, _ = eachMessage(dump[:cut], func([]byte) {})
	}
	if _, ok := parseConnection(good[:diagMsgLen-1]); ok {
		t.Fatal("a short message was taken")
	}
	refused := make([]byte, 4)
	binary.NativeEndian.PutUint32(refused, uint32(0xffffffff-uint32(unix.ENOENT)+1))
	if _, err := eachMessage(message(unix.NLMSG_ERROR, refused), collect); err == nil {
		t.Fatal("an error was not told")
	}
	if done, err := eachMessage(message(unix.NLMSG_ERROR, make([]byte, 4)), collect); !done || err != nil {
		t.Fatal("an acknowledgement is no error:", err)
	}
}

// The kernel of the test's machine lists a real connection as ours do.
func TestTheKernelListsOurConnections(t *testing.T) {
	l, err := net.Listen("tcp4", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	c, err := net.Dial("tcp4", l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.NETLINK_SOCK_DIAG)
	if err != nil {
		t.Skip("this kernel has no sock_diag:", err)
	}
	defer unix.Close(fd)
	all, err := listConnections(fd, unix.AF_INET)
	if os.IsNotExist(err) || len(all) == 0 {
		t.Skip("this kernel lists no TCP sockets:", err)
	}
	for _, found := range all {
		if found.local == addrPortOf(c.LocalAddr()) && found.remote == addrPortOf(c.RemoteAddr()) {
			return
		}
	}
	t.Fatal("our connection is not among", len(all))
}
