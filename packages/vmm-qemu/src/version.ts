import { AenvError } from "@aenv/base";
import { run } from "@aenv/host";

export const DEFAULT_BINARY = "/usr/bin/qemu-system-x86_64";

export interface QemuVersion {
  text: string;
  major: number;
  minor: number;
  /** 8.2 and later: memory-backend-file with readonly=on,rom=off. */
  readOnlyMemory: boolean;
}

/** Debian 12 has 7.2; nothing older was tried. */
const OLDEST = { major: 7, minor: 2 };

export function parseQemuVersion(text: string): QemuVersion | undefined {
  const m = /version (\d+)\.(\d+)[^\s]*/.exec(text);
  if (!m) return undefined;
  const [major, minor] = [Number(m[1]), Number(m[2])];
  return {
    text: m[0].slice("version ".length),
    major,
    minor,
    readOnlyMemory: major > 8 || (major === 8 && minor >= 2),
  };
}

export async function qemuVersion(binary: string, signal: AbortSignal): Promise<QemuVersion> {
  const version = parseQemuVersion((await run(binary, ["--version"], { signal })).stdout);
  if (!version) throw new AenvError("UNAVAILABLE", `${binary} does not tell its version`);
  if (version.major < OLDEST.major || (version.major === OLDEST.major && version.minor < OLDEST.minor))
    throw new AenvError("UNAVAILABLE", `QEMU ${version.text} is older than ${OLDEST.major}.${OLDEST.minor}`);
  return version;
}
