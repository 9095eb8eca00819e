package envd

import (
	"math"
	"net/http"
	"os"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

type metrics struct {
	TS          int64   `json:"ts"`
	CPUCount    int     `json:"cpu_count"`
	CPUUsedPct  float64 `json:"cpu_used_pct"`
	MemTotal    uint64  `json:"mem_total"`
	MemUsed     uint64  `json:"mem_used"`
	MemCache    uint64  `json:"mem_cache"`
	MemTotalMiB uint64  `json:"mem_total_mib"`
	MemUsedMiB  uint64  `json:"mem_used_mib"`
	DiskUsed    uint64  `json:"disk_used"`
	DiskTotal   uint64  `json:"disk_total"`
}

// cpuSampler measures between two calls; the first call measures since the boot.
type cpuSampler struct {
	mu          sync.Mutex
	busy, total uint64
}

// cpuTimes reads the first line of /proc/stat: cpu user nice system idle iowait irq softirq steal …
func cpuTimes(stat string) (busy, total uint64) {
	line, _, _ := strings.Cut(stat, "\n")
	for i, field := range strings.Fields(line) {
		n, err := strconv.ParseUint(field, 10, 64)
		// guest and guest_nice (9, 10) are contained in user and nice.
		if i == 0 || i > 8 || err != nil {
			continue
		}
		total += n
		if i != 4 && i != 5 {
			busy += n
		}
	}
	return busy, total
}

func (c *cpuSampler) percent() float64 {
	stat, err := os.ReadFile("/proc/stat")
	if err != nil {
		return 0
	}
	busy, total := cpuTimes(string(stat))
	c.mu.Lock()
	defer c.mu.Unlock()
	db, dt := busy-c.busy, total-c.total
	c.busy, c.total = busy, total
	if dt == 0 || db > dt {
		return 0
	}
	return math.Round(float64(db)/float64(dt)*10000) / 100
}

// memory gives bytes; used is what is not available to new programs.
func memory(meminfo string) (total, used, cache uint64) {
	var available uint64
	for line := range strings.Lines(meminfo) {
		name, rest, ok := strings.Cut(line, ":")
		if !ok {
			continue
		}
		n, err := strconv.ParseUint(strings.TrimSuffix(strings.TrimSpace(rest), " kB"), 10, 64)
		if err != nil {
			continue
		}
		switch name {
		case "MemTotal":
			total = n << 10
		case "MemAvailable":
			available = n << 10
		case "Cached", "Buffers", "SReclaimable":
			cache += n << 10
		}
	}
	if available <= total {
		used = total - available
	}
	return total, used, cache
}

func (s *server) getMetrics(w http.ResponseWriter, _ *http.Request) {
	m := metrics{TS: time.Now().Unix(), CPUCount: runtime.NumCPU(), CPUUsedPct: s.cpu.percent()}
	if text, err := os.ReadFile("/proc/meminfo"); err == nil {
		m.MemTotal, m.MemUsed, m.MemCache = memory(string(text))
		m.MemTotalMiB, m.MemUsedMiB = m.MemTotal>>20, m.MemUsed>>20
	}
	var disk unix.Statfs_t
	if unix.Statfs("/", &disk) == nil {
		m.DiskTotal = disk.Blocks * uint64(disk.Bsize)
		m.DiskUsed = (disk.Blocks - disk.Bfree) * uint64(disk.Bsize)
	}
	w.Header().Set("Cache-Control", "no-store")
	reply(w, m)
}
