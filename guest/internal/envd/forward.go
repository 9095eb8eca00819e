package envd

import (
	"context"
	"encoding/hex"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"strconv"
	"strings"
	"sync"
	"time"
)

const (
	scanInterval = time.Second
	dialTimeout  = 5 * time.Second
	tcpListen    = "0A"
)

// listeners gives the ports that listen on loopback only, each with its address, from /proc/net/tcp and tcp6.
// A listener of ours does not count as one elsewhere.
func listeners(tcp, tcp6 string, ours func(netip.AddrPort) bool) map[uint16]netip.Addr {
	loopback := map[uint16]netip.Addr{}
	elsewhere := map[uint16]bool{}
	for _, table := range []string{tcp, tcp6} {
		for line := range strings.Lines(table) {
			f := strings.Fields(line)
			if len(f) < 4 || f[3] != tcpListen {
				continue
			}
			address, ok := parseSocket(f[1])
			if !ok {
				continue
			}
			port := address.Port()
			if ours(address) {
				continue
			}
			if !address.Addr().IsLoopback() {
				elsewhere[port] = true
			} else if old, seen := loopback[port]; !seen || old.Is6() {
				loopback[port] = address.Addr()
			}
		}
	}
	for port := range elsewhere {
		delete(loopback, port)
	}
	return loopback
}

// parseSocket reads "0100007F:1F90": 32-bit words in host order (little-endian here), then the port.
func parseSocket(text string) (netip.AddrPort, bool) {
	host, portText, ok := strings.Cut(text, ":")
	raw, err := hex.DecodeString(host)
	if !ok || err != nil || (len(raw) != 4 && len(raw) != 16) {
		return netip.AddrPort{}, false
	}
	port, err := strconv.ParseUint(portText, 16, 16)
	if err != nil {
		return netip.AddrPort{}, false
	}
	for i := 0; i < len(raw); i += 4 {
		raw[i], raw[i+1], raw[i+2], raw[i+3] = raw[i+3], raw[i+2], raw[i+1], raw[i]
	}
	address, ok := netip.AddrFromSlice(raw)
	return netip.AddrPortFrom(address.Unmap(), uint16(port)), ok
}

// forwarder makes ports that listen on loopback reachable on one address of the NIC.
type forwarder struct {
	on   netip.Addr
	mu   sync.Mutex
	open map[uint16]*forwarded
}

type forwarded struct {
	listener net.Listener
	to       netip.AddrPort
}

func addressOf(name string) (netip.Addr, error) {
	if ip, err := netip.ParseAddr(name); err == nil {
		return ip, nil
	}
	nic, err := net.InterfaceByName(name)
	if err != nil {
		return netip.Addr{}, err
	}
	addrs, err := nic.Addrs()
	if err != nil {
		return netip.Addr{}, err
	}
	for _, a := range addrs {
		if p, err := netip.ParsePrefix(a.String()); err == nil && p.Addr().Is4() {
			return p.Addr(), nil
		}
	}
	return netip.Addr{}, fmt.Errorf("%s has no IPv4 address", name)
}

// runForwarder scans once a second, but not in the first second after a launch: that one belongs to the first command.
func runForwarder(name string, launched <-chan struct{}) {
	on, err := addressOf(name)
	if err != nil {
		fmt.Fprintln(os.Stderr, "envd: port forwarding is off:", err)
		return
	}
	f := &forwarder{on: on, open: map[uint16]*forwarded{}}
	scan := tableScanner{paths: [2]string{"/proc/net/tcp", "/proc/net/tcp6"}}
	for {
		if tables, changed := scan.read(); changed {
			f.follow(listeners(tables[0], tables[1], f.ours))
		}
		for waiting := true; waiting; {
			timer := time.NewTimer(scanInterval)
			select {
			case <-launched:
				timer.Stop()
			case <-timer.C:
				waiting = false
			}
		}
	}
}

// tableScanner keeps its files and buffers, so that a scan of an idle machine costs two reads.
type tableScanner struct {
	paths [2]string
	files [2]*os.File
	last  [2]string
	buf   []byte
}

func (t *tableScanner) read() ([2]string, bool) {
	changed := false
	if t.buf == nil {
		t.buf = make([]byte, 16<<10)
	}
	for i, path := range t.paths {
		if t.files[i] == nil {
			f, err := os.Open(path)
			if err != nil {
				continue
			}
			t.files[i] = f
		}
		n := 0
		for {
			m, err := t.files[i].ReadAt(t.buf[n:], int64(n))
			n += m
			if err != nil || m == 0 {
				break
			}
			if n == len(t.buf) {
				t.buf = append(t.buf, make([]byte, len(t.buf))...)
			}
		}
		if string(t.buf[:n]) != t.last[i] {
			t.last[i], changed = string(t.buf[:n]), true
		}
	}
	return t.last, changed
}

func (f *forwarder) ours(a netip.AddrPort) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	return a.Addr() == f.on && f.open[a.Port()] != nil
}

func (f *forwarder) follow(want map[uint16]netip.Addr) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for port, open := range f.open {
		if to, ok := want[port]; !ok || to != open.to.Addr() {
			_ = open.listener.Close()
			delete(f.open, port)
		}
	}
	for port, to := range want {
		if f.open[port] != nil {
			continue
		}
		l, err := net.Listen("tcp4", netip.AddrPortFrom(f.on, port).String())
		if err != nil {
			continue
		}
		entry := &forwarded{l, netip.AddrPortFrom(to, port)}
		f.open[port] = entry
		go f.serve(entry)
	}
}

func (f *forwarder) serve(entry *forwarded) {
	for {
		c, err := entry.listener.Accept()
		if err != nil {
			return
		}
		go f.pipe(c.(*net.TCPConn), entry)
	}
}

func (f *forwarder) pipe(from *net.TCPConn, entry *forwarded) {
	defer from.Close()
	ctx, cancel := context.WithTimeout(context.Background(), dialTimeout)
	defer cancel()
	c, err := (&net.Dialer{}).DialContext(ctx, "tcp", entry.to.String())
	if err != nil {
		// The program is gone: give the port back at once, it may be about to bind it on all addresses.
		_ = entry.listener.Close()
		f.mu.Lock()
		if f.open[entry.to.Port()] == entry {
			delete(f.open, entry.to.Port())
		}
		f.mu.Unlock()
		_ = from.SetLinger(0)
		return
	}
	to := c.(*net.TCPConn)
	defer to.Close()
	done := make(chan struct{})
	go func() {
		_, _ = io.Copy(to, from)
		_ = to.CloseWrite()
		close(done)
	}()
	_, _ = io.Copy(from, to)
	_ = from.CloseWrite()
	<-done
}
