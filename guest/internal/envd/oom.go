package envd

import (
	"os"
	"sync"
)

// The kernel copies oom_score_adj at fork, and only a privileged process may lower it again. So the daemon is
// unprotected exactly while it forks, and no child ever starts protected; no wrapper program is needed.
var oom struct {
	mu      sync.Mutex
	file    *os.File
	forking int
}

const protected, normal = "-1000", "0"

func protectFromOOM() error {
	f, err := os.OpenFile("/proc/self/oom_score_adj", os.O_WRONLY, 0)
	if err != nil {
		return err
	}
	if _, err := f.WriteString(protected); err != nil {
		_ = f.Close()
		return err
	}
	oom.mu.Lock()
	oom.file = f
	oom.mu.Unlock()
	return nil
}

// forkUnprotected runs fn, which forks.
func forkUnprotected(fn func() error) error {
	setOOM(+1)
	defer setOOM(-1)
	return fn()
}

func setOOM(step int) {
	oom.mu.Lock()
	defer oom.mu.Unlock()
	if oom.file == nil {
		return
	}
	before := oom.forking
	oom.forking += step
	if before == 0 {
		_, _ = oom.file.WriteAt([]byte(normal), 0)
	} else if oom.forking == 0 {
		_, _ = oom.file.WriteAt([]byte(protected), 0)
	}
}
