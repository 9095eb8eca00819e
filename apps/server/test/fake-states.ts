import { AenvError, type Clock, newSnapshotId, newTemplateId, randomName, type SandboxId } from "@aenv/base";
import type { SnapshotId } from "@aenv/base";
import { encodeCursor, parseCursor } from "@aenv/contract";
import type {
  CheckpointOptions,
  CheckpointView,
  Lineage,
  LineageNode,
  SandboxView,
  SnapshotFilter,
  SnapshotOptions,
  SnapshotView,
} from "@aenv/engine";

interface Name {
  team: string;
  alias: string;
  tag: string;
}

function nameOf(text: string, team: string): Name {
  const [, ns, alias = "", tag = "default"] = /^(?:([^/:]+)\/)?([^/:]+)(?::([^/:]+))?$/.exec(text) ?? [];
  return { team: ns ?? team, alias, tag };
}

/** Captured states of the fake engine: rows with names, and the tree between them. */
export class FakeStates {
  readonly #clock: Clock;
  readonly #nodes = new Map<SnapshotId, LineageNode>();
  /** What each sandbox went on from last. */
  readonly #at = new Map<SandboxId, SnapshotId>();
  readonly #snapshots: { view: SnapshotView; name?: Name; id: string }[] = [];
  #made = 0;
  readonly #checkpoints: { view: CheckpointView; at: SnapshotId }[] = [];
  /** Whether memory was kept when the sandbox was paused last. */
  readonly keptMemory = new Map<SandboxId, boolean>();

  constructor(clock: Clock) {
    this.#clock = clock;
  }

  capture(v: SandboxView, cause: LineageNode["cause"], name?: string): SnapshotId {
    const parent = this.#at.get(v.sandboxId) ?? this.#root(v);
    const snapshotId = newSnapshotId();
    this.#nodes.set(snapshotId, {
      snapshotId,
      parent,
      cause,
      sandboxId: v.sandboxId,
      names: name === undefined ? [] : [name],
      createdAt: this.#clock.now(),
      memory: { ownBytes: 4096, sharedBytes: 8192 },
      disk: { ownBytes: 512, sharedBytes: 1024 },
    });
    this.#at.set(v.sandboxId, snapshotId);
    return snapshotId;
  }

  #root(v: SandboxView): SnapshotId {
    const snapshotId = `s${v.templateId.slice(1)}` as SnapshotId;
    const size = { ownBytes: 8192, sharedBytes: 0 };
    const root: LineageNode = { snapshotId, cause: "build", names: [], createdAt: 0, memory: size, disk: size };
    this.#nodes.set(snapshotId, root);
    return snapshotId;
  }

  paused(v: SandboxView, memory: boolean): void {
    this.capture(v, "pause");
    this.keptMemory.set(v.sandboxId, memory);
  }

  goesOnFrom(id: SandboxId, at: SnapshotId): void {
    this.#at.set(id, at);
  }

  ended(id: SandboxId): void {
    this.#at.delete(id);
    for (let i = this.#checkpoints.length - 1; i >= 0; i--)
      if (this.#checkpoints[i]?.view.sandboxId === id) this.#checkpoints.splice(i, 1);
  }

  keep(v: SandboxView, o: SnapshotOptions): SnapshotView {
    const team = o.team ?? "default";
    const name = o.name === undefined ? undefined : nameOf(o.name, team);
    const same = this.#snapshots.find((s) => name && s.name?.team === name.team && s.name.alias === name.alias);
    const templateId = same?.view.templateId ?? newTemplateId();
    const full = name && `${name.team}/${name.alias}:${name.tag}`;
    const view: SnapshotView = {
      snapshotId: full ?? `${templateId}:default`,
      templateId,
      names: full === undefined ? [] : [full],
      sandboxId: v.sandboxId,
      team,
      cpuCount: v.cpuCount,
      memoryMB: v.memoryMB,
      diskSizeMB: v.diskSizeMB,
      createdAt: this.#clock.now(),
    };
    this.capture(v, "snapshot", full);
    this.delete(view.snapshotId);
    // Names hold characters that a cursor cannot: a number stands in for them.
    const id = `n${String(this.#made++).padStart(8, "0")}`;
    this.#snapshots.push(name ? { view, name, id } : { view, id });
    return view;
  }

  list(f: SnapshotFilter): { items: SnapshotView[]; next?: string } {
    const after = f.cursor === undefined ? undefined : parseCursor(f.cursor);
    const rest = this.#snapshots
      .map((s) => ({ ...s, at: s.view.createdAt }))
      .filter((s) => f.team === undefined || s.view.team === f.team)
      .filter((s) => f.sandboxId === undefined || s.view.sandboxId === f.sandboxId)
      .filter((s) => f.name === undefined || matches(s, f.name))
      .filter((s) => !after || s.at < after.at || (s.at === after.at && s.id < after.id))
      .toSorted((a, b) => b.at - a.at || (a.id < b.id ? 1 : -1));
    const page = rest.slice(0, f.limit ?? 100);
    const last = page.at(-1);
    return {
      items: page.map((s) => s.view),
      ...(last && rest.length > page.length ? { next: encodeCursor({ at: last.at, id: last.id, order: "desc" }) } : {}),
    };
  }

  /** What a sandbox made from it is like. */
  resolve(idOrName: string): { source: SnapshotView & { envdVersion: string } } | undefined {
    const found = this.#find(idOrName);
    return found && { source: { ...found.view, envdVersion: "0.6.13" } };
  }

  #find(idOrName: string): { view: SnapshotView; id: string } | undefined {
    const wanted = nameOf(idOrName, "default");
    return this.#snapshots.find(
      (s) =>
        s.view.snapshotId === idOrName ||
        (s.name?.team === wanted.team && s.name.alias === wanted.alias && s.name.tag === wanted.tag),
    );
  }

  delete(idOrName: string): boolean {
    const found = this.#find(idOrName);
    if (!found) return false;
    this.#snapshots.splice(this.#snapshots.indexOf(found), 1);
    return true;
  }

  checkpoint(v: SandboxView, o: CheckpointOptions): CheckpointView {
    for (const { view } of this.#checkpoints)
      if (view.sandboxId === v.sandboxId && view.name === o.name) delete view.name;
    const view: CheckpointView = {
      checkpointId: `c${randomName(16)}`,
      sandboxId: v.sandboxId,
      ...(o.name === undefined ? {} : { name: o.name }),
      createdAt: this.#clock.now(),
      ownBytes: 4608,
    };
    this.#checkpoints.push({ view, at: this.capture(v, "checkpoint", o.name) });
    return view;
  }

  checkpoints(id: SandboxId): CheckpointView[] {
    return this.#checkpoints.map((c) => c.view).filter((c) => c.sandboxId === id);
  }

  rewind(id: SandboxId, idOrName: string): void {
    const found = this.#checkpoints.find(
      ({ view }) => view.sandboxId === id && (view.checkpointId === idOrName || view.name === idOrName),
    );
    if (!found) throw new AenvError("NOT_FOUND", `sandbox ${id} has no checkpoint ${JSON.stringify(idOrName)}`);
    this.#at.set(id, found.at);
  }

  lineage(v: SandboxView, alive: readonly SandboxView[]): Lineage {
    const snapshotId = this.#at.get(v.sandboxId) ?? this.#root(v);
    const nodes: LineageNode[] = [];
    for (let n = this.#nodes.get(snapshotId); n; n = n.parent && this.#nodes.get(n.parent)) nodes.unshift(n);
    for (const n of this.#nodes.values()) {
      if (!nodes.includes(n) && n.sandboxId !== undefined && nodes.some((p) => p.snapshotId === n.parent))
        nodes.push(n);
    }
    const sandboxes = alive.flatMap((s) => {
      const at = this.#at.get(s.sandboxId) ?? this.#root(s);
      return nodes.some((n) => n.snapshotId === at && (n.cause !== "build" || s === v))
        ? [{ sandboxId: s.sandboxId, snapshotId: at, state: s.state }]
        : [];
    });
    return { sandboxId: v.sandboxId, snapshotId, nodes, sandboxes };
  }
}

function matches(s: { view: SnapshotView; name?: Name }, text: string): boolean {
  if (s.view.snapshotId === text || s.view.templateId === text) return true;
  if (!s.name) return false;
  const wanted = nameOf(text, s.name.team);
  return (
    wanted.alias === s.name.alias && wanted.team === s.name.team && (!text.includes(":") || wanted.tag === s.name.tag)
  );
}
