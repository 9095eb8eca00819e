import { AenvError, parseSandboxId, type SandboxId } from "@aenv/base";
import type { SandboxView } from "@aenv/engine";
import type { EngineApi } from "../ports.ts";
import { seenState } from "../wire.ts";

export const gone = (id: string): AenvError =>
  new AenvError("NOT_FOUND", `there is no sandbox ${JSON.stringify(id.slice(0, 64))}`);

/** No sandbox has an id of another shape: clients ask for any text and expect 404, not 400. */
export function idOf(text: string): SandboxId {
  try {
    return parseSandboxId(text);
  } catch {
    throw gone(text);
  }
}

/** NOT_FOUND also for one that a client does not see (any more). */
export function viewOf(engine: EngineApi, text: string): SandboxView {
  const v = engine.get(idOf(text));
  if (seenState(v) === undefined) throw gone(v.sandboxId);
  return v;
}
