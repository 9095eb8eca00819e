import assert from "node:assert/strict";
import { after, before, describe, test } from "node:test";
import { Cli, startApi, Terminal } from "./harness.ts";

interface Listed {
  sandboxID: string;
  state: string;
}
interface Child {
  sandbox?: Listed;
  error?: { message: string };
}

describe("states", () => {
  let api: Awaited<ReturnType<typeof startApi>>;
  let cli: Cli;
  before(async () => {
    api = await startApi();
    cli = new Cli({ AENV_API_URL: api.apiUrl, AENV_API_KEY: api.apiKey });
  });
  after(async () => {
    cli[Symbol.dispose]();
    await api[Symbol.asyncDispose]();
  });
  const start = async (...args: string[]): Promise<string> => (await cli.ok(["start", "-d", ...args])).trim();
  const json = async <T>(...args: string[]): Promise<T> => JSON.parse(await cli.ok([...args, "--json"])) as T;
  const stateOf = async (id: string): Promise<string> => (await json<Listed>("info", id)).state;

  test("pause and resume, with list and info following", async () => {
    const [a, b] = [await start("-m", "group=p"), await start("-m", "group=p")];
    const paused = (await cli.ok(["pause", a, b])).trim().split("\n").toSorted();
    assert.deepEqual(paused, [a, b].toSorted());
    assert.equal(await stateOf(a), "paused");
    assert.match(await cli.ok(["info", a]), /^Ends +not while it is paused$/m);
    const table = await cli.ok(["list", "-m", "group=p", "--state", "paused"]);
    assert.equal(table.match(/ paused /g)?.length, 2);
    assert.equal(await cli.ok(["list", "-q", "-m", "group=p", "--state", "running"]), "");
    assert.equal(await cli.ok(["resume", a, "--timeout", "1h"]), `${a}\n`);
    assert.equal(await stateOf(a), "running");
    const again = await cli.run(["resume", a]);
    assert.deepEqual([again.code, again.stdout], [0, `${a}\n`]);
    assert.match(again.stderr, /running already/);
    assert.equal((await json<{ resumed: boolean }>("resume", b)).resumed, true);
  });

  test("pausing what is paused or gone says so, and pauses the rest", async () => {
    const [a, b] = [await start(), await start()];
    await cli.ok(["pause", a]);
    const twice = await cli.run(["pause", a, b]);
    assert.equal(twice.code, 6);
    assert.equal(twice.stdout, `${b}\n`);
    assert.match(twice.stderr, new RegExp(`${a} is paused already`));
    assert.equal((await cli.run(["pause", "inotthere00000000000"])).code, 3);
    const part = await cli.run(["pause", "--json", a]);
    assert.deepEqual(JSON.parse(part.stdout), { paused: [] });
    const c = await start();
    assert.deepEqual(await json("pause", c, "--disk-only"), { paused: [c] });
  });

  test("start --auto-pause and --auto-resume are told by info", async () => {
    const id = await start("--auto-pause", "--auto-resume");
    assert.match(await cli.ok(["info", id]), /^Ends .*paused in .*, until traffic resumes it\)$/m);
    assert.match(await cli.ok(["info", await start()]), /^Ends .*deleted in /m);
    const r = await cli.run(["start", "-d", "--auto-resume"]);
    assert.equal(r.code, 2);
    assert.match(r.stderr, /--auto-pause/);
    await cli.ok(["pause", id]);
    assert.match(await cli.ok(["info", id]), /traffic resumes it/);
  });

  test("fork gives a table, ids or the API's own objects, of children that are others", async () => {
    const id = await start();
    const table = await cli.ok(["fork", id, "--count", "3"]);
    assert.match(table, /^# +ID +STATE +ENDS IN\n0 +i[a-z0-9]{19} +running +5m00s\n1 /);
    const quiet = (await cli.ok(["fork", id, "-n", "2", "-q"])).trim().split("\n");
    assert.equal(new Set([id, ...quiet]).size, 3);
    const [child] = await json<Child[]>("fork", id, "--timeout", "1h");
    assert.equal(await stateOf(child?.sandbox?.sandboxID ?? ""), "running");
    await cli.ok(["pause", id]);
    assert.equal((await json<Child[]>("fork", id, "--atomic", "-n", "2")).length, 2);
    assert.equal(await stateOf(id), "paused");
    const many = await cli.run(["fork", id, "--count", "17"]);
    assert.equal(many.code, 2);
    assert.match(many.stderr, /at most 16/);
    const more = await cli.run(["fork", id, "--count", "101"]);
    assert.match(more.stderr, /^error: --count: .*100/);
  });

  test("a child that does not start is told with its reason, and the exit code is of it", async () => {
    await using poor = await startApi({ FAKE_FAIL_CHILDREN: "1" });
    using there = new Cli({ AENV_API_URL: poor.apiUrl, AENV_API_KEY: poor.apiKey });
    const id = (await there.ok(["start", "-d"])).trim();
    const r = await there.run(["fork", id, "-n", "3"]);
    assert.equal(r.code, 5);
    assert.match(r.stdout, /^1 +- +failed +- +no network slot is free/m);
    assert.equal(r.stdout.match(/ running /g)?.length, 2);
    assert.match(r.stderr, /1 of 3 children could not be started/);
    const given = JSON.parse((await there.run(["fork", id, "-n", "2", "--json"])).stdout) as Child[];
    assert.deepEqual([given[0]?.error, given[1]?.sandbox], [undefined, undefined]);
    assert.match(given[1]?.error?.message ?? "", /no network slot/);
    const none = await there.run(["fork", id, "-n", "2", "-q", "--atomic"]);
    assert.deepEqual([none.code === 0, none.stdout], [false, ""]);
  });

  test("snapshots are kept, found, started from and deleted", async () => {
    const id = await start();
    const named = (await cli.ok(["snapshot", "create", id, "prepared:v1"])).trim();
    assert.match(named, /prepared:v1$/);
    const plain = (await cli.ok(["snapshot", "create", id])).trim();
    const table = await cli.ok(["snapshot", "list", "--sandbox", id]);
    assert.match(table, /^SNAPSHOT +SANDBOX +CPU +MEMORY +DISK +CREATED\n/);
    for (const snapshot of [named, plain]) assert.ok(table.includes(snapshot));
    assert.equal(await cli.ok(["snapshots", "-q", "--name", "prepared"]), `${named}\n`);
    assert.equal((await json<unknown[]>("snapshot", "ls", "--sandbox", id, "--limit", "1")).length, 1);
    assert.ok((await cli.ok(["complete", "snapshot"])).split("\n").includes(named));
    assert.equal(await stateOf(await start("prepared:v1")), "running");
    assert.equal(await stateOf(await start(plain)), "running");

    const refused = await cli.run(["snapshot", "delete", named]);
    assert.equal(refused.code, 2);
    assert.match(refused.stderr, /--yes/);
    assert.equal(await cli.ok(["snapshot", "delete", named, plain, "--yes"]), `${named}\n${plain}\n`);
    const gone = await cli.run(["snapshot", "delete", named, "-y"]);
    assert.equal(gone.code, 3);
    assert.match(gone.stderr, /aenv snapshot list/);
    assert.equal((await cli.run(["snapshot", "list"])).stderr, "No snapshots. aenv snapshot create ID makes one.\n");
    assert.equal((await cli.run(["snapshot", "create", id, "Not A Name"])).code, 2);
  });

  test("snapshot delete asks on a terminal", async () => {
    const snapshot = (await cli.ok(["snapshot", "create", await start()])).trim();
    await using t = new Terminal(cli, ["snapshot", "delete", snapshot]);
    await t.shows("[y/N] ");
    t.send("n\r");
    assert.equal((await t.ended()).exit, 1);
    await cli.ok(["snapshot", "delete", snapshot, "-y"]);
  });

  test("checkpoints are kept and gone back to, by name and by id", async () => {
    const id = await start();
    const first = (await cli.ok(["checkpoint", "create", id, "one"])).trim();
    const second = (await cli.ok(["checkpoint", "create", id])).trim();
    const table = await cli.ok(["checkpoint", "list", id]);
    assert.match(table, /^CHECKPOINT +NAME +OWN SIZE +CREATED\n/);
    assert.ok(table.includes(first) && table.includes(" one "));
    assert.equal(await cli.ok(["checkpoints", "-q", id]), `${first}\n${second}\n`);
    assert.equal((await json<unknown[]>("checkpoint", "list", id)).length, 2);
    for (const checkpoint of ["one", second]) assert.equal(await cli.ok(["rewind", id, checkpoint]), `${id}\n`);
    assert.equal((await json<Listed>("rewind", id, "one", "--timeout", "1h")).sandboxID, id);
    const none = await cli.run(["rewind", id, "two"]);
    assert.equal(none.code, 3);
    assert.match(none.stderr, new RegExp(`aenv checkpoint list ${id}`));
    assert.match((await cli.run(["rewind", id])).stderr, /CHECKPOINT is missing/);
  });

  test("lineage draws the tree, and --json gives it", async () => {
    const id = await start();
    await cli.ok(["checkpoint", "create", id, "begun"]);
    const [child] = await json<Child[]>("fork", id);
    const tree = await cli.ok(["lineage", id]);
    assert.match(tree, /^● template/);
    assert.match(tree, /● checkpoint begun of /);
    assert.match(tree, new RegExp(`○ ${id} running {2}← this sandbox`));
    assert.ok(tree.includes(`○ ${child?.sandbox?.sandboxID} running`));
    const { nodes } = await json<{ nodes: { cause: string; sandboxID?: string }[] }>("lineage", id);
    assert.deepEqual(
      nodes.filter((n) => n.sandboxID === id).map((n) => n.cause),
      ["checkpoint", "fork"],
    );
  });

  test("each command explains itself and has --json", async () => {
    for (const words of [
      ["pause"],
      ["resume"],
      ["fork"],
      ["snapshot", "create"],
      ["snapshot", "list"],
      ["snapshot", "delete"],
      ["checkpoint", "create"],
      ["checkpoint", "list"],
      ["rewind"],
      ["lineage"],
    ]) {
      const help = await cli.ok([...words, "--help"]);
      assert.match(help, /Examples:\n/, words.join(" "));
      assert.match(help, /--json/, words.join(" "));
    }
    assert.match((await cli.run(["checkpoint"])).stdout, /checkpoint create/);
    assert.match((await cli.run(["frok", "x"])).stderr, /Did you mean aenv fork/);
    assert.match((await cli.run(["snapshot", "crate", "x"])).stderr, /Did you mean aenv snapshot create/);
  });
});
