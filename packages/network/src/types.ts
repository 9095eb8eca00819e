import type { Logger } from "@aenv/base";

/** What one virtual machine plugs into. Valid from acquire() (or adopt()) until release(). */
export interface Slot {
  readonly index: number;
  /** Name under /run/netns. */
  readonly netns: string;
  readonly tap: "tap0";
  /** From the root netns, `hostIp:<any port>` is the guest. */
  readonly hostIp: string;
  /** Owner of the tap; the VMM runs as this uid and gid. */
  readonly uid: number;
  readonly gid: number;
}

export interface GuestLimits {
  /** Most connections that a guest has open to the outside. */
  connections: number;
  /** New connections per second to the outside, and how many at once after a quiet time. */
  newPerSecond: number;
  newBurst: number;
  /** Most bytes per second to the outside, and as many from it; absent: no limit. What is above it is dropped. */
  bytesPerSecond?: number;
}

export const DEFAULT_LIMITS: GuestLimits = { connections: 1024, newPerSecond: 500, newBurst: 1000 };

export interface NetworkOptions {
  /** 4 hex digits; in every name that the network makes on the host. */
  instance: string;
  /** Most slots that may exist at once, 1..4096. */
  limit: number;
  /** IPv4 addresses of resolvers that guests may ask on port 53, wherever these are. */
  dns: readonly string[];
  logger: Logger;
  /** Slot n's uid and gid are `uidBase + n`; default 200000. */
  uidBase?: number;
  /** Device that leads to the internet; default: whatever device has the default route at the time. */
  uplink?: string;
  /**
   * Preferred /19 block of host-side addresses. Existing slots keep theirs; a block that the host's routes overlap is
   * not used. Default: one derived from the instance.
   */
  block?: string;
  limits?: Partial<GuestLimits>;
  /** More CIDRs that no guest may reach (say, the public address of a host behind 1:1 NAT). */
  deny?: readonly string[];
  /** Without one there are no rules by domain, no transforms and no proxy. */
  gateway?: Gateway;
  /** Private ranges that guests may reach as if they were the internet: the operator's choice, which no sandbox can make. */
  open?: readonly string[];
}

/**
 * What a guest may reach, inside what the node allows; egressPolicy() makes one of what users write. `allow` wins over
 * `deny`.
 */
export interface EgressPolicy {
  /** What happens to a destination that no rule names, and to DNS. */
  allowInternet: boolean;
  allow?: readonly string[];
  deny?: readonly string[];
  /** Names that it may reach over HTTP and TLS where `allowInternet` is false: `example.com`, `*.example.com`. */
  domains?: readonly string[];
  /** Everything that it reaches over TCP it reaches through this SOCKS5 proxy; nothing else leaves but questions for names. */
  proxy?: SocksProxy;
  /** What is done to requests over HTTPS, port 443; at most one row a name. */
  transforms?: readonly HostTransform[];
  /** Of the certificates that guests get where there are transforms. */
  authority?: Authority;
}

/** A certificate and its private key, PEM. */
export interface Authority {
  cert: string;
  key: string;
}

export interface SocksProxy {
  /** A name or an IPv4 address. */
  host: string;
  port: number;
  username?: string;
  password?: string;
}

export interface HostTransform {
  /** `example.com` or `*.example.com`. */
  domain: string;
  /** Set in every request, whatever the guest sent under these names. */
  headers: Readonly<Record<string, string>>;
}

/** The node's egress gateway as the network needs it. Slots are named by their `hostIp`. */
export interface Gateway {
  readonly place: { tcpPort: number; dnsPort: number; uid: number };
  /** What no guest may reach, and the resolvers. */
  configure(options: { denied: readonly string[]; dns: readonly string[] }): Promise<void>;
  /** Holds when it resolves: connections that the policy denies are cut. `undefined`: nothing of this slot is let through. */
  setPolicy(hostIp: string, policy: EgressPolicy | undefined): Promise<void>;
  /** Forgets every slot but these. */
  retain(hostIps: readonly string[]): Promise<void>;
}

export const OPEN_POLICY: EgressPolicy = { allowInternet: true };

export interface SweepReport {
  /** Slots removed because nobody owned them. */
  freed: number[];
  /** Slots that could not be removed, with the reason. */
  failed: { index: number; reason: string }[];
}

export type SlotState = "free" | "used" | "making" | "resetting" | "unclaimed";

export interface SlotView {
  index: number;
  state: SlotState;
  netns: string;
  hostIp: string;
}

/** One thing about the host that keeps guests from working as promised, and what to do about it. */
export interface Finding {
  severity: "error" | "warning";
  subject: string;
  problem: string;
  fix: string;
}
