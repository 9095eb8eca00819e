import { addressSet, domainMatches, type EgressPolicy, type HostTransform } from "@aenv/network";

/** Where transforms apply. */
const HTTPS_PORT = 443;

/** What is known of a guest's connection when it is judged. */
export interface Subject {
  /** Where the guest sent it. */
  address: string;
  port: number;
  kind: "tls" | "http" | "other";
  /** The host it asks for; absent where it says none. */
  name?: string;
}

export type Verdict = "refuse" | "relay" | { transform: HostTransform };

/** A policy made ready for many connections. */
export class Judge {
  readonly policy: EgressPolicy;
  readonly #domains: ReadonlySet<string>;
  readonly #allow: (ip: string) => boolean;
  readonly #deny: (ip: string) => boolean;

  constructor(policy: EgressPolicy) {
    this.policy = policy;
    this.#domains = new Set(policy.domains);
    this.#allow = addressSet(policy.allow ?? []);
    this.#deny = addressSet(policy.deny ?? []);
  }

  /** Whether the guest may ask for the addresses of this name. */
  mayAsk(name: string): boolean {
    return this.policy.allowInternet || domainMatches(this.#domains, name);
  }

  /** Allowed by the address alone. */
  reaches(address: string): boolean {
    return this.#allow(address) || (this.policy.allowInternet && !this.#deny(address));
  }

  /** Whether the verdict may depend on what the guest says first. Where not, the server may speak first. */
  needsWord({ address, port }: Pick<Subject, "address" | "port">): boolean {
    if (!this.reaches(address)) return (this.policy.domains ?? []).length > 0;
    return port === HTTPS_PORT && (this.policy.transforms ?? []).length > 0;
  }

  /** `own`: the address is one that the gateway gives for the subject's name. */
  verdict({ address, port, kind, name }: Subject, own: boolean): Verdict {
    const byName = name !== undefined && own && domainMatches(this.#domains, name);
    if (!this.reaches(address) && !byName) return "refuse";
    const transform = kind === "tls" && port === HTTPS_PORT && name !== undefined ? this.#transform(name) : undefined;
    return transform ? { transform } : "relay";
  }

  /** The row of this very name, else that of the longest wildcard. */
  #transform(name: string): HostTransform | undefined {
    const rows = (this.policy.transforms ?? []).filter((t) => domainMatches(new Set([t.domain]), name));
    const exact = rows.find((t) => t.domain === name);
    return exact ?? rows.sort((a, b) => b.domain.length - a.domain.length)[0];
  }
}
