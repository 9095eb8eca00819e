import { createHash } from "node:crypto";
import type { Readable, Writable } from "node:stream";
import { buffer } from "node:stream/consumers";
import { AenvError } from "@aenv/base";
import type { StoredSnapshot, TemplateView, Transfer } from "@aenv/engine";
import type { ExchangeApi } from "../src/ports.ts";

/** A store without blobs: what was published is a row; an archive is the template's name and a sum of it. */
export class FakeExchange implements ExchangeApi {
  readonly #find: (nameOrId: string) => TemplateView | undefined;
  readonly #add: (name: string) => TemplateView;
  readonly #stored = new Map<string, StoredSnapshot>();
  readonly #transfers: Transfer[] = [];

  constructor(find: (nameOrId: string) => TemplateView | undefined, add: (name: string) => TemplateView) {
    this.#find = find;
    this.#add = add;
  }

  async publish(nameOrId: string): Promise<Transfer> {
    const { snapshotId, name } = this.#have(nameOrId);
    this.#stored.set(snapshotId, { snapshotId, name, publishedAt: Date.now(), bytes: 10, aloneBytes: 10, here: true });
    return this.#done("publish", snapshotId);
  }

  async fetch(snapshotId: string, name: string | undefined): Promise<Transfer> {
    const stored = this.#there(snapshotId);
    const { templateId } = this.#add(name ?? stored.name);
    return { ...this.#done("fetch", snapshotId), templateId };
  }

  transfers(): Transfer[] {
    return this.#transfers.toReversed();
  }

  transfer(id: string): Transfer {
    const found = this.#transfers.find((t) => t.id === id);
    if (found) return found;
    throw new AenvError("NOT_FOUND", `there is no transfer ${id.slice(0, 100)}`);
  }

  async published(): Promise<StoredSnapshot[]> {
    return [...this.#stored.values()];
  }

  async unpublish(snapshotId: string): Promise<void> {
    this.#there(snapshotId);
    this.#stored.delete(snapshotId);
  }

  async collect(): ReturnType<ExchangeApi["collect"]> {
    return { doomed: [], deleted: [], kept: { blobs: this.#stored.size, bytes: 10 * this.#stored.size }, swept: 0 };
  }

  async exportArchive(nameOrId: string, to: Writable): Promise<void> {
    const { name } = this.#have(nameOrId);
    to.end(`${name} ${sumOf(name)}`);
  }

  async importArchive(from: Readable, name: string | undefined): Promise<TemplateView> {
    const [own = "", sum] = (await buffer(from)).toString().split(" ");
    if (sum !== sumOf(own)) throw new AenvError("INVALID_ARGUMENT", "the archive cannot be read");
    return this.#add(name ?? own);
  }

  #done(kind: Transfer["kind"], source: string): Transfer {
    const at = Date.now();
    const id = `x${this.#transfers.length}`;
    const t: Transfer = {
      id,
      kind,
      source,
      state: "done",
      doneBytes: 10,
      totalBytes: 10,
      attempts: 1,
      startedAt: at,
      endedAt: at,
    };
    this.#transfers.push(t);
    return t;
  }

  #have(nameOrId: string): TemplateView {
    const found = this.#find(nameOrId);
    if (found) return found;
    throw new AenvError("NOT_FOUND", `template '${nameOrId.slice(0, 100)}' not found`);
  }

  #there(snapshotId: string): StoredSnapshot {
    const found = this.#stored.get(snapshotId);
    if (found) return found;
    throw new AenvError("NOT_FOUND", `the store has no snapshot ${snapshotId.slice(0, 100)}`);
  }
}

const sumOf = (text: string): string => createHash("sha256").update(text).digest("hex").slice(0, 16);
