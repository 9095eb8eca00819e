/** Writer of the "newc" cpio format (kernel documentation: early userspace buffer format). */

export type CpioEntry =
  | { name: string; type: "file"; mode: number; data: Buffer }
  | { name: string; type: "dir"; mode: number }
  | { name: string; type: "symlink"; target: string }
  | { name: string; type: "char"; mode: number; major: number; minor: number };

const S_IFDIR = 0o040000;
const S_IFCHR = 0o020000;
const S_IFREG = 0o100000;
const S_IFLNK = 0o120000;

const pad4 = (n: number): number => (4 - (n % 4)) % 4;

function record(ino: number, name: string, mode: number, data: Buffer, rdev: [number, number] = [0, 0]): Buffer[] {
  const nameBytes = Buffer.from(`${name}\0`);
  // magic, ino, mode, uid, gid, nlink, mtime, filesize, devmajor, devminor, rdevmajor, rdevminor, namesize, check
  const fields = [ino, mode, 0, 0, 1, 0, data.length, 0, 0, rdev[0], rdev[1], nameBytes.length, 0];
  const header = Buffer.from(`070701${fields.map((f) => f.toString(16).padStart(8, "0")).join("")}`);
  return [
    header,
    nameBytes,
    Buffer.alloc(pad4(header.length + nameBytes.length)),
    data,
    Buffer.alloc(pad4(data.length)),
  ];
}

/** Entries in order; parents must come before their children. Owner root, time 0: equal input gives equal bytes. */
export function writeCpio(entries: readonly CpioEntry[]): Buffer {
  const none = Buffer.alloc(0);
  const parts: Buffer[] = [];
  entries.forEach((e, i) => {
    const ino = i + 1;
    if (e.type === "file") parts.push(...record(ino, e.name, S_IFREG | e.mode, e.data));
    else if (e.type === "dir") parts.push(...record(ino, e.name, S_IFDIR | e.mode, none));
    else if (e.type === "symlink") parts.push(...record(ino, e.name, S_IFLNK | 0o777, Buffer.from(e.target)));
    else parts.push(...record(ino, e.name, S_IFCHR | e.mode, none, [e.major, e.minor]));
  });
  parts.push(...record(0, "TRAILER!!!", 0, none));
  return Buffer.concat(parts);
}
