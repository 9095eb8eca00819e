package pid1

import (
	"encoding/binary"
	"fmt"
	"net/netip"
	"os"
	"strings"

	"golang.org/x/sys/unix"
)

const nic = "eth0"

func setUpNetwork(c *config) error {
	if err := bringUp("lo", netip.Prefix{}); err != nil {
		return err
	}
	if c.Address == "" {
		return nil
	}
	address, err := netip.ParsePrefix(c.Address)
	if err != nil || !address.Addr().Is4() {
		return fmt.Errorf("address %q is not IPv4 with a prefix length", c.Address)
	}
	// The network behind the NIC is IPv4 only; address detection would only make noise.
	_ = os.WriteFile("/proc/sys/net/ipv6/conf/"+nic+"/disable_ipv6", []byte("1"), 0)
	if err := bringUp(nic, address); err != nil {
		return err
	}
	if c.Gateway == "" {
		return nil
	}
	gateway, err := netip.ParseAddr(c.Gateway)
	if err != nil || !gateway.Is4() {
		return fmt.Errorf("gateway %q is not an IPv4 address", c.Gateway)
	}
	return addDefaultRoute(gateway)
}

// bringUp gives the interface its address, when there is one, and starts it.
func bringUp(name string, address netip.Prefix) error {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	req, err := unix.NewIfreq(name)
	if err != nil {
		return err
	}
	if address.IsValid() {
		ip := address.Addr().As4()
		if err := req.SetInet4Addr(ip[:]); err != nil {
			return err
		}
		if err := unix.IoctlIfreq(fd, unix.SIOCSIFADDR, req); err != nil {
			return fmt.Errorf("address of %s: %w", name, err)
		}
		var mask [4]byte
		binary.BigEndian.PutUint32(mask[:], ^uint32(0)<<(32-address.Bits()))
		if err := req.SetInet4Addr(mask[:]); err != nil {
			return err
		}
		if err := unix.IoctlIfreq(fd, unix.SIOCSIFNETMASK, req); err != nil {
			return fmt.Errorf("netmask of %s: %w", name, err)
		}
	}
	if err := unix.IoctlIfreq(fd, unix.SIOCGIFFLAGS, req); err != nil {
		return fmt.Errorf("flags of %s: %w", name, err)
	}
	req.SetUint16(req.Uint16() | unix.IFF_UP)
	if err := unix.IoctlIfreq(fd, unix.SIOCSIFFLAGS, req); err != nil {
		return fmt.Errorf("start %s: %w", name, err)
	}
	return nil
}

// addDefaultRoute speaks rtnetlink: nlmsghdr(16) | rtmsg(12) | RTA_GATEWAY(8) | RTA_OIF(8).
func addDefaultRoute(gateway netip.Addr) error {
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.NETLINK_ROUTE)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	index, err := interfaceIndex(nic)
	if err != nil {
		return err
	}
	native := binary.NativeEndian
	msg := make([]byte, 44)
	native.PutUint32(msg[0:], uint32(len(msg)))
	native.PutUint16(msg[4:], unix.RTM_NEWROUTE)
	native.PutUint16(msg[6:], unix.NLM_F_REQUEST|unix.NLM_F_ACK|unix.NLM_F_CREATE|unix.NLM_F_REPLACE)
	native.PutUint32(msg[8:], 1)
	copy(msg[16:], []byte{unix.AF_INET, 0, 0, 0, unix.RT_TABLE_MAIN, unix.RTPROT_BOOT, unix.RT_SCOPE_UNIVERSE, unix.RTN_UNICAST})
	native.PutUint16(msg[28:], 8)
	native.PutUint16(msg[30:], unix.RTA_GATEWAY)
	ip := gateway.As4()
	copy(msg[32:], ip[:])
	native.PutUint16(msg[36:], 8)
	native.PutUint16(msg[38:], unix.RTA_OIF)
	native.PutUint32(msg[40:], uint32(index))
	if err := unix.Sendto(fd, msg, 0, &unix.SockaddrNetlink{Family: unix.AF_NETLINK}); err != nil {
		return err
	}
	answer := make([]byte, 4096)
	n, _, err := unix.Recvfrom(fd, answer, 0)
	if err != nil {
		return err
	}
	if n < 20 || native.Uint16(answer[4:]) != unix.NLMSG_ERROR {
		return fmt.Errorf("default route: unexpected netlink answer")
	}
	if code := int32(native.Uint32(answer[16:])); code != 0 {
		return fmt.Errorf("default route: %w", unix.Errno(-code))
	}
	return nil
}

func interfaceIndex(name string) (int, error) {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return 0, err
	}
	defer unix.Close(fd)
	req, err := unix.NewIfreq(name)
	if err != nil {
		return 0, err
	}
	if err := unix.IoctlIfreq(fd, unix.SIOCGIFINDEX, req); err != nil {
		return 0, fmt.Errorf("index of %s: %w", name, err)
	}
	return int(req.Uint32()), nil
}

const hosts = "127.0.0.1 localhost\n::1 localhost ip6-localhost ip6-loopback\n"

// writeNames leaves files alone that already say the same, so that a boot dirties no disk block without need.
func writeNames(c *config) {
	if len(c.DNS) > 0 {
		var text strings.Builder
		for _, server := range c.DNS {
			fmt.Fprintf(&text, "nameserver %s\n", server)
		}
		replaceFile("/etc/resolv.conf", text.String())
	}
	if old, err := os.ReadFile("/etc/hosts"); err != nil || !strings.Contains(string(old), "localhost") {
		replaceFile("/etc/hosts", hosts+string(old))
	}
}

// replaceFile also replaces a link, such as the one to a resolver that does not run here.
func replaceFile(path, text string) {
	if st, err := os.Lstat(path); err == nil && st.Mode().IsRegular() {
		if old, err := os.ReadFile(path); err == nil && string(old) == text {
			return
		}
	} else if err == nil {
		_ = os.Remove(path)
	}
	if err := os.MkdirAll("/etc", 0o755); err != nil {
		return
	}
	if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
		logf("%v", err)
	}
}

// Interface index and names are set; these only make life easier for programs in the sandbox.
func tune() {
	for path, value := range map[string]string{
		"net/ipv4/ping_group_range":     "0 2147483647",
		"fs/inotify/max_user_instances": "1024",
		"fs/inotify/max_user_watches":   "524288",
		"kernel/core_pattern":           "core",
		"vm/overcommit_memory":          "1",
		"net/ipv4/tcp_keepalive_time":   "600",
	} {
		_ = os.WriteFile("/proc/sys/"+path, []byte(value), 0)
	}
	_ = unix.Setrlimit(unix.RLIMIT_NOFILE, &unix.Rlimit{Cur: 65536, Max: 1 << 20})
	_ = unix.Setrlimit(unix.RLIMIT_CORE, &unix.Rlimit{Cur: 0, Max: unix.RLIM_INFINITY})
}
