package envd

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"os"
	"path"
	"strconv"
	"syscall"
	"time"

	"connectrpc.com/connect"

	pb "agentenv/guest/gen/process"
)

const (
	defaultPath      = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
	defaultKeepalive = 90 * time.Second
)

type processService struct{ s *server }

// environment is what a new process gets: ours, then the sandbox's, then the request's; nothing else is inherited.
func environment(u account, global, own map[string]string) []string {
	base := map[string]string{"PATH": defaultPath}
	if p := os.Getenv("PATH"); p != "" {
		base["PATH"] = p
	}
	base["HOME"], base["USER"], base["LOGNAME"] = u.home, u.name, u.name
	for k, v := range global {
		base[k] = v
	}
	for k, v := range own {
		base[k] = v
	}
	out := make([]string, 0, len(base))
	for k, v := range base {
		out = append(out, k+"="+v)
	}
	return out
}

func (ps *processService) prepare(ctx context.Context, req *pb.StartRequest) (launch, error) {
	u, workdir, err := rpcUser(ctx, ps.s)
	if err != nil {
		return launch{}, err
	}
	config := req.GetProcess()
	if config == nil {
		return launch{}, connect.NewError(connect.CodeInvalidArgument, errors.New("process is missing"))
	}
	cwd, err := resolvePath(config.GetCwd(), u.home, workdir)
	if err != nil {
		return launch{}, connect.NewError(connect.CodeInvalidArgument, err)
	}
	if st, err := os.Stat(cwd); err != nil {
		// A user without a home still gets a place to stand.
		if config.GetCwd() != "" || workdir != "" || !os.IsNotExist(err) {
			return launch{}, connect.NewError(connect.CodeInvalidArgument, fmt.Errorf("cwd '%s' does not exist", cwd))
		}
		cwd = "/"
	} else if !st.IsDir() {
		return launch{}, connect.NewError(connect.CodeInvalidArgument, fmt.Errorf("cwd '%s' is not a directory", cwd))
	}
	env := environment(u, ps.s.state.globalEnv(), config.GetEnvs())
	return launch{
		config: config, tag: req.Tag, pty: req.Pty, stdin: req.Stdin == nil || *req.Stdin,
		user: u, groups: ps.s.accounts.groups(u), cwd: path.Clean(cwd), env: env,
	}, nil
}

func (ps *processService) Start(ctx context.Context, req *pb.StartRequest, stream *connect.ServerStream[pb.StartResponse]) error {
	ps.s.state.waitSettled()
	l, err := ps.prepare(ctx, req)
	if err != nil {
		return err
	}
	if at, ok := ctx.Deadline(); ok {
		l.deadline = time.Until(at)
		if l.deadline <= 0 {
			return connect.NewError(connect.CodeDeadlineExceeded, context.DeadlineExceeded)
		}
	}
	p, sub, err := ps.s.procs.start(l)
	if err != nil {
		code := connect.CodeInvalidArgument
		if errors.Is(err, syscall.EAGAIN) || errors.Is(err, syscall.ENOMEM) || errors.Is(err, syscall.EMFILE) {
			code = connect.CodeResourceExhausted
		}
		return connect.NewError(code, fmt.Errorf("error starting process: %w", err))
	}
	return follow(ctx, p, sub, func(e *pb.ProcessEvent) error { return stream.Send(&pb.StartResponse{Event: e}) })
}

func (ps *processService) Connect(ctx context.Context, req *pb.ConnectRequest, stream *connect.ServerStream[pb.ConnectResponse]) error {
	p, err := ps.find(req.GetProcess(), true)
	if err != nil {
		return err
	}
	return follow(ctx, p, p.hub.subscribe(), func(e *pb.ProcessEvent) error {
		return stream.Send(&pb.ConnectResponse{Event: e})
	})
}

// follow sends start, then everything until the end of the process, or until the client leaves.
func follow(ctx context.Context, p *process, sub *subscriber, send func(*pb.ProcessEvent) error) error {
	defer p.hub.unsubscribe(sub)
	start := &pb.ProcessEvent{Event: &pb.ProcessEvent_Start{Start: &pb.ProcessEvent_StartEvent{Pid: uint32(p.pid)}}}
	if err := send(start); err != nil {
		return err
	}
	interval := keepaliveOf(ctx)
	ticker := time.NewTicker(interval)
	defer ticker.Stop()
	for {
		e, err := sub.pop()
		if err != nil {
			return connect.NewError(connect.CodeResourceExhausted, err)
		}
		if e != nil {
			if err := send(e); err != nil {
				return err
			}
			if e.GetEnd() != nil {
				return nil
			}
			ticker.Reset(interval)
			continue
		}
		select {
		case <-sub.ready:
		case <-ctx.Done():
			return ctx.Err()
		case <-ticker.C:
			alive := &pb.ProcessEvent{Event: &pb.ProcessEvent_Keepalive{Keepalive: &pb.ProcessEvent_KeepAlive{}}}
			if err := send(alive); err != nil {
				return err
			}
		}
	}
}

func keepaliveOf(ctx context.Context) time.Duration {
	info, ok := connect.CallInfoForHandlerContext(ctx)
	if !ok {
		return defaultKeepalive
	}
	return keepaliveInterval(info.RequestHeader())
}

func keepaliveInterval(h http.Header) time.Duration {
	n, err := strconv.Atoi(h.Get("Keepalive-Ping-Interval"))
	if err != nil || n <= 0 || n > 24*3600 {
		return defaultKeepalive
	}
	return time.Duration(n) * time.Second
}

func (ps *processService) find(sel *pb.ProcessSelector, late bool) (*process, error) {
	p, err := ps.s.procs.find(sel, late)
	if errors.Is(err, errNoSelector) {
		return nil, connect.NewError(connect.CodeInvalidArgument, err)
	}
	if err != nil {
		return nil, connect.NewError(connect.CodeNotFound, err)
	}
	return p, nil
}

func (ps *processService) List(context.Context, *pb.ListRequest) (*pb.ListResponse, error) {
	out := &pb.ListResponse{}
	for _, p := range ps.s.procs.list() {
		out.Processes = append(out.Processes, &pb.ProcessInfo{Config: p.config, Pid: uint32(p.pid), Tag: p.tag})
	}
	return out, nil
}

func (ps *processService) Update(_ context.Context, req *pb.UpdateRequest) (*pb.UpdateResponse, error) {
	p, err := ps.find(req.GetProcess(), false)
	if err != nil {
		return nil, err
	}
	if size := req.GetPty().GetSize(); size != nil {
		if p.tty == nil {
			return nil, connect.NewError(connect.CodeInternal, errors.New("error resizing tty: tty not assigned to process"))
		}
		if err := resizePTY(p.tty, size.GetCols(), size.GetRows()); err != nil {
			return nil, connect.NewError(connect.CodeInternal, fmt.Errorf("error resizing tty: %w", err))
		}
	}
	return &pb.UpdateResponse{}, nil
}

func (p *process) input(ctx context.Context, in *pb.ProcessInput) error {
	var err error
	switch i := in.GetInput().(type) {
	case *pb.ProcessInput_Stdin:
		err = p.writeStdin(ctx, i.Stdin)
	case *pb.ProcessInput_Pty:
		err = p.writePTY(ctx, i.Pty)
	default:
		return connect.NewError(connect.CodeUnimplemented, errors.New("input is neither stdin nor pty"))
	}
	if err != nil {
		return connect.NewError(connect.CodeInternal, err)
	}
	return nil
}

func (ps *processService) SendInput(ctx context.Context, req *pb.SendInputRequest) (*pb.SendInputResponse, error) {
	p, err := ps.find(req.GetProcess(), false)
	if err != nil {
		return nil, err
	}
	if err := p.input(ctx, req.GetInput()); err != nil {
		return nil, err
	}
	return &pb.SendInputResponse{}, nil
}

func (ps *processService) StreamInput(ctx context.Context, stream *connect.ClientStream[pb.StreamInputRequest]) (*pb.StreamInputResponse, error) {
	var p *process
	for stream.Receive() {
		switch e := stream.Msg().GetEvent().(type) {
		case *pb.StreamInputRequest_Start:
			found, err := ps.find(e.Start.GetProcess(), false)
			if err != nil {
				return nil, err
			}
			p = found
		case *pb.StreamInputRequest_Data:
			if p == nil {
				return nil, connect.NewError(connect.CodeFailedPrecondition, errors.New("the first message must be start"))
			}
			if err := p.input(ctx, e.Data.GetInput()); err != nil {
				return nil, err
			}
		case *pb.StreamInputRequest_Keepalive:
		default:
			return nil, connect.NewError(connect.CodeUnimplemented, errors.New("empty message"))
		}
	}
	if err := stream.Err(); err != nil {
		return nil, err
	}
	return &pb.StreamInputResponse{}, nil
}

// killWait bounds how long a SIGKILL waits for the process to be gone: one that the kernel holds may take longer.
var killWait = time.Second

// SendSignal answers a SIGKILL when the process is gone from the list, so that "killed" is true for whoever asks next;
// other signals may be ignored and are not waited for.
func (ps *processService) SendSignal(ctx context.Context, req *pb.SendSignalRequest) (*pb.SendSignalResponse, error) {
	p, err := ps.find(req.GetProcess(), false)
	if err != nil {
		return nil, err
	}
	var sig syscall.Signal
	switch req.GetSignal() {
	case pb.Signal_SIGNAL_SIGKILL:
		sig = syscall.SIGKILL
	case pb.Signal_SIGNAL_SIGTERM:
		sig = syscall.SIGTERM
	default:
		return nil, connect.NewError(connect.CodeUnimplemented, fmt.Errorf("signal %d is not supported", req.GetSignal()))
	}
	if err := p.signal(sig); err != nil {
		if errors.Is(err, os.ErrProcessDone) || errors.Is(err, syscall.ESRCH) {
			return nil, connect.NewError(connect.CodeNotFound, fmt.Errorf("process with pid %d not found", p.pid))
		}
		return nil, connect.NewError(connect.CodeInternal, fmt.Errorf("error sending signal: %w", err))
	}
	if sig == syscall.SIGKILL {
		limit := time.NewTimer(killWait)
		defer limit.Stop()
		select {
		case <-p.gone:
		case <-limit.C:
		case <-ctx.Done():
		}
	}
	return &pb.SendSignalResponse{}, nil
}

func (ps *processService) CloseStdin(_ context.Context, req *pb.CloseStdinRequest) (*pb.CloseStdinResponse, error) {
	p, err := ps.find(req.GetProcess(), false)
	if err != nil {
		return nil, err
	}
	if err := p.closeStdin(); err != nil {
		return nil, connect.NewError(connect.CodeFailedPrecondition, fmt.Errorf("error closing stdin: %w", err))
	}
	return &pb.CloseStdinResponse{}, nil
}
