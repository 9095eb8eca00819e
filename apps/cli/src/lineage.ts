import type { Lineage, LineageNode } from "@aenv/client";
import { duration, printable, size } from "./output.ts";

type Style = "bold" | "dim" | "green" | "yellow";
type Paint = (style: Style, text: string) => string;
type Leaf = Lineage["sandboxes"][number];

/** A state's children: the sandboxes that went on from it, then the states captured after it, oldest first. */
interface Children {
  leaves: Leaf[];
  nodes: LineageNode[];
}

/**
 * The tree, one line per state and sandbox. The line that leads to the sandbox asked about goes straight down, and so
 * does the newest line of every branch: a long chain of captures stays in its column.
 */
export function lineageLines(lineage: Lineage, now: number, paint: Paint): string[] {
  const children = childrenOf(lineage);
  const path = pathTo(lineage);
  const lines: string[] = [];
  const known = new Set(lineage.nodes.map((n) => n.nodeID));
  const leafText = (s: Leaf): string => {
    const state = paint(s.state === "running" ? "green" : "yellow", s.state);
    const id = s.sandboxID === lineage.sandboxID ? paint("bold", s.sandboxID) : s.sandboxID;
    return `○ ${id} ${state}${s.sandboxID === lineage.sandboxID ? paint("dim", "  ← this sandbox") : ""}`;
  };
  const show = (root: LineageNode, head: string, rest: string): void => {
    let prefix = head;
    for (let node: LineageNode | undefined = root; node !== undefined; ) {
      lines.push(`${prefix}● ${nodeText(node, now, paint)}`);
      prefix = rest;
      const { leaves, nodes }: Children = children.get(node.nodeID) ?? { leaves: [], nodes: [] };
      const trunk: LineageNode | undefined = nodes.find((n) => path.has(n.nodeID)) ?? nodes.at(-1);
      const side = nodes.filter((n) => n !== trunk);
      for (const [i, leaf] of leaves.entries()) {
        const last = trunk === undefined && i === leaves.length - 1;
        lines.push(`${rest}${last ? "╰─" : "├─"}${leafText(leaf)}`);
      }
      for (const n of side) show(n, `${rest}├─`, `${rest}│ `);
      if (trunk !== undefined) lines.push(`${rest}│`);
      node = trunk;
    }
  };
  for (const node of lineage.nodes) if (node.parentID === undefined || !known.has(node.parentID)) show(node, "", "");
  return lines;
}

function nodeText(n: LineageNode, now: number, paint: Paint): string {
  const what: Record<LineageNode["cause"], string> = {
    build: "template",
    pause: "pause",
    snapshot: "snapshot",
    checkpoint: "checkpoint",
    fork: "fork",
  };
  const names = n.names.map((name) => paint("bold", printable(name))).join(", ");
  const of = n.sandboxID === undefined ? "" : ` of ${n.sandboxID}`;
  const own = size(n.memory.ownBytes + n.disk.ownBytes);
  const shared = size(n.memory.sharedBytes + n.disk.sharedBytes);
  const age = `${duration(now - Date.parse(n.createdAt))} ago`;
  return `${what[n.cause]}${names === "" ? "" : ` ${names}`}${of}${paint("dim", `  ${age}, own ${own}, shared ${shared}`)}`;
}

function childrenOf(lineage: Lineage): Map<string, Children> {
  const out = new Map<string, Children>();
  const of = (nodeID: string): Children => {
    const found = out.get(nodeID) ?? { leaves: [], nodes: [] };
    out.set(nodeID, found);
    return found;
  };
  for (const s of lineage.sandboxes) of(s.nodeID).leaves.push(s);
  for (const n of lineage.nodes) if (n.parentID !== undefined) of(n.parentID).nodes.push(n);
  for (const c of out.values()) c.nodes.sort((a, b) => Date.parse(a.createdAt) - Date.parse(b.createdAt));
  return out;
}

/** The states from the root to that of the sandbox asked about. */
function pathTo(lineage: Lineage): Set<string> {
  const parents = new Map(lineage.nodes.map((n) => [n.nodeID, n.parentID]));
  const path = new Set<string>();
  for (let at: string | undefined = lineage.nodeID; at !== undefined && !path.has(at); at = parents.get(at))
    path.add(at);
  return path;
}
