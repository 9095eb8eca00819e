/** What a node needs from Debian to run sandboxes. */
export const RUNTIME = [
  "conntrack",
  "e2fsprogs",
  "iproute2",
  "mmdebstrap",
  "nftables",
  "procps",
  "qemu-system-x86",
  "util-linux",
  "xz-utils",
  "zstd",
] as const;

/** What each benchmark needs on top: outside peers of our own parts, and tools that measure. */
export const BENCH: Readonly<Record<string, readonly string[]>> = {
  create: ["podman"],
  edge: ["curl", "nginx-light", "wrk"],
  exec: ["podman"],
  nbd: ["fio", "libnbd-bin", "qemu-utils"],
  layers: ["fio", "libnbd-bin"],
  remote: ["fio", "qemu-utils"],
};

/** The packages of the benchmark that a command line names; of all of them for `all`, of none for an unknown name. */
export function benchPackages(args: readonly string[]): string[] {
  const names = args.filter((a) => !a.startsWith("-"));
  const lists = names.includes("all") ? Object.values(BENCH) : names.map((n) => BENCH[n] ?? []);
  return [...new Set(lists.flat())].toSorted();
}

/** What the tests need on top. */
export const TEST: readonly string[] = [
  "cpio",
  "docker-registry",
  "python3-venv",
  ...new Set(Object.values(BENCH).flat()),
];

/** Packages that are taken from <release>-backports where the release's own version is older than `version`. */
export const NEWER: Readonly<Record<string, { version: string; why: string }>> = {
  "qemu-system-x86": { version: "1:8.2", why: "from 8.2 on a VMM maps snapshot memory read-only" },
  "qemu-utils": {
    version: "1:8.2",
    why: "its qemu-storage-daemon is the peer of the nbd benchmark; goes with qemu-system-x86",
  },
  "golang-go": { version: "2:1.21", why: "from 1.21 on go fetches the toolchain that go.mod names" },
};
