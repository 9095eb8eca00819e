package envd

import (
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"time"
)

// initBody is what the node tells a sandbox after every launch.
type initBody struct {
	EnvVars        map[string]string `json:"envVars"`
	AccessToken    *string           `json:"accessToken"`
	Timestamp      *time.Time        `json:"timestamp"`
	DefaultUser    *string           `json:"defaultUser"`
	DefaultWorkdir *string           `json:"defaultWorkdir"`
	SandboxID      string            `json:"sandboxId"`
	TemplateID     string            `json:"templateId"`
	Hostname       string            `json:"hostname"`
	MachineID      string            `json:"machineId"`
	Entropy        string            `json:"entropy"`
	LifecycleID    string            `json:"lifecycleID"`
	Cause          string            `json:"cause"`
	// One certificate (PEM) that the machine's programs shall trust.
	CABundle string `json:"caBundle"`
}

const maxInitBody = 4 << 20

const maxHostname = 64

// validHostname: letters, digits, dots and hyphens, beginning and ending with one of the first two.
func validHostname(name string) bool {
	for i := range len(name) {
		c := name[i]
		inner := i > 0 && i < len(name)-1 && (c == '-' || c == '.')
		if !inner && (c < '0' || c > '9') && (c|0x20 < 'a' || c|0x20 > 'z') {
			return false
		}
	}
	return name != "" && len(name) <= maxHostname
}

func validMachineID(id string) bool {
	for i := range len(id) {
		if c := id[i]; (c < '0' || c > '9') && (c < 'a' || c > 'f') {
			return false
		}
	}
	return len(id) == 32
}

// postInit is not for users: once a token is set, only who knows that token (in the header, or as the token to be set
// again) may call it, so that a stranger at the edge cannot take a sandbox over.
func (s *server) postInit(w http.ResponseWriter, r *http.Request) {
	var body initBody
	if err := json.NewDecoder(io.LimitReader(r.Body, maxInitBody)).Decode(&body); err != nil && !errors.Is(err, io.EOF) {
		fail(w, http.StatusBadRequest, "invalid init body: "+err.Error())
		return
	}
	if current := s.state.accessToken(); current != "" && !sameToken(r.Header.Get("X-Access-Token"), current) {
		if body.AccessToken == nil || !sameToken(*body.AccessToken, current) {
			fail(w, http.StatusUnauthorized, unauthorized)
			return
		}
	}
	if body.Hostname != "" && !validHostname(body.Hostname) {
		fail(w, http.StatusBadRequest, "invalid hostname")
		return
	}
	if body.MachineID != "" && !validMachineID(body.MachineID) {
		fail(w, http.StatusBadRequest, "machineId is not 32 lower-case hex digits")
		return
	}
	if body.CABundle != "" && !validAuthority(body.CABundle) {
		fail(w, http.StatusBadRequest, "caBundle is not the certificate of one authority")
		return
	}
	entropy, err := base64.StdEncoding.DecodeString(body.Entropy)
	if err != nil {
		fail(w, http.StatusBadRequest, "entropy is not base64")
		return
	}
	poke(s.launched)
	newRun, fresh, settle := s.state.apply(&body)
	defer settle()
	if fresh {
		if err := s.applyToMachine(&body, entropy); err != nil {
			fmt.Fprintln(os.Stderr, "envd: init:", err)
			fail(w, http.StatusInternalServerError, "init: "+err.Error())
			return
		}
		if newRun {
			s.endStaleConnections(r.Context())
		}
		if phase := phaseAfter(body.Cause); len(s.hooks(phase)) > 0 {
			w.Header().Set("X-Aenv-Hooks", phase)
		}
	}
	w.Header().Set("X-Envd-Version", Version)
	w.WriteHeader(http.StatusNoContent)
	if f, ok := w.(http.Flusher); ok {
		f.Flush()
	}
	if fresh {
		if err := s.state.save(); err != nil {
			fmt.Fprintln(os.Stderr, "envd: state:", err)
		}
		s.writeIdentity(&body)
	}
}

// apply takes the body over. newRun: another launch than the last one; fresh: not an older message of the same launch.
// settle must be called when the files of the new identity are written.
func (s *state) apply(b *initBody) (newRun, fresh bool, settle func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	newRun = b.LifecycleID != "" && b.LifecycleID != s.lifecycleID
	if b.Timestamp != nil && !newRun && b.Timestamp.Before(s.lastInit) {
		return newRun, false, func() {}
	}
	if b.Timestamp != nil {
		s.lastInit = *b.Timestamp
	}
	if b.LifecycleID != "" {
		s.lifecycleID = b.LifecycleID
	}
	if b.CABundle != "" {
		s.trusts = true
	}
	if b.SandboxID != "" {
		s.sandboxID = b.SandboxID
	}
	if b.TemplateID != "" {
		s.templateID = b.TemplateID
	}
	if b.EnvVars != nil {
		env := make(map[string]string, len(b.EnvVars)+3)
		for k, v := range b.EnvVars {
			if k != "" && !strings.ContainsAny(k, "=\x00") && strings.IndexByte(v, 0) < 0 {
				env[k] = v
			}
		}
		s.env = env
	}
	s.env["E2B_SANDBOX"] = "true"
	if s.sandboxID != "" {
		s.env["E2B_SANDBOX_ID"] = s.sandboxID
	}
	if s.templateID != "" {
		s.env["E2B_TEMPLATE_ID"] = s.templateID
	}
	if b.AccessToken != nil {
		s.token = *b.AccessToken
	}
	if b.DefaultUser != nil && *b.DefaultUser != "" {
		s.user = *b.DefaultUser
	}
	if b.DefaultWorkdir != nil {
		s.workdir = *b.DefaultWorkdir
	}
	settled := make(chan struct{})
	s.settled = settled
	return newRun, true, func() { close(settled) }
}

// applyToMachine does what must be true before the sandbox is visible.
func (s *server) applyToMachine(b *initBody, entropy []byte) error {
	if !s.guest {
		return nil
	}
	if len(entropy) > 0 {
		if err := reseed(entropy); err != nil {
			return fmt.Errorf("entropy: %w", err)
		}
	}
	if b.Timestamp != nil {
		if err := stepClock(*b.Timestamp); err != nil {
			return fmt.Errorf("clock: %w", err)
		}
	}
	if b.Hostname != "" {
		if err := setHostname(b.Hostname); err != nil {
			return fmt.Errorf("hostname: %w", err)
		}
	}
	if b.CABundle != "" {
		if err := trust("/", b.CABundle); err != nil {
			return fmt.Errorf("authority: %w", err)
		}
	}
	return nil
}

// endStaleConnections: those that were open when the snapshot was taken, of every program and our own.
func (s *server) endStaleConnections(ctx context.Context) {
	if s.guest {
		own, _ := ctx.Value(connKey{}).(net.Conn)
		if err := abortStale(own); err != nil {
			fmt.Fprintln(os.Stderr, "envd: stale connections:", err)
		}
	}
	s.conns.closeOthers(ctx)
}

// How long after a launch the files are written that only people look at.
const leisurely = 2 * time.Second

// writeIdentity keeps the files that name this machine in step. Failing here (a full or read-only disk) is no reason
// to refuse a launch.
func (s *server) writeIdentity(b *initBody) {
	report := func(what string, err error) {
		if err != nil {
			fmt.Fprintln(os.Stderr, "envd:", what, err)
		}
	}
	if s.guest && b.MachineID != "" {
		report("machine-id", overwrite("/etc/machine-id", b.MachineID+"\n", 0o444))
	}
	if s.guest && b.Hostname != "" {
		report("hosts", nameInHosts("/etc/hosts", b.Hostname))
	}
	time.AfterFunc(leisurely, func() {
		if s.guest && b.Hostname != "" {
			report("hostname", overwrite("/etc/hostname", b.Hostname+"\n", 0o644))
		}
		if s.runDir == "" {
			return
		}
		report("run directory", os.MkdirAll(s.runDir, 0o755))
		for name, value := range map[string]string{".E2B_SANDBOX": "true", ".E2B_SANDBOX_ID": b.SandboxID, ".E2B_TEMPLATE_ID": b.TemplateID} {
			if value != "" {
				report("run directory", overwrite(filepath.Join(s.runDir, name), value, 0o444))
			}
		}
	})
}

// overwrite replaces the contents in place. Truncating to nothing first would make ext4 allocate new blocks, discard
// the old ones and write them out at the close.
func overwrite(path, text string, mode os.FileMode) error {
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE, mode)
	if err != nil {
		return err
	}
	defer f.Close()
	if _, err := f.WriteAt([]byte(text), 0); err != nil {
		return err
	}
	st, err := f.Stat()
	if err != nil || st.Size() == int64(len(text)) {
		return err
	}
	return f.Truncate(int64(len(text)))
}

const hostsMark = " # this sandbox"

// nameInHosts makes the host name resolve (sudo asks for it) and leaves every other line alone.
func nameInHosts(path, hostname string) error {
	old, err := os.ReadFile(path)
	if err != nil && !os.IsNotExist(err) {
		return err
	}
	line := "127.0.1.1 " + hostname + hostsMark + "\n"
	var out strings.Builder
	for l := range strings.Lines(string(old)) {
		if !strings.Contains(l, hostsMark) {
			out.WriteString(l)
		}
	}
	text := out.String()
	if text != "" && !strings.HasSuffix(text, "\n") {
		text += "\n"
	}
	if text += line; text == string(old) {
		return nil
	}
	return overwrite(path, text, 0o644)
}
