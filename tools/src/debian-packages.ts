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

/** What the tests and benchmarks need on top: outside peers of our own parts. */
export const TEST = [
  "cpio",
  "curl",
  "fio",
  "libnbd-bin",
  "nginx-light",
  "podman",
  "python3-venv",
  "qemu-utils",
  "wrk",
] as const;

/** Packages that are taken from <release>-backports where the release's own version is older than `version`. */
export const NEWER: Readonly<Record<string, { version: string; why: string }>> = {
  "qemu-system-x86": { version: "1:8.2", why: "from 8.2 on a VMM maps snapshot memory read-only" },
  "qemu-utils": {
    version: "1:8.2",
    why: "its qemu-storage-daemon is the peer of the nbd benchmark; goes with qemu-system-x86",
  },
  "golang-go": { version: "2:1.21", why: "from 1.21 on go fetches the toolchain that go.mod names" },
};
