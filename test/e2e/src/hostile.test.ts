/** Guests that do their worst, each beside a neighbour: neighbour, server and host go on, and the bounds of its VMM hold. */
import assert from "node:assert/strict";
import { globSync, readFileSync, statSync } from "node:fs";
import { join } from "node:path";
import { test } from "node:test";
import { CommandExitError, type Sandbox } from "e2b";
import { api, eventually, home, sandboxFor } from "./node.ts";

interface Resource {
  kind: string;
  name: string;
  owner: string | null;
  run?: string;
}

async function resources(): Promise<Resource[]> {
  return ((await (await api("GET", "/v1/doctor")).json()) as { resources: Resource[] }).resources;
}

async function vmmOf(sandbox: Sandbox): Promise<number> {
  const found = (await resources()).find((r) => r.kind === "process" && r.owner?.includes(sandbox.sandboxId));
  assert.ok(found, `no VMM of ${sandbox.sandboxId}`);
  return Number(found.name);
}

const status = (pid: number, field: string): number =>
  Number(new RegExp(`^${field}:\\s+(\\d+)`, "m").exec(readFileSync(`/proc/${pid}/status`, "utf8"))?.[1]);

/** Memory of the guest, of QEMU and of its translation cache, with room to spare. */
const MOST_RESIDENT_KB = 1300 * 1024;
/** What a group may hold is 128 and the guest's processors. */
const MOST_THREADS = 128 + 32;
const CONSOLE_LOG_BYTES = 1024 * 1024;

const FLOOD = `
import socket, os, random
payload = os.urandom(1000)
udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
raw = socket.socket(socket.AF_PACKET, socket.SOCK_RAW)
raw.bind(("eth0", 0))
n = 0
while True:
    for target in ("10.0.0.1", "169.254.169.254", "169.254.0.22", "192.0.2.1", "8.8.8.8", "255.255.255.255"):
        try: udp.sendto(payload, (target, random.randrange(1, 65535)))
        except OSError: pass
    # Frames of no protocol, with any source and any destination.
    try: raw.send(os.urandom(12) + bytes([8, random.choice((0, 6, 0xdd))]) + os.urandom(random.randrange(20, 1400)))
    except OSError: pass
    n += 1
`;

const ATTACKS: Record<string, string> = {
  "a fork bomb": "bomb() { bomb | bomb & }; bomb",
  "memory, all of it, again and again": `while :; do python3 -c 'x = [bytearray(os.urandom(1 << 20)) for os in [__import__("os")] for _ in range(4096)]'; done`,
  "its console, for ever": "while :; do head -c 1000000 /dev/zero | tr '\\0' x > /dev/console; done",
  "packets of every kind": `python3 -c '${FLOOD}'`,
  "its disk": "while :; do head -c 300000000 /dev/zero | tr '\\0' y > /fill; sync; done",
  "its own agent":
    "while :; do pkill -STOP envd; pkill -KILL envd; kill -STOP $(pidof envd aenv-guest); sleep 0.1; done",
  "its devices": `
    for d in /sys/bus/virtio/devices/*; do n=$(basename $d); for i in 1 2 3 4 5; do
      echo $n > $d/driver/unbind; echo $n > /sys/bus/virtio/drivers_probe; done; done
    while :; do for f in /dev/mem /dev/port /dev/hwrng /dev/vda; do timeout 2 dd if=/dev/urandom of=$f bs=64k count=64; done; done`,
};

for (const [what, script] of Object.entries(ATTACKS))
  test(`a guest that attacks with ${what} hurts itself only`, { timeout: 300_000 }, async (t) => {
    const neighbour = await sandboxFor(t, { timeoutMs: 300_000 });
    const hostile = await sandboxFor(t, { timeoutMs: 300_000 });
    const pid = await vmmOf(hostile);
    const { run } = (await resources()).find((r) => r.kind === "process" && r.name === String(pid)) ?? {};
    await hostile.files.write("/tmp/attack.sh", script);
    const attack = await hostile.commands.run("setsid nohup bash /tmp/attack.sh >/dev/null 2>&1 & echo on", {
      user: "root",
    });
    assert.equal(attack.stdout, "on\n");
    const alive = (): boolean => globSync(`/proc/${pid}/stat`).length > 0;
    for (let round = 0; round < 8; round++) {
      assert.equal((await neighbour.commands.run(`echo ${round}`, { timeoutMs: 60_000 })).stdout, `${round}\n`);
      assert.equal((await api("GET", "/health")).status, 200);
      if (!alive()) break;
      assert.ok(status(pid, "VmRSS") < MOST_RESIDENT_KB, `${status(pid, "VmRSS")} kB are resident`);
      assert.ok(status(pid, "Threads") <= MOST_THREADS, `${status(pid, "Threads")} threads`);
      // What the guest answers, it answers in time or not at all.
      await hostile.commands.run("true", { timeoutMs: 1000, requestTimeoutMs: 3000 }).catch((e: unknown) => {
        if (e instanceof CommandExitError) throw e;
      });
    }
    for (const log of globSync(join(home, "runs", run ?? "*", "console", "*")))
      assert.ok(statSync(log).size <= CONSOLE_LOG_BYTES, `${log} is bounded`);
    await hostile.kill();
    assert.equal(await hostile.isRunning(), false);
    await eventually(async () => !JSON.stringify(await resources()).includes(hostile.sandboxId));
    assert.equal((await neighbour.commands.run("echo still here", { timeoutMs: 60_000 })).stdout, "still here\n");
    const fresh = await sandboxFor(t);
    assert.equal((await fresh.commands.run("echo new", { timeoutMs: 60_000 })).stdout, "new\n");
  });
