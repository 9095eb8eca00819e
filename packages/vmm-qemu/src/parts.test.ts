import assert from "node:assert/strict";
import { mkdtemp, readFile, rm, stat, symlink, writeFile } from "node:fs/promises";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { type TestContext, test } from "node:test";
import { mib, newRunId, silentLogger } from "@aenv/base";
import { readTail, run } from "@aenv/host";
import { CONSOLE_LOG_BYTES, type VmSpec } from "@aenv/vmm";
import { checkMachine, qemuArgv } from "./command-line.ts";
import { rotateConsole } from "./console.ts";
import { type ExitFacts, exitCause } from "./exit-cause.ts";
import { parseMaps } from "./maps.ts";
import { kvmAccess, type ProbeBoot, probeAcceleration } from "./probe.ts";
import { parseQemuVersion } from "./version.ts";

const never = new AbortController().signal;

async function folder(t: TestContext): Promise<string> {
  const dir = await mkdtemp(join(tmpdir(), "aenv-qemu-"));
  t.after(() => rm(dir, { recursive: true, force: true }));
  return dir;
}

test("the cause of an end comes from the best witness", () => {
  const nothing: ExitFacts = { killed: false, oomKills: 0, diskFull: false, console: "", log: "" };
  const panic = "[    3.1] Kernel panic - not syncing: Attempted to kill init! exitcode=0x00000100\r\n";
  const cases: [Partial<ExitFacts>, string][] = [
    [{ killed: true, shutdownReason: "guest-shutdown" }, "killed"],
    [{ shutdownReason: "guest-shutdown", code: 0 }, "guest-shutdown"],
    [{ shutdownReason: "guest-reset", code: 0 }, "guest-reset"],
    [{ shutdownReason: "guest-reset", code: 0, console: panic }, "guest-panic"],
    [{ shutdownReason: "guest-panic" }, "guest-panic"],
    [{ shutdownReason: "host-signal" }, "killed"],
    [{ signal: "SIGKILL" }, "vmm-crash"],
    [{ signal: "SIGKILL", oomKills: 1 }, "out-of-memory"],
    [{ signal: "SIGKILL", diskFull: true }, "vmm-crash"],
    [{ signal: "SIGBUS" }, "vmm-crash"],
    [{ signal: "SIGBUS", diskFull: true }, "disk-full"],
    [{ killed: true, signal: "SIGBUS", diskFull: true }, "killed"],
    [{ code: 1, log: "qemu: cannot\n" }, "vmm-crash"],
    [{ console: panic }, "guest-panic"],
    [{ console: "[ 2.0] reboot: Power down\r\n" }, "guest-shutdown"],
    [{}, "unknown"],
  ];
  for (const [facts, cause] of cases)
    assert.equal(exitCause({ ...nothing, ...facts }).cause, cause, JSON.stringify(facts));
  assert.match(exitCause({ ...nothing, code: 1, log: "first\nqemu: cannot\n" }).detail, /qemu: cannot/);
});

test("mappings are those of the very file, in its order", () => {
  const text = [
    "7f0000000000-7f0004000000 rw-p 04000000 fe:00 77 /data/memory",
    "7e0000000000-7e0004000000 rw-p 00000000 fe:00 77 /data/memory",
    "7d0000000000-7d0004000000 rw-p 00000000 fe:00 78 /data/memory",
    "7c0000000000-7c0004000000 rw-p 00000000 fe:00 77 /other",
    "7b0000000000-7b0004000000 rw-p 00000000 00:00 0",
    "garbage",
  ].join("\n");
  assert.deepEqual(parseMaps(text, 5, { path: "/data/memory", inode: 77 }), [
    { pid: 5, hostAddress: 0x7e0000000000n, guestOffset: 0, length: 0x4000000 },
    { pid: 5, hostAddress: 0x7f0000000000n, guestOffset: 0x4000000, length: 0x4000000 },
  ]);
});

test("versions of Debian's QEMU are read, and which of them map memory read-only", () => {
  const of = (text: string) => parseQemuVersion(`QEMU emulator version ${text}`);
  assert.equal(of("10.0.2 (Debian 1:10.0.2+ds-2)")?.readOnlyMemory, true);
  assert.equal(of("8.2.0")?.readOnlyMemory, true);
  assert.equal(of("8.1.5")?.readOnlyMemory, false);
  assert.equal(of("7.2.22 (Debian 1:7.2+dfsg-7+deb12u18)")?.text, "7.2.22");
  assert.equal(parseQemuVersion("nothing"), undefined);
});

function specOf(memory: VmSpec["memory"], more: Partial<VmSpec> = {}): VmSpec {
  const machine = { vcpus: 1, memoryBytes: mib(256), kernel: "/k", initrd: "/i", cmdline: "a=b" };
  return { run: newRunId(), machine, runDir: "/run/x", uid: 1, gid: 1, memory, consoleLog: "/c", ...more };
}

test("a comma in a path does not become an option of QEMU", () => {
  const traits = { binary: "/q", accel: "tcg", readOnlyMemory: true } as const;
  const argv = qemuArgv(traits, specOf({ file: "/m,share=on", mode: "map" }, { diskSocket: "/s,x", tap: "tap0" }));
  assert.ok(argv.some((a) => a.includes("mem-path=/m,,share=on,share=off,readonly=on")));
  assert.ok(argv.some((a) => a.includes("server.path=/s,,x,")));
});

test("a QEMU that could punch holes into a shared memory file gets no balloon", () => {
  const memory = { file: "/m", mode: "map" } as const;
  const argv = (readOnlyMemory: boolean) => qemuArgv({ binary: "/q", accel: "tcg", readOnlyMemory }, specOf(memory));
  assert.ok(argv(true).some((a) => a.startsWith("virtio-balloon")));
  assert.ok(!argv(false).some((a) => a.startsWith("virtio-balloon")));
});

test("machines out of bounds are refused", () => {
  const { machine } = specOf({ file: "/m", mode: "map" });
  for (const bad of [{ vcpus: 0 }, { vcpus: 1.5 }, { vcpus: 33 }, { memoryBytes: mib(32) }])
    assert.throws(() => checkMachine({ ...machine, ...bad }));
  assert.throws(() => checkMachine({ ...machine, memoryBytes: (mib(256) + 1) as typeof machine.memoryBytes }));
});

test("a long console log moves on and keeps its newest part; a link is not followed", async (t) => {
  const dir = await folder(t);
  const log = join(dir, "console");
  await writeFile(log, "short");
  assert.equal(await rotateConsole(log), false);
  await writeFile(log, Buffer.alloc(CONSOLE_LOG_BYTES, 0x61));
  assert.equal(await rotateConsole(log), true);
  assert.equal((await stat(log)).size, 0);
  assert.equal((await stat(`${log}.1`)).size, CONSOLE_LOG_BYTES);
  assert.equal(await rotateConsole(join(dir, "none")), false);
  await symlink("/etc/hostname", join(dir, "link"));
  await assert.rejects(rotateConsole(join(dir, "link")));
  await assert.rejects(readTail(join(dir, "link"), 10));
  // A VMM that a guest took over may put a pipe there: nobody ever writes to it.
  await run("mkfifo", [join(dir, "pipe")]);
  await assert.rejects(rotateConsole(join(dir, "pipe")), /is not a file/);
  await assert.rejects(readTail(join(dir, "pipe"), 10), /is not a file/);
  await writeFile(log, "0123456789");
  assert.equal(await readTail(log, 4), "6789");
  assert.equal(await readTail(join(dir, "none"), 4), "");
});

function probeOptions(boot: ProbeBoot, cache: string, warnings: string[] = []) {
  const logger = { ...silentLogger, warn: (_f: object, m: string) => void warnings.push(m) };
  const guest = { kernel: "/dev/null", initrd: "/dev/null" };
  return { boot, version: "10.0.2", guest, cache, logger, kvmDevice: "/dev/null", kvmDeadlineMs: 50 };
}

const hang: ProbeBoot = (accel, signal) =>
  accel === "tcg"
    ? Promise.resolve()
    : new Promise((_, reject) => signal.addEventListener("abort", () => reject(signal.reason as Error)));

test("a probe guest that hangs under KVM means emulation, one warning, and the verdict is remembered", async (t) => {
  const cache = join(await folder(t), "probe.json");
  const warnings: string[] = [];
  const probe = await probeAcceleration(probeOptions(hang, cache, warnings), never);
  assert.equal(probe.accel, "tcg");
  assert.match(probe.reason, /did not boot under KVM within 0\.05 s/);
  assert.deepEqual(warnings, [probe.reason]);
  const boots: string[] = [];
  const again = await probeAcceleration(
    probeOptions(async (a) => void boots.push(a), cache),
    never,
  );
  assert.deepEqual(again, probe);
  assert.deepEqual(boots, []);
});

test("another QEMU or a damaged verdict is probed again", async (t) => {
  const cache = join(await folder(t), "probe.json");
  const works: ProbeBoot = () => Promise.resolve();
  assert.equal((await probeAcceleration(probeOptions(works, cache), never)).accel, "kvm");
  const other = { ...probeOptions(hang, cache), version: "7.2.22" };
  assert.equal((await probeAcceleration(other, never)).accel, "tcg");
  await writeFile(cache, "{");
  assert.equal((await probeAcceleration(probeOptions(works, cache), never)).accel, "kvm");
  assert.match(await readFile(cache, "utf8"), /"accel":"kvm"/);
});

test("a host on which nothing boots is an error that names both reasons", async (t) => {
  const cache = join(await folder(t), "probe.json");
  const boot: ProbeBoot = (accel) => Promise.reject(new Error(`${accel} is broken`));
  await assert.rejects(probeAcceleration(probeOptions(boot, cache), never), /kvm is broken.*tcg is broken/s);
});

test("a device that only root may open is told with what to do", async (t) => {
  const file = join(await folder(t), "kvm");
  await writeFile(file, "", { mode: 0o600 });
  assert.match((await kvmAccess(file)).obstacle ?? "", /only root may open .* chmod 660/);
  assert.match((await kvmAccess(`${file}-none`)).obstacle ?? "", /has no/);
  assert.equal((await kvmAccess("/dev/null")).obstacle, undefined);
});
