import { randomInt } from "node:crypto";
import { AenvError, type Logger, messageOf } from "@aenv/base";
import { run } from "@aenv/host";
import { formatCidr, MAX_SLOTS, parseCidr } from "./address.ts";
import { checkNetwork, rulesInPlace } from "./doctor.ts";
import { alwaysDenied, needsGateway, parseOpened } from "./egress.ts";
import * as host from "./host.ts";
import { type Instance, planSlot, type SlotPlan, tableName, vethPrefix } from "./names.ts";
import { checkOptions, findBlock } from "./options.ts";
import { type Destinations, gatewayMark, nodeRules, policyRules, slotRules, uplinkRules } from "./rules.ts";
import { makeScript, removeScript } from "./script.ts";
import {
  DEFAULT_LIMITS,
  type EgressPolicy,
  type Finding,
  type Gateway,
  type GuestLimits,
  type NetworkOptions,
  type Slot,
  type SlotState,
  type SlotView,
  type SweepReport,
} from "./types.ts";

/** Small, so that the first of many waiters does not wait for the last. */
const BATCH = 16;
/** Batches at once: most of the time of one passes in waiting for the kernel. */
const LANES = 3;

/** Half of what a connection's mark can be: the gateway's connections have the other. New slots have epoch 1. */
const MAX_EPOCH = 2 ** 31;

interface Entry {
  plan: SlotPlan;
  state: SlotState;
  /** The object that the present owner holds: a slot of an earlier owner is not accepted back. */
  slot?: Slot;
  /**
   * What the gateway holds of it, from the first policy that needs one until the slot's end: connections go on there
   * under later ones. After a restart of the server nobody here knows.
   */
  gated?: EgressPolicy | "unknown" | undefined;
  /** The latest change of its policy, settled or not. */
  change?: Promise<void>;
  /** Settles release(). */
  released?: { resolve: () => void; reject: (e: unknown) => void };
}

interface Waiter {
  resolve: (slot: Slot) => void;
  reject: (e: unknown) => void;
}

/**
 * The node's network slots. The kernel is the truth: open() finds what earlier runs left (adopt() or sweep() then
 * decide about it). One Network per instance at a time.
 */
export class Network {
  readonly #instance: Instance;
  readonly #options: NetworkOptions;
  readonly #logger: Logger;
  readonly #destinations: Destinations;
  readonly #limits: GuestLimits;
  readonly #entries = new Map<number, Entry>();
  readonly #waiters: Waiter[] = [];
  #free: Entry[] = [];
  #dirty: Entry[] = [];
  /** How many free slots the work under way shall reach. */
  #target = 0;
  /** How many free slots the last ensure() asked for: kept ready from then on. */
  #spare = 0;
  /** Batches under way. */
  readonly #lanes = new Set<Promise<void>>();
  #uplinks: string[] = [];
  #gateway: Gateway | undefined;
  #closed = false;
  /** What an earlier run left has been looked at. */
  #swept = false;

  private constructor(instance: Instance, options: NetworkOptions, destinations: Destinations) {
    this.#instance = instance;
    this.#options = options;
    this.#logger = options.logger;
    this.#destinations = destinations;
    this.#limits = { ...DEFAULT_LIMITS, ...options.limits };
    this.#gateway = options.gateway;
  }

  /** Installs the node's rules and takes stock. Needs root. */
  static async open(options: NetworkOptions): Promise<Network> {
    checkOptions(options);
    const id = options.instance;
    await host.barrier(id);
    const addresses = await host.hostAddresses(id);
    const block = findBlock(id, options, addresses);
    const destinations: Destinations = {
      block,
      dns: options.dns,
      // The rules in the root netns know the host's addresses at any time; slots know those of when they were made.
      deny: [...(options.deny ?? []).map(parseCidr), ...addresses.host],
      open: (options.open ?? []).map(parseOpened),
    };
    const network = new Network({ id, block, uidBase: options.uidBase ?? 200_000 }, options, destinations);
    await network.#start();
    return network;
  }

  /** The block of host-side addresses in use, `a.b.c.d/19`; give it to open() again to keep it. */
  get block(): string {
    return formatCidr(this.#instance.block);
  }

  get free(): number {
    return this.#free.length;
  }

  async #start(): Promise<void> {
    await host.openTunToVmms(this.#logger);
    const gateway = this.#gateway;
    if (gateway) {
      const { open, block, deny, dns } = this.#destinations;
      const denied = alwaysDenied(open, [block, ...deny]).map(formatCidr);
      await gateway.configure({ denied, dns });
      await host.routeMarkedHere(gatewayMark(this.#instance.id));
    }
    this.#uplinks = await this.#findUplinks();
    await this.#installRules();
    for (const device of [...this.#uplinks, ...(await this.#devicesToOpened())])
      await host.enableForwarding(device, this.#logger);
    for (const index of await host.inventory(this.#instance.id))
      this.#entries.set(index, { plan: planSlot(this.#instance, index), state: "unclaimed" });
  }

  /** Where the kernel cannot hand connections to the gateway, the node works without one. */
  async #installRules(): Promise<void> {
    try {
      await this.#putRules();
    } catch (e) {
      if (!this.#gateway) throw e;
      this.#gateway = undefined;
      await this.#putRules();
      this.#logger.error({ error: messageOf(e) }, "no egress by domain, proxy or transform on this host");
    }
  }

  async #putRules(): Promise<void> {
    const { limit } = this.#options;
    const flows = host.connectionsPerSlot(await host.conntrackMax(), limit, this.#limits.connections);
    const rules = nodeRules({
      instance: this.#instance.id,
      ...this.#destinations,
      uplinks: this.#uplinks,
      flowsPerSlot: flows,
      ...(this.#gateway ? { gateway: this.#gateway.place } : {}),
    });
    await run("nft", ["-f", "-"], { input: rules });
  }

  async #devicesToOpened(): Promise<string[]> {
    const devices = await host.devicesTo(this.#destinations.open);
    return devices.filter((d) => !d.startsWith(vethPrefix(this.#instance.id)));
  }

  async #findUplinks(): Promise<string[]> {
    return this.#options.uplink === undefined ? await host.defaultRouteDevices() : [this.#options.uplink];
  }

  /** Follows a change of the host's default route. Cheap when nothing changed. */
  async refreshUplink(): Promise<void> {
    const now = await this.#findUplinks();
    if (now.join() === this.#uplinks.join()) return;
    for (const device of now) await host.enableForwarding(device, this.#logger);
    await run("nft", ["-f", "-"], { input: uplinkRules(this.#instance.id, now) });
    this.#logger.info({ from: this.#uplinks, to: now }, "uplink changed");
    this.#uplinks = now;
  }

  /**
   * Resolves when at least `count` slots are free, or as many as the limit leaves room for. From then on the pool is
   * filled up to `count` again in the background whenever less than half of it is left.
   */
  async ensure(count: number, signal?: AbortSignal): Promise<void> {
    this.#assertOpen();
    this.#spare = count;
    this.#target = count;
    this.#kick();
    await abortable(this.idle(), signal);
    if (this.#free.length < Math.min(count, this.#free.length + this.#room()))
      throw new AenvError("UNAVAILABLE", "network slots could not be made", { hint: "Read the server log." });
  }

  /** A slot that nobody used since it was made or reset. Makes one when none is ready. */
  acquire(signal?: AbortSignal): Promise<Slot> {
    this.#assertOpen();
    signal?.throwIfAborted();
    const ready = this.#waiters.length === 0 ? this.#free.shift() : undefined;
    if (ready) {
      if (this.#free.length < this.#spare / 2) this.#fill();
      return Promise.resolve(this.#give(ready));
    }
    if (this.#waiters.length >= this.#coming() + this.#room())
      return Promise.reject(
        new AenvError("SLOT_EXHAUSTED", `all ${this.#options.limit} network slots are in use`, {
          data: { limit: this.#options.limit },
        }),
      );
    return new Promise((resolve, reject) => {
      const onAbort = (): void => {
        const at = this.#waiters.indexOf(waiter);
        if (at >= 0) this.#waiters.splice(at, 1);
        reject(signal?.reason as Error);
      };
      const done = (): void => signal?.removeEventListener("abort", onAbort);
      const waiter: Waiter = {
        resolve: (slot) => {
          done();
          resolve(slot);
        },
        reject: (e) => {
          done();
          reject(e);
        },
      };
      signal?.addEventListener("abort", onAbort, { once: true });
      this.#waiters.push(waiter);
      this.#kick();
    });
  }

  /**
   * Gives the slot back; its VM must be gone. Everything of it is made anew before another may have it; resolves when
   * that is done. CONFLICT when the caller does not own it (any more).
   */
  release(slot: Slot): Promise<void> {
    const entry = this.#entries.get(slot.index);
    if (entry?.state !== "used" || entry.slot !== slot)
      return Promise.reject(new AenvError("CONFLICT", `network slot ${slot.index} is not in this owner's hands`));
    delete entry.slot;
    entry.state = "resetting";
    return new Promise((resolve, reject) => {
      entry.released = { resolve, reject };
      const ready = (): void => {
        this.#dirty.push(entry);
        this.#kick();
      };
      if (entry.change || entry.gated) void this.#forget(entry).then(ready);
      else ready();
    });
  }

  /** The gateway lets nothing of the slot through any more. One that does not answer has no connections either. */
  async #forget(entry: Entry): Promise<void> {
    await entry.change;
    delete entry.change;
    if (!entry.gated) return;
    delete entry.gated;
    await this.#gateway
      ?.setPolicy(entry.plan.hostIp, undefined)
      .catch((e: unknown) => this.#logger.warn({ error: messageOf(e) }, "the gateway was not told of a slot's end"));
  }

  /** Claims slots of an earlier run. Those that the kernel no longer has are not in the answer. */
  adopt(indexes: readonly number[]): Slot[] {
    const out: Slot[] = [];
    for (const index of indexes) {
      const entry = this.#entries.get(index);
      if (entry?.state === "unclaimed") {
        entry.gated = "unknown";
        out.push(this.#give(entry));
      } else if (entry) throw new AenvError("CONFLICT", `network slot ${index} is already ${entry.state}`);
    }
    return out;
  }

  /**
   * Replaces the slot's policy as a whole; it holds when this resolves, for connections that are open too. Changes of one
   * slot happen in the order of their calls; one that fails leaves the policy before it.
   */
  setPolicy(slot: Slot, policy: EgressPolicy): Promise<void> {
    const entry = this.#entries.get(slot.index);
    const notOurs = new AenvError("CONFLICT", `network slot ${slot.index} is not in this owner's hands`);
    if (entry?.state !== "used" || entry.slot !== slot) return Promise.reject(notOurs);
    const gateway = this.#gateway;
    if (needsGateway(policy) && !gateway)
      return Promise.reject(
        new AenvError("INVALID_ARGUMENT", "this node has no egress gateway: no domains, proxy or transforms", {
          hint: "Use addresses and CIDRs only. Where the kernel lacks nft_tproxy, modprobe nft_tproxy and a restart of the node help.",
        }),
      );
    const dns = {
      resolvers: this.#options.dns,
      gateway: gateway && { ip: entry.plan.hostSide, port: gateway.place.dnsPort },
    };
    const rules = policyRules(this.#instance.id, policy, randomInt(2, MAX_EPOCH), dns);
    const change = (entry.change ?? Promise.resolve()).then(async () => {
      if (entry.slot !== slot) throw notOurs;
      const before = entry.gated;
      const there = gateway && (before !== undefined || needsGateway(policy)) ? gateway : undefined;
      await there?.setPolicy(slot.hostIp, policy);
      if (there) entry.gated = policy;
      try {
        await run("nsenter", [`--net=/run/netns/${slot.netns}`, "nft", "-f", "-"], { input: rules });
      } catch (e) {
        entry.gated = before;
        if (before !== "unknown") await there?.setPolicy(slot.hostIp, before);
        throw e;
      }
    });
    entry.change = change.catch(() => {});
    return change;
  }

  /** Removes every slot of this instance that is neither owned nor in the pool. */
  async sweep(): Promise<SweepReport> {
    const owned = [...this.#entries.values()].filter((e) => e.state === "used");
    await this.#gateway
      ?.retain(owned.map((e) => e.plan.hostIp))
      // One that is away knows of nobody when it is back.
      .catch((e: unknown) => this.#logger.warn({ error: messageOf(e) }, "the egress gateway was not told who is left"));
    for (const index of await host.inventory(this.#instance.id)) {
      if (!this.#entries.has(index))
        this.#entries.set(index, { plan: planSlot(this.#instance, index), state: "unclaimed" });
    }
    const leaked = [...this.#entries.values()]
      .filter((e) => e.state === "unclaimed")
      .sort((a, b) => a.plan.index - b.plan.index);
    const report: SweepReport = { freed: [], failed: [] };
    for (let at = 0; at < leaked.length; at += BATCH) {
      const batch = leaked.slice(at, at + BATCH);
      const gone = await this.#remove(batch);
      for (const { plan } of batch) {
        if (gone.has(plan.index)) {
          this.#entries.delete(plan.index);
          report.freed.push(plan.index);
        } else report.failed.push({ index: plan.index, reason: "its netns or veth is still there" });
      }
    }
    this.#swept = true;
    if (leaked.length > 0) this.#logger.info({ ...report }, "network slots swept");
    return report;
  }

  list(): SlotView[] {
    return [...this.#entries.values()]
      .map(({ plan, state }) => ({ index: plan.index, state, netns: plan.netns, hostIp: plan.hostIp }))
      .sort((a, b) => a.index - b.index);
  }

  /**
   * What of the host keeps guests from working as promised. Puts the node's own rules back where somebody flushed them
   * (slots keep theirs meanwhile), which is a finding as well.
   */
  async check(): Promise<Finding[]> {
    const { id } = this.#instance;
    const wanted = this.#limits.connections;
    const found = await checkNetwork({ ...this.#options, instance: id, block: this.block, connections: wanted });
    if (this.#options.gateway && !this.#gateway)
      found.push({
        severity: "warning",
        subject: "egress gateway",
        problem: "this host's kernel cannot hand connections to it: no rules by domain, no proxies, no transforms",
        fix: "modprobe nft_tproxy, then restart the node.",
      });
    found.push(...(await this.#freeLeaked()));
    if (await rulesInPlace(id)) return found;
    await this.#installRules();
    const fix = `They are back. Keep the table inet ${tableName(id)} when you reload your firewall.`;
    return [...found, { severity: "error", subject: "node rules", problem: "had been removed from the host", fix }];
  }

  /** Slots that somebody made under our names, or that an earlier sweep could not remove. */
  async #freeLeaked(): Promise<Finding[]> {
    if (!this.#swept) return [];
    const known = [...this.#entries.values()].some((e) => e.state === "unclaimed");
    const there = await host.inventory(this.#instance.id);
    // Made and forgotten between the two looks: such a slot is known, or gone.
    if (!known && [...there].every((index) => this.#entries.has(index))) return [];
    const { freed, failed } = await this.sweep();
    return [
      ...freed.map((index) => ({
        severity: "warning" as const,
        subject: `slot ${index}`,
        problem: "belonged to nobody",
        fix: "It is freed.",
      })),
      ...failed.map(({ index, reason }) => ({
        severity: "error" as const,
        subject: `slot ${index}`,
        problem: `belongs to nobody and cannot be freed: ${reason}`,
        fix: `Look for processes in it: ip netns pids ${planSlot(this.#instance, index).netns}`,
      })),
    ];
  }

  /** Resolves when no slot is being made or reset. */
  async idle(): Promise<void> {
    while (this.#lanes.size > 0) await Promise.all(this.#lanes);
  }

  /** Lets running work end and leaves everything in the kernel, for the next server. */
  async close(): Promise<void> {
    this.#closed = true;
    this.#target = 0;
    this.#spare = 0;
    for (const w of this.#waiters.splice(0)) w.reject(new AenvError("CANCELLED", "the network was closed"));
    await this.idle();
  }

  /** Removes everything of the instance from the kernel, used slots included. */
  async destroy(): Promise<void> {
    await this.close();
    for (const entry of this.#entries.values()) entry.state = "unclaimed";
    this.#free = [];
    const { failed } = await this.sweep();
    if (failed.length > 0)
      throw new AenvError("INTERNAL", `network slots are still there: ${failed.map((f) => f.index).join(", ")}`);
    const table = `table inet ${tableName(this.#instance.id)}`;
    await run("nft", ["-f", "-"], { input: `${table}\ndelete ${table}\n` });
    await host.dropMarkedRoute(gatewayMark(this.#instance.id));
    await host.removeLock(this.#instance.id);
  }

  #assertOpen(): void {
    if (this.#closed) throw new AenvError("UNAVAILABLE", "the network was closed");
  }

  #count(state: SlotState): number {
    let n = 0;
    for (const e of this.#entries.values()) if (e.state === state) n++;
    return n;
  }

  /** Slots that will be free without anything new. */
  #coming(): number {
    return this.#count("making") + this.#count("resetting");
  }

  #room(): number {
    return Math.max(0, this.#options.limit - this.#entries.size);
  }

  #give(entry: Entry): Slot {
    const { index, netns, tap, hostIp, uid, gid } = entry.plan;
    entry.slot = { index, netns, tap, hostIp, uid, gid };
    entry.state = "used";
    return entry.slot;
  }

  #fill(): void {
    this.#target = Math.max(this.#target, this.#spare);
    if (this.#missing() > 0) this.#kick();
  }

  #kick(): void {
    while (this.#lanes.size < LANES && (this.#dirty.length > 0 || this.#missing() > 0)) {
      const lane = this.#work().finally(() => {
        this.#lanes.delete(lane);
        this.#kick();
        if (this.#lanes.size === 0) this.#target = 0;
      });
      this.#lanes.add(lane);
    }
  }

  /** How many new slots are wanted and allowed. */
  #missing(): number {
    const wanted = this.#waiters.length + this.#target - this.#free.length - this.#coming();
    return Math.max(0, Math.min(wanted, this.#room()));
  }

  async #work(): Promise<void> {
    // Callers of the same turn of the event loop share a batch.
    await Promise.resolve();
    await this.refreshUplink().catch((e: unknown) =>
      this.#logger.warn({ error: messageOf(e) }, "the uplink could not be looked up"),
    );
    for (;;) {
      const dirty = this.#dirty.splice(0, BATCH);
      const fresh = this.#reserve(Math.min(this.#missing(), BATCH - dirty.length));
      if (dirty.length + fresh.length === 0) break;
      await this.#renew(dirty, fresh);
    }
  }

  #reserve(count: number): Entry[] {
    const out: Entry[] = [];
    for (let index = 0; index < MAX_SLOTS && out.length < count; index++) {
      if (this.#entries.has(index)) continue;
      const entry: Entry = { plan: planSlot(this.#instance, index), state: "making" };
      this.#entries.set(index, entry);
      out.push(entry);
    }
    return out;
  }

  async #renew(dirty: readonly Entry[], fresh: readonly Entry[]): Promise<void> {
    let { made, failure } = await this.#rebuild(dirty, fresh);
    // One bad slot must not spoil its batch: each is tried once more alone.
    if (dirty.length + fresh.length > 1) {
      for (const entry of [...dirty, ...fresh].filter((e) => !made.has(e.plan.index))) {
        const again = await this.#rebuild([entry], []);
        made = made.union(again.made);
        failure = again.failure ?? failure;
      }
    }
    const bad: Entry[] = [];
    for (const entry of [...dirty, ...fresh]) {
      const released = entry.released;
      delete entry.released;
      if (made.has(entry.plan.index)) {
        entry.state = "free";
        this.#free.push(entry);
        released?.resolve();
      } else {
        bad.push(entry);
        released?.reject(new AenvError("INTERNAL", `network slot ${entry.plan.index} could not be reset`));
      }
    }
    if (bad.length > 0) await this.#giveUp(bad, failure);
    while (this.#waiters.length > 0 && this.#free.length > 0)
      this.#waiters.shift()?.resolve(this.#give(this.#free.shift() as Entry));
  }

  async #rebuild(dirty: readonly Entry[], fresh: readonly Entry[]): Promise<{ made: Set<number>; failure?: unknown }> {
    try {
      const remove = dirty.length > 0 ? this.#removeScript(dirty) : "";
      const rules = (plan: SlotPlan): string => slotRules(this.#instance.id, plan, this.#destinations, this.#limits);
      const make = makeScript(
        [...dirty, ...fresh].map((e) => e.plan),
        rules,
      );
      return { made: await this.#run(`${remove}\n${make}`, "ok") };
    } catch (failure) {
      return { made: new Set(), failure };
    }
  }

  /** Broken slots are removed; those that resist stay as unclaimed for the next sweep. */
  async #giveUp(bad: readonly Entry[], failure: unknown): Promise<void> {
    this.#target = 0;
    this.#spare = 0;
    this.#logger.error({ slots: bad.map((e) => e.plan.index), error: messageOf(failure) }, "network slots failed");
    const gone = await this.#remove(bad).catch(() => new Set<number>());
    for (const entry of bad) {
      if (gone.has(entry.plan.index)) this.#entries.delete(entry.plan.index);
      else entry.state = "unclaimed";
    }
    const error = new AenvError("UNAVAILABLE", "a network slot could not be made", { cause: failure });
    for (const w of this.#waiters.splice(0)) w.reject(error);
  }

  #removeScript(entries: readonly Entry[]): string {
    return removeScript(
      this.#instance.id,
      entries.map((e) => e.plan),
    );
  }

  async #remove(entries: readonly Entry[]): Promise<Set<number>> {
    return await this.#run(this.#removeScript(entries), "gone");
  }

  /** Indexes of the script's lines `<word> INDEX`. */
  async #run(script: string, word: "ok" | "gone"): Promise<Set<number>> {
    const found = new Set<number>();
    const other: string[] = [];
    for (const line of (await host.runScript(this.#instance.id, script)).split("\n")) {
      const m = /^(ok|gone) (\d+)$/.exec(line);
      if (m?.[1] === word) found.add(Number(m[2]));
      else if (!m && line.trim() !== "") other.push(line);
    }
    if (other.length > 0) this.#logger.warn({ output: other.slice(0, 20) }, "a network script complained");
    return found;
  }
}

/** Resolves or rejects with the work, or rejects as soon as the signal aborts; the work goes on. */
function abortable<T>(work: Promise<T>, signal?: AbortSignal): Promise<T> {
  if (!signal) return work;
  return new Promise((resolve, reject) => {
    const onAbort = (): void => reject(signal.reason as Error);
    if (signal.aborted) return onAbort();
    signal.addEventListener("abort", onAbort, { once: true });
    work.then(resolve, reject).finally(() => signal.removeEventListener("abort", onAbort));
  });
}
