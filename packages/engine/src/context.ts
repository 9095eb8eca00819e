import { type Clock, type Logger, type RunId, type Semaphore, TaskGroup } from "@aenv/base";
import type { MemoryPort } from "@aenv/memory";
import type { Authority } from "@aenv/network";
import type { SnapshotRecord, State } from "@aenv/state";
import type { VmmDriver } from "@aenv/vmm";
import type { EngineConfig } from "./config.ts";
import { Paths } from "./paths.ts";
import type { BlockdPort, CgroupsPort, GuestFactory, NetworkPort } from "./ports.ts";
import type { VmRun } from "./run.ts";
import type { Holds } from "./holds.ts";
import { Foreground } from "./foreground.ts";
import type { Tokens } from "./tokens.ts";

/** What every room of the engine works with. */
export interface Context {
  readonly state: State;
  readonly blockd: BlockdPort;
  readonly driver: VmmDriver;
  readonly memory: MemoryPort;
  readonly network: NetworkPort;
  readonly cgroups: CgroupsPort;
  readonly guestFactory: GuestFactory;
  readonly clock: Clock;
  readonly logger: Logger;
  readonly config: EngineConfig;
  readonly paths: Paths;
  /** Background work, joined by close(). */
  readonly tasks: TaskGroup;
  readonly foreground: Foreground;
  /** Guests that were just launched and take their identity, which is work for a processor: more at once are each slower. */
  readonly inits: Semaphore;
  readonly tokens: Tokens;
  /** Every run that holds resources, until the last one is released. */
  readonly runs: Map<RunId, VmRun>;
  /** Bytes that the file system of a path has left. */
  freeBytes(path: string): number;
  /** A certificate authority for one sandbox; absent: no transforms. */
  makeAuthority?: ((name: string) => Authority) | undefined;
  readonly holds: Holds;
  /** A snapshot was committed. */
  captured(snapshot: SnapshotRecord): void;
  /** A snapshot was launched, and so many bytes written into the VMM. */
  launched(snapshot: SnapshotRecord, injected: number): void;
  /** The last resource of a run is free. */
  released(run: VmRun): void;
  /** Called before and after every effect of a launch or capture; tests fail or park here. */
  step(name: string): Promise<void> | void;
}
