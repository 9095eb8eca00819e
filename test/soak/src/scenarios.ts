/** What must hold however often it is done. Each throws when it does not, and else says in one line what was seen. */
import assert from "node:assert/strict";
import { randomInt } from "node:crypto";
import { sleep } from "@aenv/base";
import type { Sandbox } from "e2b";
import { mib, type Node, sh } from "./node.ts";

type Say = (line: string) => void;

/** A file in memory, one on the disk, and a program that counts into a file that it keeps open and to its output. */
async function busy(s: Sandbox, bytes: number): Promise<{ pid: number; sums: string }> {
  await s.commands.run(
    `mkdir -p /mnt/ram && mount -t tmpfs -o size=${2 * bytes} tmpfs /mnt/ram && chmod 777 /mnt/ram`,
    {
      user: "root",
    },
  );
  await sh(s, `head -c ${bytes} /dev/urandom > /mnt/ram/data; head -c ${bytes >> 3} /dev/urandom > data; sync`);
  const script = "exec 3>count; i=0; while :; do i=$((i+1)); echo $i >&3; echo tick $i; sleep 0.2; done";
  const { pid } = await s.commands.run(script, { background: true, timeoutMs: 0 });
  return { pid, sums: await sums(s) };
}

const sums = (s: Sandbox): Promise<string> => sh(s, "md5sum /mnt/ram/data data");

/** Its output is followed by its old pid, and what it counts to goes on in both places. Returns how far it is. */
async function alive(s: Sandbox, pid: number, from: number): Promise<number> {
  const followed = await s.commands.connect(pid, { timeoutMs: 0 });
  for (const end = Date.now() + 60_000; !/tick \d+\n/.test(followed.stdout); ) {
    assert.ok(Date.now() < end, "the output of the program does not go on");
    await sleep(20);
  }
  await followed.disconnect();
  const at = Number(/tick (\d+)\n/.exec(followed.stdout)?.[1]);
  assert.ok(at > from, `it counted to ${from} and is at ${at} now`);
  // It may be between the two.
  assert.ok(Number(await sh(s, "tail -n 1 count")) >= at);
  return at;
}

/** With fewer cycles a chain of captures is not yet as long as it gets. */
const BOUNDED_FROM = 50;

const median = (values: readonly number[]): number =>
  values.toSorted((a, b) => a - b)[Math.floor(values.length / 2)] ?? 0;

/** One sandbox, paused and resumed again and again: its disk use does not grow with the cycles. */
export async function cycles(node: Node, o: { cycles: number; bytes: number }, say: Say): Promise<string> {
  let s = await node.create();
  try {
    const { pid, sums: wanted } = await busy(s, o.bytes);
    const disk: number[] = [];
    const ms: { pause: number; resume: number }[] = [];
    let at = 0;
    for (let cycle = 1; cycle <= o.cycles; cycle++) {
      const t0 = performance.now();
      assert.equal(await s.pause(), true);
      const t1 = performance.now();
      s = await node.connect(s.sandboxId);
      ms.push({ pause: t1 - t0, resume: performance.now() - t1 });
      assert.equal(await sums(s), wanted, `cycle ${cycle}`);
      at = await alive(s, pid, at);
      disk.push(await node.diskBytes());
      if (cycle % 10 === 0) say(`cycle ${cycle}: data equal, at ${at}, ${mib(disk.at(-1) ?? 0)} on disk`);
    }
    const p50 = (of: "pause" | "resume"): string => median(ms.map((m) => m[of])).toFixed(0);
    // A fifth of the cycles in the middle, and the last fifth: old files are collected, so the second needs no more.
    const fifth = Math.ceil(disk.length / 5);
    const middle = median(disk.slice(2 * fifth, 3 * fifth));
    const end = median(disk.slice(-fifth));
    if (o.cycles >= BOUNDED_FROM) assert.ok(end < 1.25 * middle, `disk use grows: ${mib(middle)}, then ${mib(end)}`);
    return (
      `${o.cycles} pauses and resumes, ${mib(o.bytes)} in memory equal each time, program at ${at}; disk ${mib(middle)} in the middle, ` +
      `${mib(end)} at the end, ${mib(Math.max(...disk))} at most; pause ${p50("pause")} ms, connect ${p50("resume")} ms (medians, client side)`
    );
  } finally {
    await s.kill();
  }
}

/** Captures of one sandbox that goes on, then sandboxes from some of them. */
export async function chain(node: Node, o: { captures: number; launches: number }, say: Say): Promise<string> {
  const s = await node.create();
  const ids: string[] = [];
  const wanted: string[] = [];
  try {
    await busy(s, 8 << 20);
    const facts = "cat step /mnt/ram/step; md5sum /mnt/ram/data data /mnt/ram/new";
    for (let n = 0; n < o.captures; n++) {
      // Some of both that was there is overwritten, some is new.
      await sh(
        s,
        `echo ${n} | tee step > /mnt/ram/step; head -c 1000000 /dev/urandom > /mnt/ram/new
         dd if=/dev/urandom of=/mnt/ram/data bs=4096 seek=$((RANDOM % 1900)) count=64 conv=notrunc status=none
         dd if=/dev/urandom of=data bs=4096 seek=$((RANDOM % 200)) count=16 conv=notrunc status=none`,
      );
      wanted.push(await sh(s, facts));
      ids.push((await s.createSnapshot()).snapshotId);
      if (n % 10 === 9) say(`${n + 1} captures`);
    }
    for (let n = 0; n < o.launches; n++) {
      const at = randomInt(o.captures);
      const made = await node.create(ids[at]);
      try {
        assert.equal(await sh(made, facts), wanted[at], `launch from capture ${at}`);
        const before = Number(await sh(made, "tail -n 1 count"));
        for (const end = Date.now() + 60_000; Number(await sh(made, "tail -n 1 count")) <= before; )
          assert.ok(Date.now() < end, `the program of capture ${at} does not go on`);
      } finally {
        await made.kill();
      }
      say(`launch from capture ${at}: right`);
    }
    return `${o.captures} captures of one sandbox, ${o.launches} launches from any of them: each had its memory, files and program`;
  } finally {
    await s.kill();
    for (const id of ids) await node.deleteSnapshot(id);
  }
}

/** Many children at once. */
export async function forks(node: Node, o: { count: number; bytes: number }, say: Say): Promise<string> {
  const s = await node.create();
  let children: Sandbox[] = [];
  try {
    const { pid, sums: wanted } = await busy(s, o.bytes);
    const from = performance.now();
    children = await node.fork(s, o.count);
    const ms = performance.now() - from;
    say(`${o.count} children in ${ms.toFixed(0)} ms`);
    const facts = await Promise.all(
      [s, ...children].map(async (c) => {
        await alive(c, pid, 0);
        return await sh(
          c,
          `hostname; cat /etc/machine-id; head -c 16 /dev/urandom | base64; cat /proc/sys/kernel/random/uuid
           python3 -c 'import random, secrets; print(random.random()); print(secrets.token_hex())'; openssl rand -hex 16
           md5sum /mnt/ram/data data`,
        );
      }),
    );
    for (const f of facts) assert.ok(f.endsWith(wanted), `${f} does not end with ${wanted}`);
    const own = facts.flatMap((f) => f.slice(0, -wanted.length).trim().split("\n"));
    assert.equal(new Set(own).size, 7 * (o.count + 1), "something is the same in two of them");
    return `${o.count} children and their source: same data, each with its own name, ids and random numbers, all go on (${ms.toFixed(0)} ms, client side)`;
  } finally {
    await Promise.all([s, ...children].map((x) => x.kill()));
  }
}

/** Sandboxes made, forked, some paused, and killed; afterwards the host is as before. */
export async function churn(node: Node, o: { cycles: number; atOnce: number }, say: Say): Promise<string> {
  const before = await node.quiet();
  const server = await node.server();
  let next = 0;
  const worker = async (): Promise<void> => {
    for (;;) {
      const cycle = ++next;
      if (cycle > o.cycles) return;
      const s = await node.create();
      try {
        const children = await node.fork(s, 1);
        if (cycle % 5 === 0) await s.pause();
        await Promise.all(children.map((c) => c.kill()));
      } finally {
        await s.kill();
      }
      if (cycle % 50 === 0) say(`cycle ${cycle}: ${JSON.stringify(await node.server())}`);
    }
  };
  await Promise.all(Array.from({ length: o.atOnce }, worker));
  const after = await node.settled(before);
  const serverAfter = await node.server();
  assert.ok(
    serverAfter.files <= server.files + 16,
    `open files of the server: ${server.files} -> ${serverAfter.files}`,
  );
  return (
    `${o.cycles} times create, fork, kill: ${JSON.stringify(after)} as before; ` +
    `server ${server.rssMiB} -> ${serverAfter.rssMiB} MiB, ${server.files} -> ${serverAfter.files} open files`
  );
}
