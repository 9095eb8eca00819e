import { mkdir, readdir, readFile, rename, rm } from "node:fs/promises";
import { basename, join } from "node:path";
import { AenvError } from "@aenv/base";
import { publishFile, run } from "@aenv/host";

/** A guest kernel unpacked from its Debian package. */
export interface Kernel {
  /** Such as 6.1.0-40-cloud-amd64. */
  release: string;
  bzImage: string;
  modulesDir: string;
}

const META_PACKAGE = "linux-image-cloud-amd64";

async function resolvePackage(signal: AbortSignal): Promise<string> {
  const { stdout } = await run("apt-cache", ["depends", META_PACKAGE], { signal });
  const found = /Depends: (linux-image-\S+-cloud-amd64)/.exec(stdout)?.[1];
  if (found) return found;
  throw new AenvError("UNAVAILABLE", `apt knows no ${META_PACKAGE}`, {
    hint: "Run apt-get update; on a distribution without this package name a kernel with AENV_KERNEL and AENV_KERNEL_MODULES.",
  });
}

/** Fetches the guest kernel's package into `dir` and unpacks it there; the host itself never installs it. */
export async function fetchKernel(dir: string, signal: AbortSignal): Promise<Kernel> {
  const marker = join(dir, "kernel.json");
  const known = await readFile(marker, "utf8").catch(() => undefined);
  if (known) return JSON.parse(known) as Kernel;
  await mkdir(dir, { recursive: true });
  const name = await resolvePackage(signal);
  const temp = join(dir, "kernel.tmp");
  await rm(temp, { recursive: true, force: true });
  await mkdir(temp, { recursive: true });
  // apt drops to its own user for downloads and warns when that user cannot write here: it then downloads as root.
  await run("apt-get", ["-q", "-o", "APT::Sandbox::User=root", "download", name], { cwd: temp, signal });
  const deb = (await readdir(temp)).find((f) => f.endsWith(".deb"));
  if (!deb) throw new AenvError("INTERNAL", `apt-get download ${name} left no package in ${temp}`);
  await run("dpkg-deb", ["-x", deb, "root"], { cwd: temp, signal });
  await rm(join(temp, deb));
  const release = basename(name).replace(/^linux-image-/, "");
  const home = join(dir, `kernel-${release}`);
  await rm(home, { recursive: true, force: true });
  await rename(join(temp, "root"), home);
  await rm(temp, { recursive: true });
  const base = await readdir(join(home, "usr/lib/modules")).then(
    () => "usr/lib/modules",
    () => "lib/modules",
  );
  const kernel: Kernel = {
    release,
    bzImage: join(home, "boot", `vmlinuz-${release}`),
    modulesDir: join(home, base, release),
  };
  await publishFile(marker, JSON.stringify(kernel, null, 2));
  return kernel;
}
