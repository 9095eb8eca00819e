package envd

import (
	"context"
	"crypto/subtle"
	"encoding/json"
	"flag"
	"fmt"
	"net"
	"net/http"
	"os"
	"os/signal"
	"runtime/debug"
	"strings"
	"sync"
	"syscall"
	"time"

	"connectrpc.com/connect"

	"agentenv/guest/gen/filesystem/filesystemconnect"
	"agentenv/guest/gen/process/processconnect"
)

// Above the idle time-out of any proxy in front, so that it is always the proxy that closes first.
const idleTimeout = 640 * time.Second

type server struct {
	state    *state
	accounts *accounts
	procs    *registry
	conns    *connTable
	runDir   string
	guest    bool
	// Where hooks are; empty: there are none.
	hooksDir   string
	hooksLimit time.Duration
	cpu        cpuSampler
	watchers   *watcherTable
	// launched gets a token at every launch: work that can wait then waits a little longer.
	launched chan struct{}
}

// Main runs the daemon and returns its exit code.
func Main(args []string) int {
	flags := flag.NewFlagSet("envd", flag.ContinueOnError)
	addr := flags.String("addr", "0.0.0.0:49983", "address to listen on")
	user := flags.String("user", "root", "default user until the node names another")
	guest := flags.Bool("guest", false, "this machine is a sandbox: clock, host name, entropy and machine id may be set")
	forward := flags.String("forward", "", "address on which ports bound to loopback are made reachable")
	runDir := flags.String("run-dir", "", "where to leave the identity files of the sandbox (empty: nowhere)")
	hooks := flags.String("hooks", "", "where hooks are (empty: none; of a sandbox "+hooksDir+")")
	stateFD := flags.Int("state-fd", -1, "open file that keeps what the node said over a restart of this daemon")
	if err := flags.Parse(args); err != nil {
		return 2
	}
	// Small heaps: one cycle per 4 MiB of garbage is cheap, and every page touched is private memory of the sandbox.
	debug.SetGCPercent(100)
	syscall.Umask(0o022)
	if *guest {
		_ = os.WriteFile("/proc/self/comm", []byte("envd"), 0)
	}
	if err := protectFromOOM(); err != nil && *guest {
		fmt.Fprintln(os.Stderr, "envd: oom score:", err)
	}

	s := newServer(*user, *guest, *runDir)
	if s.hooksDir = *hooks; *guest && *hooks == "" {
		s.hooksDir = hooksDir
	}
	if *stateFD >= 0 {
		syscall.CloseOnExec(*stateFD)
		s.state.keepIn(os.NewFile(uintptr(*stateFD), "state"))
	}
	listener, err := (&net.ListenConfig{KeepAliveConfig: keepAlive}).Listen(context.Background(), "tcp", *addr)
	if err != nil {
		fmt.Fprintln(os.Stderr, "envd:", err)
		return 1
	}
	if *forward != "" {
		go runForwarder(*forward, s.launched)
	}
	fmt.Fprintln(os.Stderr, "envd: listening on", listener.Addr())
	srv := s.httpServer()
	stop := make(chan os.Signal, 1)
	signal.Notify(stop, syscall.SIGTERM, syscall.SIGINT)
	// Caught and dropped: a signal that is ignored here would stay ignored in every process of the sandbox.
	signal.Notify(make(chan os.Signal), syscall.SIGHUP, syscall.SIGPIPE)
	go func() {
		<-stop
		_ = srv.Close()
	}()
	if err := srv.Serve(listener); err != nil && err != http.ErrServerClosed {
		fmt.Fprintln(os.Stderr, "envd:", err)
		return 1
	}
	return 0
}

// keepAlive finds peers that vanished (a snapshot was launched elsewhere) without waking an idle guest often.
var keepAlive = net.KeepAliveConfig{Enable: true, Idle: 120 * time.Second, Interval: 30 * time.Second, Count: 4}

func newServer(user string, guest bool, runDir string) *server {
	s := &server{
		state: newState(user), accounts: newAccounts("/etc"), procs: newRegistry(), conns: newConnTable(),
		runDir: runDir, guest: guest, watchers: newWatcherTable(), launched: make(chan struct{}, 1), hooksLimit: hooksLimit,
	}
	return s
}

func (s *server) httpServer() *http.Server {
	protocols := new(http.Protocols)
	protocols.SetHTTP1(true)
	protocols.SetUnencryptedHTTP2(true)
	return &http.Server{
		Handler: s.handler(), Protocols: protocols, IdleTimeout: idleTimeout, ReadHeaderTimeout: idleTimeout,
		ConnContext: s.conns.context, ConnState: s.conns.track,
	}
}

func (s *server) handler() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /health", s.health)
	mux.HandleFunc("GET /metrics", s.getMetrics)
	mux.HandleFunc("GET /envs", s.getEnvs)
	mux.HandleFunc("POST /init", s.postInit)
	mux.HandleFunc("POST /hooks", s.postHooks)
	mux.HandleFunc("GET /files", s.getFiles)
	mux.HandleFunc("POST /files", s.postFiles)
	mux.HandleFunc("POST /files/compose", s.postCompose)
	options := []connect.HandlerOption{connect.WithCodec(jsonCodec{}), connect.WithReadMaxBytes(maxRPCMessage),
		connect.WithCompressMinBytes(compressFrom)}
	mux.Handle(processconnect.NewProcessHandler(&processService{s}, options...))
	mux.Handle(filesystemconnect.NewFilesystemHandler(&filesystemService{s: s}, options...))
	return s.cors(s.authorize(mux))
}

// maxRPCMessage bounds one message of a client; input of a process is the only large one.
const maxRPCMessage = 64 << 20

// compressFrom keeps small answers plain, also for a client that would take gzip.
const compressFrom = 64 << 10

func (s *server) cors(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Header.Get("Origin") != "" {
			h := w.Header()
			h.Set("Access-Control-Allow-Origin", "*")
			h.Set("Access-Control-Expose-Headers", "*")
			if r.Method == http.MethodOptions && r.Header.Get("Access-Control-Request-Method") != "" {
				h.Set("Access-Control-Allow-Methods", "GET, HEAD, POST, PUT, PATCH, DELETE, OPTIONS")
				if asked := r.Header.Get("Access-Control-Request-Headers"); asked != "" {
					h.Set("Access-Control-Allow-Headers", asked)
				}
				h.Set("Access-Control-Max-Age", "7200")
				w.WriteHeader(http.StatusNoContent)
				return
			}
		}
		next.ServeHTTP(w, r)
	})
}

const unauthorized = "unauthorized access, please provide a valid access token or method signing if supported"

func sameToken(a, b string) bool { return subtle.ConstantTimeCompare([]byte(a), []byte(b)) == 1 }

// authorize checks the access token of every route but those that decide for themselves.
func (s *server) authorize(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		token := s.state.accessToken()
		if token != "" && !decidesItself(r) && !sameToken(r.Header.Get("X-Access-Token"), token) {
			fail(w, http.StatusUnauthorized, unauthorized)
			return
		}
		next.ServeHTTP(w, r)
	})
}

func decidesItself(r *http.Request) bool {
	switch r.URL.Path {
	case "/health", "/init", "/files":
		return true
	}
	return false
}

func fail(w http.ResponseWriter, code int, message string) {
	w.Header().Set("Content-Type", "application/json; charset=utf-8")
	w.WriteHeader(code)
	body, _ := json.Marshal(struct {
		Code    int    `json:"code"`
		Message string `json:"message"`
	}{code, message})
	_, _ = w.Write(body)
}

func reply(w http.ResponseWriter, value any) {
	body, err := json.Marshal(value)
	if err != nil {
		fail(w, http.StatusInternalServerError, err.Error())
		return
	}
	w.Header().Set("Content-Type", "application/json; charset=utf-8")
	_, _ = w.Write(body)
}

func (s *server) health(w http.ResponseWriter, _ *http.Request) {
	w.Header().Set("Cache-Control", "no-store")
	w.WriteHeader(http.StatusNoContent)
}

func (s *server) getEnvs(w http.ResponseWriter, _ *http.Request) {
	w.Header().Set("Cache-Control", "no-store")
	reply(w, s.state.globalEnv())
}

// connTable knows every open connection. After a launch from a snapshot all older ones lead nowhere and are closed.
type connTable struct {
	mu   sync.Mutex
	open map[net.Conn]struct{}
}

type connKey struct{}

func newConnTable() *connTable { return &connTable{open: map[net.Conn]struct{}{}} }

func (t *connTable) context(ctx context.Context, c net.Conn) context.Context {
	return context.WithValue(ctx, connKey{}, c)
}

func (t *connTable) track(c net.Conn, state http.ConnState) {
	t.mu.Lock()
	defer t.mu.Unlock()
	switch state {
	case http.StateNew:
		t.open[c] = struct{}{}
	case http.StateClosed, http.StateHijacked:
		delete(t.open, c)
	}
}

// closeOthers closes every connection but the one that carries this request.
func (t *connTable) closeOthers(ctx context.Context) {
	own, _ := ctx.Value(connKey{}).(net.Conn)
	t.mu.Lock()
	defer t.mu.Unlock()
	for c := range t.open {
		if c != own {
			_ = c.Close()
		}
	}
}

// basicUser gives the user that a client asked for; RPCs name it in Basic credentials without a password.
func basicUser(header http.Header) string {
	r := http.Request{Header: header}
	user, _, _ := r.BasicAuth()
	return user
}

// userFor finds the named user, or the default one.
func (s *server) userFor(name string) (account, string, error) {
	user, workdir := s.state.defaults()
	if name == "" {
		name = user
	}
	u, err := s.accounts.lookup(name)
	return u, workdir, err
}

func rpcUser(ctx context.Context, s *server) (account, string, error) {
	info, ok := connect.CallInfoForHandlerContext(ctx)
	name := ""
	if ok {
		name = basicUser(info.RequestHeader())
	}
	u, workdir, err := s.userFor(strings.TrimSpace(name))
	if err != nil {
		return u, workdir, connect.NewError(connect.CodeUnauthenticated, err)
	}
	return u, workdir, nil
}
