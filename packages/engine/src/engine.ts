import { AenvError, type Clock, type Logger, type RunId, type SandboxId } from "@aenv/base";
import type { EngineConfigInput } from "./config.ts";
import type { BlockdPort, CgroupsPort, DriverPort, GuestFactory, NetworkPort } from "./ports.ts";
import type {
  BuildTemplateOptions,
  CreateOptions,
  CreateTiming,
  LayerFile,
  ListFilter,
  LogEntry,
  MetricSample,
  OwnedResource,
  Page,
  PoolStatus,
  Route,
  SandboxView,
  TemplateView,
} from "./types.ts";

export interface EngineDeps {
  blockd: BlockdPort;
  driver: DriverPort;
  network: NetworkPort;
  cgroups: CgroupsPort;
  guestFactory: GuestFactory;
  clock: Clock;
  logger: Logger;
  config: EngineConfigInput;
}

export interface Templates {
  /** Newest first. */
  list(team?: string): TemplateView[];
  /** NOT_FOUND unless it is a template's id, name or alias. */
  get(nameOrId: string): TemplateView;
  resolve(nameOrId: string): TemplateView | undefined;
  exists(alias: string): boolean;
  /** False when there is none. Sandboxes that run from it go on. */
  delete(nameOrId: string): Promise<boolean>;
}

const todo = (): never => {
  throw new AenvError("UNIMPLEMENTED", "the engine is being built");
};

/** The sandboxes of one node: see ARCHITECTURE.md. One instance per data folder at a time. */
export class Engine implements AsyncDisposable {
  readonly templates: Templates;

  private constructor(_deps: EngineDeps) {
    this.templates = { list: () => [], get: todo, resolve: () => undefined, exists: () => false, delete: todo };
  }

  /** Recovers: adopts the VMs that run, frees what nobody owns, then warms the pools in the background. */
  static open(deps: EngineDeps): Promise<Engine> {
    return Promise.resolve(new Engine(deps));
  }

  create(_options: CreateOptions, _signal: AbortSignal): Promise<SandboxView> {
    return todo();
  }
  /** NOT_FOUND (with the cause of its end in `data`, where known) when there is none or it is being killed. */
  get(_id: SandboxId): SandboxView {
    return todo();
  }
  list(_filter: ListFilter = {}): Page<SandboxView> {
    return { items: [], totalRunning: 0 };
  }
  /** False when there is none or somebody else kills it. Resolves when its VM is dead. */
  kill(_id: SandboxId): Promise<boolean> {
    return todo();
  }
  /** The end becomes now + ms, also earlier; 0 or less ends it now. */
  setTimeout(_id: SandboxId, _ms: number): Promise<void> {
    return todo();
  }
  /** The end becomes now + ms unless that is earlier. */
  extend(_id: SandboxId, _ms: number): Promise<void> {
    return todo();
  }
  /** As extend for a running sandbox; resumes a paused one. */
  connect(_id: SandboxId, _timeoutMs: number, _signal: AbortSignal): Promise<{ view: SandboxView; resumed: boolean }> {
    return todo();
  }
  /** Oldest first; a sandbox that ended has none (NOT_FOUND). */
  metrics(_id: SandboxId, _range: { start?: number; end?: number } = {}): MetricSample[] {
    return todo();
  }
  latestMetrics(_ids: readonly SandboxId[]): Map<SandboxId, MetricSample> {
    return new Map();
  }
  /** Its events, oldest first; also of a sandbox that ended lately. */
  logs(_id: SandboxId, _range: { start?: number; limit?: number } = {}): LogEntry[] {
    return todo();
  }
  /** Synchronous, for the edge. undefined: no such sandbox runs now. */
  route(_id: SandboxId): Route | undefined {
    return undefined;
  }
  /** Called at the moment at which a run's VM is about to end or has ended. Returns the unsubscription. */
  onRunEnded(_fn: (run: RunId, id: SandboxId) => void): () => void {
    return () => {};
  }
  timing(_id: SandboxId): CreateTiming | undefined {
    return undefined;
  }
  buildTemplate(_options: BuildTemplateOptions, _signal: AbortSignal): Promise<TemplateView> {
    return todo();
  }
  /** A raw disk image becomes a sealed layer that a template can stand on; unused ones are freed at the next start. */
  importLayer(_rawPath: string, _signal: AbortSignal): Promise<LayerFile> {
    return todo();
  }
  pools(): PoolStatus[] {
    return [];
  }
  resources(): OwnedResource[] {
    return [];
  }
  /** The server leaves: sandboxes go on, spares end. */
  close(): Promise<void> {
    return Promise.resolve();
  }
  async [Symbol.asyncDispose](): Promise<void> {
    await this.close();
  }
}
