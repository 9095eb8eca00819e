import type { DoctorReport } from "@aenv/client";
import type { HostThing } from "./scan.ts";

/** A host thing or a server's resource with the one it belongs to; without an owner it is a finding. */
export interface Judged {
  kind: string;
  name: string;
  owner: string | null;
  detail: string;
  /** What to do about it. */
  fix?: string;
}

export interface Node {
  home: string;
  instance: string | undefined;
  /** What the server says it owns; undefined when it does not answer. */
  report: DoctorReport | undefined;
}

/** Gives every thing its owner, or none. */
export function judge(things: readonly HostThing[], node: Node): Judged[] {
  const alive = new Set(
    things.flatMap((t) => (t.daemon !== undefined && t.instance !== undefined ? [t.instance] : [])),
  );
  const owned = ownersOf(node.report);
  const out: Judged[] = [];
  for (const t of things) {
    const owner = ownerOf(t, node, owned, alive);
    out.push({ kind: t.kind, name: t.name, detail: t.detail, ...owner });
  }
  const seen = new Map(out.map((j) => [j.name, j]));
  const fix = "Restart the node: it frees at its start what nobody owns.";
  for (const r of node.report?.resources ?? []) {
    const own = seen.get(r.name);
    if (own === undefined)
      out.push({
        kind: r.kind,
        name: r.name,
        owner: r.owner,
        detail: r.detail ?? "",
        ...(r.owner === null ? { fix } : {}),
      });
    else if (r.owner === null && own.owner !== null) Object.assign(own, { owner: null, fix });
  }
  return out;
}

interface Owners {
  /** Owner by resource name, by the last part of a path, and by the run id in a name. */
  by: Map<string, string>;
  /** Which classes of data files the server accounts for at all. */
  classes: Set<string>;
}

function ownersOf(report: DoctorReport | undefined): Owners {
  const by = new Map<string, string>();
  const classes = new Set<string>();
  for (const r of report?.resources ?? []) {
    if (r.owner === null) continue;
    by.set(r.name, r.owner);
    const last = r.name.slice(r.name.lastIndexOf("/") + 1);
    by.set(last, r.owner);
    for (const run of `${r.name} ${r.owner} ${r.detail ?? ""}`.match(/(?<![a-z0-9])r[a-z0-9]{12}(?![a-z0-9])/g) ?? [])
      if (!by.has(run)) by.set(run, r.owner);
    const letter = /^([lsr])[a-z0-9]{12,16}$/.exec(last)?.[1];
    if (letter !== undefined) classes.add(letter);
  }
  return { by, classes };
}

function ownerOf(t: HostThing, node: Node, owners: Owners, alive: ReadonlySet<string>): Pick<Judged, "owner" | "fix"> {
  if (t.instance === undefined)
    return t.daemon === undefined
      ? none(`Look at it with ps -fp ${t.name}; end it with kill ${t.name}.`)
      : { owner: "a node" };
  if (t.instance !== node.instance) {
    if (alive.has(t.instance)) return { owner: `node ${t.instance} (another one, running)` };
    return none(removal(t));
  }
  if (t.daemon !== undefined) return { owner: "this node" };
  if (node.report === undefined) return { owner: "this node (its server is down)" };
  const last = t.name.slice(t.name.lastIndexOf("/") + 1);
  const known =
    owners.by.get(t.name) ??
    owners.by.get(last) ??
    (t.run === undefined ? undefined : owners.by.get(t.run)) ??
    (t.kind === "interface" ? owners.by.get(t.name.replace(/^av/, "aenv-")) : undefined);
  if (known !== undefined) return { owner: known };
  // What every node has once, and data that this server does not account for by name.
  if (t.kind === "nft table" || t.name === `aenv-${t.instance}` || t.name === `/run/aenv-${t.instance}`)
    return { owner: "this node" };
  if (t.kind === "file" && !owners.classes.has(last.charAt(0)) && !t.name.includes("/runs/"))
    return { owner: "this node" };
  return none("Restart the node: it frees at its start what nobody owns.");
}

const none = (fix: string): { owner: null; fix: string } => ({ owner: null, fix });

function removal(t: HostThing): string {
  const steps: Record<HostThing["kind"], string> = {
    process: `End it: kill ${t.name}`,
    netns: `Remove it: ip netns delete ${t.name}`,
    interface: `Remove it: ip link delete ${t.name}`,
    "nft table": `Remove it: nft delete table ${t.name}`,
    mount: `Unmount it: umount ${t.name}`,
    cgroup: "Remove its folder below /sys/fs/cgroup with rmdir.",
    "run folder": `Delete it: rm -r ${t.name}`,
    file: `Delete it: rm -r ${t.name}`,
  };
  return steps[t.kind];
}
