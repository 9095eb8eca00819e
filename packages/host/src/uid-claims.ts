/**
 * Which node of this host runs its virtual machines as which uids: processes of equal uids may signal and trace each
 * other, so no two nodes may share any. A claim is a symbolic link `<first uid>` to `<instance>:<data folder>` in one
 * folder of the host; it stands as long as that data folder is the one of that instance.
 */
import { mkdir, readdir, readFile, readlink, rename, rm, rmdir, symlink } from "node:fs/promises";
import { createServer, type Server } from "node:net";
import { join } from "node:path";
import { AenvError, errnoOf, sleep } from "@aenv/base";
import { readNodeConfig } from "./home.ts";

/** Of the uids that VMMs run as, one per network slot; the one before them is for the node's egress gateway. */
const RANGE = 4096;
const FIRST = 200_000;
const STEP = 5000;
const LAST = 2 ** 31 - RANGE;
const CLAIMS = "/var/lib/aenv-uids";
const LOCK = "\0aenv-uids";
const LOCK_DEADLINE_MS = 20_000;
const LOCK_POLL_MS = 50;

export interface UidClaimant {
  home: string;
  instance: string;
}

export interface UidClaimOptions {
  /** What the operator chose. CONFLICT where another node has it. */
  wanted?: number | undefined;
  /** For tests. */
  folder?: string;
  subuid?: string;
}

interface Claim {
  name: string;
  base: number;
  owner: string;
}

/** The lowest uid of this node: the one it had before, or the lowest that is free. */
export async function claimUids(node: UidClaimant, options: UidClaimOptions = {}): Promise<number> {
  const { wanted, folder = CLAIMS, subuid = "/etc/subuid" } = options;
  await using _lock = await locked();
  await mkdir(folder, { recursive: true, mode: 0o755 });
  const claims = await standing(folder);
  const own = claims.filter((c) => c.owner === ownerOf(node));
  const others = claims.filter((c) => c.owner !== ownerOf(node));
  const before = own.find((c) => wanted === undefined || c.base === wanted);
  for (const c of own) if (c !== before) await rm(join(folder, c.name), { force: true });
  if (before) return before.base;
  const base = wanted ?? lowestFree(others, await delegated(subuid));
  const holder = others.find((c) => overlap(base, c.base));
  if (holder)
    throw new AenvError("CONFLICT", `uid ${base} and those above it belong to the node of ${holder.owner}`, {
      hint: "Leave AENV_UID_BASE away, or choose another.",
    });
  // A name of its own first: a claim appears whole or not at all.
  const temp = join(folder, `.${node.instance}.tmp`);
  await rm(temp, { force: true });
  await symlink(ownerOf(node), temp);
  await rename(temp, join(folder, String(base)));
  return base;
}

/** Gives back what the node has claimed. */
export async function releaseUids(node: UidClaimant, folder: string = CLAIMS): Promise<void> {
  await using _lock = await locked();
  for (const c of await standing(folder))
    if (c.owner === ownerOf(node)) await rm(join(folder, c.name), { force: true });
  try {
    await rmdir(folder);
  } catch (e) {
    if (!["ENOENT", "ENOTEMPTY"].includes(errnoOf(e) ?? "")) throw e;
  }
}

const ownerOf = ({ instance, home }: UidClaimant): string => `${instance}:${home}`;

/** Ranges are as long as each other, and each has one uid before it. */
const overlap = (a: number, b: number): boolean => Math.abs(a - b) <= RANGE;

function lowestFree(others: readonly Claim[], taken: readonly (readonly [from: number, to: number])[]): number {
  for (let base = FIRST; base <= LAST; base += STEP)
    if (!others.some((c) => overlap(base, c.base)) && !taken.some(([from, to]) => from < base + RANGE && base - 1 < to))
      return base;
  throw new AenvError("UNAVAILABLE", "this host has no free range of uids for another node", {
    hint: `Remove nodes that are not needed; ${CLAIMS} lists them.`,
  });
}

/** The claims whose node still is where it was; the others are removed. */
async function standing(folder: string): Promise<Claim[]> {
  const claims: Claim[] = [];
  for (const name of await readdir(folder).catch((): string[] => [])) {
    if (!/^\d{1,10}$/.test(name)) continue;
    const owner = await readlink(join(folder, name));
    const colon = owner.indexOf(":");
    const instance = owner.slice(0, colon);
    // One that cannot be read may be somebody's.
    const config = await readNodeConfig(owner.slice(colon + 1)).catch(() => ({ instance }));
    if (config?.instance === instance) claims.push({ name, base: Number(name), owner });
    else await rm(join(folder, name), { force: true });
  }
  return claims;
}

/** Uids that containers of this host's users run as. */
async function delegated(path: string): Promise<[from: number, to: number][]> {
  const text = await readFile(path, "utf8").catch(() => "");
  return text.split("\n").flatMap((line): [number, number][] => {
    const [, from, count] = /^[^:]+:(\d+):(\d+)$/.exec(line.trim()) ?? [];
    return from === undefined ? [] : [[Number(from), Number(from) + Number(count)]];
  });
}

/** One claim at a time on the host. An abstract socket: the kernel frees it however the process ends. */
async function locked(): Promise<AsyncDisposable> {
  const until = performance.now() + LOCK_DEADLINE_MS;
  for (;;) {
    const lock = createServer((socket) => socket.destroy());
    try {
      await new Promise<void>((resolve, reject) => {
        lock.once("error", reject);
        lock.listen(LOCK, resolve);
      });
      return { [Symbol.asyncDispose]: () => closed(lock) };
    } catch (e) {
      if (errnoOf(e) !== "EADDRINUSE" || performance.now() > until) throw AenvError.from(e, "lock the claims of uids");
      await sleep(LOCK_POLL_MS);
    }
  }
}

const closed = (server: Server): Promise<void> => new Promise((resolve) => server.close(() => resolve()));
