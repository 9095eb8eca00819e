package envd

import (
	"encoding/binary"
	"os"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// A clock that is ahead by less than this was set by an earlier message that travelled faster.
const aheadTolerance = time.Second

// stepClock sets the wall clock when it is behind (the guest slept in a snapshot) or far ahead.
func stepClock(to time.Time) error {
	ahead := time.Since(to)
	if ahead >= 0 && ahead < aheadTolerance {
		return nil
	}
	ts := unix.NsecToTimespec(to.UnixNano())
	return unix.ClockSettime(unix.CLOCK_REALTIME, &ts)
}

const (
	rndAddEntropy = 0x40085203
	rndReseedCRNG = 0x5207
)

// reseed mixes host randomness in and makes the kernel's generator use it now: two launches of one snapshot must not
// draw the same numbers.
func reseed(seed []byte) error {
	f, err := os.OpenFile("/dev/urandom", os.O_RDWR, 0)
	if err != nil {
		return err
	}
	defer f.Close()
	// struct rand_pool_info { int entropy_count (bits); int buf_size; __u32 buf[]; }
	info := make([]byte, 8+len(seed))
	binary.NativeEndian.PutUint32(info, uint32(len(seed)*8))
	binary.NativeEndian.PutUint32(info[4:], uint32(len(seed)))
	copy(info[8:], seed)
	if _, _, errno := unix.Syscall(unix.SYS_IOCTL, f.Fd(), rndAddEntropy, uintptr(unsafe.Pointer(&info[0]))); errno != 0 {
		return os.NewSyscallError("RNDADDENTROPY", errno)
	}
	if _, _, errno := unix.Syscall(unix.SYS_IOCTL, f.Fd(), rndReseedCRNG, 0); errno != 0 {
		return os.NewSyscallError("RNDRESEEDCRNG", errno)
	}
	return nil
}

func setHostname(name string) error { return unix.Sethostname([]byte(name)) }
