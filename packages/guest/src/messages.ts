/** Shapes of what a guest answers. Guests are hostile: everything is parsed and bounded, nothing is cast. */
import { z } from "zod";

/** What the node tells a guest after every launch. */
export interface GuestInit {
  envVars: Record<string, string>;
  /** Empty: the sandbox is open to everybody who reaches it. */
  accessToken: string;
  /** RFC 3339 with nanoseconds; the guest steps its clock to it. */
  timestamp: string;
  defaultUser: string;
  defaultWorkdir: string;
  sandboxId: string;
  templateId: string;
  hostname: string;
  /** 32 lower-case hex digits. */
  machineId: string;
  /** Base64 of at least 64 random bytes. */
  entropy: string;
  /** The run id. A new one makes the guest close every older connection. */
  lifecycleID: string;
  cause: "create" | "resume" | "rewind" | "fork" | "boot";
  /** One authority's certificate (PEM): the programs of the guest trust it from then on. */
  caBundle?: string;
  /** Of a child of a fork: given to hooks as AENV_FORK_INDEX and AENV_SEED. */
  forkIndex?: number;
  /** Decimal, below 2^63. */
  seed?: string;
}

/** Programs in `/etc/aenv/<phase>.d` of the guest. */
export interface HooksRequest {
  /** none: nothing is run. */
  phase: "pre-snapshot" | "post-resume" | "post-fork" | "none";
  /** Why: given to them as AENV_CAUSE. */
  cause: string;
  forkIndex?: number;
  seed?: string;
}

const text = z.string().max(64 * 1024);
/** proto3 JSON writes 64-bit numbers as strings. */
const count = z.union([z.number(), z.string().regex(/^-?\d{1,19}$/)]).transform(Number);

export const GuestMetrics = z.object({
  ts: z.number(),
  cpu_count: z.number(),
  cpu_used_pct: z.number(),
  mem_total: z.number(),
  mem_used: z.number(),
  mem_cache: z.number(),
  mem_total_mib: z.number(),
  mem_used_mib: z.number(),
  disk_used: z.number(),
  disk_total: z.number(),
});
export type GuestMetrics = z.infer<typeof GuestMetrics>;

export const Envs = z.record(text, text);

const FILE_TYPES = {
  FILE_TYPE_UNSPECIFIED: "other",
  FILE_TYPE_FILE: "file",
  FILE_TYPE_DIRECTORY: "dir",
  FILE_TYPE_SYMLINK: "symlink",
} as const;
const fileType = z
  .enum(["FILE_TYPE_UNSPECIFIED", "FILE_TYPE_FILE", "FILE_TYPE_DIRECTORY", "FILE_TYPE_SYMLINK"])
  .default("FILE_TYPE_UNSPECIFIED")
  .catch("FILE_TYPE_UNSPECIFIED")
  .transform((t) => FILE_TYPES[t]);

export const EntryInfo = z.object({
  name: text.default(""),
  type: fileType,
  path: text.default(""),
  size: count.default(0),
  mode: z.number().int().default(0),
  permissions: text.default(""),
  owner: text.default(""),
  group: text.default(""),
  modifiedTime: text.optional(),
  symlinkTarget: text.optional(),
  isSymlink: z.boolean().default(false),
  metadata: z.record(text, text).optional(),
});
export type EntryInfo = z.infer<typeof EntryInfo>;
export const OneEntry = z.object({ entry: EntryInfo });
export const Entries = z.object({ entries: z.array(EntryInfo).max(1_000_000).default([]) });

const config = z.object({
  cmd: text.default(""),
  args: z.array(z.string()).default([]),
  envs: z.record(z.string(), z.string()).default({}),
  cwd: text.optional(),
});
const processInfo = z.object({ config: config.prefault({}), pid: z.number().int(), tag: text.optional() });
export type ProcessSummary = z.infer<typeof processInfo>;
export const Processes = z.object({ processes: z.array(processInfo).max(100_000).default([]) });

const base64 = z.string().transform((s) => Buffer.from(s, "base64"));
const data = z.object({ stdout: base64.optional(), stderr: base64.optional(), pty: base64.optional() });
const end = z.object({
  exitCode: z.number().int().default(0),
  exited: z.boolean().default(false),
  status: text.default(""),
  error: text.optional(),
});
export const ProcessMessage = z.object({
  event: z.object({
    start: z.object({ pid: z.number().int().positive() }).optional(),
    data: data.optional(),
    end: end.optional(),
    keepalive: z.object({}).optional(),
  }),
});

export type ProcessEvent =
  | { type: "start"; pid: number }
  | { type: "stdout" | "stderr" | "pty"; data: Buffer }
  | { type: "end"; exitCode: number; exited: boolean; status: string; error?: string };

/** undefined for a keepalive and for anything that a newer guest may add. */
export function toEvent(message: z.infer<typeof ProcessMessage>): ProcessEvent | undefined {
  const { start, data, end } = message.event;
  if (start) return { type: "start", pid: start.pid };
  if (data?.stdout) return { type: "stdout", data: data.stdout };
  if (data?.stderr) return { type: "stderr", data: data.stderr };
  if (data?.pty) return { type: "pty", data: data.pty };
  if (!end) return undefined;
  const { exitCode, exited, status, error } = end;
  return { type: "end", exitCode, exited, status, ...(error === undefined ? {} : { error }) };
}

export const Written = z
  .array(z.object({ name: text, path: text, type: text.optional(), metadata: z.record(text, text).optional() }))
  .max(100_000);
export type WrittenFile = z.infer<typeof Written>[number];

const hook = z.object({
  name: text,
  /** -1: ended by a signal, or not started. */
  exitCode: z.number().int(),
  error: text.optional(),
  output: text.optional(),
});
export type HookResult = z.infer<typeof hook>;
export const Hooks = z.object({ hooks: z.array(hook).max(1000) });

export const Empty = z.object({});
/** Connect errors have a string code, plain ones the HTTP status. */
export const ErrorBody = z.object({ code: z.union([z.string(), z.number()]).optional(), message: text.default("") });
export const EndOfStream = z.object({ error: ErrorBody.optional() });
