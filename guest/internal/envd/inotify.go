package envd

import (
	"encoding/binary"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"sync"

	"golang.org/x/sys/unix"

	fspb "agentenv/guest/gen/filesystem"
)

const (
	watchMask = unix.IN_CREATE | unix.IN_MOVED_TO | unix.IN_MOVED_FROM | unix.IN_DELETE | unix.IN_MODIFY |
		unix.IN_ATTRIB | unix.IN_MOVE_SELF | unix.IN_DELETE_SELF | unix.IN_ONLYDIR
	// Events that nobody has taken yet; beyond it the watch ends with an error rather than lying.
	maxQueuedEvents = 64 << 10
)

var errEventsLost = errors.New("too many events were not read in time; some were lost")

// watch follows one directory, or a tree, and queues what happens there.
type watch struct {
	s         *server
	file      *os.File
	fd        int
	root      string
	recursive bool
	entries   bool

	mu    sync.Mutex
	queue []*fspb.FilesystemEvent
	err   error
	ready chan struct{}

	dirs map[int32]string // by watch descriptor; relative to root, "." for itself. Only run and newWatch touch it.
}

func newWatch(s *server, root string, recursive, entries bool) (*watch, error) {
	fd, err := unix.InotifyInit1(unix.IN_CLOEXEC | unix.IN_NONBLOCK)
	if err != nil {
		return nil, os.NewSyscallError("inotify_init1", err)
	}
	w := &watch{
		s: s, file: os.NewFile(uintptr(fd), "inotify"), fd: fd, root: root, recursive: recursive, entries: entries,
		ready: make(chan struct{}, 1), dirs: map[int32]string{},
	}
	if err := w.add("."); err != nil {
		_ = w.file.Close()
		return nil, err
	}
	if recursive {
		w.addBelow(".", false)
	}
	go w.run()
	return w, nil
}

func (w *watch) close() { _ = w.file.Close() }

func (w *watch) add(rel string) error {
	wd, err := unix.InotifyAddWatch(w.fd, filepath.Join(w.root, rel), watchMask)
	if err != nil {
		return os.NewSyscallError("inotify_add_watch", err)
	}
	w.dirs[int32(wd)] = rel
	return nil
}

// addBelow watches every directory below rel. What was made there before the watch existed is announced.
func (w *watch) addBelow(rel string, announce bool) {
	entries, err := os.ReadDir(filepath.Join(w.root, rel))
	if err != nil {
		return
	}
	for _, e := range entries {
		name := filepath.Join(rel, e.Name())
		if announce {
			w.emit(name, fspb.EventType_EVENT_TYPE_CREATE)
		}
		if e.IsDir() && w.add(name) == nil {
			w.addBelow(name, announce)
		}
	}
}

// forgetBelow stops watching a directory that was moved away; where it arrives inside the tree it is added again.
func (w *watch) forgetBelow(rel string) {
	for wd, dir := range w.dirs {
		if dir == rel || strings.HasPrefix(dir, rel+"/") {
			_, _ = unix.InotifyRmWatch(w.fd, uint32(wd))
			delete(w.dirs, wd)
		}
	}
}

func (w *watch) run() {
	buf := make([]byte, 64<<10)
	for {
		n, err := w.file.Read(buf)
		if err != nil || n < unix.SizeofInotifyEvent {
			w.fail(errors.New("the watched directory is gone"))
			return
		}
		for at := 0; at+unix.SizeofInotifyEvent <= n; {
			// struct inotify_event { int wd; u32 mask; u32 cookie; u32 len; char name[len]; }
			wd := int32(binary.NativeEndian.Uint32(buf[at:]))
			mask := binary.NativeEndian.Uint32(buf[at+4:])
			length := int(binary.NativeEndian.Uint32(buf[at+12:]))
			at += unix.SizeofInotifyEvent
			name := strings.TrimRight(string(buf[at:at+length]), "\x00")
			at += length
			w.handle(wd, mask, name)
		}
	}
}

func (w *watch) handle(wd int32, mask uint32, name string) {
	if mask&unix.IN_Q_OVERFLOW != 0 {
		w.fail(errEventsLost)
		return
	}
	dir, known := w.dirs[wd]
	if mask&unix.IN_IGNORED != 0 {
		delete(w.dirs, wd)
		return
	}
	// What happens to a sub-directory itself is reported by its parent.
	if !known || (name == "" && dir != ".") {
		return
	}
	rel := filepath.Join(dir, name)
	isDir := mask&unix.IN_ISDIR != 0
	if w.recursive && isDir && mask&unix.IN_MOVED_FROM != 0 {
		w.forgetBelow(rel)
	}
	for _, e := range eventOrder {
		if mask&e.bits != 0 {
			w.emit(rel, e.kind)
		}
	}
	if w.recursive && isDir && mask&(unix.IN_CREATE|unix.IN_MOVED_TO) != 0 && w.add(rel) == nil {
		w.addBelow(rel, mask&unix.IN_CREATE != 0)
	}
}

// One notification may carry several changes; this is the order in which they are told.
var eventOrder = []struct {
	bits uint32
	kind fspb.EventType
}{
	{unix.IN_CREATE | unix.IN_MOVED_TO, fspb.EventType_EVENT_TYPE_CREATE},
	{unix.IN_MOVED_FROM | unix.IN_MOVE_SELF, fspb.EventType_EVENT_TYPE_RENAME},
	{unix.IN_ATTRIB, fspb.EventType_EVENT_TYPE_CHMOD},
	{unix.IN_MODIFY, fspb.EventType_EVENT_TYPE_WRITE},
	{unix.IN_DELETE | unix.IN_DELETE_SELF, fspb.EventType_EVENT_TYPE_REMOVE},
}

func (w *watch) emit(rel string, kind fspb.EventType) {
	event := &fspb.FilesystemEvent{Name: rel, Type: kind}
	if w.entries && kind != fspb.EventType_EVENT_TYPE_REMOVE && kind != fspb.EventType_EVENT_TYPE_RENAME {
		if entry, err := w.s.describe(filepath.Join(w.root, rel)); err == nil {
			event.Entry = entry
		}
	}
	w.mu.Lock()
	if len(w.queue) >= maxQueuedEvents {
		w.err = errEventsLost
	} else {
		w.queue = append(w.queue, event)
	}
	w.mu.Unlock()
	poke(w.ready)
}

func (w *watch) fail(err error) {
	w.mu.Lock()
	if w.err == nil {
		w.err = err
	}
	w.mu.Unlock()
	poke(w.ready)
}

// take empties the queue; the error comes after the last event before it.
func (w *watch) take() ([]*fspb.FilesystemEvent, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	events := w.queue
	w.queue = nil
	if len(events) > 0 {
		return events, nil
	}
	return nil, w.err
}
