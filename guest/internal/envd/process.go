package envd

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/proto"

	pb "agentenv/guest/gen/process"
)

const (
	pipeChunk = 32 << 10
	ptyChunk  = 16 << 10
	// What a leader wrote before it exited fits in its pipe; more than this after its exit comes from somebody else.
	pipeCapacity = 64 << 10
	// How long an exit is remembered for a late Connect.
	rememberExit = 30 * time.Second
)

type process struct {
	pid    int
	config *pb.ProcessConfig
	tag    *string
	hub    hub

	inputMu sync.Mutex
	stdin   *os.File // nil without a pipe or after CloseStdin
	tty     *os.File // nil without a terminal

	exited   atomic.Bool
	gone     chan struct{} // closed when the registry no longer finds it
	deadline *time.Timer
	outputs  []*outputReader
	drained  sync.WaitGroup
}

type launch struct {
	config   *pb.ProcessConfig
	tag      *string
	pty      *pb.PTY
	stdin    bool
	user     account
	groups   []uint32
	cwd      string
	env      []string
	deadline time.Duration // 0: none
}

// start runs the process and follows its output until the end, whether or not anybody subscribes.
// The subscriber it returns misses nothing.
func (r *registry) start(l launch) (*process, *subscriber, error) {
	path, err := findProgram(l.config.GetCmd(), l.cwd, l.env)
	if err != nil {
		return nil, nil, err
	}
	p := &process{config: l.config, tag: l.tag, gone: make(chan struct{})}
	var files [3]*os.File
	var mine []*os.File // closed here when the start fails
	var theirs []*os.File
	closeAll := func(list []*os.File) {
		for _, f := range list {
			_ = f.Close()
		}
	}
	defer func() { closeAll(theirs) }()

	attr := &syscall.SysProcAttr{}
	if l.pty != nil {
		master, slave, err := openPTY()
		if err != nil {
			return nil, nil, err
		}
		mine, theirs = append(mine, master), append(theirs, slave)
		cols, rows := uint32(80), uint32(24)
		if size := l.pty.GetSize(); size != nil {
			cols, rows = size.GetCols(), size.GetRows()
		}
		if err := resizePTY(master, cols, rows); err != nil {
			closeAll(mine)
			return nil, nil, err
		}
		_ = slave.Chown(int(l.user.uid), -1)
		files = [3]*os.File{slave, slave, slave}
		attr.Setsid, attr.Setctty, attr.Ctty = true, true, 0
		p.tty = master
		p.read(master, ptyChunk, func(b []byte) *pb.ProcessEvent_DataEvent {
			return &pb.ProcessEvent_DataEvent{Output: &pb.ProcessEvent_DataEvent_Pty{Pty: b}}
		})
	} else {
		attr.Setpgid = true
		stdout, outW, err := os.Pipe()
		if err != nil {
			return nil, nil, err
		}
		mine, theirs = append(mine, stdout), append(theirs, outW)
		stderr, errW, err := os.Pipe()
		if err != nil {
			closeAll(mine)
			return nil, nil, err
		}
		mine, theirs = append(mine, stderr), append(theirs, errW)
		var in *os.File
		if l.stdin {
			var w *os.File
			if in, w, err = os.Pipe(); err != nil {
				closeAll(mine)
				return nil, nil, err
			}
			p.stdin = w
			mine = append(mine, w)
		} else if in, err = os.Open(os.DevNull); err != nil {
			closeAll(mine)
			return nil, nil, err
		}
		theirs = append(theirs, in)
		files = [3]*os.File{in, outW, errW}
		p.read(stdout, pipeChunk, func(b []byte) *pb.ProcessEvent_DataEvent {
			return &pb.ProcessEvent_DataEvent{Output: &pb.ProcessEvent_DataEvent_Stdout{Stdout: b}}
		})
		p.read(stderr, pipeChunk, func(b []byte) *pb.ProcessEvent_DataEvent {
			return &pb.ProcessEvent_DataEvent{Output: &pb.ProcessEvent_DataEvent_Stderr{Stderr: b}}
		})
	}
	attr.Credential = &syscall.Credential{Uid: l.user.uid, Gid: l.user.gid, Groups: l.groups}

	argv := append([]string{l.config.GetCmd()}, l.config.GetArgs()...)
	var child *os.Process
	err = forkUnprotected(func() (err error) {
		child, err = os.StartProcess(path, argv, &os.ProcAttr{Dir: l.cwd, Env: l.env, Files: files[:], Sys: attr})
		return err
	})
	if err != nil {
		closeAll(mine)
		return nil, nil, err
	}
	p.pid = child.Pid
	follower := p.hub.subscribe()
	if l.deadline > 0 {
		p.deadline = time.AfterFunc(l.deadline, func() { _ = p.signal(syscall.SIGKILL) })
	}
	r.add(p)
	for _, out := range p.outputs {
		p.drained.Add(1)
		go out.run(p)
	}
	go p.wait(r, child)
	return p, follower, nil
}

// findProgram looks a bare name up in the PATH of the new process. A missing bash is served by sh.
func findProgram(cmd, cwd string, env []string) (string, error) {
	if cmd == "" {
		return "", errors.New("no command given")
	}
	if strings.IndexByte(cmd, '/') >= 0 {
		path := cmd
		if path[0] != '/' {
			path = cwd + "/" + cmd
		}
		if cmd == "/bin/bash" && !executable(path) && executable("/bin/sh") {
			return "/bin/sh", nil
		}
		return path, nil
	}
	for _, dir := range strings.Split(envValue(env, "PATH"), ":") {
		if dir == "" {
			dir = cwd
		}
		if path := dir + "/" + cmd; executable(path) {
			return path, nil
		}
	}
	if cmd == "bash" && executable("/bin/sh") {
		return "/bin/sh", nil
	}
	return "", fmt.Errorf("exec: %q: executable file not found in $PATH", cmd)
}

func executable(path string) bool {
	var st syscall.Stat_t
	return syscall.Stat(path, &st) == nil && st.Mode&syscall.S_IFMT == syscall.S_IFREG && st.Mode&0o111 != 0
}

func envValue(env []string, key string) string {
	for _, kv := range env {
		if v, ok := strings.CutPrefix(kv, key+"="); ok {
			return v
		}
	}
	return ""
}

// wait reaps the process and announces its end after everything it wrote itself.
func (p *process) wait(r *registry, child *os.Process) {
	state, err := child.Wait()
	p.exited.Store(true)
	if p.deadline != nil {
		p.deadline.Stop()
	}
	r.ended(p)
	close(p.gone)
	for _, out := range p.outputs {
		_ = out.file.SetReadDeadline(time.Unix(1, 0))
	}
	p.drained.Wait()
	p.inputMu.Lock()
	if p.stdin != nil {
		_ = p.stdin.Close()
		p.stdin = nil
	}
	p.inputMu.Unlock()
	p.hub.finish(&pb.ProcessEvent{Event: &pb.ProcessEvent_End{End: endOf(state, err)}})
}

func endOf(state *os.ProcessState, err error) *pb.ProcessEvent_EndEvent {
	if state == nil {
		return &pb.ProcessEvent_EndEvent{ExitCode: -1, Status: "unknown", Error: proto.String(err.Error())}
	}
	end := &pb.ProcessEvent_EndEvent{ExitCode: int32(state.ExitCode()), Exited: state.Exited(), Status: state.String()}
	if !state.Success() {
		end.Error = proto.String(end.Status)
	}
	return end
}

// signal reaches the whole process group, so that a shell takes what it started along.
func (p *process) signal(sig syscall.Signal) error {
	if p.exited.Load() {
		return os.ErrProcessDone
	}
	if err := syscall.Kill(-p.pid, sig); err == nil {
		return nil
	}
	return syscall.Kill(p.pid, sig)
}

// writeWhile gives up when the caller does: a program need not read its input, and the request must not stay for ever.
func writeWhile(ctx context.Context, f *os.File, data []byte) error {
	stop := context.AfterFunc(ctx, func() { _ = f.SetWriteDeadline(time.Unix(1, 0)) })
	_, err := f.Write(data)
	if !stop() {
		_ = f.SetWriteDeadline(time.Time{})
	}
	return err
}

func (p *process) writeStdin(ctx context.Context, data []byte) error {
	p.inputMu.Lock()
	f, tty := p.stdin, p.tty
	p.inputMu.Unlock()
	if tty != nil {
		return errors.New("error writing to stdin: the process has a terminal, send pty input")
	}
	if f == nil {
		return errors.New("error writing to stdin: stdin not enabled or closed")
	}
	if err := writeWhile(ctx, f, data); err != nil {
		return fmt.Errorf("error writing to stdin: %w", err)
	}
	return nil
}

func (p *process) writePTY(ctx context.Context, data []byte) error {
	if p.tty == nil {
		return errors.New("error writing to tty: tty not assigned to process")
	}
	if err := writeWhile(ctx, p.tty, data); err != nil {
		return fmt.Errorf("error writing to tty: %w", err)
	}
	return nil
}

func (p *process) closeStdin() error {
	if p.tty != nil {
		return errors.New("cannot close stdin of a process with a terminal, send Ctrl+D (0x04) instead")
	}
	p.inputMu.Lock()
	defer p.inputMu.Unlock()
	if p.stdin == nil {
		return errors.New("stdin not enabled or closed")
	}
	err := p.stdin.Close()
	p.stdin = nil
	return err
}

// outputReader empties one pipe or terminal for as long as anybody holds its other end.
type outputReader struct {
	file  *os.File
	chunk int
	wrap  func([]byte) *pb.ProcessEvent_DataEvent
}

func (p *process) read(f *os.File, chunk int, wrap func([]byte) *pb.ProcessEvent_DataEvent) {
	p.outputs = append(p.outputs, &outputReader{f, chunk, wrap})
}

func (o *outputReader) run(p *process) {
	defer o.file.Close()
	buf := make([]byte, o.chunk)
	emit := func(b []byte) {
		data := o.wrap(append([]byte(nil), b...))
		p.hub.publish(&pb.ProcessEvent{Event: &pb.ProcessEvent_Data{Data: data}})
	}
	for {
		n, err := o.file.Read(buf)
		if n > 0 {
			emit(buf[:n])
		}
		if err == nil {
			continue
		}
		if !errors.Is(err, os.ErrDeadlineExceeded) {
			p.drained.Done()
			return
		}
		break
	}
	open := o.drain(buf, emit)
	p.drained.Done()
	// A background child may hold the pipe: it must neither block nor get a SIGPIPE.
	for open {
		if n, err := o.file.Read(buf); n == 0 && err != nil {
			return
		}
	}
}

// drain emits what the exited leader left behind, without waiting. It reports whether the other end is still open.
func (o *outputReader) drain(buf []byte, emit func([]byte)) bool {
	_ = o.file.SetReadDeadline(time.Time{})
	conn, err := o.file.SyscallConn()
	if err != nil {
		return false
	}
	for total := 0; total < pipeCapacity; {
		var n int
		var readErr error
		if err := conn.Read(func(fd uintptr) bool {
			n, readErr = unix.Read(int(fd), buf)
			return true
		}); err != nil {
			return false
		}
		switch {
		case n > 0:
			total += n
			emit(buf[:n])
		case readErr == unix.EINTR:
		case readErr == unix.EAGAIN:
			return true
		default:
			return false
		}
	}
	return true
}

// registry holds every process that was started through us and runs, and the exits of the last half minute.
type registry struct {
	mu     sync.RWMutex
	live   map[int]*process
	recent map[int]*process
}

func newRegistry() *registry {
	return &registry{live: map[int]*process{}, recent: map[int]*process{}}
}

func (r *registry) add(p *process) {
	r.mu.Lock()
	r.live[p.pid] = p
	delete(r.recent, p.pid)
	r.mu.Unlock()
}

func (r *registry) ended(p *process) {
	r.mu.Lock()
	if r.live[p.pid] == p {
		delete(r.live, p.pid)
		r.recent[p.pid] = p
	}
	r.mu.Unlock()
	time.AfterFunc(rememberExit, func() {
		r.mu.Lock()
		if r.recent[p.pid] == p {
			delete(r.recent, p.pid)
		}
		r.mu.Unlock()
	})
}

func (r *registry) list() []*process {
	r.mu.RLock()
	defer r.mu.RUnlock()
	out := make([]*process, 0, len(r.live))
	for _, p := range r.live {
		out = append(out, p)
	}
	return out
}

var errNoSelector = errors.New("process selector is empty")

// find gives a running process, or with `late` also one that has ended a moment ago.
func (r *registry) find(sel *pb.ProcessSelector, late bool) (*process, error) {
	r.mu.RLock()
	defer r.mu.RUnlock()
	switch s := sel.GetSelector().(type) {
	case *pb.ProcessSelector_Pid:
		if p := r.live[int(s.Pid)]; p != nil {
			return p, nil
		}
		if p := r.recent[int(s.Pid)]; p != nil && late {
			return p, nil
		}
		return nil, fmt.Errorf("process with pid %d not found", s.Pid)
	case *pb.ProcessSelector_Tag:
		if p := firstTagged(r.live, s.Tag); p != nil {
			return p, nil
		}
		if p := firstTagged(r.recent, s.Tag); p != nil && late {
			return p, nil
		}
		return nil, fmt.Errorf("process with tag %s not found", s.Tag)
	}
	return nil, errNoSelector
}

func firstTagged(from map[int]*process, tag string) (found *process) {
	for _, p := range from {
		if p.tag != nil && *p.tag == tag && (found == nil || p.pid < found.pid) {
			found = p
		}
	}
	return found
}
