package envd

import (
	"path/filepath"
	"strings"
	"testing"
)

func TestResolvePathFollowsTheProtocol(t *testing.T) {
	for _, c := range []struct{ path, workdir, want string }{
		{"", "", "/home/user"},
		{"", "/work", "/work"},
		{"", "~/w", "/home/user/w"},
		{"~", "/work", "/home/user"},
		{"~/a/../b", "", "/home/user/b"},
		{"a/b", "/work", "/home/user/a/b"},
		{"../x", "", "/home/x"},
		{"/etc/./passwd", "", "/etc/passwd"},
		{"/../..", "", "/"},
	} {
		got, err := resolvePath(c.path, "/home/user", c.workdir)
		if err != nil || got != c.want {
			t.Errorf("resolvePath(%q, workdir %q) = %q, %v; want %q", c.path, c.workdir, got, err, c.want)
		}
	}
	for _, bad := range []string{"~other", "~other/x", "a\x00b"} {
		if got, err := resolvePath(bad, "/home/user", ""); err == nil {
			t.Errorf("resolvePath(%q) = %q, want an error", bad, got)
		}
	}
}

func FuzzResolvePathGivesAbsoluteCleanPaths(f *testing.F) {
	f.Add("~/x", "/home/user", "")
	f.Add("", "/", "~")
	f.Add("../../..", "/root", "w")
	f.Fuzz(func(t *testing.T, path, home, workdir string) {
		if !strings.HasPrefix(home, "/") {
			home = "/" + home
		}
		got, err := resolvePath(path, home, workdir)
		if err == nil && strings.IndexByte(home, 0) < 0 && (!filepath.IsAbs(got) || filepath.Clean(got) != got) {
			t.Fatalf("%q with home %q gives %q", path, home, got)
		}
	})
}

func TestPartPathKeepsDirectories(t *testing.T) {
	for header, want := range map[string]string{
		`form-data; name="file"; filename="a/b.txt"`:         "a/b.txt",
		`form-data; name="file"; filename="/abs/é.txt"`:      "/abs/é.txt",
		`form-data; name="file"; filename*=UTF-8''a%2Fb%20c`: "a/b c",
		`form-data; name="file"; filename="quo\"te"`:         `quo"te`,
	} {
		if got, err := partPath(header); err != nil || got != want {
			t.Errorf("partPath(%q) = %q, %v; want %q", header, got, err, want)
		}
	}
	for _, bad := range []string{"", `form-data; name="file"`, `form-data; name="file"; filename=""`, `;;`} {
		if got, err := partPath(bad); err == nil {
			t.Errorf("partPath(%q) = %q, want an error", bad, got)
		}
	}
}

func FuzzPartPath(f *testing.F) {
	f.Add(`form-data; name="file"; filename="a/b.txt"`)
	f.Add(`form-data; filename*0="a"; filename*1="b"`)
	f.Fuzz(func(t *testing.T, header string) {
		if got, err := partPath(header); err == nil && got == "" {
			t.Fatal("empty name without an error")
		}
	})
}
