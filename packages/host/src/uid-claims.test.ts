import assert from "node:assert/strict";
import { spawn } from "node:child_process";
import { once } from "node:events";
import { existsSync, mkdirSync, mkdtempSync, readdirSync, rmSync, symlinkSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { after, test } from "node:test";
import { AenvError } from "@aenv/base";
import { ensureNodeConfig } from "./home.ts";
import { claimUids, releaseUids, type UidClaimant } from "./uid-claims.ts";

const dir = mkdtempSync(join(tmpdir(), "aenv-uids-"));
after(() => rmSync(dir, { recursive: true }));
let n = 0;
const fresh = (): { folder: string; subuid: string } => {
  const folder = join(dir, `claims-${++n}`);
  return { folder, subuid: join(dir, `subuid-${n}`) };
};

async function newNode(): Promise<UidClaimant> {
  const home = join(dir, `home-${++n}`);
  mkdirSync(home);
  return { home, instance: (await ensureNodeConfig(home, { port: 1 })).instance };
}

/** A range has one uid before its first and 4096 from it on. */
const disjoint = (bases: readonly number[]): boolean =>
  bases.every((a, i) => bases.every((b, j) => i === j || Math.abs(a - b) > 4096));

test("nodes get ranges of their own, keep them, and give them back", async () => {
  const where = fresh();
  const nodes = await Promise.all([newNode(), newNode(), newNode()]);
  const bases = await Promise.all(nodes.map((node) => claimUids(node, where)));
  assert.ok(disjoint(bases), bases.join(" "));
  assert.deepEqual(await Promise.all(nodes.map((node) => claimUids(node, where))), bases);
  const [first, ...rest] = nodes as [UidClaimant, ...UidClaimant[]];
  await releaseUids(first, where.folder);
  assert.equal(await claimUids(await newNode(), where), bases[0]);
  for (const node of rest) await releaseUids(node, where.folder);
  assert.equal(readdirSync(where.folder).length, 1);
});

test("the last one to leave takes the folder along", async () => {
  const where = fresh();
  const node = await newNode();
  await claimUids(node, where);
  await releaseUids(node, where.folder);
  assert.equal(existsSync(where.folder), false);
  await releaseUids(node, where.folder);
});

test("a node whose data folder is gone or another's has no claim; one that cannot be read has", async () => {
  const where = fresh();
  const [gone, replaced, unreadable] = [await newNode(), await newNode(), await newNode()];
  const bases: number[] = [];
  for (const node of [gone, replaced, unreadable]) bases.push(await claimUids(node, where));
  rmSync(gone.home, { recursive: true });
  rmSync(join(replaced.home, "config.json"));
  await ensureNodeConfig(replaced.home, { port: 1 });
  writeFileSync(join(unreadable.home, "config.json"), "{");
  const next = [await newNode(), await newNode(), await newNode()];
  const got: number[] = [];
  for (const node of next) got.push(await claimUids(node, where));
  assert.deepEqual(new Set(got.slice(0, 2)), new Set(bases.slice(0, 2)));
  assert.ok(disjoint([...got, bases[2] ?? 0]));
});

test("what the operator chose is taken, and refused where another node has any of it", async () => {
  const where = fresh();
  const [one, two] = [await newNode(), await newNode()];
  const base = await claimUids(one, where);
  for (const wanted of [base - 4096, base - 1, base, base + 1, base + 4096])
    await assert.rejects(claimUids(two, { ...where, wanted }), (e) => {
      return e instanceof AenvError && e.code === "CONFLICT" && e.message.includes(one.home);
    });
  assert.equal(await claimUids(two, { ...where, wanted: base + 4097 }), base + 4097);
  assert.equal(await claimUids(two, { ...where, wanted: 700_000 }), 700_000);
  assert.equal(readdirSync(where.folder).length, 2, "the former one is given back");
  assert.equal(await claimUids(two, where), 700_000);
});

test("uids of containers are left alone", async () => {
  const where = fresh();
  writeFileSync(where.subuid, "a:100000:65536\nb:165536:65536\n# nothing\nc:oops:1\nd:231072:10\n");
  const base = await claimUids(await newNode(), where);
  assert.ok(base - 1 >= 231_082, String(base));
});

test("a claimant that is killed at any moment leaves a claim or none, and the next one goes on", async () => {
  const where = fresh();
  const node = await newNode();
  const script = `const { claimUids } = await import(${JSON.stringify(join(import.meta.dirname, "uid-claims.ts"))});
    for (;;) { await claimUids(${JSON.stringify(node)}, ${JSON.stringify({ ...where, wanted: 300_000 })}); process.stdout.write("."); await claimUids(${JSON.stringify(node)}, ${JSON.stringify({ ...where, wanted: 310_000 })}); }`;
  for (let round = 0; round < 4; round++) {
    const child = spawn(process.execPath, ["--input-type=module", "-e", script], {
      stdio: ["ignore", "pipe", "inherit"],
    });
    await once(child.stdout, "data");
    child.kill("SIGKILL");
    await once(child, "exit");
    const base = await claimUids(node, where);
    const other = await newNode();
    assert.ok(disjoint([base, await claimUids(other, where)]));
    await releaseUids(other, where.folder);
  }
});

test("what is no claim is nobody's", async () => {
  const where = fresh();
  mkdirSync(where.folder);
  symlinkSync("nobody", join(where.folder, "200000"));
  symlinkSync("x", join(where.folder, "note"));
  assert.equal(await claimUids(await newNode(), where), 200_000);
});
