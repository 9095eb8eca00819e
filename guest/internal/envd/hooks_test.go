package envd

import (
	"bytes"
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"
)

// withHooks gives a server whose hooks are shell scripts, by path below the hook directory.
func withHooks(t *testing.T, scripts map[string]string) *server {
	t.Helper()
	dir := t.TempDir()
	for name, script := range scripts {
		path := filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		mode := os.FileMode(0o755)
		if strings.HasSuffix(name, "plain") {
			mode = 0o644
		}
		if err := os.WriteFile(path, []byte("#!/bin/sh\n"+script), mode); err != nil {
			t.Fatal(err)
		}
	}
	s := newServer("root", false, "")
	s.hooksDir = dir
	return s
}

func run(s *server, body hooksBody) []hookResult { return s.runHooks(t0(), &body) }

func TestHooksOfAPhaseRunInOrderWithWhatTheyNeedToKnow(t *testing.T) {
	s := withHooks(t, map[string]string{
		"post-fork.d/20-second":   `echo "$AENV_FORK_INDEX $AENV_SEED $AENV_CAUSE $AENV_PHASE $GREETING $PWD"`,
		"post-fork.d/10-first":    "echo out; echo err >&2; exit 3",
		"post-fork.d/30-plain":    "exit 9",
		"post-fork.d/.hidden":     "exit 9",
		"post-fork.d/backup~":     "exit 9",
		"post-resume.d/only-then": "exit 9",
	})
	s.state.env["GREETING"] = "hi"
	index := 3
	got := run(s, hooksBody{Phase: postFork, Cause: "fork", ForkIndex: &index, Seed: "42"})
	if len(got) != 2 {
		t.Fatalf("%+v", got)
	}
	if got[0].Name != "10-first" || got[0].ExitCode != 3 || got[0].Output != "out\nerr\n" || got[0].Error == "" {
		t.Fatalf("%+v", got[0])
	}
	if got[1].ExitCode != 0 || got[1].Error != "" || got[1].Output != "3 42 fork post-fork hi /\n" {
		t.Fatalf("%+v", got[1])
	}
}

func TestEveryLaunchHasASeedAndOnlyAForkAnIndex(t *testing.T) {
	s := withHooks(t, map[string]string{
		"post-resume.d/a":  `echo "$AENV_SEED ${AENV_FORK_INDEX-none}"`,
		"pre-snapshot.d/a": `echo "${AENV_SEED-none}"`,
	})
	seen := map[string]bool{}
	for range 4 {
		seed, index, _ := strings.Cut(strings.TrimSpace(run(s, hooksBody{Phase: postResume, Cause: "resume"})[0].Output), " ")
		if _, err := strconv.ParseInt(seed, 10, 64); err != nil || index != "none" || seen[seed] {
			t.Fatal(seed, index, seen)
		}
		seen[seed] = true
	}
	if got := run(s, hooksBody{Phase: preSnapshot})[0].Output; got != "none\n" {
		t.Fatal(got)
	}
}

func TestAHookThatHangsIsKilledWithItsChildrenAndTheNextIsNotStarted(t *testing.T) {
	s := withHooks(t, map[string]string{
		"pre-snapshot.d/1-hangs": "echo begun; sleep 1000 & wait",
		"pre-snapshot.d/2-next":  "exit 0",
	})
	s.hooksLimit = 300 * time.Millisecond
	got := run(s, hooksBody{Phase: preSnapshot})
	if len(got) != 2 || got[0].ExitCode != -1 || got[0].Error == "" || got[0].Output != "begun\n" || got[1].Error == "" {
		t.Fatalf("%+v", got)
	}
}

func TestAHookMayLeaveAProcessBehindAndWriteWithoutEnd(t *testing.T) {
	s := withHooks(t, map[string]string{
		"pre-snapshot.d/1-daemon": "sleep 3 & exit 0",
		"pre-snapshot.d/2-loud":   "i=0; while [ $i -lt 2000 ]; do echo line $i; i=$((i+1)); done",
	})
	got := run(s, hooksBody{Phase: preSnapshot})
	if got[0].ExitCode != 0 || got[0].Error != "" {
		t.Fatalf("%+v", got[0])
	}
	if out := got[1].Output; len(out) > hookOutput || !strings.HasSuffix(out, "line 1999\n") {
		t.Fatal(len(out), out)
	}
}

func TestInitTellsWhetherThereAreHooks(t *testing.T) {
	s := withHooks(t, map[string]string{"post-fork.d/a": "exit 0"})
	for cause, want := range map[string]string{"fork": postFork, "resume": "", "create": "", "boot": "", "": ""} {
		w := httptest.NewRecorder()
		body, _ := json.Marshal(map[string]string{"cause": cause})
		s.handler().ServeHTTP(w, httptest.NewRequest(http.MethodPost, "/init", bytes.NewReader(body)))
		if got := w.Header().Get("X-Aenv-Hooks"); w.Code != http.StatusNoContent || got != want {
			t.Fatal(cause, w.Code, got)
		}
	}
}

func TestHooksWantTheTokenAndAKnownPhase(t *testing.T) {
	s := withHooks(t, map[string]string{"pre-snapshot.d/a": "exit 0"})
	s.state.token = "secret"
	ask := func(token, body string) int {
		w := httptest.NewRecorder()
		r := httptest.NewRequest(http.MethodPost, "/hooks", strings.NewReader(body))
		r.Header.Set("X-Access-Token", token)
		s.handler().ServeHTTP(w, r)
		return w.Code
	}
	for _, c := range []struct {
		token, body string
		want        int
	}{
		{"", `{"phase":"pre-snapshot"}`, 401},
		{"secret", `{"phase":"pre-snapshot"}`, 200},
		{"secret", `{"phase":"none"}`, 200},
		{"secret", `{"phase":"../x"}`, 400},
		{"secret", `{`, 400},
	} {
		if got := ask(c.token, c.body); got != c.want {
			t.Fatal(c, got)
		}
	}
}
