import { AenvError, type SandboxId, type TemplateId } from "@aenv/base";
import type { SandboxRecord } from "@aenv/state";
import type { ListFilter, Page } from "./types.ts";

const MAX_PAGE = 100;

/** One page of what matches, in the order of start time and then id, which is the order that a cursor continues in. */
export function listPage<T extends { record: SandboxRecord }>(
  all: readonly T[],
  filter: ListFilter & { templateId?: TemplateId | undefined },
): Page<T> {
  const limit = filter.limit ?? MAX_PAGE;
  if (!Number.isInteger(limit) || limit < 1 || limit > MAX_PAGE)
    throw new AenvError("INVALID_ARGUMENT", `limit is 1 to ${MAX_PAGE}`);
  const sign = filter.order === "asc" ? 1 : -1;
  const wanted = all.filter(({ record: r }) => matches(r, filter));
  const totalRunning = wanted.filter(({ record }) => record.state === "running").length;
  const after = filter.cursor === undefined ? undefined : parseCursor(filter.cursor);
  const rest = wanted
    .filter(({ record: r }) => filter.states === undefined || filter.states.some((s) => s === r.state))
    .filter(({ record: r }) => after === undefined || sign * compare(r, after) > 0)
    .sort((a, b) => sign * compare(a.record, b.record));
  const items = rest.slice(0, limit);
  const last = items.at(-1);
  return { items, totalRunning, ...(rest.length > limit && last ? { next: cursorOf(last.record) } : {}) };
}

function matches(r: SandboxRecord, f: ListFilter & { templateId?: TemplateId | undefined }): boolean {
  return (
    (f.team === undefined || r.team === f.team) &&
    (f.templateId === undefined || r.template === f.templateId) &&
    (f.startedAfter === undefined || r.startedAt >= f.startedAfter) &&
    Object.entries(f.metadata ?? {}).every(([k, v]) => Object.hasOwn(r.metadata, k) && r.metadata[k] === v)
  );
}

interface Place {
  startedAt: number;
  id: SandboxId;
}

function compare(a: Place, b: Place): number {
  return a.startedAt - b.startedAt || (a.id < b.id ? -1 : a.id > b.id ? 1 : 0);
}

const cursorOf = (r: Place): string => Buffer.from(`${r.startedAt}__${r.id}`).toString("base64url");

function parseCursor(cursor: string): Place {
  const match = /^(\d{1,16})__([a-z0-9]{8,32})$/.exec(Buffer.from(cursor, "base64url").toString());
  if (!match) throw new AenvError("INVALID_ARGUMENT", "the page token is not one of ours");
  return { startedAt: Number(match[1]), id: match[2] as SandboxId };
}
