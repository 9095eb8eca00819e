/** The official SDKs by https and host names, as `aenv env --tls` sets them up, with the names answered by our own DNS. */
import assert from "node:assert/strict";
import { execFile } from "node:child_process";
import { randomInt } from "node:crypto";
import { mkdtempSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { test, type TestContext } from "node:test";
import { promisify } from "node:util";
import { silentLogger } from "@aenv/base";
import { DnsServer } from "@aenv/names";
import { home, url } from "./node.ts";

const LIMIT = { timeout: 240_000 };
const exec = promisify(execFile);
const root = join(import.meta.dirname, "../../..");
const clients = join(import.meta.dirname, "../clients");
const aenv = join(root, "bin/aenv");
const domain = `localhost:${new URL(url).port}`;

async function tlsEnv(): Promise<Record<string, string>> {
  const env = { PATH: process.env["PATH"] ?? "", HOME: "/nonexistent", AENV_HOME: home };
  const { stdout } = await exec(aenv, ["env", "--tls", "--json"], { env });
  return { ...env, ...(JSON.parse(stdout) as Record<string, string>) };
}

/** Runs a program to which our DNS server is the machine's: in a mount namespace of its own. */
async function withDns(t: TestContext): Promise<(cmd: string, args: string[]) => Promise<Record<string, unknown>>> {
  const address = `127.${randomInt(1, 255)}.${randomInt(256)}.${randomInt(1, 255)}`;
  const dns = await DnsServer.open({ listen: `${address}:53`, domain, addresses: ["127.0.0.1"], logger: silentLogger });
  t.after(() => dns[Symbol.asyncDispose]());
  const dir = mkdtempSync(join(tmpdir(), "aenv-tls-"));
  t.after(() => rmSync(dir, { recursive: true }));
  const resolvers = join(dir, "resolv.conf");
  writeFileSync(resolvers, `nameserver ${address}\n`);
  const env = await tlsEnv();
  return async (cmd, args) => {
    const script = 'mount --bind "$0" /etc/resolv.conf && exec "$@"';
    const { stdout } = await exec("unshare", ["-m", "sh", "-c", script, resolvers, cmd, ...args], { env });
    return JSON.parse(stdout) as Record<string, unknown>;
  };
}

test("the JavaScript SDK: commands, files, signed URLs, ports by their host names", LIMIT, async (t) => {
  const client = await withDns(t);
  const seen = await client(process.execPath, [join(clients, "tls.mjs")]);
  assert.match(String(seen["host"]), new RegExp(`^3000-i[a-z0-9]+\\.${domain}$`));
  delete seen["host"];
  assert.deepEqual(seen, {
    output: "over tls\n",
    downloaded: "written",
    upload: 200,
    uploaded: "uploaded",
    served: "written",
    webSocket: "refused by the server",
    running: true,
  });
});

test("the Python SDK: commands, files, a signed URL", LIMIT, async (t) => {
  const client = await withDns(t);
  const seen = await client(process.env["AENV_TEST_PYTHON"] ?? "python3", [join(clients, "tls.py")]);
  delete seen["host"];
  assert.deepEqual(seen, { output: "over tls\n", downloaded: "written", running: true });
});

test("curl gets at a port of a sandbox with the authority that aenv trust prints", LIMIT, async (t) => {
  const dir = mkdtempSync(join(tmpdir(), "aenv-tls-"));
  t.after(() => rmSync(dir, { recursive: true }));
  const { stdout, stderr } = await exec(aenv, ["trust"], { env: { ...process.env, AENV_HOME: home } });
  assert.match(stderr, /SHA-256 fingerprint ([0-9A-F]{2}:){31}[0-9A-F]{2}/);
  const ca = join(dir, "ca.crt");
  writeFileSync(ca, stdout);
  // curl itself knows that all names below localhost are this machine.
  const { stdout: body } = await exec("curl", ["-sS", "--cacert", ca, `https://80-iunknown.${domain}/`]);
  assert.equal((JSON.parse(body) as { message: string }).message, "The sandbox was not found");
  const { stdout: version } = await exec("curl", [
    "-sS",
    "-o",
    "/dev/null",
    "-w",
    "%{http_version} %{http_code}",
    "--cacert",
    ca,
    `https://${domain}/health`,
  ]);
  assert.equal(version, "2 200");
});
