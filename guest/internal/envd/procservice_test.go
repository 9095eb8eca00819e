package envd

import (
	"context"
	"os"
	"runtime"
	"sync"
	"testing"
	"time"

	"connectrpc.com/connect"

	pb "agentenv/guest/gen/process"
)

// sleeper starts a process that ends only by a signal.
func sleeper(t *testing.T) (*processService, *process) {
	t.Helper()
	ps := &processService{s: &server{procs: newRegistry()}}
	p, _, err := ps.s.procs.start(launch{
		config: &pb.ProcessConfig{Cmd: "/bin/sh", Args: []string{"-c", "exec sleep 1000"}},
		user:   account{uid: uint32(os.Getuid()), gid: uint32(os.Getgid())},
		cwd:    "/",
		env:    []string{"PATH=" + defaultPath},
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = p.signal(9)
		<-p.gone
	})
	return ps, p
}

func byPid(p *process, signal pb.Signal) *pb.SendSignalRequest {
	selector := &pb.ProcessSelector{Selector: &pb.ProcessSelector_Pid{Pid: uint32(p.pid)}}
	return &pb.SendSignalRequest{Process: selector, Signal: signal}
}

// holdRegistry keeps every process listed until the release, as a slow reaper does.
func holdRegistry(t *testing.T, ps *processService) (release func()) {
	ps.s.procs.mu.RLock()
	release = sync.OnceFunc(ps.s.procs.mu.RUnlock)
	t.Cleanup(release)
	return release
}

func within(t *testing.T, limit time.Duration) {
	before := killWait
	killWait = limit
	t.Cleanup(func() { killWait = before })
}

func TestAKilledProcessIsGoneWhenTheKillAnswers(t *testing.T) {
	within(t, time.Hour)
	ps, p := sleeper(t)
	release := holdRegistry(t, ps)
	answered := make(chan error, 1)
	go func() {
		_, err := ps.SendSignal(context.Background(), byPid(p, pb.Signal_SIGNAL_SIGKILL))
		answered <- err
	}()
	for !p.exited.Load() {
		runtime.Gosched()
	}
	select {
	case err := <-answered:
		t.Fatal("answered while the process was still listed", err)
	default:
	}
	release()
	if err := <-answered; err != nil {
		t.Fatal(err)
	}
	_, err := ps.SendSignal(context.Background(), byPid(p, pb.Signal_SIGNAL_SIGKILL))
	if connect.CodeOf(err) != connect.CodeNotFound {
		t.Fatal("a second kill found it", err)
	}
}

func TestAKillWaitsNoLongerThanItsBoundOrItsCaller(t *testing.T) {
	for name, prepare := range map[string]func() (context.Context, time.Duration){
		"bound": func() (context.Context, time.Duration) { return context.Background(), time.Millisecond },
		"caller": func() (context.Context, time.Duration) {
			ctx, cancel := context.WithCancel(context.Background())
			cancel()
			return ctx, time.Hour
		},
	} {
		t.Run(name, func(t *testing.T) {
			ctx, limit := prepare()
			within(t, limit)
			ps, p := sleeper(t)
			holdRegistry(t, ps)
			if _, err := ps.SendSignal(ctx, byPid(p, pb.Signal_SIGNAL_SIGKILL)); err != nil {
				t.Fatal(err)
			}
			select {
			case <-p.gone:
				t.Fatal("it was gone although the registry was held")
			default:
			}
		})
	}
}

func TestOtherSignalsAreNotWaitedFor(t *testing.T) {
	within(t, time.Hour)
	ps, p := sleeper(t)
	holdRegistry(t, ps)
	if _, err := ps.SendSignal(context.Background(), byPid(p, pb.Signal_SIGNAL_SIGTERM)); err != nil {
		t.Fatal(err)
	}
}
