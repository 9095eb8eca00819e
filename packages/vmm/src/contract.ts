import type { Bytes, RunId } from "@aenv/base";
import type { ProcIdentity } from "@aenv/host";

/** What of a VM is the same in every launch of a snapshot: change it and old device states no longer load. */
export interface Machine {
  /** 1..MAX_VCPUS. */
  vcpus: number;
  /** A multiple of 1 MiB. */
  memoryBytes: Bytes;
  /** Path of a bzImage. */
  kernel: string;
  /** Path of the initramfs. */
  initrd: string;
  /** The guest's part of the kernel command line; the driver adds console and panic handling of its own. */
  cmdline: string;
}

export interface VmSpec {
  run: RunId;
  machine: Machine;
  /** Existing folder owned by `uid`; sockets live here, so its path has at most 80 bytes. */
  runDir: string;
  uid: number;
  gid: number;
  /** Control group made by the caller, relative to the root of the hierarchy: `aenv-<instance>/<RunId>`. */
  cgroup?: string;
  /** Name under /run/netns. Without it the VMM keeps the network namespace of the spawner. */
  netns?: string;
  /** Tap device in `netns`, owned by `uid`. Without it the VM has no network device. */
  tap?: string;
  mac?: string;
  /** Unix socket of an NBD server that `uid` may connect to, export "disk". Without it the VM has no disk. */
  diskSocket?: string;
  memory: {
    /**
     * create: must not exist; made sparse, owned by `uid`, written through, so that it is the memory image once the VM is stopped.
     * map: private copy-on-write. `uid` must be able to read it; where others may not, its group is lent to the VMM.
     */
    file: string;
    mode: "create" | "map";
  };
  /** The guest's console; never larger than CONSOLE_LOG_BYTES, the part before goes to `<consoleLog>.1` or is lost. */
  consoleLog: string;
}

export const MAX_VCPUS = 32;
/** Upper bound of one console log file, enforced by the kernel (RLIMIT_FSIZE of the VMM). */
export const CONSOLE_LOG_BYTES = 1024 * 1024;

/** Enough to find the VM again after a restart of the server. JSON; `v` changes with its meaning. */
export interface VmHandle {
  v: 1;
  driver: string;
  run: RunId;
  identity: ProcIdentity;
  /** The driver's own facts. */
  data: Record<string, unknown>;
}

/** Why a VM is gone. */
export type ExitCause =
  /** `kill()` was called, or the VMM got a polite signal from the host. */
  | "killed"
  /** The guest powered off. */
  | "guest-shutdown"
  /** The guest restarted; a sandbox is not rebooted. */
  | "guest-reset"
  /** The guest kernel panicked, also when its init was killed. */
  | "guest-panic"
  /** The kernel killed the VMM because its control group was out of memory. */
  | "out-of-memory"
  /** The disk of its memory file is full. */
  | "disk-full"
  /** The VMM ended by itself or by a signal that nobody here sent. */
  | "vmm-crash"
  /** It is gone and nobody saw how. */
  | "unknown";

export interface VmExit {
  cause: ExitCause;
  /** One line for a person. */
  detail: string;
}

/** prepared: waits for `load`. stopped: holds a state and does not run. */
export type VmStatus = "prepared" | "stopped" | "running";

/** Guest memory as the host sees it. `guestOffset` counts in the flat memory file. */
export interface GuestMapping {
  pid: number;
  hostAddress: bigint;
  guestOffset: number;
  length: number;
}

export interface VmStats {
  /** Resident memory of the VMM, shared pages included. */
  residentBytes: Bytes;
  cpuUsec: number;
}

/** One VM process. Operations on one Vm are serialised by the driver; after the exit they throw VMM_FAILED. */
export interface Vm {
  readonly handle: VmHandle;
  readonly identity: ProcIdentity;
  /** Resolves once the process is gone; never rejects; never resolves after `detach()`. */
  readonly exited: Promise<VmExit>;
  /** Only in a prepared VM: takes the device state and leaves it stopped. When it fails the VM is killed. */
  load(deviceState: string, signal: AbortSignal): Promise<void>;
  resume(signal: AbortSignal): Promise<void>;
  stop(signal: AbortSignal): Promise<void>;
  /** Only in a stopped VM. The file appears complete or not at all, owned by the caller. The VM stays stopped and can resume. */
  saveDeviceState(path: string, signal: AbortSignal): Promise<void>;
  status(signal: AbortSignal): Promise<VmStatus>;
  /** Sorted by guestOffset, without gaps, covering all guest memory; empty where `capabilities.mappings` is false. */
  mappings(signal: AbortSignal): Promise<GuestMapping[]>;
  /** Idempotent, immediate; resolves when the process is gone. */
  kill(): Promise<void>;
  /** The server leaves, the VM stays: closes connections and timers. */
  detach(): void;
  stats(): Promise<VmStats>;
}

export interface VmmCapabilities {
  /** `mappings()` names real host memory. */
  mappings: boolean;
  /** A mapped memory file cannot be altered by the VMM that maps it. */
  readOnlyMemoryFile: boolean;
  /** The guest gives free pages back to the host. */
  freePageReporting: boolean;
}

export interface Probe {
  accel: "kvm" | "tcg";
  version: string;
  /** One line: why this acceleration. */
  reason: string;
}

export interface VmmDriver {
  readonly name: string;
  readonly capabilities: VmmCapabilities;
  /** Chooses the acceleration by booting a probe guest under a deadline; remembers the verdict for this host. */
  probe(signal: AbortSignal): Promise<Probe>;
  /** Cold boot; returns a running VM. memory.mode must be "create". */
  boot(spec: VmSpec, signal: AbortSignal): Promise<Vm>;
  /** A waiting process with nothing loaded. memory.mode must be "map". */
  prepare(spec: VmSpec, signal: AbortSignal): Promise<Vm>;
  /** After a server restart. Throws NOT_FOUND when the process is gone; `data.exit` of the error is a VmExit when it is known. */
  adopt(handle: VmHandle, signal: AbortSignal): Promise<Vm>;
  /** What a VM may use beside its guest memory: the bound of its control group is memoryBytes + this. */
  overheadBytes(machine: Machine): Bytes;
  /** Detaches from everything. VMs stay. */
  close(): Promise<void>;
}
