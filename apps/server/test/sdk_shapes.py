"""What the PyPI SDK sees of the API: run by sdk.test.ts against a server without machines."""

import datetime

from e2b import Sandbox, SandboxException, SandboxNotFoundException, SandboxQuery, SandboxState, Template


def refused(call, kind, text):
    try:
        call()
    except kind as e:
        assert text in str(e), str(e)
        return
    raise AssertionError(f"{text}: not refused")


def listed(**query):
    pages = Sandbox.list(**query)
    out = []
    while pages.has_next:
        out += pages.next_items()
    return out


def listed_snapshots(pages):
    out = []
    while pages.has_next:
        out += pages.next_items()
    return out


sandbox = Sandbox.create("base", timeout=60, metadata={"k 1": "v&w"}, envs={"A": "1"})
info = sandbox.get_info()
assert info.sandbox_id == sandbox.sandbox_id
assert info.metadata == {"k 1": "v&w"}
assert (info.end_at - info.started_at).total_seconds() == 60
assert info.state.value == "running"

sandbox.set_timeout(100)
longer = sandbox.get_info().end_at
assert longer > info.end_at
again = Sandbox.connect(sandbox.sandbox_id, timeout=1)
assert again.get_info().end_at == longer

(sample,) = sandbox.get_metrics()
assert sample.cpu_count == 1 and sample.mem_total > sample.mem_used
past = datetime.datetime(2001, 1, 1)
assert sandbox.get_metrics(start=past, end=past) == []

other = Sandbox.create("base", metadata={"k 1": "v&w", "n": "ü=%"})
assert {s.sandbox_id for s in listed(limit=1)} == {sandbox.sandbox_id, other.sandbox_id}
assert [s.sandbox_id for s in listed(query=SandboxQuery(metadata={"n": "ü=%"}))] == [other.sandbox_id]

auto = Sandbox.create("base", timeout=60, lifecycle={"on_timeout": "pause", "auto_resume": True})
assert auto.get_info().lifecycle == {"on_timeout": "pause", "auto_resume": True}
assert auto.pause() is True
assert auto.pause() is False
assert auto.get_info().state.value == "paused"
assert [s.sandbox_id for s in listed(query=SandboxQuery(state=[SandboxState.PAUSED]))] == [auto.sandbox_id]
assert Sandbox.connect(auto.sandbox_id).get_info().state.value == "running"
assert auto.pause(mode="filesystem", strict=True) is True
Sandbox.connect(auto.sandbox_id, on_resume="reboot")

children = auto.fork(timeout=30, count=3)
assert len({auto.sandbox_id, *(c.sandbox_id for c in children)}) == 4
refused(lambda: auto.fork(count=17), SandboxException, "at most 16")

kept = auto.create_snapshot(name="py-kept:v1")
assert kept.names == [kept.snapshot_id]
bare = auto.create_snapshot(mode="filesystem")
assert {s.snapshot_id for s in listed_snapshots(auto.list_snapshots(limit=1))} == {kept.snapshot_id, bare.snapshot_id}
assert [s.snapshot_id for s in listed_snapshots(Sandbox.list_snapshots(name="py-kept"))] == [kept.snapshot_id]
assert listed_snapshots(Sandbox.list_snapshots(name="nope")) == []
assert Sandbox.create(kept.snapshot_id).kill() is True
for snapshot in (kept, bare):
    assert Sandbox.delete_snapshot(snapshot.snapshot_id) is True
    assert Sandbox.delete_snapshot(snapshot.snapshot_id) is False
assert auto.kill() is True
refused(auto.pause, SandboxNotFoundException, "")
refused(auto.fork, SandboxNotFoundException, "")
refused(auto.create_snapshot, SandboxNotFoundException, "")

assert sandbox.kill() is True
assert Sandbox.kill(sandbox.sandbox_id) is False
assert Sandbox.kill("non-existing-sandbox") is False
refused(lambda: Sandbox.connect(sandbox.sandbox_id), SandboxNotFoundException, "")
refused(lambda: Sandbox.create("no-such-template"), SandboxException, "no-such-template")
refused(lambda: Sandbox.create("base", allow_internet_access=False), SandboxException, "allow_internet_access")
assert Template.exists("base") is True
assert Template.exists("no-such-template") is False
print("all as expected")
