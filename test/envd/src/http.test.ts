import assert from "node:assert/strict";
import { createHash } from "node:crypto";
import { once } from "node:events";
import { existsSync, readFileSync, writeFileSync } from "node:fs";
import { connect } from "node:net";
import { join } from "node:path";
import { after, before, test } from "node:test";
import { gzipSync } from "node:zlib";
import { GuestClient, type GuestInit } from "@aenv/guest";
import { type Envd, eventually, initBody, soon, startEnvd } from "./envd.ts";

let envd: Envd;
before(async () => void (envd = await startEnvd()));
after(() => envd[Symbol.asyncDispose]());
const at = (name: string): string => join(envd.dir, name);
const files = (query: Record<string, string>): string => `${envd.url}/files?${new URLSearchParams(query).toString()}`;
const octets = { "content-type": "application/octet-stream" };

const initOf = (over: Partial<GuestInit>): GuestInit => ({
  ...initBody,
  timestamp: new Date().toISOString(),
  lifecycleID: "r1",
  ...over,
});

test("ranges and conditions of downloads are honoured", async () => {
  writeFileSync(at("r"), "0123456789");
  const part = await fetch(files({ path: at("r") }), { headers: { range: "bytes=2-4" } });
  assert.deepEqual([part.status, await part.text(), part.headers.get("content-range")], [206, "234", "bytes 2-4/10"]);
  const whole = await fetch(files({ path: at("r") }));
  assert.match(whole.headers.get("content-disposition") ?? "", /^inline; filename="?r"?$/);
  assert.equal(whole.headers.get("vary"), "Accept-Encoding");
  await whole.text();
  const since = { "if-modified-since": whole.headers.get("last-modified") ?? "" };
  assert.equal((await fetch(files({ path: at("r") }), { headers: since })).status, 304);
  const beyond = await fetch(files({ path: at("r") }), { headers: { range: "bytes=50-" } });
  assert.equal(beyond.status, 416);
});

test("an encoding that cannot be served is refused, gzip is served when it is all that is asked for", async () => {
  writeFileSync(at("e"), "0123456789");
  const none = await fetch(files({ path: at("e") }), { headers: { "accept-encoding": "identity;q=0" } });
  assert.equal(none.status, 406);
  const zipped = await fetch(files({ path: at("e") }), { headers: { "accept-encoding": "gzip" } });
  assert.deepEqual([zipped.headers.get("content-encoding"), await zipped.text()], ["gzip", "0123456789"]);
});

test("broken uploads are refused with the reason", async () => {
  const post = async (query: Record<string, string>, body: string | Buffer, headers: Record<string, string>) => {
    const res = await fetch(files(query), { method: "POST", body: new Uint8Array(Buffer.from(body)), headers });
    return [res.status, ((await res.json()) as { code: number; message: string }).message] as const;
  };
  assert.match((await post({}, "x", octets)).join(" "), /400 .*path is required/);
  assert.match((await post({ path: at("t") }, "x", { "content-type": "text/plain" })).join(" "), /400 .*not supported/);
  assert.match((await post({ path: at("t") }, "x", { ...octets, "content-encoding": "gzip" })).join(" "), /400 .*gzip/);
  const cut = gzipSync("y".repeat(10_000)).subarray(0, 30);
  assert.match(
    (await post({ path: at("cut") }, cut, { ...octets, "content-encoding": "gzip" })).join(" "),
    /400 .*broke off/,
  );
  assert.equal(existsSync(at("cut")), false);
  const part = '--b\r\nContent-Disposition: form-data; name="file"\r\n\r\nx\r\n--b--\r\n';
  assert.match(
    (await post({}, part, { "content-type": "multipart/form-data; boundary=b" })).join(" "),
    /400 .*no file name/,
  );
  assert.match((await post({ path: at("t\0") }, "x", octets)).join(" "), /400 .*NUL/);
  assert.match((await post({ path: "x", username: "who" }, "x", octets)).join(" "), /401 invalid username: 'who'/);
});

test("a half-sent upload leaves no file", async () => {
  const socket = connect(envd.port, "127.0.0.1");
  await once(socket, "connect");
  socket.write(
    `POST /files?path=${at("half")} HTTP/1.1\r\nHost: x\r\nContent-Type: application/octet-stream\r\nContent-Length: 1000000\r\n\r\n`,
  );
  socket.write(Buffer.alloc(1000));
  await eventually(() => (existsSync(at("half")) ? true : undefined));
  socket.destroy();
  await eventually(() => (existsSync(at("half")) ? undefined : true));
});

test("parts are written under their whole file name", async () => {
  const form = new FormData();
  form.append("other", "ignored");
  form.append("file", new Blob(["one"]), at("p/one.txt"));
  form.append("file", new Blob(["two"]), at("p/q/two.txt"));
  const res = await fetch(files({}), { method: "POST", body: form });
  assert.deepEqual(await res.json(), [
    { name: "one.txt", path: at("p/one.txt"), type: "file" },
    { name: "two.txt", path: at("p/q/two.txt"), type: "file" },
  ]);
  assert.equal(readFileSync(at("p/q/two.txt"), "utf8"), "two");
});

test("compose joins files and deletes them", async () => {
  for (const [i, text] of ["a", "b", "c"].entries()) writeFileSync(at(`c${i}`), text);
  const body = { source_paths: [at("c0"), at("c1"), at("c2")], destination: at("joined/all") };
  const post = (b: unknown): Promise<Response> =>
    fetch(`${envd.url}/files/compose`, { method: "POST", body: JSON.stringify(b) });
  assert.deepEqual(await (await post(body)).json(), { name: "all", path: at("joined/all"), type: "file" });
  assert.equal(readFileSync(at("joined/all"), "utf8"), "abc");
  assert.equal(existsSync(at("c1")), false);
  assert.equal((await post(body)).status, 404);
  assert.equal(readFileSync(at("joined/all"), "utf8"), "abc");
  assert.equal((await post({})).status, 400);
});

test("a browser of any origin may call", async () => {
  const res = await fetch(`${envd.url}/files`, {
    method: "OPTIONS",
    headers: {
      origin: "http://a.example",
      "access-control-request-method": "POST",
      "access-control-request-headers": "x-access-token",
    },
  });
  assert.deepEqual([res.status, res.headers.get("access-control-allow-origin")], [204, "*"]);
  assert.equal(res.headers.get("access-control-allow-headers"), "x-access-token");
});

test("metrics are plausible", async () => {
  const m = await envd.client.metrics(soon());
  assert.ok(m.cpu_count > 0 && m.cpu_used_pct >= 0 && m.cpu_used_pct <= 100);
  assert.ok(m.mem_used > 0 && m.mem_used < m.mem_total && m.mem_cache < m.mem_total);
  assert.ok(m.disk_used > 0 && m.disk_used <= m.disk_total);
});

test("broken frames and bodies end in an error and leave the daemon well", async () => {
  const rpc = (path: string, body: Uint8Array<ArrayBuffer> | string, type: string): Promise<Response> =>
    fetch(`${envd.url}/${path}`, { method: "POST", body, headers: { "content-type": type } });
  const bad = await rpc("process.Process/List", "{nonsense", "application/json");
  assert.deepEqual([bad.status, ((await bad.json()) as { code: string }).code], [400, "invalid_argument"]);
  for (const frame of [
    [0, 0],
    [0, 0, 0, 0, 9, 1],
    [0, 255, 255, 255, 255],
    [1, 0, 0, 0, 1, 65],
    [0, 0, 0, 0, 1, 123],
  ]) {
    const res = await rpc("process.Process/Start", Uint8Array.from(frame), "application/connect+json");
    assert.match(await res.text(), /"error":\{"code":"/);
  }
  assert.equal((await rpc("process.Process/Nothing", "{}", "application/json")).status, 404);
  assert.equal((await rpc("process.Process/List", "x", "text/plain")).status, 415);
  const proto = await rpc("process.Process/List", new Uint8Array(0), "application/proto");
  assert.equal(proto.status, 200);
  assert.equal(await envd.client.health(soon()), true);
});

test("a token closes every route but health, and only who knows it may change it", async () => {
  await using own = await startEnvd();
  const open = own.client;
  await open.init(initOf({ accessToken: "first", envVars: { A: "1" } }), soon());
  for (const call of [
    () => open.envs(soon()),
    () => open.list(soon()),
    () => open.stat("/", soon()),
    () => open.metrics(soon()),
  ])
    await assert.rejects(call, { code: "UNAUTHENTICATED" });
  assert.equal(await open.health(soon()), true);
  await assert.rejects(open.init(initOf({ accessToken: "mine now", lifecycleID: "r2" }), soon()), {
    code: "UNAUTHENTICATED",
  });
  const client = new GuestClient({ host: "127.0.0.1", port: own.port, accessToken: "first" });
  const expected = { A: "1", E2B_SANDBOX: "true", E2B_SANDBOX_ID: "itest", E2B_TEMPLATE_ID: "ttest" };
  assert.deepEqual(await client.envs(soon()), expected);
  const asChild = new GuestClient({ host: "127.0.0.1", port: own.port, accessToken: "second" });
  await asChild.init(initOf({ accessToken: "second", lifecycleID: "r2" }), soon(), "first");
  await assert.rejects(client.envs(soon()), { code: "UNAUTHENTICATED" });
  assert.equal((await asChild.envs(soon()))["A"], undefined);
  for (const c of [client, asChild]) c.close();
});

test("an older init of the same run changes nothing, one of another run does", async () => {
  await using own = await startEnvd();
  const later = new Date(Date.now() + 60_000).toISOString();
  await own.client.init(initOf({ envVars: { V: "new" }, timestamp: later }), soon());
  await own.client.init(initOf({ envVars: { V: "old" } }), soon());
  assert.equal((await own.client.envs(soon()))["V"], "new");
  await own.client.init(initOf({ envVars: { V: "fork" }, lifecycleID: "r2" }), soon());
  assert.equal((await own.client.envs(soon()))["V"], "fork");
});

test("a launch closes the connections of the run before", async () => {
  await using own = await startEnvd();
  const old = await own.client.start({ cmd: "sleep", args: ["1000"] }, soon());
  await own.client.init(initOf({ lifecycleID: "r9" }), soon());
  await assert.rejects(
    async () => {
      for await (const _ of old);
    },
    { code: "GUEST_FAILED" },
  );
  assert.equal(
    (await own.client.list(soon())).some((p) => p.pid === old.pid),
    true,
  );
  await own.client.signal(old.pid, "SIGKILL", soon());
});

test("signed addresses open exactly the file and operation they were made for, until they expire", async () => {
  await using own = await startEnvd();
  const token = "0tQG31xiMp0IOQfaz9dcwi72L1CPo8e0";
  await own.client.init(initOf({ accessToken: token }), soon());
  const path = join(own.dir, "signed");
  writeFileSync(path, "secret");
  const sign = (operation: string, expiration?: number): string => {
    const raw = [path, operation, "root", token, ...(expiration === undefined ? [] : [expiration])].join(":");
    return `v1_${createHash("sha256").update(raw).digest("base64").replace(/=+$/, "")}`;
  };
  const get = (query: Record<string, string>, headers: Record<string, string> = {}): Promise<Response> =>
    fetch(`${own.url}/files?${new URLSearchParams({ path, username: "root", ...query }).toString()}`, { headers });
  const message = async (res: Response): Promise<unknown> => [res.status, await res.json()];
  assert.equal(await (await get({ signature: sign("read") })).text(), "secret");
  const future = Math.floor(Date.now() / 1000) + 60;
  const until = { signature_expiration: String(future) };
  assert.equal((await get({ signature: sign("read", future), ...until })).status, 200);
  const refused = (message: string): unknown => [401, { code: 401, message }];
  assert.deepEqual(await message(await get({})), refused("missing signature query parameter"));
  assert.deepEqual(await message(await get({ signature: sign("write") })), refused("invalid signature"));
  assert.deepEqual(await message(await get({ signature: sign("read"), ...until })), refused("invalid signature"));
  const past = { signature: sign("read", 1000), signature_expiration: "1000" };
  assert.deepEqual(await message(await get(past)), refused("signature is already expired"));
  assert.equal((await get({ signature: sign("read") }, { "x-access-token": "wrong" })).status, 401);
  assert.equal((await get({}, { "x-access-token": token })).status, 200);
});
