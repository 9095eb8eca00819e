import { z } from "zod";
import { type RouteDef, route } from "./route.ts";
import { CollectedStore, CollectStore, FetchSnapshot, StoredSnapshot, Transfer } from "./schemas/store.ts";
import { Template } from "./schemas/templates.ts";

const STORE_ERRORS = ["PERMISSION_DENIED", "CORRUPT", "DEADLINE"] as const;
const shared = { auth: "key", tag: "Store", own: true } as const;

/** Snapshots and templates in a store that nodes share, and as files. */
export const STORE_ROUTES = {
  publishSnapshot: route({
    ...shared,
    method: "POST",
    path: "/v1/snapshots/{name}/publish",
    summary: "Publish a template or snapshot to the store",
    description:
      "In the background; ask for the transfer. The snapshot appears in the store when all of it is there. What the store has already is not sent again. UNAVAILABLE: the node has no store (AENV_STORE).",
    success: { 202: { description: "It is on its way.", schema: Transfer } },
    errors: ["NOT_FOUND"],
  }),
  listTransfers: route({
    ...shared,
    method: "GET",
    path: "/v1/transfers",
    summary: "Snapshots on their way to the store or from it",
    success: { 200: { description: "The last 200, newest first.", schema: z.array(Transfer) } },
    errors: [],
  }),
  getTransfer: route({
    ...shared,
    method: "GET",
    path: "/v1/transfers/{transferID}",
    summary: "State of one transfer",
    success: { 200: { description: "As it is now.", schema: Transfer } },
    errors: ["NOT_FOUND"],
  }),
  listStore: route({
    ...shared,
    method: "GET",
    path: "/v1/store/snapshots",
    summary: "What the store holds",
    success: { 200: { description: "Oldest first.", schema: z.array(StoredSnapshot) } },
    errors: STORE_ERRORS,
  }),
  fetchSnapshot: route({
    ...shared,
    method: "POST",
    path: "/v1/store/snapshots/{snapshotID}/fetch",
    summary: "Make a template of this node out of a published snapshot",
    description:
      "In the background; ask for the transfer. Memory comes at once; disk layers stay in the store and are read through the node's cache when they are needed.",
    body: FetchSnapshot,
    bodyOptional: true,
    example: { name: "prepared" },
    success: { 202: { description: "It is on its way.", schema: Transfer } },
    errors: ["INVALID_ARGUMENT", "NOT_FOUND", ...STORE_ERRORS],
  }),
  unpublishSnapshot: route({
    ...shared,
    method: "DELETE",
    path: "/v1/store/snapshots/{snapshotID}",
    summary: "Remove a snapshot from the store",
    description: "Its objects go with the next collections. Nodes that fetched it need them: delete it there first.",
    success: { 204: { description: "It is gone." } },
    errors: ["NOT_FOUND", ...STORE_ERRORS],
  }),
  collectStore: route({
    ...shared,
    method: "POST",
    path: "/v1/store/collect",
    summary: "Delete what no snapshot of the store uses",
    description: "In two runs: the first finds what is unused, a later one deletes what still is.",
    body: CollectStore,
    bodyOptional: true,
    example: { dryRun: true },
    success: { 200: { description: "What was found and done.", schema: CollectedStore } },
    errors: ["INVALID_ARGUMENT", ...STORE_ERRORS],
  }),
  exportSnapshot: route({
    ...shared,
    method: "GET",
    path: "/v1/snapshots/{name}/archive",
    summary: "A template or snapshot as one file",
    description: "A tar that any node can import. A stream that ends early is not complete: its connection is reset.",
    success: { 200: { description: "The archive.", contentType: "application/x-tar" } },
    errors: ["NOT_FOUND", "NO_SPACE", ...STORE_ERRORS],
  }),
  importSnapshot: route({
    ...shared,
    method: "POST",
    path: "/v1/archives",
    summary: "Make a template out of such a file",
    description: "The body is the archive. It is checked as a whole before the template appears.",
    query: z.object({ name: z.string().optional().describe("Of the template. Default: its own name.") }),
    stream: true,
    success: { 201: { description: "The template is there.", schema: Template } },
    errors: ["INVALID_ARGUMENT", "CONFLICT", "CORRUPT", "NO_SPACE"],
  }),
} as const satisfies Record<string, RouteDef>;
