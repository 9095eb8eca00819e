import type { IncomingMessage } from "node:http";

/** envd's port in every guest. */
export const ENVD_PORT = 49983;

export interface Route {
  sandboxId: string;
  port: number;
}

/** Meant for a sandbox, but names none: 400 with this message. */
export interface BadRoute {
  bad: string;
}

const ID = /^[a-z0-9]{1,64}$/;
// No leading zero: one port has one spelling.
const PORT = /^[1-9][0-9]{0,4}$/;
const MAX_HOSTS = 1024;
const MAX_HOST_LENGTH = 256;
const HOSTNAME = /^[a-z0-9._-]{1,253}$/;

function parsePort(text: string): number | undefined {
  if (!PORT.test(text)) return undefined;
  const port = Number(text);
  return port <= 65535 ? port : undefined;
}

/** Lower case, without port and final dot; undefined for IP literals in brackets and for what is no host name. */
export function hostnameOf(authority: string): string | undefined {
  const colon = authority.indexOf(":");
  let name = (colon < 0 ? authority : authority.slice(0, colon)).toLowerCase();
  if (colon >= 0 && !/^[0-9]{0,5}$/.test(authority.slice(colon + 1))) return undefined;
  if (name.endsWith(".")) name = name.slice(0, -1);
  return HOSTNAME.test(name) ? name : undefined;
}

/** `<port>-<id>` before the first dot; what follows the dot is not looked at. */
export function parseSandboxHost(hostname: string): Route | undefined {
  const dot = hostname.indexOf(".");
  const dash = hostname.indexOf("-");
  if (dash < 0 || dot < dash) return undefined;
  const port = parsePort(hostname.slice(0, dash));
  const sandboxId = hostname.slice(dash + 1, dot);
  return port !== undefined && ID.test(sandboxId) ? { sandboxId, port } : undefined;
}

function parseHeaders(id: string, portText: string | undefined): Route | BadRoute {
  // Old clients append `-<client id>`.
  const dash = id.indexOf("-");
  const sandboxId = dash < 0 ? id : id.slice(0, dash);
  if (!ID.test(sandboxId)) return { bad: "The E2b-Sandbox-Id header is not a sandbox id" };
  const port = portText === undefined ? ENVD_PORT : parsePort(portText);
  return port === undefined ? { bad: "The E2b-Sandbox-Port header is not a port" } : { sandboxId, port };
}

/**
 * Which sandbox a request is for; undefined when it is for none (the API's).
 * A host under our domain wins over the headers, the headers win over a host of the same form under any other domain
 * (wildcard DNS of others that leads here).
 */
export function routeOf(
  authority: string | undefined,
  idHeader: string | undefined,
  portHeader: string | undefined,
  domain: string,
): Route | BadRoute | undefined {
  const hostname = authority === undefined ? undefined : hostnameOf(authority);
  const ours =
    hostname !== undefined && hostname.endsWith(domain) && hostname[hostname.length - domain.length - 1] === ".";
  const byHost = hostname === undefined ? undefined : parseSandboxHost(hostname);
  if (ours && byHost) return byHost;
  if (ours && /^[0-9]+-/.test(hostname)) return { bad: `Invalid host: expected <port>-<sandbox id>.${domain}` };
  if (idHeader !== undefined) return parseHeaders(idHeader, portHeader);
  if (byHost) return byHost;
  if (ours && hostname.startsWith("sandbox.")) return { bad: "The E2b-Sandbox-Id header is missing" };
  return undefined;
}

/** What recent Host headers lead to; clients keep to few. */
class HostCache {
  readonly #domain: string;
  readonly #seen = new Map<string, { route: Route | BadRoute | undefined }>();

  constructor(domain: string) {
    this.#domain = domain;
  }

  routeOf(authority: string): Route | BadRoute | undefined {
    const known = this.#seen.get(authority);
    if (known) return known.route;
    const route = routeOf(authority, undefined, undefined, this.#domain);
    if (this.#seen.size >= MAX_HOSTS) this.#seen.clear();
    if (authority.length <= MAX_HOST_LENGTH) this.#seen.set(authority, { route });
    return route;
  }
}

/** A header that must not be repeated: node joins repetitions with a comma, which no valid value has. */
function one(value: string | string[] | undefined): string | undefined {
  return Array.isArray(value) ? value.join(",") : value;
}

/** The host that a request is for, and its path and query. An absolute request target wins over the Host header. */
export function originOf(req: IncomingMessage): { authority: string | undefined; path: string } | BadRoute {
  const url = req.url ?? "";
  if (url.startsWith("/") || url === "*") return { authority: req.headers.host, path: url };
  const match = /^https?:\/\/([^/?#@]+)(\/[^#]*|\?[^#]*)?$/i.exec(url);
  if (!match?.[1]) return { bad: "Invalid request target" };
  const rest = match[2] ?? "/";
  return { authority: match[1], path: rest.startsWith("?") ? `/${rest}` : rest };
}

/** `routeOf` for requests. */
export class Router {
  readonly #domain: string;
  readonly #hosts: HostCache;

  constructor(domain: string) {
    this.#domain = domain;
    this.#hosts = new HostCache(domain);
  }

  route(req: IncomingMessage): Route | BadRoute | undefined {
    const origin = originOf(req);
    const id = one(req.headers["e2b-sandbox-id"]);
    if ("bad" in origin) return id === undefined ? undefined : origin;
    if (id === undefined && origin.authority !== undefined) return this.#hosts.routeOf(origin.authority);
    return routeOf(origin.authority, id, one(req.headers["e2b-sandbox-port"]), this.#domain);
  }
}

const ENVD_INTERNAL = new Set(["init", "freeze", "unfreeze", "collapse", "fsfreeze", "fsthaw", "upgrade", "hooks"]);

/**
 * The path as the most lenient router could read it: decoded, without empty and dot segments, in lower case. undefined
 * when it cannot be decoded.
 */
export function plainPath(path: string): string | undefined {
  const end = path.search(/[?#]/);
  let plain = end < 0 ? path : path.slice(0, end);
  if (plain.includes("%")) {
    try {
      plain = decodeURIComponent(plain);
    } catch {
      return undefined;
    }
  }
  const segments: string[] = [];
  for (const s of plain.replaceAll("\\", "/").split("/")) {
    if (s === "..") segments.pop();
    else if (s !== "" && s !== ".") segments.push(s);
  }
  return `/${segments.join("/")}`.toLowerCase();
}

/** Routes of envd that only the node may call. */
export function isEnvdInternal(path: string): boolean {
  const plain = plainPath(path);
  return plain === undefined || ENVD_INTERNAL.has(plain.split("/")[1] ?? "");
}
