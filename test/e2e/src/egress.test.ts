/** A sandbox and the internet, which here is a network namespace with sites, a resolver and an authority of its own. */
import assert from "node:assert/strict";
import { type ChildProcessWithoutNullStreams, spawn } from "node:child_process";
import { mkdtempSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { createInterface } from "node:readline";
import { after, before, test } from "node:test";
import { run } from "@aenv/host";
import { issue, makeAuthority } from "@aenv/names";
import type { Sandbox } from "e2b";
import { api, eventually, ownedPid, sandboxFor, serverPid, startServer, url } from "./node.ts";

const LIMIT = { timeout: 300_000 };
const repo = join(import.meta.dirname, "../../..");
const NETNS = "aenv-e2e-internet";
/** Public addresses that nobody else on this host asks for. */
const SITE = "93.184.216.34";
const OTHER = "93.184.216.35";
const RESOLVER = "93.184.216.53";
const RECORDS = { "api.test": [SITE], "plain.test": [SITE], "other.test": [OTHER], "rebind.test": ["127.0.0.1"] };
const SECRET = "never in the guest";

interface Said {
  event?: "said" | "question";
  host: string;
  from: string;
  text: string;
}

let internet: ChildProcessWithoutNullStreams;
const heard: Said[] = [];
const folder = mkdtempSync(join(tmpdir(), "aenv-e2e-egress-"));
const authority = makeAuthority("e2e world", Date.now());

async function makeInternet(): Promise<void> {
  const lines = [
    `netns add ${NETNS}`,
    `link add aenve2e0 type veth peer name eth0 netns ${NETNS}`,
    "addr add 192.0.2.1/30 dev aenve2e0",
    "link set aenve2e0 up",
    ...[SITE, OTHER, RESOLVER].map((a) => `route add ${a}/32 dev aenve2e0`),
  ];
  await run("ip", ["-batch", "-"], { input: lines.join("\n") });
  const inside = [
    "link set lo up",
    "addr add 192.0.2.2/30 dev eth0",
    "link set eth0 up",
    ...[SITE, OTHER, RESOLVER].map((a) => `addr add ${a}/32 dev eth0`),
  ];
  await run("ip", ["-n", NETNS, "-batch", "-"], { input: inside.join("\n") });
  internet = spawn("nsenter", [`--net=/run/netns/${NETNS}`, process.execPath, join(repo, "apps/egress/test/peer.ts")]);
  internet.stderr.pipe(process.stderr);
  const done = new Set<number>();
  createInterface({ input: internet.stdout }).on("line", (line) => {
    const o = JSON.parse(line) as Said & { id?: number };
    if (o.id === undefined) heard.push(o);
    else done.add(o.id);
  });
  const { cert, key } = issue(authority, ["api.test", "plain.test", "other.test"], Date.now());
  const orders = [
    { op: "dns", host: RESOLVER },
    { op: "records", records: RECORDS },
    ...[SITE, OTHER].flatMap((host) => [
      { op: "site", host, port: 80 },
      { op: "secure", host, port: 443, cert, key },
    ]),
  ];
  for (const [id, order] of orders.entries()) internet.stdin.write(`${JSON.stringify({ id, ...order })}\n`);
  await eventually(async () => done.size === orders.length);
}

/** The node with other variables; its gateway is started anew with them. */
async function restart(env: Record<string, string>): Promise<void> {
  const [former, gateway] = [serverPid(), await ownedPid("node (egress)")];
  process.kill(former, "SIGKILL");
  process.kill(gateway, "SIGKILL");
  await startServer(former, env);
}

before(async () => {
  await makeInternet();
  writeFileSync(join(folder, "world.crt"), authority.cert);
  await restart({ AENV_DNS: RESOLVER, NODE_EXTRA_CA_CERTS: join(folder, "world.crt") });
}, LIMIT);

after(async () => {
  internet.kill("SIGKILL");
  await run("ip", ["-force", "-batch", "-"], { input: `link del aenve2e0\nnetns del ${NETNS}` });
  rmSync(folder, { recursive: true });
  await restart({});
}, LIMIT);

/** Its output, or its exit code. */
async function shell(sandbox: Sandbox, command: string): Promise<string> {
  const r = await sandbox.commands.run(`{ ${command}; } 2>&1; echo "exit $?"`, { timeoutMs: 60_000 });
  return r.stdout;
}
const get = (sandbox: Sandbox, what: string): Promise<string> => shell(sandbox, `curl -sS -m 20 ${what}`);

test("a sandbox reaches the names it may, with headers that it never sees, and no others", LIMIT, async (t) => {
  const network = {
    allowOut: ["api.test", "plain.test", "rebind.test"],
    denyOut: ["0.0.0.0/0"],
    rules: { "api.test": [{ transform: { headers: { Authorization: SECRET } } }] },
  };
  const sandbox = await sandboxFor(t, { network });
  const answer = await get(sandbox, "-H 'Authorization: guest' https://api.test/path");
  assert.match(answer, /exit 0\n$/);
  const got = JSON.parse(answer.replace(/exit 0\n$/, "")) as { url: string; headers: string[] };
  assert.equal(got.url, "/path");
  assert.ok(got.headers.includes(SECRET) && !got.headers.includes("guest"));
  // A program that brings its own authorities takes the sandbox's from the environment.
  const python = `python3 -c 'import urllib.request as u; print(u.urlopen("https://api.test/").status)'`;
  assert.equal(await shell(sandbox, python), "200\nexit 0\n");
  // The world's authority is not the guest's: nobody opened this connection.
  assert.match(await get(sandbox, "https://plain.test/"), /certificate[\s\S]*exit 60\n$/);
  assert.equal(await get(sandbox, "-H 'Connection: close' --http0.9 http://plain.test/"), `site ${SITE}\nexit 0\n`);

  const from = heard.length;
  assert.match(await get(sandbox, "http://other.test/"), /exit 6\n$/);
  assert.match(await get(sandbox, "http://rebind.test/"), /exit 6\n$/);
  assert.doesNotMatch(await get(sandbox, `-H 'Connection: close' --http0.9 http://${OTHER}/`), /site/);
  assert.doesNotMatch(
    await get(sandbox, `-H 'Connection: close' --http0.9 --resolve plain.test:80:${OTHER} http://plain.test/`),
    /site/,
  );
  assert.deepEqual(
    heard.slice(from).filter((h) => h.event === "said" || h.text === "other.test"),
    [],
  );
});

test("a change of the rules holds for a sandbox that runs, its trust included", LIMIT, async (t) => {
  const sandbox = await sandboxFor(t, { network: { denyOut: ["0.0.0.0/0"] } });
  const put = async (body: object): Promise<void> => {
    const r = await api("PUT", `/sandboxes/${sandbox.sandboxId}/network`, body);
    assert.equal(r.status, 204, await r.text());
  };
  assert.match(await get(sandbox, "http://plain.test/"), /exit 6\n$/);
  await put({ allowOut: ["plain.test"], denyOut: ["0.0.0.0/0"] });
  assert.equal(await get(sandbox, "-H 'Connection: close' --http0.9 http://plain.test/"), `site ${SITE}\nexit 0\n`);
  await put({
    allowOut: ["api.test"],
    denyOut: ["0.0.0.0/0"],
    rules: { "api.test": [{ transform: { headers: { "x-secret": SECRET } } }] },
  });
  assert.match(await get(sandbox, "https://api.test/"), new RegExp(SECRET));
  assert.match(await get(sandbox, "http://plain.test/"), /exit 6\n$/);
});

test(
  "root in a guest that scans, lies about who it is, floods and attacks its gateway reaches nothing",
  LIMIT,
  async (t) => {
    const neighbour = await sandboxFor(t);
    await neighbour.commands.run("python3 -m http.server 8000 >/dev/null 2>&1", { background: true, timeoutMs: 0 });
    const sandbox = await sandboxFor(t, { network: { allowOut: ["plain.test"], denyOut: ["0.0.0.0/0"] } });
    const script = `
import os, socket, struct, sys
import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (4096, 4096))
ports = list(range(1, 1025)) + [2375, 3128, 5000, 5355, 6443, 8000, 8080, 9090, 10250, ${new URL(url).port}] + list(range(20000, 20200))
hosts = ["169.254.0.22", "169.254.0.20", "169.254.169.254", "10.0.0.1", "192.168.0.1", "172.17.0.1", "192.0.2.1"] + sys.argv[1:]
opened = []
for host in hosts:
    socks = []
    for port in ports if host == hosts[0] else [22, 80, 443, 8000, ${new URL(url).port}, 49983]:
        s = socket.socket(); s.setblocking(False)
        try: s.connect((host, port))
        except BlockingIOError: pass
        except OSError: s.close(); continue
        socks.append((s, port))
    import select, time
    end = time.time() + 3
    while socks and time.time() < end:
        _, w, _ = select.select([], [s for s, _ in socks][:900], [], 0.2)
        for s in w:
            port = [p for q, p in socks if q is s][0]
            if s.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == 0: opened.append((host, port))
            socks = [(q, p) for q, p in socks if q is not s]; s.close()
    for s, _ in socks: s.close()
raw = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0x0800); raw.bind(("eth0", 0))
def ip(src, dst, payload, smac=b"\\x02\\xfc\\0\\0\\0\\x05"):
    head = struct.pack("!BBHHHBBH4s4s", 0x45, 0, 20 + len(payload), 1, 0, 64, 17, 0, socket.inet_aton(src), socket.inet_aton(dst))
    total = sum(struct.unpack("!10H", head)); total = (total >> 16) + (total & 0xffff); total += total >> 16
    head = head[:10] + struct.pack("!H", ~total & 0xffff) + head[12:]
    return b"\\x02\\xfc\\0\\0\\0\\x01" + smac + b"\\x08\\0" + head + payload
spoofed = struct.pack("!HHHH", 4000, 53, 8 + 7, 0) + b"spoofed"
for src in ["8.8.8.8", "127.0.0.1", "169.254.0.22", "10.0.0.1"]: raw.send(ip(src, "${RESOLVER}", spoofed))
raw.send(ip("169.254.0.21", "${RESOLVER}", spoofed, b"\\x02\\xfc\\0\\0\\0\\x09"))
for n in range(20000): raw.send(ip("169.254.0.21", "${OTHER}", struct.pack("!HHHH", n & 0xffff, 80, 8 + 5, 0) + b"flood"))
print("opened", opened)
`;
    await sandbox.files.write("/tmp/attack.py", script);
    const from = heard.length;
    const attack = shell(sandbox, "sudo python3 /tmp/attack.py");
    assert.equal((await neighbour.commands.run("echo still here")).stdout, "still here\n");
    // Questions to whatever address are answered by the node, for allowed names.
    assert.equal(await attack, "opened [('169.254.0.22', 53)]\nexit 0\n");
    assert.deepEqual(heard.slice(from), []);
    assert.equal(await get(sandbox, "-H 'Connection: close' --http0.9 http://plain.test/"), `site ${SITE}\nexit 0\n`);
    assert.equal((await api("GET", "/health")).ok, true);
  },
);
