import { X509Certificate } from "node:crypto";
import { mkdirSync, readFileSync, rmSync, writeFileSync } from "node:fs";
import { dirname, join } from "node:path";
import { AenvError, errnoOf } from "@aenv/base";
import { aenvHome, run, tlsFolder } from "@aenv/host";
import { authorityFile, bundleFile, machineAuthorities } from "@aenv/names";
import type { trust as command } from "../commands/node.ts";
import type { Context } from "../context.ts";
import type { Args, Exit } from "../define.ts";
import { configPath } from "../settings.ts";

/** Debian's folder for authorities that the administrator adds. */
const ADDED = "/usr/local/share/ca-certificates";

export async function trust(args: Args<typeof command>, context: Context): Promise<Exit> {
  const { out } = context;
  if (args.install && args.remove)
    throw new AenvError("INVALID_ARGUMENT", "--install and --remove exclude each other", { hint: "Give one of them." });
  const { certificateAuthority: certificate, instance } = await (await context.client()).node();
  if (certificate === undefined)
    throw new AenvError("NOT_FOUND", "The node has a certificate of its operator's, not of its own authority", {
      hint: "Clients need nothing where a public authority signed it; else ask the operator for the authority's certificate.",
    });
  const fingerprint = new X509Certificate(certificate).fingerprint256;
  const path = join(ADDED, `aenv-${instance}.crt`);
  if (args.install || args.remove) await change(path, args.install ? certificate : undefined);
  if (out.json) return out.value({ certificate, fingerprint, installed: args.install ? path : null });
  if (!args.install && !args.remove) out.line(certificate.trimEnd());
  out.note(`SHA-256 fingerprint ${fingerprint}`);
  if (args.install) out.note(`Installed as ${path}. Node programs need NODE_EXTRA_CA_CERTS=${path} besides.`);
  if (args.remove) out.note(`Removed ${path}.`);
}

async function change(path: string, certificate: string | undefined): Promise<void> {
  try {
    if (certificate === undefined) rmSync(path, { force: true });
    else {
      mkdirSync(dirname(path), { recursive: true });
      writeFileSync(path, certificate, { mode: 0o644 });
    }
  } catch (e) {
    if (errnoOf(e) === "EACCES" || errnoOf(e) === "EPERM")
      throw new AenvError("PERMISSION_DENIED", `${path} may only be changed by root`, { hint: "Run it with sudo." });
    throw AenvError.from(e, `write ${path}`);
  }
  // Only --fresh takes away the links to a certificate that is gone.
  await run("update-ca-certificates", certificate === undefined ? ["--fresh"] : []);
}

/** What an SDK needs to use the node by https. Files of a node elsewhere are kept beside the saved settings. */
export async function tlsVariables(context: Context): Promise<Record<string, string>> {
  const { certificateAuthority: certificate, domain, instance } = await (await context.client()).node();
  if (certificate === undefined) return { E2B_DOMAIN: domain };
  const own = tlsFolder(aenvHome({ ...context.env }));
  if (readIfThere(authorityFile(own)) === certificate)
    return { E2B_DOMAIN: domain, NODE_EXTRA_CA_CERTS: authorityFile(own), SSL_CERT_FILE: bundleFile(own) };
  const kept = join(dirname(configPath(context.env)), `tls-${instance}`);
  try {
    mkdirSync(kept, { recursive: true, mode: 0o700 });
    writeFileSync(authorityFile(kept), certificate);
    writeFileSync(bundleFile(kept), `${await machineAuthorities()}\n${certificate}`);
  } catch (e) {
    throw AenvError.from(e, `write ${kept}`);
  }
  return { E2B_DOMAIN: domain, NODE_EXTRA_CA_CERTS: authorityFile(kept), SSL_CERT_FILE: bundleFile(kept) };
}

function readIfThere(path: string): string | undefined {
  try {
    return readFileSync(path, "utf8");
  } catch {
    return undefined;
  }
}
