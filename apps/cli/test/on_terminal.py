"""Runs a command on a terminal of its own, for tests.

argv: COLS ROWS CMD...   stdin: JSON lines {"send": text} | {"resize": [cols, rows]} | {"signal": name}
stdout: JSON lines {"out": text}, at the end {"exit": code or -signal, "restored": terminal settings as before}
"""
import fcntl, json, os, pty, select, signal, struct, sys, termios

cols, rows, argv = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]


def resize(fd, cols, rows):
    fcntl.ioctl(fd, termios.TIOCSWINSZ, struct.pack("HHHH", rows, cols, 0, 0))


def say(value):
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()


master, slave = pty.openpty()
resize(master, cols, rows)
before = termios.tcgetattr(slave)
pid = os.fork()
if pid == 0:
    os.setsid()
    fcntl.ioctl(slave, termios.TIOCSCTTY, 0)
    for fd in (0, 1, 2):
        os.dup2(slave, fd)
    os.close(master)
    os.execvp(argv[0], argv)

pending = b""
inputs = [master, 0]
status = None
while True:
    ready, _, _ = select.select(inputs, [], [], 0.05)
    if master in ready:
        data = os.read(master, 65536)
        say({"out": data.decode("utf-8", "replace")})
    if 0 in ready:
        data = os.read(0, 65536)
        if not data:
            inputs.remove(0)
        pending += data
        while b"\n" in pending:
            line, pending = pending.split(b"\n", 1)
            step = json.loads(line)
            if "send" in step:
                os.write(master, step["send"].encode())
            elif "resize" in step:
                resize(master, *step["resize"])
            else:
                os.kill(pid, getattr(signal, step["signal"]))
    if status is None:
        done, s = os.waitpid(pid, os.WNOHANG)
        if done:
            status = os.waitstatus_to_exitcode(s)
    elif master not in ready:
        break
# Local modes hold what raw mode changes: echo, line editing, signals.
after = termios.tcgetattr(slave)
say({"exit": status, "restored": before[:4] == after[:4]})
