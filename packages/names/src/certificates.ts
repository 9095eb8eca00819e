import { X509Certificate } from "node:crypto";
import { readFile, stat } from "node:fs/promises";
import { hostname } from "node:os";
import { createSecureContext, type SecureContext, type SecureContextOptions } from "node:tls";
import { AenvError, type Logger, messageOf } from "@aenv/base";
import { ensureAuthority } from "./authority.ts";
import { type CertAndKey, issue } from "./certificate.ts";

/** Files (PEM) of an operator's certificate, chain included, and of its key. */
export interface CertFiles {
  cert: string;
  key: string;
}

export interface CertificatesOptions {
  /** Folder of the node's own authority. */
  dir: string;
  /** Sandboxes are `<port>-<id>.<domain>`; a port in it is ignored. */
  domain: string;
  /** Further names and addresses of this node. */
  names: readonly string[];
  /** In place of our own authority's certificate. */
  operator?: CertFiles;
  logger: Logger;
  /** ms since the epoch. */
  now?: () => number;
}

const CHECK_MS = 10_000;
const DAY_MS = 86_400_000;
/** Ours are made anew long before they end. */
const RENEW_MS = 60 * DAY_MS;
/** Certificates of single names that are kept, and how many are made in a second: strangers choose the names. */
const MAX_MINTED = 512;
const MINTS_PER_SECOND = 20;
const HOST = /^[a-z0-9](?:[a-z0-9._-]{0,251}[a-z0-9])?$/;

interface Loaded {
  options: SecureContextOptions;
  context: SecureContext;
  /** Changes when it has to be loaded again. */
  stamp: string;
  /** Absent with the operator's files. */
  own?: { authority: CertAndKey; key: string; madeAt: number };
}

/**
 * The certificates of a node: from the operator's files, which are read again when they change, or from an authority of
 * its own. Clients accept `*.domain` only where the domain has a dot; below `localhost` each name gets its own certificate.
 */
export class Certificates implements Disposable {
  readonly #o: CertificatesOptions;
  readonly #now: () => number;
  readonly #domain: string;
  readonly #timer: NodeJS.Timeout;
  readonly #listeners: (() => void)[] = [];
  readonly #minted = new Map<string, SecureContext>();
  readonly #mints = { second: 0, count: 0 };
  #loaded: Loaded;

  /** Throws where the operator's files are missing, no PEM, or not of one pair. */
  static async open(o: CertificatesOptions): Promise<Certificates> {
    return new Certificates(o, await load(o));
  }

  private constructor(o: CertificatesOptions, loaded: Loaded) {
    this.#o = o;
    this.#now = o.now ?? Date.now;
    this.#domain = bare(o.domain);
    this.#loaded = loaded;
    this.#timer = setInterval(() => void this.check(), CHECK_MS);
    this.#timer.unref();
  }

  [Symbol.dispose](): void {
    clearInterval(this.#timer);
  }

  /** The certificate (PEM) that clients have to trust; undefined with the operator's files. */
  get authority(): string | undefined {
    return this.#loaded.own?.authority.cert;
  }

  /** For clients that name no host. */
  current(): SecureContextOptions {
    return this.#loaded.options;
  }

  forName(name: string): SecureContext {
    return this.#mint(name.toLowerCase()) ?? this.#loaded.context;
  }

  onChange(listener: () => void): void {
    this.#listeners.push(listener);
  }

  /** Loads what has changed or ends soon; runs every few seconds on its own. What cannot be loaded leaves the old one. */
  async check(): Promise<void> {
    const { own, stamp } = this.#loaded;
    try {
      if (own && this.#now() - own.madeAt < RENEW_MS) return;
      if (this.#o.operator && (await stampOf(this.#o.operator)) === stamp) return;
      this.#loaded = await load(this.#o);
    } catch (e) {
      this.#o.logger.error({ error: messageOf(e) }, "the certificate could not be read again; the old one is used");
      return;
    }
    this.#minted.clear();
    this.#o.logger.info({}, "the certificate was read again");
    for (const changed of this.#listeners) changed();
  }

  /** A certificate for this name alone, where the wildcard does not cover it and it is ours. */
  #mint(name: string): SecureContext | undefined {
    const { own } = this.#loaded;
    if (!own || hasWildcard(this.#domain) || !name.endsWith(`.${this.#domain}`) || !HOST.test(name)) return undefined;
    const known = this.#minted.get(name);
    if (known) return known;
    const second = Math.floor(this.#now() / 1000);
    if (this.#mints.second !== second) Object.assign(this.#mints, { second, count: 0 });
    if (++this.#mints.count > MINTS_PER_SECOND) return undefined;
    const { context } = contextOf(issue(own.authority, [name], this.#now(), own.key), own.authority.cert);
    const [oldest] = this.#minted.keys();
    if (this.#minted.size >= MAX_MINTED && oldest !== undefined) this.#minted.delete(oldest);
    this.#minted.set(name, context);
    return context;
  }
}

const bare = (domain: string): string => domain.toLowerCase().replace(/:[0-9]+$/, "");
const hasWildcard = (domain: string): boolean => domain.includes(".");

function contextOf(pair: CertAndKey, ca: string): Pick<Loaded, "options" | "context"> {
  // Without `ca` every context would carry the authorities of the whole world, which a server has no use for.
  const options = { cert: pair.cert, key: pair.key, ca };
  return { options, context: createSecureContext(options) };
}

async function load(o: CertificatesOptions): Promise<Loaded> {
  if (o.operator) {
    const stamp = await stampOf(o.operator);
    const [cert, key] = await Promise.all([readPem(o.operator.cert), readPem(o.operator.key)]);
    try {
      const leaf = new X509Certificate(cert);
      return { ...contextOf({ cert, key }, leaf.toString()), stamp };
    } catch (e) {
      throw new AenvError("INVALID_ARGUMENT", `${o.operator.cert} and ${o.operator.key}: ${messageOf(e)}`, {
        hint: "Both are PEM files: the certificate with its chain, and the key that belongs to it, without a passphrase.",
      });
    }
  }
  const now = (o.now ?? Date.now)();
  const authority = await ensureAuthority(o.dir, now);
  const domain = bare(o.domain);
  const local = ["localhost", hostname().toLowerCase(), "127.0.0.1", "::1"];
  const names = [domain, ...(hasWildcard(domain) ? [`*.${domain}`] : []), ...local, ...o.names];
  const leaf = issue(authority, [...new Set(names)], now);
  return { ...contextOf(leaf, authority.cert), stamp: "", own: { authority, key: leaf.key, madeAt: now } };
}

async function readPem(path: string): Promise<string> {
  try {
    return await readFile(path, "utf8");
  } catch (e) {
    throw AenvError.from(e, `read ${path}`);
  }
}

async function stampOf(files: CertFiles): Promise<string> {
  const stamps = [files.cert, files.key].map(async (path) => {
    try {
      const s = await stat(path);
      return `${s.ino}:${s.size}:${s.mtimeMs}`;
    } catch (e) {
      throw AenvError.from(e, `read ${path}`);
    }
  });
  return (await Promise.all(stamps)).join(" ");
}
