// Package pid1 is the init of a sandbox: it brings the machine up, runs envd, reaps, and never ends.
package pid1

import (
	"encoding/json"
	"fmt"
	"os"
	"os/signal"
	"runtime/debug"
	"slices"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// config is /etc/aenv/guest.json of the initramfs.
type config struct {
	Address string   `json:"address"`
	Gateway string   `json:"gateway"`
	DNS     []string `json:"dns"`
	Root    string   `json:"root"`
	// File names below /lib/modules, in load order.
	Modules []string `json:"modules"`
	// Optional; ext4 and the options of every root when absent.
	RootType    string `json:"rootType"`
	RootOptions string `json:"rootOptions"`
}

// probeMark tells the host's driver that a guest comes up under the acceleration that it tries; nothing else is wanted then.
const (
	probeOption = "aenv.probe"
	probeMark   = "AENV-PROBE-OK"
)

func isProbe() bool {
	cmdline, err := os.ReadFile("/proc/cmdline")
	return err == nil && slices.Contains(strings.Fields(string(cmdline)), probeOption)
}

const configPath = "/etc/aenv/guest.json"

func logf(format string, args ...any) { fmt.Fprintf(os.Stderr, "aenv-init: "+format+"\n", args...) }

// Main never returns. A failure before envd runs ends the machine: there is nobody who could repair it from inside.
func Main() {
	// The heap of init stays far below one collection, and an idle machine must not be woken for it.
	debug.SetGCPercent(-1)
	started := time.Now()
	signals := make(chan os.Signal, 16)
	signal.Notify(signals)

	self, err := boot()
	if err != nil {
		logf("FATAL: %v", err)
		endMachine()
	}
	logf("booted in %d ms", time.Since(started).Milliseconds())
	go handleSignals(signals)
	supervise(self)
}

func boot() (*os.File, error) {
	if err := earlyMounts(); err != nil {
		return nil, err
	}
	attachConsole()
	_ = os.WriteFile("/proc/self/comm", []byte("aenv-init"), 0)
	if isProbe() {
		fmt.Println(probeMark)
		endMachine()
	}
	data, err := os.ReadFile(configPath)
	if err != nil {
		return nil, err
	}
	var c config
	if err := json.Unmarshal(data, &c); err != nil {
		return nil, fmt.Errorf("%s: %w", configPath, err)
	}
	for _, name := range c.Modules {
		if err := loadModule("/lib/modules/" + name); err != nil {
			return nil, fmt.Errorf("module %s: %w", name, err)
		}
	}
	self, err := openSelf()
	if err != nil {
		return nil, err
	}
	if err := switchRoot(&c); err != nil {
		return nil, err
	}
	lateMounts()
	if err := setUpNetwork(&c); err != nil {
		return nil, fmt.Errorf("network: %w", err)
	}
	writeNames(&c)
	tune()
	return self, nil
}

// selfFD is above every descriptor that a child gets, so that starting a child cannot overwrite it before the exec.
const selfFD = 100

// openSelf keeps our own file open: after the switch of roots it has no name any more.
func openSelf() (*os.File, error) {
	fd, err := unix.Open("/proc/self/exe", unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, os.NewSyscallError("open /proc/self/exe", err)
	}
	defer unix.Close(fd)
	if err := unix.Dup3(fd, selfFD, unix.O_CLOEXEC); err != nil {
		return nil, os.NewSyscallError("dup3", err)
	}
	return os.NewFile(selfFD, "self"), nil
}

// attachConsole makes 0, 1 and 2 the console where the kernel could not (an initramfs without /dev/console).
func attachConsole() {
	fd, err := unix.Open("/dev/console", unix.O_RDWR|unix.O_NOCTTY, 0)
	if err != nil {
		return
	}
	for to := range 3 {
		_ = unix.Dup3(fd, to, 0)
	}
	if fd > 2 {
		_ = unix.Close(fd)
	}
}

func loadModule(path string) error {
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	defer f.Close()
	if err := unix.FinitModule(int(f.Fd()), "", 0); err != nil && err != unix.EEXIST {
		return os.NewSyscallError("finit_module", err)
	}
	return nil
}

// handleSignals: init has no default action for any signal, so what it does not handle here is ignored.
// `reboot`, `poweroff` and friends of the image end the machine; the host never restarts it.
func handleSignals(signals <-chan os.Signal) {
	for s := range signals {
		switch s {
		case syscall.SIGTERM, syscall.SIGINT, syscall.SIGUSR1, syscall.SIGUSR2, syscall.SIGPWR:
			logf("%v: shutting down", s)
			shutDown()
		}
	}
}

// A process that ignores SIGTERM is killed after this.
const shutdownGrace = 2 * time.Second

func shutDown() {
	stopping.Store(true)
	_ = unix.Kill(-1, unix.SIGTERM)
	time.Sleep(shutdownGrace)
	_ = unix.Kill(-1, unix.SIGKILL)
	unix.Sync()
	_ = unix.Mount("", "/", "", unix.MS_REMOUNT|unix.MS_RDONLY, "")
	endMachine()
}

// endMachine resets the machine; the VMM runs with -no-reboot and exits. A reset works on every machine type, a
// power-off does not.
func endMachine() {
	unix.Sync()
	_ = unix.Reboot(unix.LINUX_REBOOT_CMD_RESTART)
	for {
		time.Sleep(time.Hour)
	}
}
