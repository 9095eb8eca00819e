import { readdir, readFile } from "node:fs/promises";
import { join } from "node:path";
import { AenvError, errnoOf } from "@aenv/base";

/** One archive this machine already uses, as apt knows it. */
export interface AptSource {
  uri: string;
  suite: string;
  components: string[];
  /** Path of the keyring, or undefined where apt's trusted keys apply. */
  signedBy: string | undefined;
}

/** Parses the one-line format of sources.list(5); lines that are not `deb` are ignored. */
export function parseOneLine(text: string): AptSource[] {
  const out: AptSource[] = [];
  for (const raw of text.split("\n")) {
    const match = /^\s*deb\s+(?:\[([^\]]*)\]\s+)?(\S+)\s+(\S+)\s+([^#]+)/.exec(raw);
    if (!match) continue;
    const [, options = "", uri = "", suite = "", components = ""] = match;
    out.push({
      uri,
      suite,
      components: components.trim().split(/\s+/),
      signedBy: /signed-by=(\S+)/.exec(options)?.[1],
    });
  }
  return out;
}

/** Parses the deb822 format of sources.list(5). */
export function parseDeb822(text: string): AptSource[] {
  const out: AptSource[] = [];
  for (const stanza of text.split(/\n\s*\n/)) {
    const fields = new Map<string, string>();
    let name = "";
    for (const line of stanza.split("\n")) {
      if (line.startsWith("#")) continue;
      const field = /^([A-Za-z-]+):(.*)$/.exec(line);
      if (field) fields.set((name = (field[1] ?? "").toLowerCase()), (field[2] ?? "").trim());
      else if (name && /^\s/.test(line)) fields.set(name, `${fields.get(name)} ${line.trim()}`);
    }
    const words = (key: string): string[] => (fields.get(key) ?? "").split(/\s+/).filter(Boolean);
    if (!words("types").includes("deb") || fields.get("enabled") === "no") continue;
    // An inline key block is kept by apt only; a path can be handed on.
    const signedBy = fields.get("signed-by");
    for (const uri of words("uris"))
      for (const suite of words("suites"))
        out.push({
          uri,
          suite,
          components: words("components"),
          signedBy: signedBy?.startsWith("/") ? signedBy : undefined,
        });
  }
  return out;
}

/** Every binary archive configured under `root`/etc/apt. */
export async function aptSources(root = "/"): Promise<AptSource[]> {
  const dir = join(root, "etc/apt");
  const read = async (path: string): Promise<string> => {
    try {
      return await readFile(path, "utf8");
    } catch (e) {
      if (errnoOf(e) === "ENOENT") return "";
      throw e;
    }
  };
  const out = parseOneLine(await read(join(dir, "sources.list")));
  let names: string[] = [];
  try {
    names = (await readdir(join(dir, "sources.list.d"))).toSorted();
  } catch (e) {
    if (errnoOf(e) !== "ENOENT") throw e;
  }
  for (const name of names) {
    const text = await read(join(dir, "sources.list.d", name));
    if (name.endsWith(".list")) out.push(...parseOneLine(text));
    else if (name.endsWith(".sources")) out.push(...parseDeb822(text));
  }
  return out;
}

export interface Distribution {
  id: string;
  codename: string;
}

export async function distribution(root = "/"): Promise<Distribution> {
  const text = await readFile(join(root, "etc/os-release"), "utf8");
  const field = (name: string): string => new RegExp(`^${name}="?([^"\n]*)"?$`, "m").exec(text)?.[1] ?? "";
  return { id: field("ID"), codename: field("VERSION_CODENAME") };
}

/** The archive that carries the distribution's own release: where the base image's packages come from. */
export function mainSource(sources: readonly AptSource[], codename: string): AptSource {
  const found = sources.find((s) => s.suite === codename && s.components.includes("main"));
  if (found) return found;
  throw new AenvError("UNAVAILABLE", `no apt source for the release "${codename}" was found`, {
    hint: `Add the main archive of ${codename || "your Debian release"} to /etc/apt/sources.list, run apt-get update, and try again.`,
  });
}

/** One deb822 stanza. */
export function renderDeb822(s: AptSource): string {
  const signed = s.signedBy ? `Signed-By: ${s.signedBy}\n` : "";
  return `Types: deb\nURIs: ${s.uri}\nSuites: ${s.suite}\nComponents: ${s.components.join(" ")}\n${signed}`;
}
