import type {
  ApiKey,
  Checkpoint,
  Lineage,
  ListedSandbox,
  Sandbox,
  SandboxDetail,
  SandboxLogEntry,
  SandboxLogs,
  SandboxMetric,
  SandboxState,
  SnapshotInfo,
  Template,
  TemplateWithBuilds,
  Webhook,
} from "@aenv/contract";
import { LIFECYCLE_TYPES } from "@aenv/contract";
import type {
  CheckpointView,
  Lineage as LineageView,
  LogEntry,
  MetricSample,
  SandboxView,
  SnapshotView,
  TemplateView,
  VisibleState,
} from "@aenv/engine";
import type { ApiKeyRecord, WebhookRecord } from "@aenv/state";

/** Clients need one, nobody reads it. */
const CLIENT_ID = "aenv";

const iso = (ms: number): string => new Date(ms).toISOString();

/** What a client sees of each state; undefined: to it the sandbox does not exist (any more). */
const SEEN: Readonly<Record<VisibleState, SandboxState | undefined>> = {
  creating: undefined,
  running: "running",
  pausing: "paused",
  paused: "paused",
  resuming: "running",
  rewinding: "running",
  killing: undefined,
};

export const seenState = (view: SandboxView): SandboxState | undefined => SEEN[view.state];

/** The engine's states behind the states that a client asks for. */
export const statesBehind = (wanted: readonly SandboxState[]): VisibleState[] =>
  (Object.keys(SEEN) as VisibleState[]).filter((s) => wanted.some((w) => w === SEEN[s]));

export function sandboxOf(v: SandboxView, domain: string): Sandbox {
  return {
    templateID: v.templateId,
    sandboxID: v.sandboxId,
    clientID: CLIENT_ID,
    ...(v.alias === undefined ? {} : { alias: v.alias }),
    envdVersion: v.envdVersion,
    ...(v.envdAccessToken === undefined ? {} : { envdAccessToken: v.envdAccessToken }),
    trafficAccessToken: v.trafficAccessToken ?? null,
    domain,
  };
}

export function listedOf(v: SandboxView): ListedSandbox {
  return {
    templateID: v.templateId,
    sandboxID: v.sandboxId,
    clientID: CLIENT_ID,
    ...(v.alias === undefined ? {} : { alias: v.alias }),
    startedAt: iso(v.startedAt),
    endAt: iso(v.endAt),
    cpuCount: v.cpuCount,
    memoryMB: v.memoryMB,
    diskSizeMB: v.diskSizeMB,
    metadata: v.metadata,
    state: seenState(v) ?? "running",
    envdVersion: v.envdVersion,
    volumeMounts: [],
  };
}

export function detailOf(v: SandboxView, domain: string): SandboxDetail {
  return {
    ...listedOf(v),
    domain,
    ...(v.envdAccessToken === undefined ? {} : { envdAccessToken: v.envdAccessToken }),
    allowInternetAccess: v.allowInternetAccess,
    ...networkOf(v),
    lifecycle: { onTimeout: v.lifecycle.onTimeout, autoResume: v.lifecycle.autoResume },
  };
}

/** Only what was asked for: absent means the defaults. */
function networkOf({ network, trafficAccessToken, ingress = {} }: SandboxView): Pick<SandboxDetail, "network"> {
  const { allowOut, denyOut, rules, egressProxy } = network;
  const found = {
    ...(trafficAccessToken === undefined ? {} : { allowPublicTraffic: false }),
    ...(allowOut ? { allowOut: [...allowOut] } : {}),
    ...(denyOut ? { denyOut: [...denyOut] } : {}),
    ...(rules ? { rules: { ...rules } } : {}),
    ...(ingress.maskRequestHost === undefined ? {} : { maskRequestHost: ingress.maskRequestHost }),
    ...(ingress.httpsPorts ? { httpsPorts: [...ingress.httpsPorts] } : {}),
    // Never its password.
    ...(egressProxy
      ? {
          egressProxy: {
            address: egressProxy.address,
            ...(egressProxy.username ? { username: egressProxy.username } : {}),
          },
        }
      : {}),
  };
  return Object.keys(found).length > 0 ? { network: found } : {};
}

export function metricOf(m: MetricSample): SandboxMetric {
  return {
    timestamp: iso(m.timestamp),
    timestampUnix: Math.floor(m.timestamp / 1000),
    cpuCount: m.cpuCount,
    cpuUsedPct: m.cpuUsedPct,
    memUsed: m.memUsed,
    memTotal: m.memTotal,
    memCache: m.memCache,
    diskUsed: m.diskUsed,
    diskTotal: m.diskTotal,
  };
}

const asText = (value: unknown): string => (typeof value === "string" ? value : (JSON.stringify(value) ?? ""));

export const logEntryOf = (e: LogEntry): SandboxLogEntry => ({
  timestamp: iso(e.timestamp),
  message: e.message,
  level: e.level,
  fields: Object.fromEntries(Object.entries(e.fields).map(([k, v]) => [k, asText(v)])),
});

export function webhookOf(w: WebhookRecord): Webhook {
  return {
    id: w.id,
    teamID: w.team,
    name: w.name,
    url: w.url,
    enabled: w.enabled,
    // One that was made by a later version may have types that this one does not know.
    events: LIFECYCLE_TYPES.filter((t) => w.events.includes(t)),
    createdAt: iso(w.createdAt),
  };
}

/** The CLI reads `level`, `logger` and `message` out of each line, and fails where one is missing. */
export function logsOf(entries: readonly LogEntry[]): SandboxLogs {
  const logEntries = entries.map(logEntryOf);
  const logs = logEntries.map((e) => ({
    timestamp: e.timestamp,
    line: JSON.stringify({
      logger: "sandbox",
      ...e.fields,
      level: e.level,
      message: e.message,
      timestamp: e.timestamp,
    }),
  }));
  return { logs, logEntries };
}

export function snapshotOf(s: SnapshotView): SnapshotInfo {
  return {
    snapshotID: s.snapshotId,
    names: s.names,
    sandboxID: s.sandboxId,
    templateID: s.templateId,
    createdAt: iso(s.createdAt),
    cpuCount: s.cpuCount,
    memoryMB: s.memoryMB,
    diskSizeMB: s.diskSizeMB,
  };
}

export function checkpointOf(c: CheckpointView): Checkpoint {
  return {
    checkpointID: c.checkpointId,
    sandboxID: c.sandboxId,
    ...(c.name === undefined ? {} : { name: c.name }),
    createdAt: iso(c.createdAt),
    ownBytes: c.ownBytes,
  };
}

export function lineageOf(l: LineageView): Lineage {
  return {
    sandboxID: l.sandboxId,
    nodeID: l.snapshotId,
    nodes: l.nodes.map((n) => ({
      nodeID: n.snapshotId,
      ...(n.parent === undefined ? {} : { parentID: n.parent }),
      cause: n.cause,
      ...(n.sandboxId === undefined ? {} : { sandboxID: n.sandboxId }),
      names: n.names,
      createdAt: iso(n.createdAt),
      memory: n.memory,
      disk: n.disk,
    })),
    sandboxes: l.sandboxes.flatMap((s) => {
      const state = SEEN[s.state];
      return state === undefined ? [] : [{ sandboxID: s.sandboxId, nodeID: s.snapshotId, state }];
    }),
  };
}

const namesOf = (t: TemplateView): string[] => [...new Set([t.name, ...t.aliases])];

export function templateOf(t: TemplateView): Template {
  return {
    templateID: t.templateId,
    buildID: t.snapshotId,
    cpuCount: t.cpuCount,
    memoryMB: t.memoryMB,
    diskSizeMB: t.diskSizeMB,
    public: t.public,
    aliases: namesOf(t),
    names: namesOf(t),
    createdAt: iso(t.createdAt),
    updatedAt: iso(t.updatedAt),
    createdBy: null,
    lastSpawnedAt: t.lastSpawnedAt === undefined ? null : iso(t.lastSpawnedAt),
    spawnCount: t.spawnCount,
    buildCount: t.buildCount,
    envdVersion: t.envdVersion,
    buildStatus: "ready",
  };
}

export function templateWithBuildsOf(t: TemplateView): TemplateWithBuilds {
  return {
    templateID: t.templateId,
    public: t.public,
    aliases: namesOf(t),
    names: namesOf(t),
    createdAt: iso(t.createdAt),
    updatedAt: iso(t.updatedAt),
    lastSpawnedAt: t.lastSpawnedAt === undefined ? null : iso(t.lastSpawnedAt),
    spawnCount: t.spawnCount,
    builds: [
      {
        buildID: t.snapshotId,
        status: "ready",
        createdAt: iso(t.createdAt),
        updatedAt: iso(t.updatedAt),
        finishedAt: iso(t.updatedAt),
        cpuCount: t.cpuCount,
        memoryMB: t.memoryMB,
        diskSizeMB: t.diskSizeMB,
        envdVersion: t.envdVersion,
      },
    ],
  };
}

const KEY_PREFIX = "e2b_";
/** Hex digits after the prefix. */
const KEY_DIGITS = 40;

export function apiKeyOf(k: ApiKeyRecord): ApiKey {
  return {
    id: k.id,
    name: k.name,
    mask: {
      prefix: KEY_PREFIX,
      valueLength: KEY_DIGITS,
      maskedValuePrefix: "",
      maskedValueSuffix: k.mask.slice(-4),
    },
    createdAt: iso(k.createdAt),
    lastUsed: k.lastUsedAt === undefined ? null : iso(k.lastUsedAt),
    createdBy: null,
  };
}
