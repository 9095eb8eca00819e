import type { Readable, Writable } from "node:stream";
import type { CollectedStore, StoredSnapshot, Template, Transfer } from "@aenv/contract";
import type { HttpClient } from "./http.ts";

const part = encodeURIComponent;

/** Snapshots in the node's store, and as files. */
export class StoreClient {
  readonly #http: HttpClient;

  constructor(http: HttpClient) {
    this.#http = http;
  }

  /** Starts it; ask for the transfer. */
  async publish(nameOrId: string, signal?: AbortSignal): Promise<Transfer> {
    return (await this.#http.call("POST", `/v1/snapshots/${part(nameOrId)}/publish`, { signal, repeatable: true }))
      .body as Transfer;
  }

  /** Starts it; ask for the transfer. */
  async fetch(snapshotID: string, name?: string, signal?: AbortSignal): Promise<Transfer> {
    const body = name === undefined ? {} : { name };
    const path = `/v1/store/snapshots/${part(snapshotID)}/fetch`;
    return (await this.#http.call("POST", path, { body, signal, repeatable: true })).body as Transfer;
  }

  async transfer(transferID: string, signal?: AbortSignal): Promise<Transfer> {
    return (await this.#http.call("GET", `/v1/transfers/${part(transferID)}`, { signal })).body as Transfer;
  }

  async transfers(signal?: AbortSignal): Promise<Transfer[]> {
    return (await this.#http.call("GET", "/v1/transfers", { signal })).body as Transfer[];
  }

  async list(signal?: AbortSignal): Promise<StoredSnapshot[]> {
    return (await this.#http.call("GET", "/v1/store/snapshots", { signal })).body as StoredSnapshot[];
  }

  async remove(snapshotID: string, signal?: AbortSignal): Promise<void> {
    await this.#http.call("DELETE", `/v1/store/snapshots/${part(snapshotID)}`, { signal, repeatable: true });
  }

  async collect(
    options: { dryRun?: boolean; graceSeconds?: number | undefined } = {},
    signal?: AbortSignal,
  ): Promise<CollectedStore> {
    return (await this.#http.call("POST", "/v1/store/collect", { body: options, signal })).body as CollectedStore;
  }

  /** Writes the archive of a template or snapshot; ends the stream. Rejects when it is not complete. */
  async exportTo(nameOrId: string, to: Writable, signal?: AbortSignal): Promise<void> {
    await this.#http.stream("GET", `/v1/snapshots/${part(nameOrId)}/archive`, { to, signal });
  }

  async importFrom(from: Readable, name?: string, signal?: AbortSignal): Promise<Template> {
    const query = name === undefined ? "" : `?name=${part(name)}`;
    return (await this.#http.stream("POST", `/v1/archives${query}`, { from, signal })) as Template;
  }
}
