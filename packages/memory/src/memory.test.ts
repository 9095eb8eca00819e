import assert from "node:assert/strict";
import { type ChildProcessWithoutNullStreams, spawn } from "node:child_process";
import { randomBytes } from "node:crypto";
import { mkdtemp, readFile, rm, writeFile } from "node:fs/promises";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { createInterface } from "node:readline";
import { type TestContext, test } from "node:test";
import fc from "fast-check";
import { type DeltaPiece, type GuestMapping, inject, narrow, PAGE_BYTES, readRuns, writtenRuns } from "./index.ts";

const PAGES = 256;

/** A process that maps a file privately, as a VMM does, and writes to it on demand. */
const HOLDER = `
import ctypes, mmap, os, sys
fd = os.open(sys.argv[1], os.O_RDONLY)
m = mmap.mmap(fd, ${PAGES * PAGE_BYTES}, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
print(ctypes.addressof(ctypes.c_char.from_buffer(m)), flush=True)
for line in sys.stdin:
    op, page, value = line.split()
    page = int(page) * ${PAGE_BYTES}
    if op == "read": print(m[page], flush=True)
    elif op == "fill": m[page:page + ${PAGE_BYTES}] = bytes([int(value)]) * ${PAGE_BYTES}; print("ok", flush=True)
`;

interface Holder {
  mappings: GuestMapping[];
  file: string;
  content: Buffer;
  ask(line: string): Promise<string>;
}

async function holder(t: TestContext): Promise<Holder> {
  const dir = await mkdtemp(join(tmpdir(), "aenv-memory-"));
  t.after(() => rm(dir, { recursive: true }));
  const file = join(dir, "memory");
  const content = randomBytes(PAGES * PAGE_BYTES);
  await writeFile(file, content);
  const child: ChildProcessWithoutNullStreams = spawn("python3", ["-c", HOLDER, file]);
  t.after(() => child.kill("SIGKILL"));
  const lines = createInterface({ input: child.stdout })[Symbol.asyncIterator]();
  const next = async (): Promise<string> => String((await lines.next()).value);
  const hostAddress = BigInt(await next());
  const half = (PAGES / 2) * PAGE_BYTES;
  // Two mappings, as a guest with memory below and above 4 GiB has.
  const mappings = [
    { pid: child.pid ?? 0, hostAddress, guestOffset: 0, length: half },
    { pid: child.pid ?? 0, hostAddress: hostAddress + BigInt(half), guestOffset: half, length: half },
  ];
  return {
    mappings,
    file,
    content,
    ask: (line) => {
      child.stdin.write(`${line}\n`);
      return next();
    },
  };
}

test("only written pages are found, read pages are not, and neighbours make one run over two mappings", async (t) => {
  const h = await holder(t);
  assert.deepEqual(writtenRuns(h.mappings), []);
  await h.ask("read 5 0");
  for (const page of [3, 4, 127, 128, 255]) await h.ask(`fill ${page} ${page}`);
  const page = (first: number, count: number) => ({ offset: first * PAGE_BYTES, length: count * PAGE_BYTES });
  assert.deepEqual(writtenRuns(h.mappings), [page(3, 2), page(127, 2), page(255, 1)]);
  const read = [...readRuns(h.mappings, writtenRuns(h.mappings))];
  assert.equal(
    read.reduce((n, p) => n + p.length, 0),
    5 * PAGE_BYTES,
  );
  const at = read.find((p) => p.offset === 128 * PAGE_BYTES);
  assert.deepEqual(at?.data, Buffer.alloc(PAGE_BYTES, 128));
});

test("what is injected is what the process sees, and the file stays as it was", async (t) => {
  const h = await holder(t);
  const data = Buffer.alloc(3 * PAGE_BYTES, 77);
  const wrote = inject(h.mappings, [
    { offset: 127 * PAGE_BYTES, length: data.length, data },
    { offset: 10 * PAGE_BYTES, length: PAGE_BYTES, data: undefined },
  ]);
  assert.equal(wrote, 4 * PAGE_BYTES);
  assert.deepEqual([await h.ask("read 127 0"), await h.ask("read 129 0"), await h.ask("read 10 0")], ["77", "77", "0"]);
  assert.equal(Buffer.compare(await readFile(h.file), h.content), 0);
});

test("a process that has ended and an address outside the machine are told, not guessed", async (t) => {
  const h = await holder(t);
  const gone = h.mappings.map((m) => ({ ...m, pid: 2 ** 22 + 1 }));
  assert.throws(() => writtenRuns(gone), { code: "VMM_FAILED" });
  const outside = { offset: PAGES * PAGE_BYTES, length: PAGE_BYTES, data: undefined };
  assert.throws(() => inject(h.mappings, [outside]), { code: "CORRUPT" });
});

test("parent plus what narrow keeps is the child, for any mix of equal, zero and new pages", () => {
  const page = fc.constantFrom<"same" | "zero" | "new">("same", "zero", "new");
  fc.assert(
    fc.property(fc.array(page, { minLength: 1, maxLength: 40 }), fc.nat(1000), (kinds, first) => {
      const parent = randomBytes(kinds.length * PAGE_BYTES);
      const child = Buffer.from(parent);
      kinds.forEach((k, i) => {
        if (k === "zero") child.fill(0, i * PAGE_BYTES, (i + 1) * PAGE_BYTES);
        if (k === "new") randomBytes(PAGE_BYTES).copy(child, i * PAGE_BYTES);
      });
      const base = first * PAGE_BYTES;
      const kept = narrow({ offset: base, length: child.length, data: child }, (offset, into) => {
        parent.copy(into, 0, offset - base);
      });
      const rebuilt = Buffer.from(parent);
      for (const k of kept) {
        if (k.data) k.data.copy(rebuilt, k.offset - base);
        else rebuilt.fill(0, k.offset - base, k.offset - base + k.length);
      }
      assert.equal(Buffer.compare(rebuilt, child), 0);
      const bytes = (pieces: readonly DeltaPiece[]): number => pieces.reduce((n, p) => n + p.length, 0);
      assert.equal(bytes(kept), kinds.filter((k) => k !== "same").length * PAGE_BYTES);
    }),
    { numRuns: 100 },
  );
});
