import { z } from "zod";
import { EnvVars, Metadata, timestamp } from "./common.ts";

/** Seconds a sandbox lives when the caller does not say; the two create versions differ. */
export const DEFAULT_TIMEOUT_S = { v1: 15, v2: 300, connect: 300, resume: 15, refresh: 15, fork: 300 } as const;

/** The encoded sum of keys and values that one sandbox may carry. */
export const MAX_METADATA_BYTES = 64 * 1024;
export const MAX_ENV_BYTES = 512 * 1024;

const utf8 = new TextEncoder();
function totalBytes(record: Record<string, string>): number {
  let sum = 0;
  for (const [k, v] of Object.entries(record)) sum += utf8.encode(k).length + utf8.encode(v).length;
  return sum;
}

/** `NAME=value` and its end are at most 32 pages (MAX_ARG_STRLEN of Linux). */
const MAX_ENV_ENTRY_BYTES = 32 * 4096 - 2;

const metadataIn = Metadata.refine(
  (m) => totalBytes(m) <= MAX_METADATA_BYTES,
  `all keys and values together may have at most ${MAX_METADATA_BYTES} bytes`,
);
const envVarsIn = EnvVars.refine(
  (m) => totalBytes(m) <= MAX_ENV_BYTES,
  `all names and values together may have at most ${MAX_ENV_BYTES} bytes`,
)
  .refine(
    (m) => Object.entries(m).every(([k, v]) => /^[^=\0]+$/.test(k) && !v.includes("\0")),
    "a name must not be empty or hold = or NUL, a value must not hold NUL",
  )
  .refine(
    (m) => Object.entries(m).every(([k, v]) => totalBytes({ [k]: v }) <= MAX_ENV_ENTRY_BYTES),
    `a name and its value may have at most ${MAX_ENV_ENTRY_BYTES} bytes: the guest's kernel starts no program with longer ones`,
  );

const lifetime = z.int().min(1, "must be at least 1 second");

/** Fields of create and of the update that say what a sandbox may reach. */
const egress = {
  allowOut: z
    .array(z.string())
    .nullish()
    .describe(
      "IPv4 addresses and CIDRs, and where everything else is denied also domains and *.domains, checked by the name in TLS and HTTP. Wins over denyOut.",
    ),
  denyOut: z.array(z.string()).nullish().describe("IPv4 addresses and CIDRs; 0.0.0.0/0 is everything."),
  rules: z
    .record(
      z.string(),
      z.array(
        z.looseObject({ transform: z.looseObject({ headers: z.record(z.string(), z.string()).nullish() }).nullish() }),
      ),
    )
    .nullish()
    .describe(
      "By domain or *.domain: headers that requests over HTTPS (port 443) get in place of what the guest sent. The exact name wins, then the longest wildcard. The guest trusts the certificates that this needs.",
    ),
  egressProxy: z
    .looseObject({
      address: z.string().describe("host:port of a SOCKS5 proxy."),
      username: z.string().nullish(),
      password: z.string().nullish(),
    })
    .nullish()
    .describe("Everything over TCP goes through it, and nothing else leaves the sandbox but questions for names."),
};

/** Replaces all of them: what is left out is cleared. */
export const SandboxNetworkUpdate = z.object({
  ...egress,
  allow_internet_access: z.boolean().nullish().describe("false denies everything that allowOut does not name."),
});
export type SandboxNetworkUpdate = z.infer<typeof SandboxNetworkUpdate>;

const NetworkConfig = z.looseObject({
  ...egress,
  allowPublicTraffic: z.boolean().nullish().describe("false: traffic from outside needs the traffic access token."),
  maskRequestHost: z
    .string()
    .nullish()
    .describe("The Host header that the servers in the sandbox see; ${PORT} in it stands for the port."),
  httpsPorts: z.array(z.int().min(1).max(65535)).nullish().describe("Ports whose servers speak TLS."),
});
export type NetworkConfig = z.infer<typeof NetworkConfig>;

const newSandbox = {
  templateID: z
    .string()
    .min(1)
    .max(256)
    .describe("A template's id, alias, `alias:tag`, `team/alias:tag`, or a snapshot's id."),
  metadata: metadataIn.nullish(),
  envVars: envVarsIn.nullish(),
  allow_internet_access: z.boolean().nullish().describe("Default: allowed."),
  network: NetworkConfig.nullish(),
  iam: z.looseObject({ tokens: z.record(z.string(), z.unknown()).nullish() }).nullish(),
  mcp: z.record(z.string(), z.unknown()).nullish(),
  autoPause: z.boolean().nullish().describe("At the end of its time pause the sandbox instead of killing it."),
  autoPauseMemory: z
    .boolean()
    .nullish()
    .describe("false: that pause keeps the disk only; not together with autoResume. Default true."),
  autoResume: z
    .looseObject({ enabled: z.boolean().nullish() })
    .nullish()
    .describe("enabled: a request to one of its ports wakes the sandbox while it is paused."),
  volumeMounts: z.array(z.looseObject({ name: z.string(), path: z.string() })).nullish(),
};

export const NewSandbox = z.object({
  ...newSandbox,
  timeout: lifetime.nullish().describe(`Seconds to live. Default ${DEFAULT_TIMEOUT_S.v1}.`),
  secure: z.boolean().nullish().describe("Default true. false: the agent in the sandbox asks for no token."),
});
export const NewSandboxV2 = z.object({
  ...newSandbox,
  timeout: lifetime.nullish().describe(`Seconds to live. Default ${DEFAULT_TIMEOUT_S.v2}.`),
});
export type NewSandbox = z.infer<typeof NewSandbox>;
export type NewSandboxV2 = z.infer<typeof NewSandboxV2>;

export const Sandbox = z.object({
  templateID: z.string(),
  sandboxID: z.string(),
  clientID: z.string().describe("Constant; kept for old clients."),
  alias: z.string().optional(),
  envdVersion: z.string().describe("Version of the agent in the sandbox; the SDKs choose features by it."),
  envdAccessToken: z.string().optional().describe("Send it as X-Access-Token to the agent (port 49983)."),
  trafficAccessToken: z.string().nullable().optional(),
  domain: z.string().nullable().optional().describe("Sandbox hosts are <port>-<sandboxID>.<domain>."),
});
export type Sandbox = z.infer<typeof Sandbox>;

export const SandboxState = z.enum(["running", "paused"]);
export type SandboxState = z.infer<typeof SandboxState>;

const VolumeMount = z.object({ name: z.string(), path: z.string() });

export const ListedSandbox = z.object({
  templateID: z.string(),
  sandboxID: z.string(),
  clientID: z.string(),
  alias: z.string().optional(),
  startedAt: timestamp(),
  endAt: timestamp(),
  cpuCount: z.int(),
  memoryMB: z.int(),
  diskSizeMB: z.int(),
  metadata: Metadata.optional(),
  state: SandboxState,
  envdVersion: z.string(),
  volumeMounts: z.array(VolumeMount).optional(),
});
export type ListedSandbox = z.infer<typeof ListedSandbox>;

export const SandboxDetail = ListedSandbox.extend({
  domain: z.string().nullable().optional(),
  envdAccessToken: z.string().optional(),
  allowInternetAccess: z.boolean().nullable().optional(),
  network: z
    .looseObject({
      allowPublicTraffic: z.boolean().optional(),
      allowOut: z.array(z.string()).optional(),
      denyOut: z.array(z.string()).optional(),
      rules: z.record(z.string(), z.unknown()).optional(),
      egressProxy: z.looseObject({ address: z.string(), username: z.string().optional() }).optional(),
    })
    .optional(),
  lifecycle: z
    .object({ onTimeout: z.enum(["kill", "pause"]), autoResume: z.boolean() })
    .optional()
    .describe("What happens at the end of its time, and whether traffic wakes it while it is paused."),
});
export type SandboxDetail = z.infer<typeof SandboxDetail>;

export const SandboxTimeout = z.object({
  timeout: z.int().describe("Seconds from now; 0 or less ends the sandbox now."),
});
export const SandboxRefresh = z.object({
  duration: z
    .int()
    .min(0)
    .max(3600)
    .nullish()
    .describe(`Seconds from now. Default ${DEFAULT_TIMEOUT_S.refresh}. Never shortens.`),
});
export const ConnectSandbox = z.object({
  timeout: z.int().min(0).describe("Seconds from now; never shortens."),
  memory: z.boolean().nullish().describe("false: boot from disk instead of resuming memory."),
});
export const ConnectSandboxV2 = z.object({
  timeout: z.int().min(0).nullish().describe(`Seconds from now. Default ${DEFAULT_TIMEOUT_S.connect}. Never shortens.`),
  memory: z.boolean().nullish().describe("false: boot from disk instead of resuming memory."),
});

export const SandboxMetric = z.object({
  timestamp: timestamp(),
  timestampUnix: z.int().describe("Seconds."),
  cpuCount: z.int(),
  cpuUsedPct: z.number().describe("100 is one vCPU fully used."),
  memUsed: z.int().describe("Bytes."),
  memTotal: z.int().describe("Bytes."),
  memCache: z.int().describe("Bytes."),
  diskUsed: z.int().describe("Bytes."),
  diskTotal: z.int().describe("Bytes."),
});
export type SandboxMetric = z.infer<typeof SandboxMetric>;
export const SandboxesWithMetrics = z.object({ sandboxes: z.record(z.string(), SandboxMetric) });

export const LogLevel = z.enum(["debug", "info", "warn", "error"]);
export const SandboxLogEntry = z.object({
  timestamp: timestamp(),
  message: z.string(),
  level: LogLevel,
  fields: z.record(z.string(), z.string()),
});
export type SandboxLogEntry = z.infer<typeof SandboxLogEntry>;
export const SandboxLogs = z.object({
  logs: z.array(z.object({ timestamp: timestamp(), line: z.string().describe("The entry as one JSON object.") })),
  logEntries: z.array(SandboxLogEntry),
});
export type SandboxLogs = z.infer<typeof SandboxLogs>;
export const SandboxLogsV2 = z.object({ logs: z.array(SandboxLogEntry) });
