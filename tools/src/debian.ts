/** Installs missing Debian packages, newer ones from backports where a release is too old. */
import { access, readFile, writeFile } from "node:fs/promises";
import { AenvError, messageOf } from "@aenv/base";
import { run } from "@aenv/host";
import { aptSources, distribution, mainSource, renderDeb822 } from "@aenv/images";
import { NEWER } from "./debian-packages.ts";

const BACKPORTS_FILE = "/etc/apt/sources.list.d/aenv-backports.sources";
/** Another apt (unattended upgrades) may hold the lock. */
const LOCK_WAIT = "DPkg::Lock::Timeout=120";
const ENV = { PATH: process.env["PATH"] ?? "", DEBIAN_FRONTEND: "noninteractive", LC_ALL: "C", HOME: "/root" };

async function installedVersion(name: string): Promise<string | undefined> {
  try {
    const { stdout } = await run("dpkg-query", ["-W", "-f", "${db:Status-Status} ${Version}", name]);
    const [status, version] = stdout.split(" ");
    return status === "installed" ? version : undefined;
  } catch {
    return undefined;
  }
}

async function candidate(name: string): Promise<string | undefined> {
  const { stdout } = await run("apt-cache", ["policy", name]);
  const found = /Candidate: (\S+)/.exec(stdout)?.[1];
  return found === "(none)" ? undefined : found;
}

async function atLeast(version: string, wanted: string): Promise<boolean> {
  return run("dpkg", ["--compare-versions", version, "ge", wanted]).then(
    () => true,
    () => false,
  );
}

async function update(signal: AbortSignal): Promise<void> {
  await run("apt-get", ["-q", "-o", LOCK_WAIT, "update"], { env: ENV, signal });
}

/** Adds <release>-backports, derived from the machine's own main archive. Returns the suite, or undefined if there is none. */
async function enableBackports(signal: AbortSignal): Promise<string | undefined> {
  const { codename } = await distribution();
  const suite = `${codename}-backports`;
  const sources = await aptSources();
  if (sources.some((s) => s.suite === suite)) return suite;
  await writeFile(BACKPORTS_FILE, renderDeb822({ ...mainSource(sources, codename), suite, components: ["main"] }));
  await update(signal);
  return suite;
}

/** Installs what is missing. Returns the names it installed. */
export async function ensureDebianPackages(
  names: readonly string[],
  say: (note: string) => void,
  signal: AbortSignal,
): Promise<string[]> {
  const missing: string[] = [];
  for (const name of names) if (!(await installedVersion(name))) missing.push(name);
  if (missing.length === 0) return [];
  if (process.getuid?.() !== 0)
    throw new AenvError("PERMISSION_DENIED", `these Debian packages are missing: ${missing.join(" ")}`, {
      hint: `Run this command as root, or install them yourself: apt-get install ${missing.join(" ")}`,
    });
  await access("/etc/debian_version").catch(() => {
    throw new AenvError("UNAVAILABLE", "this is not a Debian machine", {
      hint: "Use Debian 12 or newer (or a container of it).",
    });
  });
  say("apt-get update");
  await update(signal);
  const plain: string[] = [];
  const fromBackports: string[] = [];
  let suite: string | undefined;
  for (const name of missing) {
    const newer = NEWER[name];
    const have = await candidate(name);
    if (!newer || (have && (await atLeast(have, newer.version)))) plain.push(name);
    else {
      suite ??= await enableBackports(signal);
      (suite ? fromBackports : plain).push(name);
    }
  }
  const install = async (what: readonly string[], extra: readonly string[]): Promise<void> => {
    if (what.length === 0) return;
    say(`apt-get install ${what.join(" ")}`);
    // A fresh machine must not find a web server on port 80 because a benchmark compares against one.
    const policy = "/usr/sbin/policy-rc.d";
    const had = await readFile(policy).catch(() => undefined);
    if (!had) await writeFile(policy, "#!/bin/sh\nexit 101\n", { mode: 0o755 });
    try {
      await run("apt-get", ["-q", "-y", "-o", LOCK_WAIT, "--no-install-recommends", ...extra, "install", ...what], {
        env: ENV,
        signal,
      });
    } finally {
      if (!had) await run("rm", ["-f", policy]);
    }
  };
  await install(plain, []);
  try {
    await install(fromBackports, ["-t", suite ?? ""]);
  } catch (e) {
    say(`backports failed (${messageOf(e).slice(0, 80)}), taking the release's own version`);
    await install(fromBackports, []);
  }
  return missing;
}
