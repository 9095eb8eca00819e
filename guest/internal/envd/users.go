package envd

import (
	"fmt"
	"os"
	"strconv"
	"strings"
	"sync"
	"syscall"
)

type account struct {
	name, home, shell string
	uid, gid          uint32
}

// dbFile caches one colon-separated file of /etc for as long as its inode, size and times stay the same.
type dbFile struct {
	path string
	mu   sync.Mutex
	key  [4]int64
	rows [][]string
}

func (f *dbFile) load() [][]string {
	f.mu.Lock()
	defer f.mu.Unlock()
	var st syscall.Stat_t
	if err := syscall.Stat(f.path, &st); err != nil {
		f.rows, f.key = nil, [4]int64{}
		return nil
	}
	key := [4]int64{int64(st.Ino), st.Size, st.Mtim.Nano(), st.Ctim.Nano()}
	if key == f.key {
		return f.rows
	}
	data, err := os.ReadFile(f.path)
	if err != nil {
		return nil
	}
	f.rows, f.key = parseDB(string(data)), key
	return f.rows
}

func parseDB(text string) [][]string {
	var rows [][]string
	for line := range strings.Lines(text) {
		line = strings.TrimRight(line, "\r\n")
		if line == "" || line[0] == '#' {
			continue
		}
		rows = append(rows, strings.Split(line, ":"))
	}
	return rows
}

// accounts reads users and groups from the image's own files; no libc and no NSS.
type accounts struct{ passwd, group dbFile }

func newAccounts(etc string) *accounts {
	return &accounts{passwd: dbFile{path: etc + "/passwd"}, group: dbFile{path: etc + "/group"}}
}

func accountOf(row []string) (account, bool) {
	if len(row) < 7 {
		return account{}, false
	}
	uid, err1 := strconv.ParseUint(row[2], 10, 32)
	gid, err2 := strconv.ParseUint(row[3], 10, 32)
	if err1 != nil || err2 != nil {
		return account{}, false
	}
	home := row[5]
	if home == "" {
		home = "/"
	}
	return account{name: row[0], uid: uint32(uid), gid: uint32(gid), home: home, shell: row[6]}, true
}

// lookup finds a user by name; root exists even where the image has no passwd file.
func (a *accounts) lookup(name string) (account, error) {
	for _, row := range a.passwd.load() {
		if row[0] == name {
			if u, ok := accountOf(row); ok {
				return u, nil
			}
		}
	}
	if name == "root" {
		return account{name: "root", home: "/root", shell: "/bin/sh"}, nil
	}
	return account{}, fmt.Errorf("invalid username: '%s'", name)
}

func (a *accounts) groups(u account) []uint32 {
	out := []uint32{u.gid}
	for _, row := range a.group.load() {
		if len(row) < 4 {
			continue
		}
		gid, err := strconv.ParseUint(row[2], 10, 32)
		if err != nil || uint32(gid) == u.gid {
			continue
		}
		for _, member := range strings.Split(row[3], ",") {
			if member == u.name {
				out = append(out, uint32(gid))
				break
			}
		}
	}
	return out
}

func nameOf(rows [][]string, id uint32) string {
	want := strconv.FormatUint(uint64(id), 10)
	for _, row := range rows {
		if len(row) > 2 && row[2] == want {
			return row[0]
		}
	}
	return want
}

// userName gives the name of a uid, or the number where there is none.
func (a *accounts) userName(uid uint32) string  { return nameOf(a.passwd.load(), uid) }
func (a *accounts) groupName(gid uint32) string { return nameOf(a.group.load(), gid) }
