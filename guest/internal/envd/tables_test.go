package envd

import (
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"
)

const tcpTable = `  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode
   0: 0100007F:1F90 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 1
   1: 00000000:0016 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 2
   2: 0100007F:0016 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 3
   3: 0100007F:2222 0100007F:1F90 01 00000000:00000000 00:00000000 00000000     0        0 4
   4: 1500FEA9:0BB8 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 5
   5: 0100007F:0BB8 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 6
   6: broken
`

const tcp6Table = `  sl  local_address                         remote_address                        st
   0: 00000000000000000000000001000000:1389 00000000000000000000000000000000:0000 0A 0:0
   1: 00000000000000000000000001000000:1F90 00000000000000000000000000000000:0000 0A 0:0
`

func TestOnlyPortsThatListenOnLoopbackAloneAreForwarded(t *testing.T) {
	nic := netip.MustParseAddr("169.254.0.21")
	none := func(netip.AddrPort) bool { return false }
	got := listeners(tcpTable, tcp6Table, none)
	if len(got) != 2 || got[8080] != netip.MustParseAddr("127.0.0.1") || got[5001] != netip.IPv6Loopback() {
		t.Fatal(got)
	}
	ours := func(a netip.AddrPort) bool { return a.Addr() == nic }
	if got := listeners(tcpTable, tcp6Table, ours); got[3000] != netip.MustParseAddr("127.0.0.1") {
		t.Fatal("our own listener hid the program behind it:", got)
	}
}

func FuzzParseSocket(f *testing.F) {
	f.Add("0100007F:1F90")
	f.Add("00000000000000000000000001000000:1389")
	f.Fuzz(func(t *testing.T, text string) {
		if a, ok := parseSocket(text); ok && !a.Addr().IsValid() {
			t.Fatal(text)
		}
	})
}

func TestAccountsComeFromTheFilesOfTheImage(t *testing.T) {
	etc := t.TempDir()
	write := func(name, text string) {
		if err := os.WriteFile(filepath.Join(etc, name), []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	a := newAccounts(etc)
	if u, err := a.lookup("root"); err != nil || u.home != "/root" {
		t.Fatal("root must exist without a passwd file:", u, err)
	}
	if _, err := a.lookup("user"); err == nil || err.Error() != "invalid username: 'user'" {
		t.Fatal(err)
	}
	write("passwd", "# comment\nbroken\nbad:x:no:1::/:\nuser:x:1000:100:U,,,:/home/user:/bin/bash\n")
	write("group", "users:x:100:\nsudo:x:27:other,user\ndocker:x:999:user\n")
	u, err := a.lookup("user")
	if err != nil || u.uid != 1000 || u.gid != 100 || u.home != "/home/user" || u.shell != "/bin/bash" {
		t.Fatal(u, err)
	}
	if got := a.groups(u); !slices.Equal(got, []uint32{100, 27, 999}) {
		t.Fatal(got)
	}
	if a.userName(1000) != "user" || a.groupName(27) != "sudo" || a.userName(4242) != "4242" {
		t.Fatal(a.userName(1000), a.groupName(27), a.userName(4242))
	}
	write("passwd", "late:x:1:1::/l:/bin/sh\nuser:x:1001:100::/home/user:/bin/sh\n")
	if u, _ := a.lookup("user"); u.uid != 1001 {
		t.Fatal("a changed file was not read again")
	}
}

func TestNegotiateGivesGzipOnlyToWhoWantsNothingElse(t *testing.T) {
	for accept, want := range map[string]string{
		"": "identity", "gzip": "gzip", "gzip, deflate": "identity", "gzip;q=0": "identity", "identity;q=0, gzip": "gzip",
		"identity;q=0": "refused", "*;q=0": "refused", "br": "identity", "gzip, identity;q=0.5": "identity",
	} {
		h := http.Header{}
		if accept != "" {
			h.Set("Accept-Encoding", accept)
		}
		got, ok := negotiate(h)
		if !ok {
			got = "refused"
		}
		if got != want {
			t.Errorf("%q gives %s, want %s", accept, got, want)
		}
	}
	ranged := http.Header{"Accept-Encoding": {"gzip"}, "Range": {"bytes=0-1"}}
	if got, _ := negotiate(ranged); got != "identity" {
		t.Error("a range must be served plain")
	}
}

func TestHostsFileNamesTheSandboxOnceAndKeepsTheRest(t *testing.T) {
	path := filepath.Join(t.TempDir(), "hosts")
	if err := os.WriteFile(path, []byte("127.0.0.1 localhost\n10.0.0.1 mine"), 0o644); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"one", "two", "two"} {
		if err := nameInHosts(path, name); err != nil {
			t.Fatal(err)
		}
	}
	got, _ := os.ReadFile(path)
	if want := "127.0.0.1 localhost\n10.0.0.1 mine\n127.0.1.1 two # this sandbox\n"; string(got) != want {
		t.Fatalf("%q", got)
	}
}

func TestMetricsReadTheKernelsNumbers(t *testing.T) {
	busy, total := cpuTimes("cpu  10 1 5 100 4 2 3 1 50 50\ncpu0 1 1 1 1\n")
	if busy != 22 || total != 126 {
		t.Fatal(busy, total)
	}
	mem, used, cache := memory("MemTotal: 1000 kB\nMemAvailable: 400 kB\nBuffers: 10 kB\nCached: 20 kB\nSReclaimable: 5 kB\nOdd\n")
	if mem != 1000<<10 || used != 600<<10 || cache != 35<<10 {
		t.Fatal(mem, used, cache)
	}
}

func TestStateOutlivesTheDaemon(t *testing.T) {
	f, err := os.Create(filepath.Join(t.TempDir(), "state"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	token, user, at := "secret", "user", time.Unix(5, 0)
	first := newState("root")
	first.keepIn(f)
	_, _, settle := first.apply(&initBody{AccessToken: &token, DefaultUser: &user, Timestamp: &at, LifecycleID: "r1", EnvVars: map[string]string{"A": "1", "B=": "no"}})
	settle()
	if err := first.save(); err != nil {
		t.Fatal(err)
	}
	second := newState("root")
	second.keepIn(f)
	name, _ := second.defaults()
	if second.accessToken() != token || name != user || second.globalEnv()["A"] != "1" || len(second.globalEnv()) != 2 {
		t.Fatal(second)
	}
	earlier := time.Unix(4, 0)
	if _, fresh, _ := second.apply(&initBody{Timestamp: &earlier, LifecycleID: "r1"}); fresh {
		t.Fatal("an older message of the same run was taken")
	}
}
