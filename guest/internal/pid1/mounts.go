package pid1

import (
	"fmt"
	"os"
	"time"

	"golang.org/x/sys/unix"
)

type mount struct {
	source, target, kind string
	flags                uintptr
	data                 string
}

const safe = unix.MS_NOSUID | unix.MS_NODEV | unix.MS_NOEXEC

func (m mount) do() error {
	if err := os.MkdirAll(m.target, 0o755); err != nil {
		return err
	}
	if err := unix.Mount(m.source, m.target, m.kind, m.flags, m.data); err != nil && err != unix.EBUSY {
		return fmt.Errorf("mount %s: %w", m.target, err)
	}
	return nil
}

func earlyMounts() error {
	for _, m := range []mount{
		{"proc", "/proc", "proc", safe, ""},
		{"sysfs", "/sys", "sysfs", safe, ""},
		{"devtmpfs", "/dev", "devtmpfs", unix.MS_NOSUID, "mode=0755"},
	} {
		if err := m.do(); err != nil {
			return err
		}
	}
	return nil
}

const (
	newRoot         = "/newroot"
	rootWait        = 15 * time.Second
	rootPoll        = time.Millisecond
	defaultRootOpts = "noinit_itable,discard"
)

// switchRoot makes the disk the root. The initramfs is emptied first so that its memory is free again.
func switchRoot(c *config) error {
	if err := waitFor(c.Root); err != nil {
		return err
	}
	kind, options := c.RootType, c.RootOptions
	if kind == "" {
		kind = "ext4"
	}
	if options == "" && kind == "ext4" {
		options = defaultRootOpts
	}
	if err := (mount{c.Root, newRoot, kind, 0, options}).do(); err != nil {
		return err
	}
	for _, dir := range []string{"/dev", "/proc", "/sys"} {
		target := newRoot + dir
		if err := os.MkdirAll(target, 0o755); err != nil {
			return err
		}
		if err := unix.Mount(dir, target, "", unix.MS_MOVE, ""); err != nil {
			return fmt.Errorf("move %s: %w", dir, err)
		}
	}
	emptyInitramfs()
	if err := unix.Chdir(newRoot); err != nil {
		return err
	}
	if err := unix.Mount(".", "/", "", unix.MS_MOVE, ""); err != nil {
		return fmt.Errorf("move root: %w", err)
	}
	if err := unix.Chroot("."); err != nil {
		return err
	}
	return unix.Chdir("/")
}

// waitFor polls, since the device appears a moment after its driver; there is no udev to tell.
func waitFor(path string) error {
	for end := time.Now().Add(rootWait); ; time.Sleep(rootPoll) {
		if _, err := os.Stat(path); err == nil {
			return nil
		}
		if time.Now().After(end) {
			return fmt.Errorf("root device %s did not appear within %v", path, rootWait)
		}
	}
}

// emptyInitramfs removes files only on the file system of /, never across a mount.
func emptyInitramfs() {
	var root unix.Stat_t
	if unix.Stat("/", &root) != nil {
		return
	}
	removeBelow("/", root.Dev)
}

func removeBelow(dir string, dev uint64) {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return
	}
	for _, e := range entries {
		path := dir + "/" + e.Name()
		var st unix.Stat_t
		if unix.Lstat(path, &st) != nil || st.Dev != dev {
			continue
		}
		if st.Mode&unix.S_IFMT == unix.S_IFDIR {
			removeBelow(path, dev)
			_ = unix.Rmdir(path)
		} else {
			_ = unix.Unlink(path)
		}
	}
}

// lateMounts are wanted but not needed: an image may have a read-only or odd root.
func lateMounts() {
	for _, m := range []mount{
		{"devpts", "/dev/pts", "devpts", unix.MS_NOSUID | unix.MS_NOEXEC, "gid=5,mode=620,ptmxmode=666"},
		{"tmpfs", "/dev/shm", "tmpfs", unix.MS_NOSUID | unix.MS_NODEV, "mode=1777"},
		{"mqueue", "/dev/mqueue", "mqueue", safe, ""},
		{"tmpfs", "/run", "tmpfs", unix.MS_NOSUID | unix.MS_NODEV, "mode=755,size=25%"},
		{"cgroup2", "/sys/fs/cgroup", "cgroup2", safe, "nsdelegate"},
	} {
		if err := m.do(); err != nil {
			logf("%v", err)
		}
	}
	links := [][2]string{{"/proc/self/fd", "/dev/fd"}, {"/proc/self/fd/0", "/dev/stdin"}, {"/proc/self/fd/1", "/dev/stdout"}, {"/proc/self/fd/2", "/dev/stderr"}}
	for _, l := range links {
		_ = os.Symlink(l[0], l[1])
	}
	for _, dir := range []string{"/run/lock", "/tmp", "/var/tmp"} {
		if os.MkdirAll(dir, 0o755) == nil {
			_ = os.Chmod(dir, os.ModeSticky|0o777)
		}
	}
	_ = os.MkdirAll("/root", 0o700)
}
