/** The one place where the rooms are put together and drivers are chosen. */
import { mkdir } from "node:fs/promises";
import { createRequire } from "node:module";
import { isIP } from "node:net";
import { join } from "node:path";
import { AenvError, type Logger, messageOf, mib, type SandboxId, systemClock, TaskGroup } from "@aenv/base";
import { BlockdClient } from "@aenv/block";
import type { Check, DoctorReport } from "@aenv/contract";
import { GatewayClient } from "@aenv/egress";
import { damageOf, Engine, type Ingress, type Route } from "@aenv/engine";
import { GuestClient } from "@aenv/guest";
import { Cgroups, guestResolvers, tlsFolder } from "@aenv/host";
import { readBaseManifest } from "@aenv/images";
import { Certificates, DnsServer, makeAuthority } from "@aenv/names";

import { Network, type NetworkOptions } from "@aenv/network";
import {
  createEdge,
  createFrontServer,
  ENVD_PORT,
  type Asleep,
  type Edge,
  type EdgeError,
  type Target,
} from "@aenv/proxy";
import { State } from "@aenv/state";
import { WebhookSender } from "@aenv/webhooks";
import { type Probe, VmdClient } from "@aenv/vmm";
import { QemuDriver } from "@aenv/vmm-qemu";
import type { FastifyInstance } from "fastify";
import { buildApp } from "./app.ts";
import { BaseTemplate } from "./base-template.ts";
import type { ServerConfig } from "./config.ts";
import { Daemon, superviseDaemons } from "./daemons.ts";
import { checkDisk, ownerKey, reconcile, report, scanHost, templateCheck } from "./doctor.ts";
import { ensureFirstKey } from "./first-key.ts";
import { allHandlers } from "./handlers.ts";
import { type Reading, ServerMetrics } from "./metrics.ts";
import type { NodeApi, NodeFacts } from "./ports.ts";
import { Timings } from "./timings.ts";

export interface Node extends AsyncDisposable {
  app: FastifyInstance;
  edge: Edge;
  engine: Engine;
}

interface Rooms {
  config: ServerConfig;
  daemons: readonly Daemon[];
  blockd: BlockdClient;
  network: Network;
  cgroups: Cgroups;
  state: State;
  engine: Engine;
  edge: Edge;
  base: BaseTemplate;
  probe: Probe;
  driver: QemuDriver;
  timings: Timings;
  tls: Certificates;
}

const SETTING_BLOCK = "network.block";
const { version } = createRequire(import.meta.url)("../package.json") as { version: string };
const appMain = (name: string): string => join(import.meta.dirname, `../../${name}/src/main.ts`);

/** Opens everything below the API and recovers what an earlier server left; sandboxes that run are adopted. */
export async function openNode(config: ServerConfig, logger: Logger, signal: AbortSignal): Promise<Node> {
  await using undo = new AsyncDisposableStack();
  const { home, runRoot, instance } = config;
  await makeFolders(config);
  const daemons = makeDaemons(config, logger);
  undo.use(await superviseDaemons(daemons, logger, signal));

  const state = undo.use(State.open(join(home, "state.db"), systemClock, { room: true }));
  if ((await ensureFirstKey(home, state)) === "made") logger.info({ path: join(home, "auth.json") }, "first key made");
  const blockd = undo.adopt(new BlockdClient(join(runRoot, "blockd.sock")), (b) => b.close());
  const vmd = undo.adopt(new VmdClient(join(runRoot, "vmd.sock")), (v) => v.close());
  const cgroups = new Cgroups();
  const driver = await openDriver(config, { vmd, cgroups, logger }, signal);
  const probe = await driver.probe(signal);
  logger.info({ ...probe }, "acceleration chosen");

  const gateway = undo.adopt(await GatewayClient.open(join(runRoot, "egress.sock"), logger), (g) => g.close());
  const network = undo.adopt(await openNetwork(config, state, logger, gateway), (n) => n.close());
  const timings = new Timings();
  const engine = undo.use(
    await Engine.open({
      state,
      blockd,
      driver,
      network,
      cgroups,
      makeAuthority: (name) => makeAuthority(name, Date.now()),
      guestFactory: (target) => new GuestClient(target),
      clock: systemClock,
      logger,
      config: {
        home,
        instance,
        runRoot,
        maxForks: config.forkLimit,
        ...(config.poolMB === undefined ? {} : { pool: { memoryBudgetBytes: mib(config.poolMB) } }),
        onOperation: (o) => timings.addOperation(o),
        diskReserveBytes: config.diskReserveBytes,
        store: config.store,
      },
    }),
  );
  const edge = undo.adopt(
    createEdge({
      resolve: (id, port) => targetOf(engine, id, port),
      accessTokens: () => engine.accessTokens(),
      domain: config.domain,
      logger,
    }),
    (e) => e.close(),
  );
  undo.defer(engine.onRunEnded((run) => edge.endRun(run)));
  const tls = undo.use(await openCertificates(config, logger));
  if (config.dns) {
    const { listen, answer } = config.dns;
    undo.use(await DnsServer.open({ listen, addresses: answer, domain: config.domain, logger }));
  }
  undo.use(new WebhookSender({ state, clock: systemClock, logger }));
  const base = new BaseTemplate(home, { engine, snapshots: state.snapshots }, logger);
  const rooms = { config, daemons, blockd, network, cgroups, state, engine, edge, base, probe, driver, timings, tls };
  const metrics = undo.use(new ServerMetrics(readings(rooms)));
  const node = nodeApi(rooms);
  const app = buildApp({
    handlers: allHandlers({ engine, node, keys: state, metrics }),
    keys: state,
    logger,
    metrics,
    server: (api) => createFrontServer({ edge, api, tls, logger }),
  });
  undo.defer(async () => app.close());
  const tasks = undo.use(new TaskGroup((task, e) => logger.error({ task, error: messageOf(e) }, "a task failed")));
  tasks.spawn("base template", (s) => base.ensure(s));
  const owned = undo.move();
  return { app, edge, engine, [Symbol.asyncDispose]: () => owned.disposeAsync() };
}

async function makeFolders({ home, runRoot }: ServerConfig): Promise<void> {
  await mkdir(join(home, "log"), { recursive: true, mode: 0o700 });
  await mkdir(join(home, "blockd"), { recursive: true, mode: 0o700 });
  // VMMs pass through to the folder of their run, and see no others.
  for (const dir of [runRoot, join(runRoot, "r"), join(home, "runs")])
    await mkdir(dir, { recursive: true, mode: 0o711 });
}

function makeDaemons({ home, runRoot, uidBase, cacheMiB }: ServerConfig, logger: Logger): Daemon[] {
  // The compiled output of our modules is cached: without it every daemon carries a compiler of 30 MB.
  const env = {
    PATH: process.env["PATH"] ?? "/usr/sbin:/usr/bin:/sbin:/bin",
    ...(process.env["NODE_COMPILE_CACHE"] === undefined
      ? {}
      : { NODE_COMPILE_CACHE: process.env["NODE_COMPILE_CACHE"] }),
    // Authorities, besides Node's own, that the egress gateway trusts where it opens HTTPS connections.
    ...(process.env["NODE_EXTRA_CA_CERTS"] === undefined
      ? {}
      : { NODE_EXTRA_CA_CERTS: process.env["NODE_EXTRA_CA_CERTS"] }),
  };
  // Where the AWS tools find credentials: blockd reads layers of stores.
  const credentials = Object.fromEntries(
    Object.entries(process.env).flatMap(([k, v]) =>
      v !== undefined && (k === "HOME" || k.startsWith("AWS_")) ? [[k, v]] : [],
    ),
  );
  const daemon = (name: string, args: readonly string[], more: Record<string, string> = {}): Daemon => {
    const log = join(home, `log/${name}.log`);
    const socket = join(runRoot, `${name}.sock`);
    return new Daemon(
      { name, main: appMain(name), socket, args: [...args, "--log", log], log, env: { ...env, ...more } },
      logger,
    );
  };
  return [
    daemon("blockd", ["--state", join(home, "blockd"), "--cache-mib", String(cacheMiB)], credentials),
    daemon("vmd", []),
    daemon("egress", ["--state", join(home, "egress"), "--uid", String(uidBase - 1)]),
  ];
}

function openCertificates({ home, domain, listen, tls }: ServerConfig, logger: Logger): Promise<Certificates> {
  const names = isIP(listen) !== 0 && !isUnspecified(listen) ? [listen] : [];
  return Certificates.open({ dir: tlsFolder(home), domain, names, logger, ...(tls ? { operator: tls } : {}) });
}

const isUnspecified = (address: string): boolean => address === "0.0.0.0" || address === "::";

async function openDriver(
  { home, accel }: ServerConfig,
  { vmd, cgroups, logger }: { vmd: VmdClient; cgroups: Cgroups; logger: Logger },
  signal: AbortSignal,
): Promise<QemuDriver> {
  const manifest = await readBaseManifest(home);
  if (!manifest)
    throw new AenvError("UNAVAILABLE", `${home} has no guest kernel`, { hint: "Run npm run up: it sets the node up." });
  return QemuDriver.open(
    {
      spawner: vmd,
      cgroups,
      logger,
      accel,
      probeCache: join(home, "probe.json"),
      probeGuest: { kernel: manifest.kernel, initrd: manifest.initrd },
    },
    signal,
  );
}

/** The block of addresses stays the same over restarts: slots of running sandboxes have them. */
export async function networkOptions(config: ServerConfig, state: State, logger: Logger): Promise<NetworkOptions> {
  const block = state.setting(SETTING_BLOCK, () => "");
  return {
    instance: config.instance,
    limit: config.slots,
    uidBase: config.uidBase,
    dns: config.resolvers.length > 0 ? config.resolvers : await guestResolvers(),
    ...config.egress,
    limits: config.limits,
    logger,
    ...(block === "" ? {} : { block }),
  };
}

async function openNetwork(
  config: ServerConfig,
  state: State,
  logger: Logger,
  gateway: GatewayClient,
): Promise<Network> {
  const network = await Network.open({ ...(await networkOptions(config, state, logger)), gateway });
  if (state.setting(SETTING_BLOCK, () => "") !== network.block) state.putSetting(SETTING_BLOCK, network.block);
  return network;
}

function targetOf(engine: Engine, id: string, port: number): Target | EdgeError | Asleep {
  const sandboxId = id as SandboxId;
  const route = engine.route(sandboxId);
  if (route) return targetAt(route, port);
  const asleep = engine.asleep(sandboxId);
  if (!asleep) return { error: "not_found" };
  return {
    ...(asleep.accessToken === undefined ? {} : { accessToken: asleep.accessToken }),
    ...(asleep.trafficToken === undefined ? {} : { requiredTrafficToken: asleep.trafficToken }),
    wake: async (signal) => {
      try {
        const woken = await engine.resumeForTraffic(sandboxId, signal);
        return woken ? targetAt(woken, port) : { error: "not_found" };
      } catch (e) {
        return unwoken(AenvError.from(e, `wake sandbox ${id}`));
      }
    },
  };
}

/** What the one who asked a paused sandbox is told; why is in the log. */
function unwoken({ code }: AenvError): EdgeError {
  if (code === "NOT_FOUND") return { error: "not_found" };
  if (code === "IN_TRANSITION" || code === "CONFLICT") return { error: "conflict" };
  if (code === "RATE_LIMITED")
    return { error: "unavailable", message: "The sandbox is paused, and its node runs as many as it may" };
  return { error: "unavailable", message: "The sandbox is paused and could not be resumed" };
}

function targetAt(route: Route, port: number): Target {
  return {
    run: route.run,
    host: route.host,
    port,
    ...(route.trafficToken === undefined ? {} : { requiredTrafficToken: route.trafficToken }),
    ...(route.accessToken === undefined ? {} : { accessToken: route.accessToken }),
    ...(port === ENVD_PORT ? {} : ingressAt(route.ingress ?? {}, port)),
  };
}

const ingressAt = (ingress: Ingress, port: number): Pick<Target, "maskHost" | "tls"> => ({
  ...(ingress.maskRequestHost === undefined
    ? {}
    : { maskHost: ingress.maskRequestHost.replaceAll("${PORT}", String(port)) }),
  ...(ingress.httpsPorts?.includes(port) ? { tls: true } : {}),
});

function nodeApi(rooms: Rooms): NodeApi {
  const { config, engine, base, probe, driver, timings, tls } = rooms;
  return {
    version,
    instance: config.instance,
    get domain() {
      return config.domain;
    },
    forkLimit: config.forkLimit,
    features: { pause: true, internetOff: true, egressRules: true, privateTraffic: true },
    facts: (): NodeFacts => ({
      vmm: driver.name,
      vmmVersion: probe.version,
      accel: probe.accel,
      accelReason: probe.reason,
      envdVersion: engine.templates.resolve("base")?.envdVersion ?? "",
      base: base.status,
      ...(tls.authority === undefined ? {} : { certificateAuthority: tls.authority }),
    }),
    timings: () => timings.list(),
    operations: (after) => timings.operations(after),
    doctor: () => examine(rooms),
  };
}

async function examine(rooms: Rooms): Promise<DoctorReport> {
  const { config, daemons, blockd, network, cgroups, state, engine, base } = rooms;
  const { home, runRoot, instance } = config;
  const own = new Map([[process.pid, "server"]]);
  for (const d of daemons) if (d.identity) own.set(d.identity.pid, d.name);
  const found = await scanHost({
    instance,
    home,
    runRoot,
    own,
    slots: () => network.list(),
    disks: () => blockd.listDisks(),
    cgroups: () => cgroups.list(`aenv-${instance}`),
  });
  // Asked after the host: what was made in between is not found, what was found is still claimed.
  const owners = new Map<string, string>();
  for (const r of engine.resources()) owners.set(ownerKey(r.kind, r.name), `${r.owner.kind} ${r.owner.id}`);
  for (const [key, owner] of fileOwners(home, state)) owners.set(key, owner);
  const checks = [
    ...daemons.map(checkDaemon),
    checkBase(base),
    ...(await checkTemplates(engine, state)),
    await checkDisk(home),
    ...(await checkSlots(network)),
  ];
  return report(checks, reconcile(found, owners));
}

/** Whose the files of captured states are; those of a capture that runs are its VM run's. */
function* fileOwners(home: string, state: State): Generator<[key: string, owner: string]> {
  const at = (kind: "snapshot" | "memory" | "layer", id: string): string =>
    ownerKey(kind, join(home, kind === "memory" ? kind : `${kind}s`, id));
  for (const r of state.resources.list())
    if (r.kind === "snapshot" || r.kind === "memory" || r.kind === "layer")
      yield [at(r.kind, r.name), `capture of run ${r.run}`];
  for (const l of state.layers.list()) yield [at("layer", l.id), "the layers of disks"];
  for (const m of state.memory.list()) yield [at("memory", m.id), "the memory of snapshots"];
  for (const s of state.snapshots.list())
    yield [at("snapshot", s.id), s.sandbox === undefined ? "template" : `${s.cause} of sandbox ${s.sandbox}`];
}

/** A warning is worth reading but keeps nothing from working as promised. */
async function checkSlots(network: Network): Promise<Check[]> {
  const findings = await network.check();
  if (findings.length === 0) return [{ name: "network", ok: true, detail: `slots at ${network.block}` }];
  return findings.map(({ severity, subject, problem, fix }) => ({
    name: `network: ${subject}`,
    ok: severity === "warning",
    detail: problem,
    fix,
  }));
}

function checkDaemon(d: Daemon): Check {
  const name = `${d.name} runs`;
  return d.identity
    ? { name, ok: true, detail: `pid ${d.identity.pid}, restarted ${d.restarts} times` }
    : { name, ok: false, detail: "it is being started again", fix: "Read its log in the data folder." };
}

function checkBase({ status }: BaseTemplate): Check {
  const ok = status.state === "ready";
  const detail = [status.state, status.step, status.error].filter((x) => x !== undefined).join(": ");
  return { name: "template base", ok, detail, ...(ok ? {} : { fix: "Run npm run up; the server log says more." }) };
}

/** Templates whose files are damaged, or of which no spare could be made the last time. */
async function checkTemplates(engine: Engine, state: State): Promise<Check[]> {
  const failed = new Map(engine.pools().flatMap((p) => (p.lastError ? [[p.snapshotId, p.lastError]] : [])));
  const checks: Check[] = [];
  for (const t of engine.templates.list()) {
    const snapshot = state.snapshots.get(t.snapshotId);
    const error = (snapshot && (await damageOf(snapshot))) ?? failed.get(t.snapshotId);
    if (error) checks.push(templateCheck(t.name, error));
  }
  return checks;
}

function readings({ engine, edge, network, daemons }: Rooms): Reading[] {
  const pools = (which: "hot" | "prepared") => (): Record<string, number> =>
    Object.fromEntries(engine.pools().map((p) => [p.template ?? p.snapshotId, p[which]]));
  return [
    { name: "aenv_sandboxes_running", help: "Running sandboxes", read: () => engine.count().running },
    { name: "aenv_sandboxes_paused", help: "Paused sandboxes", read: () => engine.count().paused },
    { name: "aenv_pool_hot", help: "Idle running spares", label: "template", read: pools("hot") },
    { name: "aenv_pool_prepared", help: "Waiting VMMs", label: "template", read: pools("prepared") },
    { name: "aenv_slots_free", help: "Network slots that are ready", read: () => network.free },
    {
      name: "aenv_edge",
      help: "Counters of the edge since the start",
      label: "what",
      read: () => ({ ...edge.stats() }),
    },
    {
      name: "aenv_daemon_restarts",
      help: "Daemons that had to be started again",
      label: "daemon",
      read: () => Object.fromEntries(daemons.map((d) => [d.name, d.restarts])),
    },
  ];
}
