package envd

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/binary"
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// Hooks are programs of the image or of its user: executable files in <dir>/<phase>.d, run as root in the order of their
// names. One that fails keeps nothing from happening; the node is told and logs it.
const (
	preSnapshot = "pre-snapshot"
	postResume  = "post-resume"
	postFork    = "post-fork"
	// A call that is made for the way that it takes.
	noPhase = "none"

	hooksDir = "/etc/aenv"
	// All hooks of a phase together; what still runs then is killed.
	hooksLimit = 20 * time.Second
	// The last bytes of what a hook wrote are reported.
	hookOutput = 2 << 10
	// How long the output is read of processes that a hook left behind.
	hookLinger = 100 * time.Millisecond
	maxHooks   = 64

	hookPath = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
)

// phaseAfter gives the hooks that follow a launch.
func phaseAfter(cause string) string {
	switch cause {
	case "fork":
		return postFork
	case "create", "resume", "rewind":
		return postResume
	}
	return ""
}

// hooks lists the programs of a phase, in order.
func (s *server) hooks(phase string) []string {
	if s.hooksDir == "" || phase == "" || phase == noPhase {
		return nil
	}
	dir := filepath.Join(s.hooksDir, phase+".d")
	entries, err := os.ReadDir(dir)
	if err != nil {
		return nil
	}
	var out []string
	for _, e := range entries {
		name := e.Name()
		path := filepath.Join(dir, name)
		if strings.HasPrefix(name, ".") || strings.HasSuffix(name, "~") || !executable(path) {
			continue
		}
		if out = append(out, path); len(out) == maxHooks {
			break
		}
	}
	return out
}

type hooksBody struct {
	Phase     string `json:"phase"`
	Cause     string `json:"cause"`
	ForkIndex *int   `json:"forkIndex"`
	Seed      string `json:"seed"`
}

type hookResult struct {
	Name string `json:"name"`
	// -1: ended by a signal, or not started.
	ExitCode int    `json:"exitCode"`
	Error    string `json:"error,omitempty"`
	Output   string `json:"output,omitempty"`
}

// postHooks is the node's; the edge lets nobody else call it.
func (s *server) postHooks(w http.ResponseWriter, r *http.Request) {
	var body hooksBody
	if err := json.NewDecoder(io.LimitReader(r.Body, maxInitBody)).Decode(&body); err != nil {
		fail(w, http.StatusBadRequest, "invalid hooks body: "+err.Error())
		return
	}
	switch body.Phase {
	case preSnapshot, postResume, postFork, noPhase:
	default:
		fail(w, http.StatusBadRequest, "unknown phase of hooks")
		return
	}
	// That somebody answers is told before the hooks have run.
	if len(s.hooks(body.Phase)) > 0 {
		w.Header().Set("Content-Type", "application/json; charset=utf-8")
		w.WriteHeader(http.StatusOK)
		if f, ok := w.(http.Flusher); ok {
			f.Flush()
		}
	}
	reply(w, struct {
		Hooks []hookResult `json:"hooks"`
	}{s.runHooks(r.Context(), &body)})
}

func (s *server) runHooks(parent context.Context, body *hooksBody) []hookResult {
	results := []hookResult{}
	paths := s.hooks(body.Phase)
	if len(paths) == 0 {
		return results
	}
	s.state.waitSettled()
	ctx, cancel := context.WithTimeout(parent, s.hooksLimit)
	defer cancel()
	env := s.hookEnv(body)
	for _, path := range paths {
		results = append(results, runHook(ctx, path, env))
	}
	return results
}

func (s *server) hookEnv(body *hooksBody) []string {
	values := map[string]string{"PATH": hookPath, "HOME": "/root", "USER": "root", "LOGNAME": "root", "SHELL": "/bin/sh"}
	for k, v := range s.state.globalEnv() {
		values[k] = v
	}
	values["AENV_PHASE"], values["AENV_CAUSE"] = body.Phase, body.Cause
	if body.Phase != preSnapshot {
		values["AENV_SEED"] = body.Seed
		if body.Seed == "" {
			values["AENV_SEED"] = newSeed()
		}
	}
	if body.ForkIndex != nil {
		values["AENV_FORK_INDEX"] = strconv.Itoa(*body.ForkIndex)
	}
	env := make([]string, 0, len(values))
	for k, v := range values {
		env = append(env, k+"="+v)
	}
	return env
}

// newSeed gives 63 bits: they fit every signed integer that a program may parse them into.
func newSeed() string {
	var b [8]byte
	_, _ = rand.Read(b[:])
	return strconv.FormatUint(binary.NativeEndian.Uint64(b[:])>>1, 10)
}

func runHook(ctx context.Context, path string, env []string) hookResult {
	out := &tail{limit: hookOutput}
	cmd := exec.CommandContext(ctx, path)
	cmd.Env, cmd.Dir, cmd.Stdout, cmd.Stderr = env, "/", out, out
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) }
	cmd.WaitDelay = hookLinger
	result := hookResult{Name: filepath.Base(path), ExitCode: -1}
	err := ctx.Err()
	if err == nil {
		if err = forkUnprotected(cmd.Start); err == nil {
			err = cmd.Wait()
		}
	}
	if cmd.ProcessState != nil {
		result.ExitCode = cmd.ProcessState.ExitCode()
	}
	switch {
	case ctx.Err() != nil:
		result.Error = "it was stopped: the hooks of a phase have " + hooksLimit.String() + " together"
	case err != nil && !errors.Is(err, exec.ErrWaitDelay):
		result.Error = err.Error()
	}
	result.Output = out.String()
	return result
}

// tail keeps the end of what is written to it.
type tail struct {
	limit int
	buf   bytes.Buffer
}

func (t *tail) Write(p []byte) (int, error) {
	t.buf.Write(p)
	if over := t.buf.Len() - t.limit; over > 0 {
		t.buf.Next(over)
	}
	return len(p), nil
}

func (t *tail) String() string { return strings.ToValidUTF8(t.buf.String(), "\uFFFD") }
