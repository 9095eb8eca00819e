import { readFile, stat } from "node:fs/promises";
import { AenvError } from "@aenv/base";
import type { GuestMapping } from "@aenv/vmm";

/** Lines of /proc/PID/maps: `start-end perms offset major:minor inode path`. Those of the given file, in file order. */
export function parseMaps(text: string, pid: number, file: { path: string; inode: number }): GuestMapping[] {
  const out: GuestMapping[] = [];
  for (const line of text.split("\n")) {
    const m = /^([0-9a-f]+)-([0-9a-f]+) \S+ ([0-9a-f]+) \S+ (\d+)\s+(.*)$/.exec(line);
    if (!m) continue;
    const [, start = "", end = "", offset = "", inode = "", path = ""] = m;
    // The inode alone may be another file system's; the path alone may be a file that replaced ours.
    if (Number(inode) !== file.inode || path !== file.path) continue;
    const hostAddress = BigInt(`0x${start}`);
    const length = Number(BigInt(`0x${end}`) - hostAddress);
    out.push({ pid, hostAddress, guestOffset: Number.parseInt(offset, 16), length });
  }
  return out.sort((a, b) => a.guestOffset - b.guestOffset);
}

/** Host mappings of guest memory. Throws VMM_FAILED unless they cover exactly `memoryBytes`. */
export async function guestMappings(pid: number, path: string, memoryBytes: number): Promise<GuestMapping[]> {
  let text: string;
  let inode: number;
  try {
    [text, { ino: inode }] = await Promise.all([readFile(`/proc/${pid}/maps`, "utf8"), stat(path)]);
  } catch (e) {
    throw new AenvError("VMM_FAILED", `the mappings of process ${pid} cannot be read`, { cause: e });
  }
  const mappings = parseMaps(text, pid, { path, inode });
  let next = 0;
  for (const m of mappings) {
    if (m.guestOffset !== next) break;
    next += m.length;
  }
  if (next !== memoryBytes)
    throw new AenvError("VMM_FAILED", `process ${pid} maps ${next} of ${memoryBytes} bytes of ${path} in order`);
  return mappings;
}
