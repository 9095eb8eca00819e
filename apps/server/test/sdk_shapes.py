"""What the PyPI SDK sees of the API: run by sdk.test.ts against a server without machines."""

import datetime

from e2b import Sandbox, SandboxException, SandboxNotFoundException, SandboxQuery, Template


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

assert sandbox.kill() is True
assert Sandbox.kill(sandbox.sandbox_id) is False
assert Sandbox.kill("non-existing-sandbox") is False
refused(lambda: Sandbox.connect(sandbox.sandbox_id), SandboxNotFoundException, "")
refused(lambda: Sandbox.create("no-such-template"), SandboxException, "no-such-template")
refused(lambda: Sandbox.create("base", allow_internet_access=False), SandboxException, "allow_internet_access")
assert Template.exists("base") is True
assert Template.exists("no-such-template") is False
print("all as expected")
