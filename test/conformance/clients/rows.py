"""The rows for the Python SDK: prints {row: "ok" | "-" | reason} as JSON. The connection comes from E2B_* in the environment."""

import json
import os
import time
import urllib.error
import urllib.request

from e2b import AuthenticationException, CommandExitException, NotFoundException, PtySize, Sandbox, SandboxQuery

opened = []


class Absent(Exception):
    """What this SDK does not have cannot fail."""


def make(**opts):
    sandbox = Sandbox.create(timeout=120, **opts)
    opened.append(sandbox)
    return sandbox


def need(owner, method):
    found = getattr(owner, method, None)
    if found is None:
        raise Absent
    return found


def eventually(probe):
    end = time.monotonic() + 60
    while time.monotonic() < end:
        value = probe()
        if value:
            return value
        time.sleep(0.1)
    raise AssertionError("it did not happen within 60 s")


def raises(kind, fn):
    try:
        fn()
    except kind as e:
        return e
    raise AssertionError("no %s was raised" % kind.__name__)


def create():
    s = make(metadata={"k 1": "v&w"}, envs={"GREETING": "hi"})
    info = s.get_info()
    assert info.sandbox_id == s.sandbox_id and info.metadata == {"k 1": "v&w"} and info.end_at > info.started_at
    assert s.commands.run("echo $GREETING").stdout == "hi\n"


def wrong_key():
    raises(AuthenticationException, lambda: Sandbox.create(api_key="e2b_" + "0" * 40))


def listing():
    tag = "t%d" % os.getpid()
    a, b = make(metadata={"tag": tag}), make(metadata={"tag": tag})
    pages = Sandbox.list(query=SandboxQuery(metadata={"tag": tag}), limit=1)
    seen = []
    while pages.has_next:
        seen += [s.sandbox_id for s in pages.next_items()]
    assert seen == [b.sandbox_id, a.sandbox_id], seen


def kill():
    s = make()
    assert s.kill() is True
    assert Sandbox.kill(s.sandbox_id) is False
    assert s.is_running() is False


def timeout():
    s = make()
    s.set_timeout(60)
    end_at = s.get_info().end_at
    assert Sandbox.connect(s.sandbox_id, timeout=1).get_info().end_at == end_at
    s.set_timeout(1)
    eventually(lambda: not s.is_running())
    raises(NotFoundException, lambda: Sandbox.connect(s.sandbox_id))


def commands():
    s = make()
    r = s.commands.run("echo out; echo err >&2; pwd; id -un")
    assert (r.stdout, r.stderr, r.exit_code) == ("out\n/home/user\nuser\n", "err\n", 0), r
    assert raises(CommandExitException, lambda: s.commands.run("exit 3")).exit_code == 3
    assert s.commands.run("id -un; pwd", user="root", cwd="/tmp").stdout == "root\n/tmp\n"


def background():
    s = make()
    cat = s.commands.run("cat", background=True, stdin=True)
    s.commands.send_stdin(cat.pid, "typed\n")
    for out, _, _ in cat:
        if out == "typed\n":
            break
    assert any(p.pid == cat.pid for p in s.commands.list())
    assert s.commands.kill(cat.pid) is True
    raises(CommandExitException, cat.wait)


def files():
    s = make()
    s.files.write("a/b.txt", "text")
    assert s.files.read("a/b.txt") == "text"
    assert s.files.exists("a/b.txt") is True
    assert [e.name for e in s.files.list("a")] == ["b.txt"]
    s.files.rename("a/b.txt", "a/c.txt")
    s.files.remove("a/c.txt")
    assert s.files.exists("a/c.txt") is False
    raises(NotFoundException, lambda: s.files.read("a/c.txt"))


def watch():
    s = make()
    s.files.make_dir("w")
    watcher = s.files.watch_dir("w")
    s.files.write("w/new.txt", "x")
    eventually(lambda: any(e.name == "new.txt" for e in watcher.get_new_events()))
    watcher.stop()


def pty():
    s = make()
    seen = []
    handle = s.pty.create(PtySize(rows=24, cols=80))
    s.pty.send_stdin(handle.pid, b"echo $((6*7)); exit\n")
    handle.wait(on_pty=seen.append)
    assert b"42" in b"".join(seen)


def signed():
    s = make()
    s.files.write("s.txt", "signed")
    assert urllib.request.urlopen(s.download_url("s.txt")).read() == b"signed"
    old = s.download_url("s.txt", use_signature_expiration=-60)
    refused = raises(urllib.error.HTTPError, lambda: urllib.request.urlopen(old))
    assert (refused.code, json.load(refused)["message"]) == (401, "signature is already expired")


def metrics():
    s = make()
    m = eventually(s.get_metrics)[0]
    assert m.mem_total > 0 and m.cpu_count > 0


def pause():
    s = make()
    stop = getattr(s, "pause", None) or need(s, "beta_pause")
    sleep = s.commands.run("sleep 1000", background=True, timeout=0)
    stop()
    assert s.is_running() is False
    back = Sandbox.connect(s.sandbox_id, timeout=120)
    assert any(p.pid == sleep.pid for p in back.commands.list())


def snapshot():
    s = make()
    take = need(s, "create_snapshot")
    s.files.write("kept.txt", "kept")
    snapshot_id = take().snapshot_id
    copy = Sandbox.create(snapshot_id, timeout=60)
    opened.append(copy)
    assert copy.files.read("kept.txt") == "kept"
    copy.kill()
    assert Sandbox.delete_snapshot(snapshot_id) is True
    assert Sandbox.delete_snapshot(snapshot_id) is False


def fork():
    s = make()
    split = need(s, "fork")
    s.files.write("/tmp/state.txt", "before")
    children = split(count=2)
    opened.extend(c for c in children if isinstance(c, Sandbox))
    assert len(children) == 2
    assert all(c.files.read("/tmp/state.txt") == "before" for c in children)
    assert s.is_running() is True


def network():
    s = make(network={"deny_out": ["203.0.113.0/24"]})
    update = need(s, "update_network")
    update({"deny_out": ["198.51.100.0/24"]})
    update({})


ROWS = {
    "create, info": create,
    "wrong key": wrong_key,
    "list, filter, pages": listing,
    "kill": kill,
    "timeout, connect": timeout,
    "commands": commands,
    "background, stdin, kill": background,
    "files": files,
    "watch": watch,
    "pty": pty,
    "signed URLs": signed,
    "metrics": metrics,
    "pause, resume": pause,
    "snapshot": snapshot,
    "fork": fork,
    "network": network,
}

result = {}
for name, row in ROWS.items():
    try:
        row()
        result[name] = "ok"
    except Absent:
        result[name] = "-"
    except Exception as e:  # whatever it is, it is this row's result
        result[name] = " ".join(("%s: %s" % (type(e).__name__, e)).split("\n")[:6])
    for sandbox in opened:
        try:
            sandbox.kill()
        except Exception:
            pass
    opened.clear()
print(json.dumps(result))
