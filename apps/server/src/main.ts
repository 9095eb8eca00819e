/** The node's server: API, edge and engine in one process. Usage: see --help. */
import { leanProcess } from "./lean.ts";

const load = (): Promise<typeof import("./server.ts")> => import("./server.ts");
await leanProcess(load);
const { serve } = await load();
const { AenvError } = await import("@aenv/base");
try {
  await serve(process.argv.slice(2));
  process.exit(0);
} catch (e) {
  console.error(e instanceof AenvError ? `${e.message}. ${e.hint}` : e);
  process.exit(1);
}
