import { createHash } from "node:crypto";
import type { FileHandle } from "node:fs/promises";
import { AenvError, deadline, errnoOf, messageOf, sleep } from "@aenv/base";
import type { Credentials } from "./credentials.ts";
import { type Descriptor, INDEX_TYPES, MANIFEST_TYPES, MAX_MANIFEST_BYTES } from "./manifest.ts";
import { apiHost, formatReference, type ImageReference, isLoopback } from "./reference.ts";

const JSON_MS = 60_000;
/** A download that gives nothing for so long is begun again where it stopped. */
const IDLE_MS = 60_000;
const ATTEMPTS = 6;
const MIRROR_ATTEMPTS = 2;
const FIRST_PAUSE_MS = 200;
const MAX_REDIRECTS = 5;
const MAX_TOKEN_BYTES = 1024 * 1024;
/** Of a token that says nothing; and a margin for its way here. */
const TOKEN_S = 60;
const TOKEN_MARGIN_S = 5;

export interface RegistryOptions {
  /** For a host and a repository; the same ones every time are fine. */
  credentials: (host: string, repository: string) => Promise<Credentials | undefined>;
  /** Hosts asked before the one of the name, by that host. */
  mirrors?: Readonly<Record<string, readonly string[]>>;
  /** Hosts that speak plain HTTP, beside those of loopback. */
  insecure?: ReadonlySet<string>;
  /** Milliseconds without a byte. */
  idleMs?: number;
  /** Of each request; a mirror gets two. */
  attempts?: number;
}

export interface FoundManifest {
  digest: string;
  mediaType: string;
  json: unknown;
  /** The registry that gave it. */
  host: string;
}

interface Challenge {
  realm: string;
  service: string | undefined;
}

/** Reads images from registries that speak the OCI distribution protocol. */
export class RegistryClient {
  readonly #options: RegistryOptions;
  /** Authorization by host and repository, with its end. */
  readonly #auth = new Map<string, { header: string; until: number }>();

  constructor(options: RegistryOptions) {
    this.#options = options;
  }

  /** The manifest or index of an image, checked against the digest it was asked for by. Mirrors are asked first. */
  async manifest(ref: ImageReference, signal: AbortSignal): Promise<FoundManifest> {
    const hosts = [...(this.#options.mirrors?.[ref.host] ?? []), ref.host];
    let last: unknown;
    for (const host of hosts) {
      try {
        return await this.#manifestOf({ ...ref, host }, host === ref.host ? this.#attempts : MIRROR_ATTEMPTS, signal);
      } catch (e) {
        signal.throwIfAborted();
        // A mirror that lacks the image, or is away, is passed over.
        last = e;
      }
    }
    throw last;
  }

  /** Writes a blob from the start of the file, goes on after a break, and checks size and digest. */
  async blob(
    ref: Pick<ImageReference, "host" | "repository">,
    { digest, size }: Pick<Descriptor, "digest" | "size">,
    file: FileHandle,
    signal: AbortSignal,
    onBytes: (n: number) => void = () => {},
  ): Promise<void> {
    const name = `${ref.host}/${ref.repository}@${digest}`;
    const hash = createHash("sha256");
    let done = 0;
    const take = async (data: Uint8Array): Promise<void> => {
      if (done + data.length > size) throw corrupt(`${name} is longer than ${size} bytes`);
      hash.update(data);
      await file.writeFile(data);
      done += data.length;
      onBytes(data.length);
    };
    await this.#retried(name, this.#attempts, signal, async () => {
      if (done === size && size > 0) return;
      const path = `/v2/${ref.repository}/blobs/${digest}`;
      const headers = done > 0 ? { range: `bytes=${done}-` } : {};
      const res = await this.#get(ref, path, headers, signal);
      // One that does not know ranges begins anew: what we have is passed over.
      let skip = res.status === 206 ? 0 : done;
      for await (const chunk of bodyOf(res, this.#options.idleMs ?? IDLE_MS, signal)) {
        const part = chunk.subarray(Math.min(skip, chunk.length));
        skip -= chunk.length - part.length;
        if (part.length > 0) await take(part);
      }
      if (done < size) throw new AenvError("UNAVAILABLE", `${name} broke off after ${done} of ${size} bytes`);
    });
    if (`sha256:${hash.digest("hex")}` !== digest) throw corrupt(`${name} is not what its digest says`);
  }

  /** A small JSON blob, such as an image's configuration. */
  async json(ref: Pick<ImageReference, "host" | "repository">, d: Descriptor, signal: AbortSignal): Promise<unknown> {
    const name = `${ref.host}/${ref.repository}@${d.digest}`;
    const res = await this.#retried(name, this.#attempts, signal, async () => {
      const answer = await this.#get(ref, `/v2/${ref.repository}/blobs/${d.digest}`, {}, deadline(JSON_MS, signal));
      return await gather(answer, d.size, name, this.#options.idleMs ?? IDLE_MS, signal);
    });
    return parseJson(checked(res, d.digest, name), name);
  }

  async #manifestOf(ref: ImageReference, attempts: number, signal: AbortSignal): Promise<FoundManifest> {
    const name = formatReference(ref);
    const accept = [...MANIFEST_TYPES, ...INDEX_TYPES].join(", ");
    return await this.#retried(name, attempts, signal, async () => {
      const path = `/v2/${ref.repository}/manifests/${ref.digest ?? ref.tag ?? "latest"}`;
      const res = await this.#get(ref, path, { accept }, deadline(JSON_MS, signal));
      const mediaType = (res.headers.get("content-type") ?? "").split(";")[0]?.trim() ?? "";
      const body = await gather(res, MAX_MANIFEST_BYTES, name, this.#options.idleMs ?? IDLE_MS, signal);
      const digest = `sha256:${createHash("sha256").update(body).digest("hex")}`;
      if (ref.digest !== undefined) checked(body, ref.digest, name);
      const json = parseJson(body, name);
      const own = (json as { mediaType?: unknown }).mediaType;
      return { digest, mediaType: typeof own === "string" ? own : mediaType, json, host: ref.host };
    });
  }

  /** GET with authorization, which is fetched when the registry asks for it. Never sent to where a redirect leads. */
  async #get(
    ref: Pick<ImageReference, "host" | "repository">,
    path: string,
    headers: Record<string, string>,
    signal: AbortSignal,
  ): Promise<Response> {
    const base = this.#base(ref.host);
    const key = `${ref.host}/${ref.repository}`;
    for (let fresh = false; ; fresh = true) {
      const known = this.#auth.get(key);
      const auth = known && known.until > Date.now() ? { authorization: known.header } : {};
      const res = await follow(new URL(base + path), { ...headers, ...auth }, signal);
      if (res.status === 401 && !fresh) {
        await res.body?.cancel();
        this.#auth.set(key, await this.#authorize(ref, res.headers.get("www-authenticate") ?? "", signal));
        continue;
      }
      if (res.status >= 200 && res.status < 300) return res;
      throw await refusal(res, ref, path);
    }
  }

  async #authorize(
    ref: Pick<ImageReference, "host" | "repository">,
    header: string,
    signal: AbortSignal,
  ): Promise<{ header: string; until: number }> {
    const credentials = await this.#options.credentials(ref.host, ref.repository);
    const basic =
      credentials && "username" in credentials
        ? `Basic ${Buffer.from(`${credentials.username}:${credentials.password}`).toString("base64")}`
        : undefined;
    if (/^basic\b/i.test(header)) {
      if (basic !== undefined) return { header: basic, until: Number.POSITIVE_INFINITY };
      throw unauthenticated(ref.host, "it asks for a name and a password");
    }
    const challenge = parseChallenge(header);
    if (!challenge) throw unauthenticated(ref.host, "it asks for authorization of a kind that is not known");
    const url = new URL(challenge.realm);
    if (url.protocol !== "https:" && !this.#isInsecure(ref.host)) {
      throw unauthenticated(ref.host, `its tokens come from ${url.origin}, which is not secure`);
    }
    const scope = `repository:${ref.repository}:pull`;
    let res: Response;
    if (credentials && "identityToken" in credentials) {
      const form = new URLSearchParams({
        grant_type: "refresh_token",
        refresh_token: credentials.identityToken,
        service: challenge.service ?? "",
        scope,
        client_id: "aenv",
      });
      res = await fetch(url, { method: "POST", body: form, redirect: "error", signal: deadline(JSON_MS, signal) });
    } else {
      url.searchParams.set("scope", scope);
      if (challenge.service !== undefined) url.searchParams.set("service", challenge.service);
      const headers = basic === undefined ? {} : { authorization: basic };
      res = await fetch(url, { headers, redirect: "error", signal: deadline(JSON_MS, signal) });
    }
    const body = await gather(res, MAX_TOKEN_BYTES, url.origin, JSON_MS, signal);
    if (!res.ok) throw unauthenticated(ref.host, `${url.origin} gave no token (${res.status})`);
    const { token, access_token, expires_in } = parseJson(body, url.origin) as Record<string, unknown>;
    const given = typeof token === "string" ? token : access_token;
    if (typeof given !== "string" || /[\r\n]/.test(given))
      throw unauthenticated(ref.host, `${url.origin} gave no token`);
    const seconds = typeof expires_in === "number" ? expires_in : TOKEN_S;
    return { header: `Bearer ${given}`, until: Date.now() + Math.max(1, seconds - TOKEN_MARGIN_S) * 1000 };
  }

  get #attempts(): number {
    return this.#options.attempts ?? ATTEMPTS;
  }

  #base(host: string): string {
    return `${this.#isInsecure(host) ? "http" : "https"}://${apiHost(host)}`;
  }

  #isInsecure(host: string): boolean {
    return isLoopback(host) || this.#options.insecure?.has(host) === true;
  }

  async #retried<T>(name: string, attempts: number, signal: AbortSignal, fn: () => Promise<T>): Promise<T> {
    for (let attempt = 1; ; attempt++) {
      signal.throwIfAborted();
      try {
        return await fn();
      } catch (e) {
        signal.throwIfAborted();
        const error = explain(e, name);
        if (!error.retry || attempt === attempts) throw error;
      }
      await sleep(FIRST_PAUSE_MS * 2 ** (attempt - 1) * (0.5 + Math.random()), signal);
    }
  }
}

async function follow(start: URL, headers: Record<string, string>, signal: AbortSignal): Promise<Response> {
  let url = start;
  for (let n = 0; n <= MAX_REDIRECTS; n++) {
    const { authorization: _, ...bare } = headers;
    const sent = url.origin === start.origin && n === 0 ? headers : bare;
    const res = await fetch(url, { headers: { "user-agent": "aenv", ...sent }, redirect: "manual", signal });
    const location = res.headers.get("location");
    if (res.status < 300 || res.status >= 400 || location === null) return res;
    await res.body?.cancel();
    const next = new URL(location, url);
    if (next.protocol !== "https:" && next.protocol !== start.protocol) {
      throw new AenvError("PERMISSION_DENIED", `${start.host} leads to ${next.origin}, which is not secure`);
    }
    url = next;
  }
  throw new AenvError("UNAVAILABLE", `${start.host} leads from place to place without end`);
}

/** Chunks of the body; UNAVAILABLE when it gives none for too long. */
async function* bodyOf(res: Response, idleMs: number, signal: AbortSignal): AsyncGenerator<Uint8Array> {
  const reader = res.body?.getReader();
  if (!reader) return;
  try {
    for (;;) {
      const idle = Promise.withResolvers<never>();
      const timer = setTimeout(() => idle.reject(new AenvError("UNAVAILABLE", "the registry sends nothing")), idleMs);
      try {
        const { done, value } = await Promise.race([reader.read(), idle.promise]);
        if (done) return;
        signal.throwIfAborted();
        yield value;
      } finally {
        clearTimeout(timer);
      }
    }
  } finally {
    await reader.cancel().catch(() => {});
  }
}

async function gather(
  res: Response,
  maxBytes: number,
  name: string,
  idleMs: number,
  signal: AbortSignal,
): Promise<Buffer> {
  const parts: Uint8Array[] = [];
  let size = 0;
  for await (const chunk of bodyOf(res, idleMs, signal)) {
    size += chunk.length;
    if (size > maxBytes) throw corrupt(`${name} is longer than ${maxBytes} bytes`);
    parts.push(chunk);
  }
  return Buffer.concat(parts);
}

function checked(body: Buffer, digest: string, name: string): Buffer {
  if (`sha256:${createHash("sha256").update(body).digest("hex")}` !== digest) {
    throw corrupt(`${name} is not what its digest says`);
  }
  return body;
}

function parseJson(body: Buffer, name: string): unknown {
  try {
    const json: unknown = JSON.parse(body.toString("utf8"));
    if (typeof json === "object" && json !== null) return json;
  } catch {
    // Said below.
  }
  throw new AenvError("INVALID_ARGUMENT", `${name} is not JSON`);
}

/** `Bearer realm="…",service="…",scope="…"`. */
function parseChallenge(header: string): Challenge | undefined {
  if (!/^bearer\s/i.test(header)) return undefined;
  const fields = new Map([...header.matchAll(/([a-z_]+)="([^"]*)"/gi)].map((m) => [m[1]?.toLowerCase(), m[2]]));
  const realm = fields.get("realm");
  if (realm === undefined || !/^https?:\/\//.test(realm) || !URL.canParse(realm)) return undefined;
  return { realm, service: fields.get("service") };
}

async function refusal(
  res: Response,
  ref: Pick<ImageReference, "host" | "repository">,
  path: string,
): Promise<AenvError> {
  const text = (await gather(res, 64 * 1024, ref.host, 5000, new AbortController().signal).catch(() => Buffer.alloc(0)))
    .toString("utf8")
    .slice(0, 300);
  const what = `${ref.host} answered ${res.status} for ${path}${text === "" ? "" : `: ${text}`}`;
  if (res.status === 404) {
    return new AenvError("NOT_FOUND", `${ref.host} has no ${path.replace(/^\/v2\//, "")}`, {
      hint: "Check the name and the tag; a private image may look as if it were not there.",
    });
  }
  if (res.status === 401 || res.status === 403)
    return unauthenticated(ref.host, `access to ${ref.repository} is denied`);
  if (res.status === 429 || res.status >= 500) return new AenvError("UNAVAILABLE", what);
  return new AenvError("INVALID_ARGUMENT", what);
}

function unauthenticated(host: string, why: string): AenvError {
  return new AenvError("PERMISSION_DENIED", `the registry ${host} refuses: ${why}`, {
    hint: `Save credentials with docker login ${host} or podman login ${host} on the node, or send them with the request.`,
  });
}

function corrupt(what: string): AenvError {
  return new AenvError("CORRUPT", what, {
    hint: "The registry or something on the way changes images: do not use it.",
  });
}

function explain(e: unknown, name: string): AenvError {
  if (e instanceof AenvError) return e;
  // fetch wraps what went wrong below.
  const cause = e instanceof TypeError ? e.cause : e;
  const why = errnoOf(cause) ?? messageOf(cause);
  if (e instanceof TypeError || e instanceof DOMException) {
    return new AenvError("UNAVAILABLE", `${name} cannot be read: ${why}`, {
      cause: e,
      hint: "Check the registry's address and the network to it.",
    });
  }
  return AenvError.from(e, `reading ${name}`);
}
