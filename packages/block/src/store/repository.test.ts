import assert from "node:assert/strict";
import {
  createReadStream,
  createWriteStream,
  existsSync,
  mkdirSync,
  readdirSync,
  readFileSync,
  statSync,
  truncateSync,
  writeFileSync,
} from "node:fs";
import { join } from "node:path";
import { Readable } from "node:stream";
import { after, before, describe, test } from "node:test";
import { AenvError } from "@aenv/base";
import fc from "fast-check";
import { withDir } from "../../test/content.ts";
import { S3Server } from "../../test/s3-server.ts";
import { exportSnapshot, importSnapshot } from "./archive.ts";
import { collectGarbage, storeUse } from "./collect.ts";
import type { Encoding } from "./encode.ts";
import { FolderStore } from "./folder.ts";
import { openStore } from "./open.ts";
import type { BlobStore } from "./port.ts";
import { SnapshotRepository } from "./repository.ts";

const MIB = 1024 * 1024;
type PublishFile = { name: string; path: string; encoding: Encoding };
const code = (wanted: string) => (e: unknown) => e instanceof AenvError && e.code === wanted;
const vector = (name: string): string => join(import.meta.dirname, "../../test/vectors", name);

/** A folder with a layer, a device state and a memory file full of holes; `seed` makes them others. */
function snapshotFiles(dir: string, seed: number): PublishFile[] {
  mkdirSync(dir, { recursive: true });
  const memory = join(dir, `memory-${seed}`);
  writeFileSync(memory, Buffer.alloc(8192, seed));
  truncateSync(memory, 3 * MIB + 4096);
  const device = join(dir, `device-${seed}`);
  writeFileSync(device, `device state ${seed}`);
  return [
    { name: "layer/0", path: vector("commit.bin"), encoding: "zfile" },
    { name: "memory/0", path: memory, encoding: "sparse" },
    { name: "device", path: device, encoding: "plain" },
  ];
}

async function keys(store: BlobStore): Promise<string[]> {
  const out: string[] = [];
  for await (const { key } of store.list("")) out.push(key);
  return out.toSorted();
}

/** Every file of a snapshot, fetched into a fresh folder, is what was published. */
async function checkFetched(
  repository: SnapshotRepository,
  id: string,
  dir: string,
  files: readonly PublishFile[],
): Promise<void> {
  const { blobs } = await repository.get(id);
  assert.deepEqual(
    blobs.map((b) => b.name),
    files.map((f) => f.name),
  );
  for (const [i, blob] of blobs.entries()) {
    const path = join(dir, id, String(i));
    await repository.fetch(blob, path);
    assert.ok(readFileSync(path).equals(readFileSync((files[i] as PublishFile).path)), blob.name);
  }
  assert.equal(readdirSync(join(dir, id)).length, blobs.length, "nothing else is left");
}

/** A store that stops working after so many calls that change it. */
function breaksAfter(store: BlobStore, changes: number): BlobStore {
  let left = changes;
  const change =
    <A extends unknown[]>(fn: (...a: A) => Promise<void>) =>
    (...a: A): Promise<void> =>
      left-- > 0 ? fn(...a) : Promise.reject(new AenvError("UNAVAILABLE", "the store is away"));
  return {
    name: store.name,
    put: change((...a) => store.put(...a)),
    delete: change((...a) => store.delete(...a)),
    stat: (...a) => store.stat(...a),
    read: (...a) => store.read(...a),
    list: (...a) => store.list(...a),
    sweep: (...a) => store.sweep(...a),
    [Symbol.dispose]: () => {},
  };
}

test(
  "a published snapshot is there for others, its files are what they were, and equal contents are stored once",
  withDir(async (dir) => {
    const store = new FolderStore(join(dir, "store"));
    const repository = new SnapshotRepository(store);
    const [a, b] = [snapshotFiles(dir, 1), snapshotFiles(dir, 2)];
    const seen: number[] = [];
    const record = { machine: { vcpus: 1 } };
    await repository.publish({
      id: "s1",
      record,
      files: a,
      scratch: join(dir, "x"),
      onProgress: (d, t) => seen.push(d / t),
    });
    await repository.publish({ id: "s2", record, files: b, scratch: join(dir, "x") });
    assert.deepEqual(readdirSync(join(dir, "x")), [], "no scratch file is left");
    assert.equal(seen.at(-1), 1);
    const other = new SnapshotRepository(new FolderStore(join(dir, "store")));
    assert.deepEqual(
      (await other.list()).map((m) => [m.id, m.record]),
      [
        ["s1", record],
        ["s2", record],
      ],
    );
    await checkFetched(other, "s1", join(dir, "f"), a);
    await checkFetched(other, "s2", join(dir, "f"), b);
    const memory = join(dir, "f", "s1", "1");
    assert.ok(statSync(memory).blocks * 512 < MIB, "zeros are holes");
    assert.equal((await keys(store)).filter((k) => k.startsWith("blobs/")).length, 5);
    const use = await storeUse(other);
    assert.ok(use.every((u) => u.aloneBytes > 0 && u.aloneBytes < u.bytes));
    await repository.publish({ id: "s1", record, files: a, scratch: join(dir, "x") });
    assert.equal((await keys(store)).length, 7, "again is the same");
  }),
);

test(
  "a publish that breaks at any step is invisible, and the next one completes it",
  withDir(async (dir) => {
    const files = snapshotFiles(dir, 1);
    for (let steps = 0; ; steps++) {
      const store = new FolderStore(join(dir, `store-${steps}`));
      const broken = new SnapshotRepository(breaksAfter(store, steps));
      const publish = { id: "s1", record: {}, files, scratch: join(dir, "x") };
      const failed = await broken.publish(publish).then(
        () => false,
        (e: unknown) => code("UNAVAILABLE")(e),
      );
      const repository = new SnapshotRepository(store);
      if (!failed) {
        assert.ok(steps >= 5, "note, three blobs and the manifest");
        break;
      }
      assert.deepEqual(await repository.list(), []);
      await assert.rejects(repository.get("s1"), code("NOT_FOUND"));
      await repository.publish(publish);
      await checkFetched(repository, "s1", join(dir, `f-${steps}`), files);
    }
  }),
);

test(
  "other bytes than were published are refused, whatever they are, and no file appears",
  withDir(async (dir) => {
    const store = new FolderStore(join(dir, "store"));
    const repository = new SnapshotRepository(store);
    const { blobs } = await repository.publish({
      id: "s1",
      record: {},
      files: snapshotFiles(dir, 1),
      scratch: join(dir, "x"),
    });
    for (const blob of blobs) {
      const path = join(dir, "store", blob.key);
      const good = readFileSync(path);
      for (const change of ["flip", "cut", "grow"] as const) {
        const bad = Buffer.from(change === "cut" ? good.subarray(0, -1) : good);
        if (change === "flip") bad.writeUInt8(bad.readUInt8(bad.length >> 1) ^ 1, bad.length >> 1);
        writeFileSync(path, change === "grow" ? Buffer.concat([Buffer.from("x"), bad]) : bad);
        const target = join(dir, "out", "file");
        await assert.rejects(repository.fetch(blob, target), code("CORRUPT"));
        assert.deepEqual(readdirSync(join(dir, "out")), []);
      }
      writeFileSync(path, good);
    }
  }),
);

test(
  "a damaged manifest is told by name and hides nothing else",
  withDir(async (dir) => {
    const store = new FolderStore(join(dir, "store"));
    const repository = new SnapshotRepository(store);
    const files = snapshotFiles(dir, 1);
    const good = await repository.publish({ id: "s1", record: {}, files, scratch: join(dir, "x") });
    const bad: unknown[] = [
      "{",
      [],
      { ...good, version: 2 },
      { ...good, id: "s2" },
      { ...good, id: "../s1" },
      { ...good, blobs: [{ ...good.blobs[0], key: "../../etc/passwd" }] },
      { ...good, blobs: [{ ...good.blobs[0], bytes: -1 }] },
      { ...good, blobs: Array.from({ length: 2000 }, () => good.blobs[0]) },
    ];
    for (const value of bad) {
      await store.put("snapshots/s1.json", Buffer.from(typeof value === "string" ? value : JSON.stringify(value)));
      await assert.rejects(
        repository.get("s1"),
        (e) => code("CORRUPT")(e) && /snapshots\/s1\.json/.test((e as Error).message),
      );
    }
    for (const id of ["../x", "", "A", "a/b"]) {
      await assert.rejects(repository.get(id), code("NOT_FOUND"));
      await assert.rejects(repository.publish({ id, record: {}, files, scratch: dir }), code("INVALID_ARGUMENT"));
    }
  }),
);

type Step =
  | { op: "publish"; id: number; seed: number; breaks: number | undefined }
  | { op: "remove"; id: number }
  | { op: "collect"; dry: boolean };
const step: fc.Arbitrary<Step> = fc.oneof(
  {
    weight: 4,
    arbitrary: fc.record({
      op: fc.constant("publish" as const),
      id: fc.nat(4),
      seed: fc.nat(5),
      breaks: fc.option(fc.nat(6), { nil: undefined }),
    }),
  },
  { weight: 2, arbitrary: fc.record({ op: fc.constant("remove" as const), id: fc.nat(4) }) },
  { weight: 3, arbitrary: fc.record({ op: fc.constant("collect" as const), dry: fc.boolean() }) },
);

test(
  "whatever is published, removed, broken off and collected: all of a snapshot stays, and in the end nothing else",
  withDir(async (dir) => {
    let n = 0;
    await fc.assert(
      fc.asyncProperty(fc.array(step, { maxLength: 25 }), async (steps) => {
        const store = new FolderStore(join(dir, `store-${n}`));
        const repository = new SnapshotRepository(store);
        const there = new Map<string, PublishFile[]>();
        let now = Date.now();
        const collect = (dryRun: boolean): ReturnType<typeof collectGarbage> => {
          now += 2 * 3_600_000;
          return collectGarbage(repository, { now, dryRun });
        };
        for (const s of steps) {
          if (s.op === "publish") {
            const files = snapshotFiles(dir, s.seed);
            const target = s.breaks === undefined ? store : breaksAfter(store, s.breaks);
            const published = new SnapshotRepository(target).publish({
              id: `s${s.id}`,
              record: {},
              files,
              scratch: join(dir, "x"),
            });
            await published.then(
              () => there.set(`s${s.id}`, files),
              () => {},
            );
          } else if (s.op === "remove") {
            await repository.remove(`s${s.id}`);
            there.delete(`s${s.id}`);
          } else {
            const before = s.dry ? await keys(store) : [];
            await collect(s.dry);
            if (s.dry) assert.deepEqual(await keys(store), before, "a dry run changes nothing");
          }
        }
        assert.deepEqual((await repository.list()).map((m) => m.id).toSorted(), [...there.keys()].toSorted());
        // Notes of publishers that died keep their blobs for a day.
        now += 48 * 3_600_000;
        await collect(false);
        await collect(false);
        for (const [id, files] of there) await checkFetched(repository, id, join(dir, `f-${n}`), files);
        const used = new Set((await repository.list()).flatMap((m) => m.blobs.map((b) => b.key)));
        const wanted = [...used, ...[...there.keys()].map((id) => `snapshots/${id}.json`), "doomed.json"];
        assert.deepEqual(await keys(store), wanted.toSorted());
        n++;
      }),
      { numRuns: 40 },
    );
  }),
);

test(
  "a publisher that meets a doomed blob stores its own, so that no collector deletes it under it",
  withDir(async (dir) => {
    const store = new FolderStore(join(dir, "store"));
    const repository = new SnapshotRepository(store);
    const files = snapshotFiles(dir, 1);
    const first = await repository.publish({ id: "s1", record: {}, files, scratch: join(dir, "x") });
    await repository.remove("s1");
    const doomed = await collectGarbage(repository);
    assert.equal(doomed.doomed.length, 3);
    assert.equal((await collectGarbage(repository)).deleted.length, 0, "not before its grace is over");
    const second = await repository.publish({ id: "s2", record: {}, files, scratch: join(dir, "x") });
    assert.ok(second.blobs.every((b, i) => b.key !== first.blobs[i]?.key));
    const { deleted } = await collectGarbage(repository, { now: Date.now() + 2 * 3_600_000 });
    assert.deepEqual(deleted.map((d) => d.key).toSorted(), first.blobs.map((b) => b.key).toSorted());
    await checkFetched(repository, "s2", join(dir, "f"), files);
  }),
);

test(
  "an archive carries a snapshot to another store; a damaged or foreign one is refused and leaves no snapshot",
  withDir(async (dir) => {
    const from = new SnapshotRepository(new FolderStore(join(dir, "from")));
    const files = snapshotFiles(dir, 1);
    await from.publish({ id: "s1", record: { a: 1 }, files, scratch: join(dir, "x") });
    const archive = join(dir, "s1.tar");
    await exportSnapshot(from, "s1", createWriteStream(archive));
    const to = new SnapshotRepository(new FolderStore(join(dir, "to")));
    const manifest = await importSnapshot(to, createReadStream(archive), join(dir, "y"));
    assert.deepEqual([manifest.id, manifest.record], ["s1", { a: 1 }]);
    await checkFetched(to, "s1", join(dir, "f"), files);
    assert.deepEqual(readdirSync(join(dir, "y")), []);
    const good = readFileSync(archive);
    const refused = async (bytes: Buffer, wanted: readonly string[]): Promise<void> => {
      const store = new FolderStore(join(dir, "refused"));
      await assert.rejects(
        importSnapshot(new SnapshotRepository(store), Readable.from([bytes]), join(dir, "y")),
        (e) => {
          assert.ok(e instanceof AenvError && wanted.includes(e.code), String(e));
          return true;
        },
      );
      assert.deepEqual(await new SnapshotRepository(store).list(), []);
      assert.deepEqual(readdirSync(join(dir, "y")), []);
    };
    await refused(Buffer.from("not a tar at all"), ["INVALID_ARGUMENT"]);
    await refused(Buffer.alloc(0), ["INVALID_ARGUMENT"]);
    await refused(good.subarray(0, good.length >> 1), ["INVALID_ARGUMENT"]);
    await refused(good.subarray(512), ["INVALID_ARGUMENT"]);
    await refused(Buffer.concat([good.subarray(0, 2048), good]), ["INVALID_ARGUMENT", "CORRUPT"]);
    const bad = Buffer.from(good);
    const at = bad.indexOf("device state 1");
    assert.ok(at > 0);
    bad.write("device state 2", at);
    await refused(bad, ["CORRUPT"]);
    const seed = Number(process.env["LAYER_FUZZ_SEED"] ?? Date.now() % 2 ** 31);
    for (const [where, byte] of fc.sample(fc.tuple(fc.nat(good.length - 1), fc.nat(255)), { numRuns: 120, seed })) {
      const b = Buffer.from(good);
      b[where] = byte;
      const store = new FolderStore(join(dir, "fuzz"));
      await importSnapshot(new SnapshotRepository(store), Readable.from([b]), join(dir, "y")).catch((e: unknown) => {
        assert.ok(e instanceof AenvError, `seed ${seed}: ${String(e)}`);
      });
    }
    await assert.rejects(exportSnapshot(from, "s9", createWriteStream(join(dir, "none"))), code("NOT_FOUND"));
    assert.ok(existsSync(archive));
  }),
);

describe("over S3", () => {
  let server: S3Server;
  before(async () => {
    server = await S3Server.start();
  });
  after(async () => {
    await server[Symbol.asyncDispose]();
  });

  test(
    "a snapshot that one node published is fetched by another, while the store comes and goes",
    withDir(async (dir) => {
      using one = await openStore(server.address("shared"));
      using two = await openStore(server.address("shared"));
      const files = snapshotFiles(dir, 3);
      const publishing = new SnapshotRepository(one).publish({ id: "s3", record: {}, files, scratch: join(dir, "x") });
      await server.down();
      await server.up();
      await publishing;
      const other = new SnapshotRepository(two);
      server.pause();
      const fetching = checkFetched(other, "s3", join(dir, "f"), files);
      server.goOn();
      await fetching;
      const { deleted, kept } = await collectGarbage(other, { now: Date.now() + 3_600_000 });
      assert.deepEqual([deleted.length, kept.blobs], [0, 3]);
    }),
  );
});
