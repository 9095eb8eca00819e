import { mkdir, rename, rm, truncate, writeFile } from "node:fs/promises";
import { join } from "node:path";
import type { Bytes } from "@aenv/base";
import { run } from "@aenv/host";
import { aptSources, distribution, mainSource, renderDeb822 } from "./apt.ts";

/** What the SDKs' users and tests expect in a sandbox; the rest of Debian is one apt-get away. */
const PACKAGES = [
  "bash",
  "ca-certificates",
  "curl",
  "git",
  "iproute2",
  "iputils-ping",
  "less",
  "nano",
  "ncurses-bin",
  "netbase",
  "openssl",
  "procps",
  "python-is-python3",
  "python3",
  "python3-pip",
  "python3-venv",
  "sudo",
  "unzip",
  "xz-utils",
];

/** Creates the account every sandbox runs as; `$1` is the root folder. */
const USER_HOOK = [
  'chroot "$1" useradd -m -u 1000 -s /bin/bash user',
  'echo "user ALL=(ALL) NOPASSWD:ALL" > "$1/etc/sudoers.d/user"',
  'chmod 0440 "$1/etc/sudoers.d/user"',
  'echo sandbox > "$1/etc/hostname"',
  ': > "$1/etc/machine-id"',
  'rm -rf "$1"/var/lib/apt/lists/* "$1"/var/cache/apt/*.bin "$1"/var/log/*.log "$1"/var/log/apt/*',
].join(" && ");

/**
 * Builds the base root filesystem from Debian packages as a folder, `dir`. Uses the archive this machine itself uses.
 * Needs root and mmdebstrap.
 */
export async function buildRootfs(dir: string, signal: AbortSignal): Promise<void> {
  const { codename } = await distribution();
  const source = mainSource(await aptSources(), codename);
  const temp = `${dir}.tmp`;
  await rm(temp, { recursive: true, force: true });
  await rm(dir, { recursive: true, force: true });
  await mkdir(temp, { recursive: true });
  const list = join(`${dir}.sources`);
  await writeFile(list, renderDeb822({ ...source, components: ["main"] }));
  await run(
    "mmdebstrap",
    [
      "--mode=root",
      "--variant=minbase",
      `--include=${PACKAGES.join(",")}`,
      "--aptopt=Acquire::Languages none",
      "--dpkgopt=force-unsafe-io",
      "--dpkgopt=path-exclude=/usr/share/man/*",
      "--dpkgopt=path-exclude=/usr/share/doc/*",
      "--dpkgopt=path-include=/usr/share/doc/*/copyright",
      "--dpkgopt=path-exclude=/usr/share/locale/*",
      "--dpkgopt=path-include=/usr/share/locale/locale.alias",
      `--customize-hook=${USER_HOOK}`,
      codename,
      temp,
      list,
    ],
    { signal },
  );
  await rm(list);
  await rename(temp, dir);
}

/** Packs a folder into a sparse ext4 image of `size` bytes. Inode tables stay unwritten until used. */
export async function packExt4(dir: string, image: string, size: Bytes, signal: AbortSignal): Promise<void> {
  const temp = `${image}.tmp`;
  await rm(temp, { force: true });
  await writeFile(temp, "");
  await truncate(temp, size);
  await run(
    "mke2fs",
    [
      "-q",
      "-F",
      "-t",
      "ext4",
      "-L",
      "aenv",
      "-m",
      "0",
      "-J",
      "size=16",
      "-E",
      "lazy_itable_init=1,discard,root_owner=0:0",
      "-d",
      dir,
      temp,
    ],
    { signal },
  );
  await rename(temp, image);
}

/** Everything that decides the content of the base root filesystem, as text; package versions float with the archive. */
export async function rootfsRecipe(): Promise<string> {
  return JSON.stringify([(await distribution()).codename, PACKAGES, USER_HOOK]);
}
