"""The Python SDK against a lone envd (E2B_DEBUG and E2B_SANDBOX_URL are set by the caller)."""

import asyncio
import os
import tempfile
import time
import unittest

from e2b import (
    AsyncSandbox,
    CommandExitException,
    FileNotFoundException,
    InvalidArgumentException,
    Sandbox,
    TimeoutException,
)


def eventually(probe):
    while True:
        value = probe()
        if value:
            return value
        time.sleep(0.01)


class Commands(unittest.TestCase):
    def setUp(self):
        self.sandbox = Sandbox.create()

    def test_output_and_exit_code(self):
        result = self.sandbox.commands.run("echo out; echo err >&2")
        self.assertEqual((result.stdout, result.stderr), ("out\n", "err\n"))
        with self.assertRaises(CommandExitException) as caught:
            self.sandbox.commands.run("exit 3")
        self.assertEqual(caught.exception.exit_code, 3)

    def test_stdin_list_connect_and_kill(self):
        handle = self.sandbox.commands.run("cat", background=True, stdin=True)
        self.assertIn(handle.pid, [p.pid for p in self.sandbox.commands.list()])
        self.sandbox.commands.send_stdin(handle.pid, "abc")
        self.sandbox.commands.close_stdin(handle.pid)
        self.assertEqual(handle.wait().stdout, "abc")
        sleeper = self.sandbox.commands.run("sleep 1000", background=True)
        self.assertTrue(self.sandbox.commands.connect(sleeper.pid).kill())
        self.assertFalse(self.sandbox.commands.kill(sleeper.pid))

    def test_timeout(self):
        with self.assertRaises(TimeoutException):
            self.sandbox.commands.run("sleep 1000", timeout=0.3)

    def test_terminal(self):
        terminal = self.sandbox.pty.create(size=__import__("e2b").PtySize(rows=33, cols=91))
        self.sandbox.pty.send_stdin(terminal.pid, b"stty size; exit 4\n")
        seen = bytearray()
        with self.assertRaises(CommandExitException) as caught:
            terminal.wait(on_pty=seen.extend)
        self.assertEqual(caught.exception.exit_code, 4)
        self.assertIn(b"33 91", seen)


class Files(unittest.TestCase):
    def setUp(self):
        self.sandbox = Sandbox.create()
        self.folder = tempfile.TemporaryDirectory(prefix="aenv-envd-")
        self.addCleanup(self.folder.cleanup)

    def at(self, name):
        return os.path.join(self.folder.name, name)

    def test_write_and_read(self):
        files = self.sandbox.files
        for content in ["", "h\u00e9llo", "x" * 1_000_000]:
            for gzip in [False, True]:
                self.assertEqual(files.write(self.at("a/b"), content, gzip=gzip).path, self.at("a/b"))
                self.assertEqual(files.read(self.at("a/b"), gzip=gzip), content)
        with open(self.at("local"), "wb") as f:
            f.write(b"bytes" * 1000)
        with open(self.at("local"), "rb") as f:
            files.write(self.at("copy"), f)
        self.assertEqual(bytes(files.read(self.at("copy"), format="bytes")), b"bytes" * 1000)
        self.assertEqual(b"".join(files.read(self.at("copy"), format="stream")), b"bytes" * 1000)

    def test_entries(self):
        files = self.sandbox.files
        self.assertTrue(files.make_dir(self.at("d/e")))
        self.assertFalse(files.make_dir(self.at("d/e")))
        files.write(self.at("d/f"), "x", metadata={"k": "v"})
        os.symlink(self.at("d/f"), self.at("d/link"))
        self.assertEqual([e.name for e in files.list(self.at("d"), depth=2)], ["e", "f", "link"])
        self.assertEqual(files.get_info(self.at("d/f")).metadata, {"k": "v"})
        self.assertEqual(files.get_info(self.at("d/link")).symlink_target, self.at("d/f"))
        self.assertEqual(files.rename(self.at("d/f"), self.at("g/h")).path, self.at("g/h"))
        files.remove(self.at("d"))
        self.assertFalse(files.exists(self.at("d")))
        with self.assertRaises(FileNotFoundException):
            files.read(self.at("d"))
        with self.assertRaises(InvalidArgumentException):
            files.list(self.at("g/h"))

    def test_polled_watch(self):
        handle = self.sandbox.files.watch_dir(self.folder.name, recursive=True)
        self.sandbox.files.write(self.at("new"), "x")
        seen = []

        def poll():
            seen.extend((e.type.value, e.name) for e in handle.get_new_events())
            return ("create", "new") in seen and ("write", "new") in seen

        eventually(poll)
        handle.stop()


class Async(unittest.IsolatedAsyncioTestCase):
    async def test_commands_and_watch(self):
        sandbox = await AsyncSandbox.create()
        result = await sandbox.commands.run("echo hi")
        self.assertEqual(result.stdout, "hi\n")
        with tempfile.TemporaryDirectory(prefix="aenv-envd-") as folder:
            found = asyncio.Event()

            def on_event(event):
                if event.name == "new":
                    found.set()

            handle = await sandbox.files.watch_dir(folder, on_event=on_event)
            await sandbox.files.write(f"{folder}/new", "x")
            await asyncio.wait_for(found.wait(), 30)
            await handle.stop()


if __name__ == "__main__":
    unittest.main()
