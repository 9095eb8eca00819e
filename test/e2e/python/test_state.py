"""Pause, connect, snapshots, forks, end of time, with the unmodified PyPI e2b package. E2B_* in the environment."""

import asyncio
import time
import unittest

from e2b import AsyncSandbox, NotFoundException, Sandbox, SandboxException, SandboxQuery, SandboxState, TimeoutException

from test_sdk import eventually


def run(sandbox, script):
    return sandbox.commands.run(script).stdout.strip()


def boot_id(sandbox):
    return run(sandbox, "cat /proc/sys/kernel/random/boot_id")


class States(unittest.TestCase):
    def create(self, template=None, **opts):
        sandbox = Sandbox.create(template, timeout=opts.pop("timeout", 120), **opts)
        self.addCleanup(sandbox.kill)
        return sandbox

    def test_pause_and_connect(self):
        sandbox = self.create(envs={"GREETING": "hi"}, metadata={"suite": "python-state"})
        handle = sandbox.commands.run("while :; do echo tick; sleep 0.1; done", background=True, timeout=0)
        boot = boot_id(sandbox)
        self.assertTrue(sandbox.pause())
        self.assertFalse(sandbox.pause())
        self.assertFalse(sandbox.is_running())
        with self.assertRaises(TimeoutException):
            handle.wait()
        paused = Sandbox.list(query=SandboxQuery(metadata={"suite": "python-state"}, state=[SandboxState.PAUSED]))
        self.assertEqual([s.sandbox_id for s in paused.next_items()], [sandbox.sandbox_id])
        again = Sandbox.connect(sandbox.sandbox_id, timeout=200)
        self.assertEqual(boot_id(again), boot)
        self.assertEqual(run(sandbox, "echo $GREETING"), "hi")
        self.assertIn(handle.pid, [p.pid for p in again.commands.list()])
        output = again.commands.connect(handle.pid)
        self.assertEqual(next(out for out, _, _ in output if out)[:4], "tick")
        self.assertTrue(again.commands.kill(handle.pid))

    def test_pause_without_memory(self):
        sandbox = self.create()
        sandbox.files.write("kept", "on disk")
        boot = boot_id(sandbox)
        self.assertTrue(sandbox.pause(keep_memory=False))
        again = Sandbox.connect(sandbox.sandbox_id)
        self.assertNotEqual(boot_id(again), boot)
        self.assertEqual(again.files.read("kept"), "on disk")

    def test_snapshots(self):
        name = "py-%d" % time.time_ns()
        sandbox = self.create()
        sandbox.files.write("state", "one")
        unnamed = sandbox.create_snapshot()
        named = sandbox.create_snapshot(name)
        self.assertTrue(any(name in n for n in named.names))
        pages = sandbox.list_snapshots(limit=1)
        found = []
        while pages.has_next:
            found += [s.snapshot_id for s in pages.next_items()]
        self.assertEqual(found, [named.snapshot_id, unnamed.snapshot_id])
        self.assertEqual(Sandbox.list_snapshots(name="no-such-snapshot").next_items(), [])
        sandbox.files.write("state", "two")
        for template in (unnamed.snapshot_id, name):
            self.assertEqual(self.create(template).files.read("state"), "one")
        for snapshot in (unnamed.snapshot_id, named.snapshot_id):
            self.assertTrue(Sandbox.delete_snapshot(snapshot))
            self.assertFalse(Sandbox.delete_snapshot(snapshot))
        with self.assertRaises(SandboxException):
            Sandbox.create(unnamed.snapshot_id)

    def test_fork(self):
        sandbox = self.create()
        sandbox.files.write("file", "source")
        children = sandbox.fork(timeout=100, count=2)
        for child in children:
            self.assertIsInstance(child, Sandbox)
            self.addCleanup(child.kill)
        self.assertEqual(len({sandbox.sandbox_id, *(c.sandbox_id for c in children)}), 3)
        for child in children:
            self.assertEqual(run(child, "cat file; echo; hostname"), "source\n" + child.sandbox_id)
            child.files.write("file", "child")
        self.assertEqual(sandbox.files.read("file"), "source")
        sandbox.kill()
        with self.assertRaises(NotFoundException):
            Sandbox.fork(sandbox.sandbox_id)

    def test_paused_at_its_end_and_woken_by_use(self):
        sandbox = self.create(lifecycle={"on_timeout": "pause", "auto_resume": True})
        sandbox.files.write("file", "kept")
        sandbox.set_timeout(1)
        eventually(lambda: sandbox.get_info().state == SandboxState.PAUSED)
        self.assertFalse(sandbox.is_running())
        self.assertEqual(sandbox.get_info().state, SandboxState.PAUSED)
        self.assertEqual(sandbox.files.read("file"), "kept")
        self.assertTrue(sandbox.is_running())


class AsyncStates(unittest.IsolatedAsyncioTestCase):
    async def test_all_of_it(self):
        sandbox = await AsyncSandbox.create(timeout=120)
        made = [sandbox]
        try:
            await sandbox.files.write("file", "kept")
            self.assertTrue(await sandbox.pause())
            self.assertFalse(await sandbox.is_running())
            again = await AsyncSandbox.connect(sandbox.sandbox_id)
            self.assertEqual(await again.files.read("file"), "kept")
            snapshot = await again.create_snapshot()
            made.append(await AsyncSandbox.create(snapshot.snapshot_id, timeout=60))
            made += await again.fork(count=2)
            texts = await asyncio.gather(*(s.files.read("file") for s in made))
            self.assertEqual(texts, ["kept"] * 4)
            self.assertTrue(await AsyncSandbox.delete_snapshot(snapshot.snapshot_id))
        finally:
            await asyncio.gather(*(s.kill() for s in made))


if __name__ == "__main__":
    unittest.main(verbosity=2)
