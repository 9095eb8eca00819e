"""The PyPI e2b package, unmodified, against a running node. The connection comes from E2B_* in the environment."""

import asyncio
import io
import os
import time
import unittest

from e2b import (
    AsyncSandbox,
    AuthenticationException,
    CommandExitException,
    FileNotFoundException,
    InvalidArgumentException,
    NotFoundException,
    Sandbox,
    SandboxQuery,
    TimeoutException,
)


def eventually(probe, limit=60.0):
    end = time.monotonic() + limit
    while time.monotonic() < end:
        value = probe()
        if value:
            return value
        time.sleep(0.05)
    raise AssertionError("it did not happen within %s s" % limit)


class SyncSdk(unittest.TestCase):
    def setUp(self):
        self.sandbox = Sandbox.create(timeout=120, metadata={"suite": "python"}, envs={"GREETING": "hi"})
        self.addCleanup(self.sandbox.kill)

    def test_commands(self):
        result = self.sandbox.commands.run("echo $GREETING; echo err >&2; id -un")
        self.assertEqual((result.exit_code, result.stdout, result.stderr), (0, "hi\nuser\n", "err\n"))
        with self.assertRaises(CommandExitException) as caught:
            self.sandbox.commands.run("exit 5")
        self.assertEqual(caught.exception.exit_code, 5)
        with self.assertRaises(InvalidArgumentException):
            self.sandbox.commands.run("true", cwd="/none")

    def test_background_stdin_kill(self):
        handle = self.sandbox.commands.run("cat", background=True, stdin=True)
        self.assertIn(handle.pid, [p.pid for p in self.sandbox.commands.list()])
        self.sandbox.commands.send_stdin(handle.pid, "typed\n")
        seen = next(out for out, _, _ in handle if out)
        self.assertEqual(seen, "typed\n")
        self.assertTrue(self.sandbox.commands.kill(handle.pid))
        self.assertFalse(self.sandbox.commands.kill(999_999))

    def test_timeout_of_a_command(self):
        with self.assertRaises(TimeoutException):
            self.sandbox.commands.run("sleep 60", timeout=0.5)

    def test_files(self):
        files = self.sandbox.files
        info = files.write("dir/a.txt", "text")
        self.assertEqual((info.name, info.path), ("a.txt", "/home/user/dir/a.txt"))
        self.assertEqual(files.read("dir/a.txt"), "text")
        data = os.urandom(2_000_003)
        files.write("blob", io.BytesIO(data))
        self.assertEqual(bytes(files.read("blob", format="bytes")), data)
        files.write("empty", b"")
        self.assertEqual(files.read("empty"), "")
        self.assertEqual([e.name for e in files.list("dir")], ["a.txt"])
        self.assertTrue(files.make_dir("made"))
        self.assertFalse(files.make_dir("made"))
        files.rename("dir/a.txt", "dir/b.txt")
        self.assertTrue(files.exists("dir/b.txt"))
        files.remove("dir")
        with self.assertRaises(FileNotFoundException):
            files.read("dir/b.txt")

    def test_watch(self):
        self.sandbox.files.make_dir("w")
        watch = self.sandbox.files.watch_dir("w")
        self.sandbox.files.write("w/new.txt", "x")
        names = []

        def seen():
            names.extend(e.name for e in watch.get_new_events())
            return "new.txt" in names

        eventually(seen)
        watch.stop()

    def test_pty(self):
        screen = bytearray()
        from e2b import PtySize

        pty = self.sandbox.pty.create(PtySize(rows=30, cols=90))
        self.sandbox.pty.send_stdin(pty.pid, b"stty size; exit\n")
        for _, _, out in pty:
            if out:
                screen.extend(out)
        self.assertIn(b"30 90", bytes(screen))

    def test_lifecycle(self):
        info = self.sandbox.get_info()
        self.assertEqual(info.metadata, {"suite": "python"})
        self.assertEqual(info.name, "base")
        self.sandbox.set_timeout(200)
        self.assertGreater(self.sandbox.get_info().end_at, info.end_at)
        found = Sandbox.list(query=SandboxQuery(metadata={"suite": "python"})).next_items()
        self.assertIn(self.sandbox.sandbox_id, [s.sandbox_id for s in found])
        again = Sandbox.connect(self.sandbox.sandbox_id)
        self.assertEqual(again.commands.run("echo again").stdout, "again\n")
        self.assertTrue(self.sandbox.is_running())
        metric = eventually(self.sandbox.get_metrics)[0]
        self.assertGreater(metric.mem_total, 0)
        self.assertTrue(self.sandbox.kill())
        self.assertFalse(self.sandbox.is_running())
        self.assertFalse(self.sandbox.kill())
        with self.assertRaises(NotFoundException):
            Sandbox.connect(self.sandbox.sandbox_id)

    def test_wrong_key(self):
        with self.assertRaises(AuthenticationException):
            Sandbox.create(api_key="e2b_" + "0" * 40)


class AsyncSdk(unittest.IsolatedAsyncioTestCase):
    async def test_everything_at_once(self):
        sandbox = await AsyncSandbox.create(timeout=120)
        try:
            results = await asyncio.gather(*(sandbox.commands.run("echo %d" % i) for i in range(8)))
            self.assertEqual([r.stdout for r in results], ["%d\n" % i for i in range(8)])
            await sandbox.files.write("x.txt", "async")
            self.assertEqual(await sandbox.files.read("x.txt"), "async")
            events = []
            await sandbox.files.make_dir("w")
            watch = await sandbox.files.watch_dir("w", on_event=events.append)
            await sandbox.files.write("w/f", "1")
            for _ in range(600):
                if events:
                    break
                await asyncio.sleep(0.05)
            self.assertEqual(events[0].name, "f")
            await watch.stop()
        finally:
            self.assertTrue(await sandbox.kill())


if __name__ == "__main__":
    unittest.main(verbosity=2)
