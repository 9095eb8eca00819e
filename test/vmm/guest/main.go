// A guest for the driver's tests: it owns one block of memory that changes with every tick, and prints ticks with the
// block's checksum on the console. The kernel command line picks one way to end.
package main

import (
	"crypto/sha256"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"
	"unsafe"
)

const sysFinitModule = 313

func option(cmdline, name, fallback string) string {
	for _, word := range strings.Fields(cmdline) {
		if value, ok := strings.CutPrefix(word, name+"="); ok {
			return value
		}
		if word == name {
			return "1"
		}
	}
	return fallback
}

// fill is the block's content at a tick; the test computes the same.
func fill(block []byte, tick uint64) {
	for i := 0; i+8 <= len(block); i += 512 {
		binary.LittleEndian.PutUint64(block[i:], tick*0x9e3779b97f4a7c15+uint64(i))
	}
}

// loadModules loads what /etc/aenv/guest.json names, in its order.
func loadModules() {
	var config struct{ Modules []string }
	raw, _ := os.ReadFile("/etc/aenv/guest.json")
	json.Unmarshal(raw, &config)
	for _, name := range config.Modules {
		file, err := os.Open("/lib/modules/" + name)
		if err != nil {
			fmt.Println("MODULE", err)
			continue
		}
		empty := []byte{0}
		_, _, errno := syscall.Syscall(sysFinitModule, file.Fd(), uintptr(unsafe.Pointer(&empty[0])), 0)
		if errno != 0 {
			fmt.Printf("MODULE %s %v\n", name, errno)
		}
		file.Close()
	}
}

func disk() {
	file, err := os.OpenFile("/dev/vda", os.O_RDWR|syscall.O_SYNC, 0)
	if err != nil {
		fmt.Println("DISK", err)
		return
	}
	defer file.Close()
	sum := sha256.New()
	n, err := io.Copy(sum, io.LimitReader(file, 1<<20))
	fmt.Printf("DISK read=%d sum=%x err=%v\n", n, sum.Sum(nil)[:8], err)
	if _, err := file.WriteAt([]byte("written by the guest"), 1<<20); err != nil {
		fmt.Println("DISK write", err)
	}
}

// record writes the tick to the disk and waits until it is there.
func record(tick uint64) {
	file, err := os.OpenFile("/dev/vda", os.O_RDWR|syscall.O_SYNC, 0)
	if err == nil {
		defer file.Close()
		_, err = file.WriteAt([]byte(fmt.Sprintf("tick %08d", tick)), 2<<20)
	}
	if err != nil {
		fmt.Println("DISK record", err)
	}
}

// churn takes and gives back memory in one piece: what the kernel reports as free to a balloon.
func churn(size int) {
	block, err := syscall.Mmap(-1, 0, size, syscall.PROT_READ|syscall.PROT_WRITE, syscall.MAP_ANON|syscall.MAP_PRIVATE)
	if err != nil {
		fmt.Println("CHURN", err)
		return
	}
	for i := 0; i < size; i += 4096 {
		block[i] = 0xa5
	}
	syscall.Munmap(block)
}

func end(how string) {
	switch how {
	case "poweroff":
		syscall.Reboot(syscall.LINUX_REBOOT_CMD_POWER_OFF)
	case "reboot":
		syscall.Reboot(syscall.LINUX_REBOOT_CMD_RESTART)
	case "panic":
		os.WriteFile("/proc/sysrq-trigger", []byte("c"), 0)
	case "exit":
		os.Exit(1)
	case "flood":
		line := []byte(strings.Repeat("hostile ", 512) + "\n")
		for {
			os.Stdout.Write(line)
		}
	}
}

func main() {
	for _, dir := range []string{"/proc", "/sys", "/dev", "/tmp"} {
		os.MkdirAll(dir, 0o755)
	}
	syscall.Mount("proc", "/proc", "proc", 0, "")
	syscall.Mount("sysfs", "/sys", "sysfs", 0, "")
	syscall.Mount("dev", "/dev", "devtmpfs", 0, "")
	syscall.Mount("tmp", "/tmp", "tmpfs", 0, "")
	raw, _ := os.ReadFile("/proc/cmdline")
	cmdline := string(raw)
	if option(cmdline, "aenv.probe", "") != "" {
		fmt.Println("AENV-PROBE-OK")
		syscall.Reboot(syscall.LINUX_REBOOT_CMD_POWER_OFF)
	}
	loadModules()
	disk()
	links, _ := net.Interfaces()
	for _, link := range links {
		fmt.Println("LINK", link.Name, link.HardwareAddr)
	}
	if hw, err := os.ReadFile("/sys/class/misc/hw_random/rng_current"); err == nil {
		fmt.Printf("RNG %s", hw)
	}
	cpus, _ := filepath.Glob("/sys/devices/system/cpu/cpu[0-9]*")
	fmt.Println("CPUS", len(cpus))
	how := option(cmdline, "test.end", "")
	last, _ := strconv.ParseUint(option(cmdline, "test.ticks", "0"), 10, 64)
	size, _ := strconv.ParseUint(option(cmdline, "test.block", "4194304"), 10, 64)
	period, _ := strconv.ParseUint(option(cmdline, "test.period", "50"), 10, 64)
	block := make([]byte, size)
	churned, _ := strconv.Atoi(option(cmdline, "test.churn", "0"))
	for tick := uint64(1); ; tick++ {
		if churned > 0 && tick%5 == 0 {
			churn(churned << 20)
		}
		fill(block, tick)
		time.Sleep(time.Duration(period) * time.Millisecond)
		if option(cmdline, "test.record", "") != "" {
			record(tick)
		}
		// The sum is taken after the wait, so that a capture falls between the write and the reading.
		fmt.Printf("TICK %d %x\n", tick, sha256.Sum256(block))
		if how != "" && tick >= last {
			end(how)
		}
	}
}
