/**
 * Which workspace package may import which. A package that is not a row may not exist; a row that is not a package is
 * an error too, so the table and the tree stay one. Reasons: docs/design and ARCHITECTURE.md.
 */
const BELOW_ENGINE = ["base", "host", "block", "nbd", "memory", "vmm", "network", "guest", "state"] as const;

export const ALLOWED: Readonly<Record<string, readonly string[]>> = {
  "packages/base": [],
  "packages/host": ["base"],
  "packages/contract": ["base"],
  "packages/block": ["base", "host"],
  "packages/nbd": ["base"],
  "packages/memory": ["base", "host", "block"],
  "packages/vmm": ["base", "host"],
  "packages/vmm-qemu": ["base", "host", "vmm"],
  "packages/network": ["base", "host"],
  "packages/egress": ["base", "network"],
  "packages/guest": ["base"],
  "packages/state": ["base", "host"],
  "packages/engine": BELOW_ENGINE,
  "packages/images": ["base", "host", "block", "engine"],
  "packages/names": ["base", "host"],
  "packages/webhooks": ["base", "contract", "state"],
  "packages/proxy": ["base"],
  "packages/client": ["base", "contract"],
};

/** Wiring: these may import every package, and nothing may import them. */
export const WIRING = ["apps/", "test/", "bench", "tools"] as const;
