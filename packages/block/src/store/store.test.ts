import assert from "node:assert/strict";
import { createHash } from "node:crypto";
import { mkdirSync, mkdtempSync, readdirSync, rmSync, truncateSync, utimesSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { after, before, describe, test } from "node:test";
import { AenvError } from "@aenv/base";
import { S3Server } from "../../test/s3-server.ts";
import { openStore } from "./open.ts";
import type { BlobInfo, BlobStore } from "./port.ts";
import { S3Store } from "./s3.ts";

const MIB = 1024 * 1024;

function noise(bytes: number, seed = 1): Buffer {
  const b = Buffer.alloc(bytes);
  let x = seed;
  for (let i = 0; i + 4 <= bytes; i += 4) b.writeUInt32LE((x = (x * 48_271) % 2_147_483_647), i);
  return b;
}

async function keys(store: BlobStore, prefix: string): Promise<string[]> {
  const out: string[] = [];
  for await (const { key } of store.list(prefix)) out.push(key);
  return out.toSorted();
}

const code = (wanted: string) => (e: unknown) => e instanceof AenvError && e.code === wanted;

/** What every store promises. `store` gives one that holds nothing; `cut` makes an object shorter behind its back. */
function contract(fresh: () => Promise<BlobStore>, cut: (store: BlobStore, key: string, bytes: number) => void): void {
  test("what was put is there, whole and in ranges, and replaced as a whole", async () => {
    using store = await fresh();
    const data = noise(300_000);
    await store.put("blobs/a", data);
    const info = (await store.stat("blobs/a")) as BlobInfo;
    assert.equal(info.bytes, data.length);
    assert.ok(Math.abs(info.modifiedAt - Date.now()) < 600_000);
    assert.ok((await store.read("blobs/a", 0, data.length)).equals(data));
    assert.ok((await store.read("blobs/a", 12_345, 1)).equals(data.subarray(12_345, 12_346)));
    assert.ok((await store.read("blobs/a", 299_000, 1000)).equals(data.subarray(299_000)));
    assert.equal((await store.read("blobs/a", 7, 0)).length, 0);
    await store.put("blobs/a", Buffer.from("other"));
    assert.equal((await store.read("blobs/a", 0, 5)).toString(), "other");
    assert.equal((await store.stat("blobs/a"))?.bytes, 5);
    await store.put("blobs/empty", Buffer.alloc(0));
    assert.equal((await store.stat("blobs/empty"))?.bytes, 0);
  });

  test("a large object goes and comes in pieces", async () => {
    using store = await fresh();
    const data = noise(37 * MIB + 11);
    const reads: number[] = [];
    const read = (position: number, length: number): Promise<Buffer> => {
      reads.push(length);
      return Promise.resolve(data.subarray(position, position + length));
    };
    await store.put("large", { bytes: data.length, read });
    assert.ok(Math.max(...reads) <= 16 * MIB, "no more than a piece at a time");
    assert.equal((await store.stat("large"))?.bytes, data.length);
    const back = await store.read("large", 3, data.length - 3);
    assert.ok(
      createHash("sha256")
        .update(back)
        .digest()
        .equals(createHash("sha256").update(data.subarray(3)).digest()),
    );
  });

  test("a put whose source fails, or that is given up, is never seen", async () => {
    using store = await fresh();
    for (const bytes of [1000, 40 * MIB]) {
      let reads = 0;
      const failing = {
        bytes,
        read: (_: number, length: number): Promise<Buffer> =>
          ++reads * 16 * MIB > bytes - 1
            ? Promise.reject(new Error("the source broke"))
            : Promise.resolve(Buffer.alloc(length)),
      };
      await assert.rejects(store.put("torn", failing), /the source broke/);
      const stop = new AbortController();
      const slow = {
        bytes,
        read: (_: number, length: number): Promise<Buffer> => {
          stop.abort();
          return Promise.resolve(Buffer.alloc(length));
        },
      };
      await assert.rejects(store.put("torn", slow, stop.signal), { name: "AbortError" });
      assert.equal(await store.stat("torn"), undefined);
    }
    assert.deepEqual(await keys(store, ""), []);
  });

  test("what is not there is NOT_FOUND, what is too short is CORRUPT, and no memory is taken first", async () => {
    using store = await fresh();
    assert.equal(await store.stat("a/b"), undefined);
    await assert.rejects(store.read("a/b", 0, 10), code("NOT_FOUND"));
    await assert.rejects(store.read("a/b", 0, 10 * MIB), code("NOT_FOUND"));
    await store.put("a/b", noise(100_000));
    await assert.rejects(store.read("a/b", 0, 100_001), code("CORRUPT"));
    await assert.rejects(store.read("a/b", 100_000, 5), code("CORRUPT"));
    await assert.rejects(store.read("a/b", 0, 2 ** 40), code("CORRUPT"));
    cut(store, "a/b", 50_000);
    await assert.rejects(store.read("a/b", 40_000, 20_000), code("CORRUPT"));
  });

  test("lists by prefix, deletes, and does both again", async () => {
    using store = await fresh();
    for (const key of ["snapshots/b.json", "snapshots/a.json", "blobs/x", "snapshots/deep/er"]) {
      await store.put(key, Buffer.from(key));
    }
    assert.deepEqual(await keys(store, "snapshots/"), ["snapshots/a.json", "snapshots/b.json", "snapshots/deep/er"]);
    assert.deepEqual(await keys(store, "snapshots/a"), ["snapshots/a.json"]);
    assert.deepEqual(await keys(store, ""), ["blobs/x", "snapshots/a.json", "snapshots/b.json", "snapshots/deep/er"]);
    assert.deepEqual(await keys(store, "nothing/"), []);
    await store.delete("snapshots/a.json");
    await store.delete("snapshots/a.json");
    await store.delete("never/was");
    assert.deepEqual(await keys(store, "snapshots/"), ["snapshots/b.json", "snapshots/deep/er"]);
  });

  test("names that lead elsewhere are refused", async () => {
    using store = await fresh();
    for (const key of [
      "../x",
      "a/../../x",
      "/etc/x",
      "a//b",
      "",
      ".uploads/x",
      "a/.",
      "a\0b",
      "a b",
      "x".repeat(600),
    ]) {
      await assert.rejects(store.put(key, Buffer.from("x")), code("INVALID_ARGUMENT"));
      await assert.rejects(store.read(key, 0, 1), code("INVALID_ARGUMENT"));
      await assert.rejects(store.delete(key), code("INVALID_ARGUMENT"));
    }
  });

  test("many at once do not disturb each other", async () => {
    using store = await fresh();
    const all = Array.from({ length: 24 }, (_, i) => noise(50_000 + i, i + 1));
    await Promise.all(all.map((data, i) => store.put(`k/${i % 12}`, i < 12 ? data : (all[i - 12] as Buffer))));
    const back = await Promise.all(Array.from({ length: 12 }, (_, i) => store.read(`k/${i}`, 0, 50_000 + i)));
    back.forEach((b, i) => assert.ok(b.equals(all[i] as Buffer)));
  });

  test("a caller that gives up is told so at once", async () => {
    using store = await fresh();
    await store.put("x", noise(1000));
    await assert.rejects(store.read("x", 0, 10, AbortSignal.abort()), { name: "AbortError" });
  });
}

describe("a folder", () => {
  const dir = mkdtempSync(join(tmpdir(), "aenv-store-"));
  after(() => rmSync(dir, { recursive: true, force: true }));
  let n = 0;
  const roots = new Map<BlobStore, string>();
  contract(
    async () => {
      const root = join(dir, String(n++));
      const store = await openStore(`${root}/`);
      roots.set(store, root);
      return store;
    },
    (store, key, bytes) => truncateSync(join(roots.get(store) ?? "", key), bytes),
  );

  test("what a killed writer left is swept once it is old, and never listed", async () => {
    const root = join(dir, "swept");
    using store = await openStore(root);
    mkdirSync(join(root, ".uploads"), { recursive: true });
    writeFileSync(join(root, ".uploads", "old"), "x");
    writeFileSync(join(root, ".uploads", "new"), "x");
    utimesSync(join(root, ".uploads", "old"), 1000, 1000);
    assert.deepEqual(await keys(store, ""), []);
    assert.equal(await store.sweep(Date.now() - 3_600_000), 1);
    assert.deepEqual(readdirSync(join(root, ".uploads")), ["new"]);
  });
});

describe("S3", () => {
  let server: S3Server;
  before(async () => {
    server = await S3Server.start();
  });
  after(async () => {
    await server[Symbol.asyncDispose]();
  });
  let n = 0;
  const prefixes = new Map<BlobStore, string>();
  contract(
    async () => {
      const prefix = `p${n++}`;
      const store = await openStore(server.address(prefix));
      prefixes.set(store, prefix);
      return store;
    },
    (store, key, bytes) => truncateSync(server.file(`${prefixes.get(store)}/${key}`), bytes),
  );

  const direct = (requestMs: number, attempts: number): S3Store =>
    new S3Store({
      bucket: server.bucket,
      prefix: "direct/",
      endpoint: `http://127.0.0.1:${server.port}`,
      region: "us-east-1",
      pathStyle: true,
      requestMs,
      attempts,
    });

  test("a server that dies in the middle of an upload and comes back gets it all", async () => {
    using store = direct(60_000, 30);
    const data = noise(48 * MIB);
    let reads = 0;
    const dying = {
      bytes: data.length,
      async read(position: number, length: number) {
        if (++reads === 3) {
          await server.down();
          void new Promise((r) => setTimeout(r, 150)).then(() => server.up());
        }
        return data.subarray(position, position + length);
      },
    };
    await store.put("dying", dying);
    assert.ok((await store.read("dying", 0, data.length)).equals(data));
  });

  test("a server that is away is UNAVAILABLE, one that hangs too; both go on when it is back", async () => {
    using impatient = direct(300, 2);
    using store = direct(1000, 30);
    const data = noise(10_000);
    await store.put("away", data);
    await server.down();
    await assert.rejects(impatient.read("away", 0, 10), code("UNAVAILABLE"));
    await server.up();
    server.pause();
    await assert.rejects(impatient.read("away", 0, 10), code("UNAVAILABLE"));
    const read = store.read("away", 0, data.length);
    server.goOn();
    assert.ok((await read).equals(data));
  });

  test("refusals say what to do", async () => {
    const at = `endpoint=http://127.0.0.1:${server.port}`;
    using none = await openStore(`s3://no-such-bucket/x?${at}`);
    await assert.rejects(
      none.put("a", Buffer.from("x")),
      (e) => code("INVALID_ARGUMENT")(e) && /bucket/.test((e as AenvError).hint),
    );
    const secret = process.env["AWS_SECRET_ACCESS_KEY"];
    process.env["AWS_SECRET_ACCESS_KEY"] = "wrong";
    try {
      using refused = await openStore(server.address("x"));
      await assert.rejects(
        refused.put("a", Buffer.from("x")),
        (e) => code("PERMISSION_DENIED")(e) && /AWS_/.test((e as AenvError).hint),
      );
    } finally {
      process.env["AWS_SECRET_ACCESS_KEY"] = secret;
    }
    await assert.rejects(openStore("s3://Bad_Bucket/x"), code("INVALID_ARGUMENT"));
    await assert.rejects(openStore("s3://bucket/x?endpont=http://h"), code("INVALID_ARGUMENT"));
    await assert.rejects(openStore("s3://bucket/x?endpoint=h"), code("INVALID_ARGUMENT"));
    await assert.rejects(openStore("ftp://h/x"), code("INVALID_ARGUMENT"));
    await assert.rejects(openStore("relative/path"), code("INVALID_ARGUMENT"));
  });
});
