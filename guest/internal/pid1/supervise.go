package pid1

import (
	"os"
	"strconv"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
)

var stopping atomic.Bool

const (
	listenOn = "0.0.0.0:49983"
	// envd that died sooner than this after its start is restarted with a pause.
	soon  = time.Second
	pause = 200 * time.Millisecond
)

// supervise keeps envd running and reaps everything that lost its parent. It does not return.
func supervise(self *os.File) {
	// What the node told envd (the access token above all) lives here, so that a new envd is not an open one.
	memory, err := unix.MemfdCreate("aenv-state", unix.MFD_CLOEXEC)
	if err != nil {
		logf("FATAL: memfd: %v", err)
		endMachine()
	}
	state := os.NewFile(uintptr(memory), "aenv-state")
	envd, started := startEnvd(self, state), time.Now()
	for {
		var status unix.WaitStatus
		pid, err := unix.Wait4(-1, &status, 0, nil)
		if err == unix.EINTR {
			continue
		}
		if err != nil {
			time.Sleep(pause)
		}
		if stopping.Load() {
			continue
		}
		if err == nil && pid != envd {
			continue
		}
		logf("envd ended (%s), starting another", describe(status))
		if time.Since(started) < soon {
			time.Sleep(pause)
		}
		envd, started = startEnvd(self, state), time.Now()
	}
}

func describe(s unix.WaitStatus) string {
	if s.Signaled() {
		return "signal: " + s.Signal().String()
	}
	return "exit status " + strconv.Itoa(s.ExitStatus())
}

// startEnvd gives the pid, or 0 when it cannot be started; then the next turn tries again.
func startEnvd(self, state *os.File) int {
	argv := []string{"envd", "envd", "--guest", "--addr", listenOn, "--forward", nic, "--run-dir", "/run/e2b", "--state-fd", "3"}
	// Preemption by signal costs more than it gives: cold code under emulation looks like a loop that hogs the CPU.
	env := []string{"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "HOME=/root", "GODEBUG=asyncpreemptoff=1"}
	// The open file, by its number here: our image has no name after the switch of roots.
	path := "/proc/self/fd/" + strconv.Itoa(int(self.Fd()))
	p, err := os.StartProcess(path, argv, &os.ProcAttr{Dir: "/", Env: env, Files: []*os.File{os.Stdin, os.Stdout, os.Stderr, state}})
	if err != nil {
		logf("cannot start envd: %v", err)
		return 0
	}
	pid := p.Pid
	_ = p.Release()
	return pid
}
