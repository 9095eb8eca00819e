import assert from "node:assert/strict";
import { createHash, randomBytes } from "node:crypto";
import { mkdtempSync, readdirSync, readFileSync, rmSync, statSync, writeFileSync } from "node:fs";
import { createServer, type IncomingMessage, type Server, type ServerResponse } from "node:http";
import type { AddressInfo } from "node:net";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { after, before, describe, test } from "node:test";
import { AenvError } from "@aenv/base";
import fc from "fast-check";
import { digestOf, type Pushed, TestRegistry } from "../../test/registry.ts";
import { credentialFiles, findCredentials } from "./credentials.ts";
import { choosePlatform, parseConfig, parseManifest } from "./manifest.ts";
import { chainIds, ImageStore, type PullOptions } from "./pull.ts";
import { formatReference, parseReference } from "./reference.ts";
import { RegistryClient, type RegistryOptions } from "./registry.ts";

const signal = new AbortController().signal;
const code = (wanted: string) => (e: unknown) => e instanceof AenvError && e.code === wanted;
const FOR: PullOptions = { architecture: "amd64", signal };
/** Name user, password secret. */
const HTPASSWD = "user:$2b$04$1.S4BDU1X/64zmhkYk75..0ukRb89s1jUqCfNeMflwAvKWgRzV.kW";
const BASIC = `Basic ${Buffer.from("user:secret").toString("base64")}`;

const client = (o: Partial<RegistryOptions> = {}): RegistryClient =>
  new RegistryClient({ credentials: () => Promise.resolve(undefined), ...o });

test("references are read as the usual tools write them", () => {
  const digest = `sha256:${"a".repeat(64)}`;
  const cases: [string, string][] = [
    ["alpine", "docker.io/library/alpine:latest"],
    ["alpine:3.20", "docker.io/library/alpine:3.20"],
    ["team/app", "docker.io/team/app:latest"],
    ["localhost/app", "localhost/app:latest"],
    ["localhost:5000/a/b/c:v1", "localhost:5000/a/b/c:v1"],
    ["registry.example.com/app", "registry.example.com/app:latest"],
    [`app@${digest}`, `docker.io/library/app@${digest}`],
    [`127.0.0.1:1/app:x@${digest}`, `127.0.0.1:1/app:x@${digest}`],
  ];
  for (const [text, full] of cases) {
    assert.equal(formatReference(parseReference(text)), full);
    assert.deepEqual(parseReference(full), parseReference(text), "the full form means the same");
  }
  const wrong = [
    "",
    "A",
    "a b",
    "a//b",
    "/a",
    "a/",
    "a:",
    "a:b:c",
    "../x",
    "a/../b",
    "a@sha256:1",
    "http://h/a",
    "h.com:99999999/a",
    "a\n",
    "x".repeat(600),
  ];
  for (const text of wrong) assert.throws(() => parseReference(text), code("INVALID_ARGUMENT"), text);
  fc.assert(
    fc.property(fc.string({ maxLength: 40 }), (text) => {
      try {
        const { host, repository } = parseReference(text);
        assert.ok(!`${host}/${repository}`.includes("..") && !/[\s@]/.test(`${host}${repository}`));
      } catch (e) {
        assert.ok(code("INVALID_ARGUMENT")(e), String(e));
      }
    }),
  );
});

test("credentials are found as Docker and Podman keep them, the most exact entry first", async () => {
  const dir = mkdtempSync(join(tmpdir(), "aenv-auth-"));
  try {
    const file = join(dir, "config.json");
    const basic = (u: string, p: string): { auth: string } => ({ auth: Buffer.from(`${u}:${p}`).toString("base64") });
    const auths = {
      "https://index.docker.io/v1/": basic("hub", "a:b"),
      "r.example.com": basic("all", "1"),
      "r.example.com/team": { username: "team", password: "2" },
      "https://t.example.com/v2/": { identitytoken: "long" },
    };
    writeFileSync(file, JSON.stringify({ auths, credsStore: "x" }));
    const files = credentialFiles({
      REGISTRY_AUTH_FILE: "",
      DOCKER_CONFIG: join(dir, "none"),
      XDG_RUNTIME_DIR: dir,
      HOME: "/h",
    });
    assert.deepEqual(files, [
      join(dir, "none/config.json"),
      join(dir, "containers/auth.json"),
      "/h/.docker/config.json",
    ]);
    files.splice(1, 2, file);
    assert.deepEqual(await findCredentials("docker.io", "library/x", files), { username: "hub", password: "a:b" });
    assert.deepEqual(await findCredentials("r.example.com", "x", files), { username: "all", password: "1" });
    assert.deepEqual(await findCredentials("r.example.com", "team/x", files), { username: "team", password: "2" });
    assert.deepEqual(await findCredentials("r.example.com", "teams/x", files), { username: "all", password: "1" });
    assert.deepEqual(await findCredentials("t.example.com", "x", files), { identityToken: "long" });
    assert.equal(await findCredentials("other.example.com", "x", files), undefined);
    for (const bad of ["{", "[]", '{"auths":{"x":{"auth":5}}}']) {
      writeFileSync(file, bad);
      await assert.rejects(findCredentials("x", "y", files), code("INVALID_ARGUMENT"));
    }
  } finally {
    rmSync(dir, { recursive: true });
  }
});

test("what a registry says is checked: manifests, indexes and configurations of any kind are taken or refused", () => {
  const d = { mediaType: "application/vnd.oci.image.layer.v1.tar", digest: `sha256:${"0".repeat(64)}`, size: 1 };
  const wrong: unknown[] = [
    null,
    5,
    [],
    {},
    { config: d },
    { config: d, layers: [{ ...d, size: -1 }] },
    { config: d, layers: [{ ...d, size: 2 ** 50 }] },
    { config: d, layers: [{ ...d, digest: "sha256:../../x" }] },
    { config: d, layers: Array.from({ length: 300 }, () => d) },
    { config: { ...d, size: 2 ** 30 }, layers: [] },
  ];
  for (const json of wrong) assert.throws(() => parseManifest(json, "x"), code("INVALID_ARGUMENT"));
  assert.throws(() => choosePlatform({ manifests: [] }, "x", "amd64"), code("NOT_FOUND"));
  fc.assert(
    fc.property(fc.jsonValue(), (json) => {
      for (const parse of [
        () => parseManifest(json, "x"),
        () => parseConfig(json, "x"),
        () => choosePlatform(json, "x", "amd64"),
      ]) {
        assert.throws(parse, (e) => code("INVALID_ARGUMENT")(e) || code("NOT_FOUND")(e));
      }
    }),
  );
});

test("the chain of layers is named as the format says", () => {
  const ids = ["a", "b", "c"].map((x) => digestOf(Buffer.from(x)));
  const sha = (t: string): string => `sha256:${createHash("sha256").update(t).digest("hex")}`;
  const [one = "", two = "", three = ""] = chainIds(ids);
  assert.equal(one, ids[0]);
  assert.equal(two, sha(`${ids[0]} ${ids[1]}`));
  assert.equal(three, sha(`${two} ${ids[2]}`));
});

describe("with a real registry", () => {
  let registry: TestRegistry;
  const dir = mkdtempSync(join(tmpdir(), "aenv-oci-"));
  let n = 0;
  before(async () => {
    registry = await TestRegistry.start();
  });
  after(async () => {
    await registry[Symbol.asyncDispose]();
    rmSync(dir, { recursive: true, force: true });
  });
  const store = (o: Partial<RegistryOptions> = {}): { images: ImageStore; dir: string } => {
    const own = join(dir, String(n++));
    return { images: new ImageStore(own, client(o)), dir: own };
  };
  const layers = (...sizes: number[]): { tar: Buffer; compression: "none" | "gzip" | "zstd" }[] =>
    sizes.map((s, i) => ({ tar: randomBytes(s), compression: (["gzip", "zstd", "none"] as const)[i % 3] ?? "none" }));
  const ref = (name: string) => parseReference(`${registry.host}/${name}`);

  function check(own: string, pushed: Pushed): void {
    const blobs = join(own, "blobs", "sha256");
    assert.deepEqual(readdirSync(blobs).toSorted(), pushed.layers.map((l) => l.digest.slice(7)).toSorted());
    for (const l of pushed.layers) assert.ok(readFileSync(join(blobs, l.digest.slice(7))).equals(l.bytes));
  }

  test("an image comes with its layers and configuration, by tag and by digest", async () => {
    const config = {
      User: "app",
      Env: ["A=1", "B=x=y", "bad"],
      WorkingDir: "/srv",
      Entrypoint: ["/run"],
      Cmd: ["a"],
      Labels: { l: "v" },
      ExposedPorts: { "80/tcp": {} },
    };
    const made = layers(300_000, 2000, 50_000);
    const pushed = await registry.push("team/app", "v1", { layers: made, config });
    const s = store();
    const seen: [number, number][] = [];
    const image = await s.images.pull(ref("team/app:v1"), { ...FOR, onProgress: (d, t) => seen.push([d, t]) });
    assert.equal(image.digest, pushed.digest);
    check(s.dir, pushed);
    assert.deepEqual(
      image.layers.map((l) => l.compression),
      ["gzip", "zstd", "none"],
    );
    assert.deepEqual(
      image.layers.map((l) => l.diffId),
      made.map((l) => digestOf(l.tar)),
    );
    const { diffIds: _, ...rest } = image.config;
    assert.deepEqual(rest, {
      user: "app",
      env: { A: "1", B: "x=y" },
      workdir: "/srv",
      entrypoint: ["/run"],
      cmd: ["a"],
      labels: { l: "v" },
      exposedPorts: ["80/tcp"],
    });
    const [done, total] = seen.at(-1) ?? [0, 1];
    assert.equal(done, total);
    assert.equal((await s.images.pull(ref(`team/app@${pushed.digest}`), FOR)).digest, pushed.digest);
    await assert.rejects(s.images.pull(ref("team/app:none"), FOR), code("NOT_FOUND"));
    await assert.rejects(s.images.pull(ref("nobody/nothing"), FOR), code("NOT_FOUND"));
  });

  test("of an index comes the image for the machine; another machine is told what there is", async () => {
    const amd = await registry.push("multi", "amd", { layers: layers(1000) });
    const arm = await registry.push("multi", "arm", { layers: layers(2000), architecture: "arm64" });
    const entry = (digest: string, architecture: string) => ({
      mediaType: "application/vnd.oci.image.manifest.v1+json",
      digest,
      size: 600,
      platform: { os: "linux", architecture },
    });
    const sized = (digest: string, architecture: string) => ({
      ...entry(digest, architecture),
      size: statSync(registry.file(digest)).size,
    });
    const index = {
      schemaVersion: 2,
      mediaType: "application/vnd.oci.image.index.v1+json",
      manifests: [sized(arm.digest, "arm64"), sized(amd.digest, "amd64")],
    };
    await registry.putManifest("multi", "latest", index);
    const s = store();
    assert.equal((await s.images.pull(ref("multi"), FOR)).digest, amd.digest);
    check(s.dir, amd);
    assert.equal((await store().images.pull(ref("multi"), { ...FOR, architecture: "arm64" })).digest, arm.digest);
    await assert.rejects(store().images.pull(ref("multi"), { ...FOR, architecture: "riscv64" }), (e) => {
      assert.ok(code("NOT_FOUND")(e) && /linux\/arm64, linux\/amd64/.test((e as AenvError).hint));
      return true;
    });
  });

  test("images that share layers fetch them once, also at the same time", async () => {
    const shared = layers(500_000, 400_000);
    await registry.push("one", "latest", { layers: [...shared, ...layers(10)] });
    await registry.push("two", "latest", { layers: [...shared, ...layers(20)] });
    const s = store();
    const took: number[] = [];
    const pulls = ["one", "two", "one"].map((name) =>
      s.images.pull(ref(name), { ...FOR, onProgress: (d, t) => took.push(d / t) }),
    );
    const images = await Promise.all(pulls);
    assert.equal(new Set(images.flatMap((i) => i.layers.map((l) => l.path))).size, 4);
    assert.equal(readdirSync(join(s.dir, "blobs", "sha256")).length, 4);
  });

  test("a registry that changed a blob is refused, and no file of it stays", async () => {
    const pushed = await registry.push("changed", "latest", { layers: layers(100_000) });
    const file = registry.file(pushed.layers[0]?.digest ?? "");
    const bad = readFileSync(file);
    bad.writeUInt8(bad.readUInt8(5000) ^ 1, 5000);
    writeFileSync(file, bad);
    const s = store();
    await assert.rejects(s.images.pull(ref("changed"), FOR), code("CORRUPT"));
    assert.deepEqual(readdirSync(join(s.dir, "blobs", "sha256")), []);
  });

  test("a mirror is asked first, and passed over where it lacks the image or is away", async () => {
    const pushed = await registry.push("library/mirrored", "latest", { layers: layers(1000) });
    await using empty = await TestRegistry.start();
    const mirrors = { "docker.io": ["127.0.0.1:1", empty.host, registry.host] };
    const s = store({ mirrors });
    assert.equal((await s.images.pull(parseReference("mirrored"), FOR)).digest, pushed.digest);
    check(s.dir, pushed);
  });

  test("a registry with a password takes the right one, and says what to do without it", async () => {
    await using closed = await TestRegistry.start({ htpasswd: HTPASSWD, authorization: BASIC });
    const pushed = await closed.push("private", "latest", { layers: layers(1000) });
    const name = parseReference(`${closed.host}/private`);
    const as = (password: string) => ({ credentials: () => Promise.resolve({ username: "user", password }) });
    assert.equal((await store(as("secret")).images.pull(name, FOR)).digest, pushed.digest);
    for (const o of [as("wrong"), {}]) {
      await assert.rejects(
        store(o).images.pull(name, FOR),
        (e) => code("PERMISSION_DENIED")(e) && /login/.test((e as AenvError).hint),
      );
    }
  });

  test("a registry that dies in the middle of a pull and comes back is gone on with", async () => {
    const pushed = await registry.push("dying", "latest", { layers: layers(4_000_000, 3_000_000) });
    const s = store();
    let died: Promise<void> | undefined;
    await s.images.pull(ref("dying"), {
      ...FOR,
      onProgress: () => {
        died ??= registry.down().then(() => registry.up());
      },
    });
    await died;
    check(s.dir, pushed);
  });
});

describe("with a registry of any behaviour", () => {
  let server: Server;
  let answer: (req: IncomingMessage, res: ServerResponse) => void;
  let host = "";
  const asked: IncomingMessage[] = [];
  before(async () => {
    server = createServer((req, res) => {
      asked.push(req);
      answer(req, res);
    });
    await new Promise<void>((done) => server.listen(0, "127.0.0.1", done));
    host = `127.0.0.1:${(server.address() as AddressInfo).port}`;
  });
  after(() => {
    server.closeAllConnections();
    server.close();
  });
  const manifest = { config: { mediaType: "c", digest: digestOf(Buffer.from("{}")), size: 2 }, layers: [] };

  test("tokens are fetched with the credentials, used, and never sent to where a redirect leads", async () => {
    asked.length = 0;
    answer = (req, res) => {
      const url = new URL(req.url ?? "", `http://${host}`);
      if (url.pathname === "/token") {
        assert.equal(url.searchParams.get("scope"), "repository:app:pull");
        assert.equal(url.searchParams.get("service"), "s");
        assert.equal(req.headers.authorization, BASIC);
        res.end(JSON.stringify({ token: "t1", expires_in: 300 }));
      } else if (url.pathname.startsWith("/elsewhere")) res.end(JSON.stringify(manifest));
      else if (req.headers.authorization === "Bearer t1") {
        res.writeHead(307, { location: `http://localhost:${host.split(":")[1]}/elsewhere` });
        res.end();
      } else {
        res.writeHead(401, { "www-authenticate": `Bearer realm="http://${host}/token",service="s"` });
        res.end();
      }
    };
    const c = client({ credentials: () => Promise.resolve({ username: "user", password: "secret" }) });
    for (let i = 0; i < 2; i++) await c.manifest(parseReference(`${host}/app`), signal);
    assert.equal(asked.filter((r) => r.url?.startsWith("/token")).length, 1, "one token for both");
    for (const r of asked.filter((a) => a.url === "/elsewhere")) assert.equal(r.headers.authorization, undefined);
  });

  test("an answer that is too long, hangs or leads nowhere ends in an error, not in memory", async () => {
    const pull = (o: Partial<RegistryOptions> = {}) =>
      client({ attempts: 2, ...o }).manifest(parseReference(`${host}/app`), signal);
    answer = (_req, res) => {
      const chunk = Buffer.alloc(64 * 1024, 0x20);
      const more = (): void => {
        while (!res.destroyed && res.write(chunk));
        if (!res.destroyed) res.once("drain", more);
      };
      more();
    };
    await assert.rejects(pull(), code("CORRUPT"));
    answer = (_req, res) => {
      res.writeHead(302, { location: `http://${host}/v2/again` });
      res.end();
    };
    await assert.rejects(pull(), code("UNAVAILABLE"));
    answer = (_req, res) => void res.write("{");
    await assert.rejects(pull({ idleMs: 20 }), code("UNAVAILABLE"));
    answer = (_req, res) => void res.end("no json");
    await assert.rejects(pull(), code("INVALID_ARGUMENT"));
    answer = (_req, res) => {
      res.writeHead(401, { "www-authenticate": 'Bearer realm="ftp://x"' });
      res.end();
    };
    await assert.rejects(pull(), code("PERMISSION_DENIED"));
    answer = (_req, res) => {
      res.writeHead(503);
      res.end();
    };
    await assert.rejects(pull(), code("UNAVAILABLE"));
  });
});
