import { createHash } from "node:crypto";
import { existsSync, readdirSync } from "node:fs";
import { readFile, stat } from "node:fs/promises";
import { release } from "node:os";
import { AenvError, deadline, type Logger, messageOf } from "@aenv/base";
import { publishFile } from "@aenv/host";
import type { Probe } from "@aenv/vmm";

export interface ProbeGuest {
  kernel: string;
  /** Its init prints AENV-PROBE-OK and powers off when the kernel command line has `aenv.probe`. */
  initrd: string;
}

export const PROBE_MARK = "AENV-PROBE-OK";
export const PROBE_CMDLINE = "aenv.probe";

/** A guest under working KVM is up in half a second, nested in two. One that hangs costs this once per host. */
const KVM_DEADLINE_MS = 10_000;
/** Emulation takes 2 s alone on an idle core and shares it here with the attempt under KVM. */
const TCG_DEADLINE_MS = 60_000;

export type ProbeBoot = (accel: "kvm" | "tcg", signal: AbortSignal) => Promise<void>;

export interface ProbeOptions {
  /** Boots the probe guest; rejects unless it printed PROBE_MARK. */
  boot: ProbeBoot;
  version: string;
  guest: ProbeGuest;
  cache: string | undefined;
  logger: Logger;
  kvmDevice?: string;
  kvmDeadlineMs?: number;
}

/** Why KVM cannot be tried at all; undefined when it can. `groups` are those a VMM needs to open the device. */
export async function kvmAccess(device: string): Promise<{ groups: number[]; obstacle?: string }> {
  let info;
  try {
    info = await stat(device);
  } catch {
    return { groups: [], obstacle: `this host has no ${device}` };
  }
  if ((info.mode & 0o006) === 0o006) return { groups: [] };
  if ((info.mode & 0o060) === 0o060 && info.gid !== 0) return { groups: [info.gid] };
  return {
    groups: [],
    obstacle: `only root may open ${device} (chgrp kvm ${device} && chmod 660 ${device} would change that)`,
  };
}

/** Chooses by booting, and remembers the verdict for as long as the host, QEMU and the guest kernel stay the same. */
export async function probeAcceleration(o: ProbeOptions, signal: AbortSignal): Promise<Probe> {
  const device = o.kvmDevice ?? "/dev/kvm";
  const fingerprint = await fingerprintOf(o, device);
  const cached = await readVerdict(o.cache, fingerprint);
  if (cached) return cached;
  const tcg = o.boot("tcg", deadline(TCG_DEADLINE_MS, signal));
  tcg.catch(() => {});
  const { obstacle } = await kvmAccess(device);
  const failure = obstacle ?? (await kvmFailure(o, signal));
  let probe: Probe;
  if (failure === undefined) {
    probe = { accel: "kvm", version: o.version, reason: "a probe guest booted under KVM" };
    await tcg.catch(() => {});
  } else {
    try {
      await tcg;
    } catch (e) {
      signal.throwIfAborted();
      throw new AenvError("VMM_FAILED", `no guest boots on this host: KVM: ${failure}; emulation: ${messageOf(e)}`, {
        cause: e,
      });
    }
    probe = { accel: "tcg", version: o.version, reason: `software emulation is used because ${failure}` };
    o.logger.warn({ accel: "tcg" }, probe.reason);
  }
  if (o.cache !== undefined) await publishFile(o.cache, `${JSON.stringify({ v: 1, fingerprint, probe })}\n`);
  return probe;
}

async function kvmFailure(o: ProbeOptions, signal: AbortSignal): Promise<string | undefined> {
  const limit = o.kvmDeadlineMs ?? KVM_DEADLINE_MS;
  const until = AbortSignal.timeout(limit);
  try {
    await o.boot("kvm", AbortSignal.any([until, signal]));
    return undefined;
  } catch (e) {
    signal.throwIfAborted();
    const pvm = existsSync("/sys/module/kvm_pvm") ? " (this host has paravirtual nested KVM, kvm_pvm)" : "";
    return until.aborted
      ? `a probe guest did not boot under KVM within ${limit / 1000} s${pvm}`
      : `a probe guest failed under KVM${pvm}: ${messageOf(e).split("\n", 1)[0]}`;
  }
}

async function fingerprintOf(o: ProbeOptions, device: string): Promise<string> {
  const facts: unknown[] = [o.version, release(), device];
  try {
    const cpu = await readFile("/proc/cpuinfo", "utf8");
    facts.push(/^model name.*$/m.exec(cpu)?.[0], /\b(vmx|svm)\b/.exec(cpu)?.[0]);
    facts.push(readdirSync("/sys/module").filter((m) => m.startsWith("kvm")));
  } catch {
    // A host without these is told apart by the rest.
  }
  for (const path of [device, o.guest.kernel]) {
    const info = await stat(path).catch(() => undefined);
    facts.push(info && [info.mode, info.gid, info.size, path === device ? 0 : info.mtimeMs]);
  }
  return createHash("sha256").update(JSON.stringify(facts)).digest("hex");
}

async function readVerdict(cache: string | undefined, fingerprint: string): Promise<Probe | undefined> {
  if (cache === undefined) return undefined;
  try {
    const saved = JSON.parse(await readFile(cache, "utf8")) as { v: 1; fingerprint: string; probe: Probe };
    if (saved.v !== 1 || saved.fingerprint !== fingerprint) return undefined;
    const { accel, version, reason } = saved.probe;
    if ((accel !== "kvm" && accel !== "tcg") || typeof version !== "string" || typeof reason !== "string")
      return undefined;
    return { accel, version, reason };
  } catch {
    // No verdict yet, or a damaged one: probe again.
    return undefined;
  }
}
