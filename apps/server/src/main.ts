/** The node's server: API, edge and engine in one process. Usage: see --help. */
import { leanProcess } from "./lean.ts";

leanProcess();
const { serve } = await import("./server.ts");
const { AenvError } = await import("@aenv/base");
try {
  await serve(process.argv.slice(2));
  process.exit(0);
} catch (e) {
  console.error(e instanceof AenvError ? `${e.message}. ${e.hint}` : e);
  process.exit(1);
}
