package envd

import (
	"os"
	"strconv"

	"golang.org/x/sys/unix"
)

// openPTY gives the two ends of a new terminal.
func openPTY() (master, slave *os.File, err error) {
	fd, err := unix.Open("/dev/ptmx", unix.O_RDWR|unix.O_NOCTTY|unix.O_CLOEXEC|unix.O_NONBLOCK, 0)
	if err != nil {
		return nil, nil, os.NewSyscallError("open /dev/ptmx", err)
	}
	master = os.NewFile(uintptr(fd), "/dev/ptmx")
	if err := unix.IoctlSetPointerInt(fd, unix.TIOCSPTLCK, 0); err != nil {
		_ = master.Close()
		return nil, nil, os.NewSyscallError("unlock pty", err)
	}
	n, err := unix.IoctlGetUint32(fd, unix.TIOCGPTN)
	if err != nil {
		_ = master.Close()
		return nil, nil, os.NewSyscallError("pty number", err)
	}
	name := "/dev/pts/" + strconv.FormatUint(uint64(n), 10)
	slave, err = os.OpenFile(name, os.O_RDWR|unix.O_NOCTTY, 0)
	if err != nil {
		_ = master.Close()
		return nil, nil, err
	}
	return master, slave, nil
}

func resizePTY(f *os.File, cols, rows uint32) error {
	conn, err := f.SyscallConn()
	if err != nil {
		return err
	}
	size := &unix.Winsize{Col: clamp16(cols), Row: clamp16(rows)}
	var set error
	if err := conn.Control(func(fd uintptr) { set = unix.IoctlSetWinsize(int(fd), unix.TIOCSWINSZ, size) }); err != nil {
		return err
	}
	return set
}

func clamp16(n uint32) uint16 { return uint16(min(n, 0xffff)) }
