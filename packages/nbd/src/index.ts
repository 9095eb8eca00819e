export { BufferPool } from "./buffers.ts";
export type { ServedExport } from "./connection.ts";
export type { ExportInfo } from "./handshake.ts";
export { NbdServer, type NbdServerOptions } from "./server.ts";
export { type BlockTarget, type Extent, type Pending, wireErrno } from "./target.ts";
