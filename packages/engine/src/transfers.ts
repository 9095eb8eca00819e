/** Long moves of snapshots in the background, whose state everybody can see. */
import { readdir, readFile, rm } from "node:fs/promises";
import { mkdirSync } from "node:fs";
import { join } from "node:path";
import { AenvError, messageOf, randomName, Semaphore, sleep } from "@aenv/base";
import { publishFile } from "@aenv/host";
import { z } from "zod";
import type { Context } from "./context.ts";

const AT_ONCE = 2;
const KEPT = 200;
const ATTEMPTS = 6;
const FIRST_PAUSE_MS = 2000;

const transferSchema = z.object({
  id: z.string(),
  kind: z.enum(["publish", "fetch"]),
  /** Of a template or snapshot here, or of a snapshot in the store. */
  source: z.string(),
  /** Of the template that a fetched snapshot becomes. */
  name: z.string().optional(),
  state: z.enum(["queued", "running", "done", "failed"]),
  doneBytes: z.number(),
  totalBytes: z.number(),
  attempts: z.number(),
  snapshotId: z.string().optional(),
  templateId: z.string().optional(),
  error: z.object({ code: z.string(), message: z.string(), hint: z.string() }).optional(),
  startedAt: z.number(),
  endedAt: z.number().optional(),
});
export type Transfer = z.infer<typeof transferSchema>;

/** Legal moves; a transfer that a server's end cut off is queued again by the next server. */
const MOVES: Readonly<Record<Transfer["state"], readonly Transfer["state"][]>> = {
  queued: ["running", "failed"],
  running: ["queued", "done", "failed"],
  done: [],
  failed: [],
};

export interface Worked {
  snapshotId: string;
  templateId?: string;
}
export type Work = (
  t: Readonly<Transfer>,
  onProgress: (done: number, total: number) => void,
  signal: AbortSignal,
) => Promise<Worked>;

export class Transfers {
  readonly #ctx: Context;
  readonly #work: Work;
  readonly #all = new Map<string, Transfer>();
  readonly #slots = new Semaphore(AT_ONCE);
  readonly #pauseMs: number;

  constructor(ctx: Context, work: Work, pauseMs = FIRST_PAUSE_MS) {
    this.#ctx = ctx;
    this.#work = work;
    this.#pauseMs = pauseMs;
  }

  /** Goes on with what an earlier server began. */
  async recover(): Promise<void> {
    const dir = this.#ctx.paths.transfers;
    mkdirSync(dir, { recursive: true, mode: 0o700 });
    for (const name of await readdir(dir)) {
      const path = join(dir, name);
      try {
        const t = transferSchema.parse(JSON.parse(await readFile(path, "utf8")));
        this.#all.set(t.id, t);
      } catch (e) {
        this.#ctx.logger.warn({ path, error: messageOf(e) }, "the record of a transfer cannot be read and is dropped");
        await rm(path, { force: true });
      }
    }
    for (const t of this.#all.values()) {
      if (t.state === "running") t.state = "queued";
      if (t.state === "queued") this.#spawn(t);
    }
  }

  /** The same again while it is not over is the one that runs. */
  async start(kind: Transfer["kind"], source: string, name?: string): Promise<Transfer> {
    const running = this.list().find((t) => t.kind === kind && t.source === source && t.name === name && !isOver(t));
    if (running) return running;
    const t: Transfer = {
      id: `x${randomName(16)}`,
      kind,
      source,
      ...(name === undefined ? {} : { name }),
      state: "queued",
      doneBytes: 0,
      totalBytes: 0,
      attempts: 0,
      startedAt: this.#ctx.clock.now(),
    };
    await this.#save(t);
    this.#all.set(t.id, t);
    await this.#trim();
    this.#spawn(t);
    return { ...t };
  }

  /** Newest first. */
  list(): Transfer[] {
    return [...this.#all.values()].map((t) => ({ ...t })).toSorted((a, b) => b.startedAt - a.startedAt);
  }

  get(id: string): Transfer {
    const t = this.#all.get(id);
    if (t) return { ...t };
    throw new AenvError("NOT_FOUND", `there is no transfer ${id.slice(0, 100)}`, {
      hint: `A node remembers the last ${KEPT}.`,
    });
  }

  #spawn(t: Transfer): void {
    this.#ctx.tasks.spawn(`transfer ${t.id}`, async (signal) => {
      for (;;) {
        if (await this.#slots.run(() => this.#try(t, signal), signal)) return;
        await sleep(this.#pauseMs * 2 ** (t.attempts - 1), signal);
      }
    });
  }

  /** True when it is over. */
  async #try(t: Transfer, signal: AbortSignal): Promise<boolean> {
    await this.#move(t, "running", { attempts: t.attempts + 1, doneBytes: 0 });
    try {
      const progress = (done: number, total: number): void => {
        t.doneBytes = done;
        t.totalBytes = total;
      };
      const { snapshotId, templateId } = await this.#work({ ...t }, progress, signal);
      const made = { snapshotId, ...(templateId === undefined ? {} : { templateId }), error: undefined };
      await this.#move(t, "done", { ...made, endedAt: this.#ctx.clock.now() });
      return true;
    } catch (e) {
      // The server ends: the next one goes on.
      if (signal.aborted) return true;
      const { code, message, hint, retry } = AenvError.from(e, `${t.kind} ${t.source}`);
      const again = retry && t.attempts < ATTEMPTS;
      this.#ctx.logger.warn({ transfer: t.id, code, error: message, again }, "a transfer failed");
      const error = { code, message, hint };
      if (again) await this.#move(t, "queued", { error });
      else await this.#move(t, "failed", { error, endedAt: this.#ctx.clock.now() });
      return !again;
    }
  }

  async #move(t: Transfer, to: Transfer["state"], change: Partial<Record<keyof Transfer, unknown>>): Promise<void> {
    if (!MOVES[t.state].includes(to))
      throw new AenvError("INTERNAL", `transfer ${t.id} cannot go from ${t.state} to ${to}`);
    Object.assign(t, change, { state: to });
    await this.#save(t);
  }

  async #save(t: Transfer): Promise<void> {
    await publishFile(join(this.#ctx.paths.transfers, `${t.id}.json`), JSON.stringify(t), 0o600);
  }

  async #trim(): Promise<void> {
    for (const t of this.list().slice(KEPT)) {
      if (!isOver(t)) continue;
      this.#all.delete(t.id);
      await rm(join(this.#ctx.paths.transfers, `${t.id}.json`), { force: true });
    }
  }
}

const isOver = (t: Transfer): boolean => MOVES[t.state].length === 0;
