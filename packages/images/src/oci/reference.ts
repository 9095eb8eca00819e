import { AenvError } from "@aenv/base";

/** A named image: where it is and which one. */
export interface ImageReference {
  /** Of the registry, with its port. */
  host: string;
  repository: string;
  /** A digest goes before a tag. */
  tag: string | undefined;
  digest: string | undefined;
}

const DEFAULT_HOST = "docker.io";
/** What Docker's own registry answers to. */
const DOCKER_API_HOST = "registry-1.docker.io";
const MAX_LENGTH = 512;
const HOST = /^(?:[a-zA-Z0-9](?:[a-zA-Z0-9.-]{0,252}[a-zA-Z0-9])?|\[[0-9a-fA-F:]+\])(?::[0-9]{1,5})?$/;
const PATH_PART = /^[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*$/;
const TAG = /^[a-zA-Z0-9_][a-zA-Z0-9._-]{0,127}$/;
export const DIGEST = /^sha256:[0-9a-f]{64}$/;

/** `[HOST[:PORT]/]NAME[:TAG][@sha256:DIGEST]`, as the usual tools write it. Throws INVALID_ARGUMENT. */
export function parseReference(text: string): ImageReference {
  const wrong = (why: string): AenvError =>
    new AenvError("INVALID_ARGUMENT", `${JSON.stringify(text.slice(0, 200))} is not the name of an image: ${why}`, {
      hint: "Write [HOST/]NAME[:TAG], as in alpine:3.20 or registry.example.com/team/app@sha256:…",
    });
  if (text === "" || text.length > MAX_LENGTH) throw wrong("its length");
  const at = text.indexOf("@");
  const digest = at < 0 ? undefined : text.slice(at + 1);
  if (digest !== undefined && !DIGEST.test(digest)) throw wrong("its digest");
  const rest = at < 0 ? text : text.slice(0, at);
  const slash = rest.indexOf("/");
  const first = slash < 0 ? "" : rest.slice(0, slash);
  // As Docker tells hosts from folders: a dot, a port, or localhost.
  const named = first === "localhost" || /[.:]/.test(first) || first !== first.toLowerCase();
  const host = named ? first : DEFAULT_HOST;
  if (!HOST.test(host)) throw wrong("its host");
  const path = named ? rest.slice(slash + 1) : rest;
  const colon = path.lastIndexOf(":");
  const tag = colon > path.lastIndexOf("/") ? path.slice(colon + 1) : undefined;
  if (tag !== undefined && !TAG.test(tag)) throw wrong("its tag");
  const name = tag === undefined ? path : path.slice(0, colon);
  const repository = host === DEFAULT_HOST && !name.includes("/") ? `library/${name}` : name;
  if (!repository.split("/").every((p) => PATH_PART.test(p))) throw wrong("its name");
  return { host, repository, tag: tag ?? (digest === undefined ? "latest" : undefined), digest };
}

export function formatReference({ host, repository, tag, digest }: ImageReference): string {
  return `${host}/${repository}${tag === undefined ? "" : `:${tag}`}${digest === undefined ? "" : `@${digest}`}`;
}

/** The host that answers to the API. */
export function apiHost(host: string): string {
  return host === DEFAULT_HOST || host === "index.docker.io" ? DOCKER_API_HOST : host;
}

/** Loopback registries speak plain HTTP. */
export function isLoopback(host: string): boolean {
  const name = host.replace(/:\d+$/, "");
  return name === "localhost" || name === "[::1]" || /^127(?:\.\d{1,3}){3}$/.test(name);
}
