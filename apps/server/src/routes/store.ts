import { once } from "node:events";
import { PassThrough } from "node:stream";
import type { Transfer as TransferView } from "@aenv/engine";
import type { StoredSnapshot, Transfer } from "@aenv/contract";
import { accepted, created, type Handlers, noContent, ok, streamed } from "../call.ts";
import { templateOf } from "../wire.ts";
import type { RouteDeps } from "./sandboxes.ts";

type StoreRoutes = Pick<
  Handlers,
  | "publishSnapshot"
  | "listTransfers"
  | "getTransfer"
  | "listStore"
  | "fetchSnapshot"
  | "unpublishSnapshot"
  | "collectStore"
  | "exportSnapshot"
  | "importSnapshot"
>;

const iso = (ms: number): string => new Date(ms).toISOString();

function transferOf(t: TransferView): Transfer {
  return {
    transferID: t.id,
    kind: t.kind,
    snapshotID: t.source,
    ...(t.name === undefined ? {} : { name: t.name }),
    state: t.state,
    doneBytes: t.doneBytes,
    totalBytes: t.totalBytes,
    attempts: t.attempts,
    ...(t.templateId === undefined ? {} : { templateID: t.templateId }),
    ...(t.error === undefined
      ? {}
      : { error: { code: t.error.code, message: `${t.error.message} ${t.error.hint}`.trim() } }),
    startedAt: iso(t.startedAt),
    ...(t.endedAt === undefined ? {} : { endedAt: iso(t.endedAt) }),
  };
}

const sum = (objects: readonly { bytes: number }[]): { count: number; bytes: number } => ({
  count: objects.length,
  bytes: objects.reduce((n, o) => n + o.bytes, 0),
});

export function storeRoutes({ engine }: RouteDeps): StoreRoutes {
  const { exchange } = engine;
  return {
    publishSnapshot: async ({ params }) => accepted(transferOf(await exchange.publish(params.name))),
    listTransfers: () => ok(exchange.transfers().map(transferOf)),
    getTransfer: ({ params }) => ok(transferOf(exchange.transfer(params.transferID))),

    listStore: async ({ signal }) =>
      ok(
        (await exchange.published(signal)).map(
          ({ snapshotId, name, publishedAt, bytes, aloneBytes, here }): StoredSnapshot => ({
            snapshotID: snapshotId,
            name,
            publishedAt: iso(publishedAt),
            bytes,
            aloneBytes,
            here,
          }),
        ),
      ),

    fetchSnapshot: async ({ params, body, signal }) =>
      accepted(transferOf(await exchange.fetch(params.snapshotID, body.name ?? undefined, signal))),

    unpublishSnapshot: async ({ params, signal }) => {
      await exchange.unpublish(params.snapshotID, signal);
      return noContent();
    },

    collectStore: async ({ body, signal }) => {
      const grace = body.graceSeconds ?? undefined;
      const options = { dryRun: body.dryRun === true, ...(grace === undefined ? {} : { graceMs: grace * 1000 }) };
      const { kept, doomed, deleted, swept } = await exchange.collect(options, signal);
      return ok({
        kept: { count: kept.blobs, bytes: kept.bytes },
        doomed: sum(doomed),
        deleted: sum(deleted),
        swept,
      });
    },

    exportSnapshot: async ({ params, connection }) => {
      const out = new PassThrough({ highWaterMark: 1024 * 1024 });
      const work = exchange.exportArchive(params.name, out, connection);
      work.catch((e: unknown) => out.destroy(e as Error));
      // Until there is something to send, an error is still an answer.
      await Promise.race([once(out, "readable"), work]);
      return streamed(out);
    },

    importSnapshot: async ({ query, stream, connection }) =>
      created(templateOf(await exchange.importArchive(stream, query.name, connection))),
  };
}
