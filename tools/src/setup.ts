/** The steps from a clone to a running node with its first template; `npm run up` and the tests share them. */
import { mkdir } from "node:fs/promises";
import { createServer } from "node:net";
import { join } from "node:path";
import { AenvError, errnoOf } from "@aenv/base";
import { ensureNodeConfig, readNodeConfig, run, setNodePort } from "@aenv/host";
import { ensureBaseDisk, ensureKernel, type Kernel, writeBaseManifest } from "@aenv/images";
import { ensureBase } from "./base.ts";
import { buildGuest, goPath } from "./build-guest.ts";
import { RUNTIME } from "./debian-packages.ts";
import { ensureDebianPackages } from "./debian.ts";
import { root, runningServer, startServer } from "./node.ts";
import type { Step } from "./steps.ts";

export interface SetupOptions {
  home: string;
  port: number;
  /** The port was asked for by name: a node made with another one moves to it. */
  movePort?: boolean;
  /** More Debian packages than a node needs. */
  packages?: readonly string[];
}

const GUEST_ADDRESS = { address: "169.254.0.21/30", gateway: "169.254.0.22", root: "/dev/vda" };
async function hasGo(): Promise<boolean> {
  return run("go", ["version"], {
    env: { PATH: goPath(), HOME: process.env["HOME"] ?? "/root" },
  }).then(
    () => true,
    () => false,
  );
}

/** Packages every command needs; `go` only where the machine has none of its own. */
async function wantedPackages(extra: readonly string[]): Promise<string[]> {
  return [...RUNTIME, ...extra, ...((await hasGo()) ? [] : ["golang-go"])];
}

export function setupSteps(o: SetupOptions, signal: AbortSignal): Step[] {
  const cache = join(root, ".cache");
  let kernel: Kernel | undefined;
  let guestBinary = "";
  let disk = "";
  return [
    {
      name: "port",
      hint: "Set AENV_PORT to a port that is free.",
      run: async () => {
        const known = runningServer(o.home);
        const port = known?.port ?? (o.movePort ? o.port : ((await readNodeConfig(o.home))?.port ?? o.port));
        if (!known) await mustBeFree(port);
        return `:${port}`;
      },
    },
    {
      name: "Debian packages",
      hint: "Check the network and /etc/apt/sources.list, then run the command again.",
      run: async (say) => {
        if (process.getuid?.() !== 0)
          throw new AenvError("PERMISSION_DENIED", "a node needs root: it makes network namespaces and cgroups", {
            hint: "Run it with sudo, or as root.",
          });
        const installed = await ensureDebianPackages(await wantedPackages(o.packages ?? []), say, signal);
        return installed.length === 0 ? "all there" : `installed ${installed.length}`;
      },
    },
    {
      name: "guest kernel",
      hint: "apt-get download failed: check the network and run apt-get update.",
      run: async () => (kernel = await ensureKernel(cache, signal)).release,
    },
    {
      name: "guest binary",
      hint: "The Go build failed: see its output above. It needs the Go module proxy and Go 1.21 or newer, which fetches the one that guest/go.mod names unless GOTOOLCHAIN is local.",
      run: () => {
        const built = buildGuest();
        guestBinary = built.path;
        return Promise.resolve(built.rebuilt ? "built" : "unchanged");
      },
    },
    {
      name: "base image",
      hint: "mmdebstrap or mke2fs failed: check the network and the free disk space (1 GiB).",
      run: async (say) => {
        disk = await ensureBaseDisk(cache, say, signal);
        return undefined;
      },
    },
    {
      name: "initramfs and config",
      hint: `Check that ${o.home} can be written.`,
      run: async () => {
        if (!kernel) throw new AenvError("INTERNAL", "the kernel step did not run");
        const config = await ensureNodeConfig(o.home, { port: o.port });
        if (o.movePort && config.port !== o.port && !runningServer(o.home)) await setNodePort(o.home, o.port);
        await mkdir(join(o.home, "log"), { recursive: true });
        // The gateway stands for whatever resolvers the node has, also where a snapshot wakes on another.
        const guest = { ...GUEST_ADDRESS, dns: [GUEST_ADDRESS.gateway] };
        await writeBaseManifest({ home: o.home, kernel, guestBinary, disk, guest });
        return `${o.home}, instance ${config.instance}`;
      },
    },
    {
      name: "node",
      hint: `Read ${o.home}/log/server.log.`,
      run: async () => {
        const known = runningServer(o.home);
        if (known) {
          const moved = o.movePort && known.port !== o.port ? `; AENV_PORT=${o.port} needs npm run down first` : "";
          return `already running on :${known.port}${moved}`;
        }
        const server = await startServer(o.home, signal);
        return `listening on :${server.port}`;
      },
    },
    {
      name: "template base",
      hint: `Read ${o.home}/log/server.log and the guest's console below ${o.home}/runs.`,
      run: (say) => ensureBase(o.home, say, signal),
    },
  ];
}

/** Told before the first of two minutes of work, not after the last. */
function mustBeFree(port: number): Promise<void> {
  return new Promise((resolve, reject) => {
    const probe = createServer();
    probe.once("error", (e) => {
      const hint = `End what listens there (ss -ltnp 'sport = :${port}' names it), or use another: AENV_PORT=${port + 1} npm run up`;
      reject(
        errnoOf(e) === "EADDRINUSE"
          ? new AenvError("CONFLICT", `port ${port} is in use`, { hint })
          : AenvError.from(e, `listen on port ${port}`),
      );
    });
    probe.listen(port, "127.0.0.1", () => probe.close(() => resolve()));
  });
}
