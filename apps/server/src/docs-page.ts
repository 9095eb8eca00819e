import {
  COMMON_ERRORS,
  ERROR_TABLE,
  errorsOf,
  LATER,
  ROUTE_IDS,
  ROUTES,
  type RouteDef,
  type Tag,
} from "@aenv/contract";
import { z } from "zod";

const escapeHtml = (text: string): string =>
  text.replace(/[&<>"]/g, (c) => ({ "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;" })[c] ?? c);

/** `code` marks of our own texts. */
const prose = (text: string): string => escapeHtml(text).replace(/`([^`]+)`/g, "<code>$1</code>");

const TAGS: Readonly<Record<Tag, string>> = {
  Sandboxes: "Create virtual machines, find them, keep them alive, and end them.",
  State: "Pause a machine, keep its state, go back to it, and start others from it.",
  Templates: "What sandboxes are made from.",
  Store: "Move snapshots between nodes: through a store they share, or as files.",
  Account: "Keys and the team they belong to.",
  Events: "What happened to sandboxes, and being told of it.",
  Node: "The machine that all of this runs on.",
};

interface JsonSchema {
  type?: string | string[];
  format?: string;
  enum?: unknown[];
  const?: unknown;
  description?: string;
  items?: JsonSchema;
  anyOf?: JsonSchema[];
  properties?: Record<string, JsonSchema>;
  required?: string[];
  additionalProperties?: JsonSchema | boolean;
}

function typeOf(s: JsonSchema): string {
  if (s.enum) return s.enum.map((v) => JSON.stringify(v)).join(" | ");
  if (s.const !== undefined) return JSON.stringify(s.const);
  if (s.anyOf) return [...new Set(s.anyOf.map(typeOf))].join(" | ");
  if (s.type === "array") return `${typeOf(s.items ?? {})}[]`;
  if (s.type === "object" && !s.properties && typeof s.additionalProperties === "object")
    return `map of ${typeOf(s.additionalProperties)}`;
  const name = Array.isArray(s.type) ? s.type.join(" | ") : (s.type ?? "any");
  return s.format === undefined ? name : `${name} (${s.format})`;
}

const inner = (s: JsonSchema): JsonSchema | undefined =>
  s.properties ? s : s.items ? inner(s.items) : s.anyOf?.map(inner).find((x) => x !== undefined);

function describe(s: JsonSchema): string {
  return s.description ?? s.anyOf?.find((x) => x.description !== undefined)?.description ?? "";
}

function fieldTable(schema: z.ZodType, io: "input" | "output"): string {
  const whole = z.toJSONSchema(schema, { io }) as JsonSchema;
  const object = inner(whole);
  if (!object?.properties) return `<p class="type">${escapeHtml(typeOf(whole))}</p>`;
  const rows = Object.entries(object.properties).map(([name, s]) => {
    const must = object.required?.includes(name) ? ' <b class="must">required</b>' : "";
    return `<tr><td><code>${escapeHtml(name)}</code>${must}</td><td class="type">${escapeHtml(typeOf(s))}</td><td>${prose(describe(s))}</td></tr>`;
  });
  const many = whole.type === "array" ? "<p>A list of:</p>" : "";
  return `${many}<table><tbody>${rows.join("")}</tbody></table>`;
}

function curlOf(def: RouteDef): string {
  const parts = ["curl -s"];
  if (def.method !== "GET") parts[0] += ` -X ${def.method}`;
  if (def.auth === "key") parts.push(`-H "X-API-KEY: $E2B_API_KEY"`);
  if (def.example !== undefined) {
    parts.push(`-H "Content-Type: application/json"`, `-d '${JSON.stringify(def.example)}'`);
  }
  const path = def.path.replace(/\{(\w+)\}/g, (_, name: string) => `$${name.replace(/ID$/, "_ID").toUpperCase()}`);
  parts.push(`"${BASE}${path}"`);
  return parts.join(parts.length > 2 ? " \\\n  " : " ");
}

function routeSection(id: string, def: RouteDef): string {
  const block = (title: string, html: string): string => `<h4>${title}</h4>${html}`;
  const answers = Object.entries(def.success).map(([status, a]) => {
    const headers = Object.entries(a.headers ?? {})
      .map(([name, what]) => `<li><code>${name}</code>: ${prose(what)}</li>`)
      .join("");
    return `<p><b class="ok">${status}</b> ${prose(a.description)}</p>${headers ? `<ul>${headers}</ul>` : ""}${a.schema ? fieldTable(a.schema, "output") : ""}`;
  });
  const failures = [...errorsOf(def)].flatMap(([status, codes]) =>
    codes
      .filter((c) => !COMMON_ERRORS.includes(c))
      .map((c) => `<a href="#error-${c}"><b class="err">${status}</b> ${c}</a>`),
  );
  const headers = Object.entries(def.headers ?? {}).map(
    ([name, what]) => `<tr><td><code>${name}</code></td><td>${prose(what)}</td></tr>`,
  );
  return [
    `<section class="route" id="${id}"><h3><b class="method ${def.method}">${def.method}</b> <code>${escapeHtml(def.path)}</code>`,
    `${def.deprecated ? ' <span class="note">deprecated</span>' : ""}${def.auth === "none" ? ' <span class="note">no key needed</span>' : ""}</h3>`,
    `<p class="summary">${prose(def.summary)}.${def.description === undefined ? "" : ` ${prose(def.description)}`}</p>`,
    `<pre>${escapeHtml(curlOf(def))}</pre>`,
    headers.length > 0 ? block("Headers", `<table><tbody>${headers.join("")}</tbody></table>`) : "",
    def.query ? block("Query", fieldTable(def.query, "input")) : "",
    def.body ? block(`Body${def.bodyOptional ? " (optional)" : ""}`, fieldTable(def.body, "input")) : "",
    block("Answer", answers.join("")),
    failures.length > 0 ? `<p class="fails">Fails with ${failures.join(", ")}</p>` : "",
    "</section>",
  ].join("");
}

const STYLE = `
:root{color-scheme:light dark;--fg:#1b1f24;--bg:#fff;--soft:#f4f6f8;--line:#d8dee4;--dim:#59636e;--accent:#0b62d6}
@media(prefers-color-scheme:dark){:root{--fg:#e6edf3;--bg:#0f1318;--soft:#181e25;--line:#2d3640;--dim:#9aa6b2;--accent:#6cb0ff}}
*{box-sizing:border-box}html{scroll-behavior:smooth;scroll-padding-top:1rem}
body{margin:0;font:16px/1.55 system-ui,sans-serif;color:var(--fg);background:var(--bg);display:grid;grid-template-columns:17rem minmax(0,52rem);gap:3rem}
nav{position:sticky;top:0;height:100vh;overflow:auto;padding:1.5rem 1rem 3rem 1.5rem;border-right:1px solid var(--line);font-size:.875rem}
nav h2{font-size:.8rem;text-transform:uppercase;letter-spacing:.06em;color:var(--dim);margin:1.4rem 0 .3rem}
nav a{display:block;padding:.12rem 0;color:inherit;text-decoration:none;overflow:hidden;text-overflow:ellipsis;white-space:nowrap}
nav a:hover{color:var(--accent)}main{padding:2rem 1.5rem 6rem 0}a{color:var(--accent)}
h1{font-size:2rem;margin:.2rem 0}h2{margin:3rem 0 .3rem;font-size:1.5rem}h3{font-size:1.05rem;margin:0 0 .4rem}h4{margin:1rem 0 .3rem;font-size:.85rem;color:var(--dim)}
code,pre{font:.875em/1.5 ui-monospace,SFMono-Regular,Menlo,monospace}pre{background:var(--soft);border:1px solid var(--line);border-radius:8px;padding:.8rem 1rem;overflow-x:auto}
.route{border-top:1px solid var(--line);padding:1.6rem 0 .6rem}.method{font:700 .75rem ui-monospace,monospace;padding:.15rem .45rem;border-radius:5px;background:var(--soft);border:1px solid var(--line)}
.GET{color:#1a7f37}.POST{color:#0b62d6}.DELETE{color:#cf222e}.PATCH,.PUT{color:#9a6700}
@media(prefers-color-scheme:dark){.GET{color:#4ac26b}.POST{color:#6cb0ff}.DELETE{color:#ff7b72}.PATCH,.PUT{color:#d4a72c}}
table{border-collapse:collapse;width:100%;font-size:.9rem}td,th{text-align:left;vertical-align:top;border-top:1px solid var(--line);padding:.35rem .8rem .35rem 0}
.type{color:var(--dim);font-size:.85rem}.must{font-size:.7rem;color:#cf222e}.note{font-size:.72rem;color:var(--dim);border:1px solid var(--line);border-radius:99px;padding:.1rem .5rem;font-weight:400}
.fails{font-size:.85rem;color:var(--dim)}.fails a{color:inherit;text-decoration:none}.err{color:#cf222e}.ok{color:#1a7f37}
@media(max-width:60rem){body{display:block}nav{position:static;height:auto;border:0}main{padding:1rem 1.5rem}}
`;

/** Stand for where the node is, which only a request tells. */
const BASE = "@base-url@";
const DOMAIN = "@domain@";

const START = `export E2B_API_URL=${BASE}
export E2B_SANDBOX_URL=${BASE}
export E2B_API_KEY=e2b_...        # aenv env prints all three`;
const TYPESCRIPT = `import { Sandbox } from "e2b";

const sandbox = await Sandbox.create("base");
const { stdout } = await sandbox.commands.run("uname -a");
await sandbox.kill();`;
const PYTHON = `from e2b import Sandbox

with Sandbox.create("base") as sandbox:
    print(sandbox.commands.run("uname -a").stdout)`;
const CURL = `id=$(curl -s -H "X-API-KEY: $E2B_API_KEY" -H "Content-Type: application/json" \\
  -d '{"templateID":"base"}' "${BASE}/v2/sandboxes" | grep -o '"sandboxID":"[^"]*"' | cut -d'"' -f4)
# a web server on port 8080 of the sandbox, by headers or by host name:
curl -H "E2b-Sandbox-Id: $id" -H "E2b-Sandbox-Port: 8080" "${BASE}/"
curl "http://8080-$id.${DOMAIN}/"`;

/** A feature's endpoints that this version answers with 501. */
function laterSection(): string {
  if (LATER.length === 0) return "";
  const rows = LATER.map(
    ({ method, path, feature }) =>
      `<tr><td><b class="method ${method}">${method}</b> <code>${escapeHtml(path)}</code></td><td>${escapeHtml(feature)}</td><td><span class="note">not available yet</span></td></tr>`,
  );
  return `<h2 id="later">Not available yet</h2><p>Parts of the E2B API that this version answers with 501.</p><table><tbody>${rows.join("")}</tbody></table>`;
}

/** Writes the page; `at` fills in where the reader has reached this node. */
export function docsPage(facts: { version: string }): (at: { baseUrl: string; domain: string }) => string {
  const page = pageWith(facts);
  return ({ baseUrl, domain }) => page.replaceAll(BASE, escapeHtml(baseUrl)).replaceAll(DOMAIN, escapeHtml(domain));
}

/** The API for people: one page, no scripts, nothing from elsewhere. */
function pageWith({ version }: { version: string }): string {
  const tags = Object.keys(TAGS) as Tag[];
  const of = (tag: Tag): [string, RouteDef][] =>
    ROUTE_IDS.map((id): [string, RouteDef] => [id, ROUTES[id]]).filter(([, def]) => def.tag === tag);
  const nav = tags
    .map(
      (tag) =>
        `<h2>${tag}</h2>${of(tag)
          .map(([id, def]) => `<a href="#${id}">${prose(def.summary)}</a>`)
          .join("")}`,
    )
    .join("");
  const body = tags
    .map(
      (tag) =>
        `<h2 id="${tag}">${tag}</h2><p>${TAGS[tag]}</p>${of(tag)
          .map(([id, def]) => routeSection(id, def))
          .join("")}`,
    )
    .join("");
  const errors = ERROR_TABLE.map(
    (e) =>
      `<tr id="error-${e.code}"><td><code>${e.code}</code></td><td>${e.status}</td><td>${e.retry ? "yes" : "no"}</td><td>${escapeHtml(e.hint)}</td></tr>`,
  ).join("");
  return `<!doctype html><html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width,initial-scale=1">
<title>AgentENV API</title><style>${STYLE}</style></head><body>
<nav><strong>AgentENV ${escapeHtml(version)}</strong><a href="#start">Start</a><a href="#errors">Errors</a><a href="/openapi.json">openapi.json</a>${nav}${LATER.length > 0 ? '<h2><a href="#later">Not available yet</a></h2>' : ""}</nav>
<main><h1 id="start">AgentENV API</h1>
<p>Sandboxes that are virtual machines. The official E2B SDKs work with it unchanged; this page describes what they call.</p>
<pre>${escapeHtml(START)}</pre><h4>TypeScript</h4><pre>${escapeHtml(TYPESCRIPT)}</pre><h4>Python</h4><pre>${escapeHtml(PYTHON)}</pre><h4>curl</h4><pre>${escapeHtml(CURL)}</pre>
<p>Send the key as <code>X-API-KEY</code> or as a bearer token. Traffic of a sandbox itself needs no API key: its agent on port 49983 asks for the access token that create gave.
Unknown fields are ignored; ids in a path may be percent-encoded; a body may have up to 16 MiB.</p>
${body}
${laterSection()}
<h2 id="errors">Errors</h2><p>Every failure has a JSON body <code>{"code", "message", "error_code"}</code>: the HTTP status, what happened with what to do, and a name that never changes its meaning.
<code>Should-Retry</code> says whether the same request may work later, <code>Retry-After</code> after how many seconds.</p>
<table><thead><tr><th>error_code</th><th>status</th><th>retry</th><th>what to do</th></tr></thead><tbody>${errors}</tbody></table>
</main></body></html>
`;
}
