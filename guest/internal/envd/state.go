package envd

import (
	"encoding/json"
	"io"
	"os"
	"sync"
	"time"
)

// Version is what the node reports as envdVersion: the SDKs decide by it what they may ask for.
const Version = "0.6.13"

// state is what the node told us about this sandbox. It lives in guest memory, so a snapshot keeps it.
type state struct {
	mu          sync.RWMutex
	env         map[string]string
	token       string
	user        string
	workdir     string
	sandboxID   string
	templateID  string
	lifecycleID string
	lastInit    time.Time
	// trusts: the node's authority was added to those of the machine.
	trusts bool
	// settled is closed when the files that follow an identity change are written; starting a process waits for it.
	settled chan struct{}
	file    *os.File
}

// saved is the part of the state that a restarted daemon needs; without the token it would be open to everybody.
type saved struct {
	Env                                                map[string]string
	Token, User, Workdir, Sandbox, Template, Lifecycle string
	LastInit                                           time.Time
	Trusts                                             bool
}

// keepIn takes over what the file holds and writes every later change to it.
func (s *state) keepIn(f *os.File) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.file = f
	var old saved
	if json.NewDecoder(io.NewSectionReader(f, 0, maxInitBody)).Decode(&old) != nil {
		return
	}
	s.env, s.token, s.user, s.workdir = old.Env, old.Token, old.User, old.Workdir
	s.sandboxID, s.templateID, s.lifecycleID, s.lastInit = old.Sandbox, old.Template, old.Lifecycle, old.LastInit
	s.trusts = old.Trusts
}

func (s *state) save() error {
	s.mu.RLock()
	defer s.mu.RUnlock()
	if s.file == nil {
		return nil
	}
	data, err := json.Marshal(saved{s.env, s.token, s.user, s.workdir, s.sandboxID, s.templateID, s.lifecycleID, s.lastInit, s.trusts})
	if err != nil {
		return err
	}
	if err := s.file.Truncate(0); err != nil {
		return err
	}
	_, err = s.file.WriteAt(data, 0)
	return err
}

func newState(user string) *state {
	done := make(chan struct{})
	close(done)
	return &state{env: map[string]string{"E2B_SANDBOX": "true"}, user: user, settled: done}
}

func (s *state) accessToken() string {
	s.mu.RLock()
	defer s.mu.RUnlock()
	return s.token
}

func (s *state) defaults() (user, workdir string) {
	s.mu.RLock()
	defer s.mu.RUnlock()
	return s.user, s.workdir
}

// globalEnv returns a copy.
func (s *state) globalEnv() map[string]string {
	s.mu.RLock()
	defer s.mu.RUnlock()
	out := make(map[string]string, len(s.env))
	if s.trusts {
		for k, v := range trustEnv("/") {
			out[k] = v
		}
	}
	for k, v := range s.env {
		out[k] = v
	}
	return out
}

func (s *state) waitSettled() {
	s.mu.RLock()
	c := s.settled
	s.mu.RUnlock()
	<-c
}
