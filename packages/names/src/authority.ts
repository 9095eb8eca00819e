import { mkdir, readFile } from "node:fs/promises";
import { hostname } from "node:os";
import { join } from "node:path";
import { rootCertificates } from "node:tls";
import { AenvError, errnoOf } from "@aenv/base";
import { publishFile } from "@aenv/host";
import { type CertAndKey, makeAuthority } from "./certificate.ts";

const SYSTEM_AUTHORITIES = "/etc/ssl/certs/ca-certificates.crt";

/** The certificate of a node's own authority, in the folder of its TLS files. */
export const authorityFile = (dir: string): string => join(dir, "ca.crt");
/** The machine's authorities and the node's own, for clients that take one file in place of the machine's. */
export const bundleFile = (dir: string): string => join(dir, "bundle.crt");

async function readIfThere(path: string): Promise<string | undefined> {
  try {
    return await readFile(path, "utf8");
  } catch (e) {
    if (errnoOf(e) === "ENOENT") return undefined;
    throw AenvError.from(e, `read ${path}`);
  }
}

/** The authorities that this machine trusts, PEM. */
export async function machineAuthorities(): Promise<string> {
  return ((await readIfThere(SYSTEM_AUTHORITIES)) ?? rootCertificates.join("\n")).trimEnd();
}

/** Reads the node's own authority; makes it at the first call. `now` in ms since the epoch. */
export async function ensureAuthority(dir: string, now: number): Promise<CertAndKey> {
  await mkdir(dir, { recursive: true, mode: 0o755 });
  const [cert, key] = await Promise.all([readIfThere(authorityFile(dir)), readIfThere(join(dir, "ca.key"))]);
  if (cert !== undefined && key !== undefined) return { cert, key };
  if (cert !== undefined)
    throw new AenvError("CORRUPT", `${dir} has ca.crt but no ca.key`, {
      hint: "Put ca.key back, or remove ca.crt: clients then have to trust a new authority (aenv trust).",
    });
  const made = makeAuthority(`AgentENV ${hostname()}`.slice(0, 64), now);
  await publishFile(join(dir, "ca.key"), made.key, 0o600);
  await publishFile(bundleFile(dir), `${await machineAuthorities()}\n${made.cert}`);
  // Last: whoever sees it finds the others.
  await publishFile(authorityFile(dir), made.cert);
  return made;
}
