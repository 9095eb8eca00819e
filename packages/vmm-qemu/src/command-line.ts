import { AenvError, type Bytes, bytes } from "@aenv/base";
import { MAX_VCPUS, type Machine, type VmSpec } from "@aenv/vmm";

const MIB = 1024 * 1024;

/**
 * Translation cache under emulation. QEMU's own default is up to 1 GiB per VM, which the guest fills over time with
 * memory that no sandbox shares; when this one is full it is flushed and refilled.
 */
const TB_CACHE_MIB = 128;
/** QEMU itself: code, device models, kernel and initramfs blobs, malloc arenas. */
const QEMU_BASE_BYTES = 128 * MIB;
/**
 * So long a guest waits for a blockd that is down; then its disk fails, which a guest's filesystem does not get over. The
 * server starts blockd again at once: the rest is for hosts on which that takes long.
 */
const DISK_PATIENCE_S = 300;
/** Thread stacks, TCG regions and malloc arenas per virtual CPU. */
const PER_VCPU_BYTES = 16 * MIB;

export interface QemuTraits {
  binary: string;
  accel: "kvm" | "tcg";
  /** QEMU can map a memory file that it may only read (8.2 and later). */
  readOnlyMemory: boolean;
  /** Told to guests under emulation, which cannot find it out on a busy host. */
  tscKhz?: number | undefined;
}

export interface QemuPaths {
  qmp: string;
  load: string;
  state: string;
}

/** Everything the VMM makes in its run folder. */
export function runPaths(runDir: string): QemuPaths {
  return {
    qmp: `${runDir}/qmp.sock`,
    load: `${runDir}/load.sock`,
    state: `${runDir}/device-state`,
  };
}

export function checkMachine(machine: Machine): void {
  const { vcpus, memoryBytes } = machine;
  if (!Number.isInteger(vcpus) || vcpus < 1 || vcpus > MAX_VCPUS)
    throw new AenvError("INVALID_ARGUMENT", `${vcpus} is not a number of virtual CPUs from 1 to ${MAX_VCPUS}`);
  if (memoryBytes % MIB !== 0 || memoryBytes < 64 * MIB)
    throw new AenvError("INVALID_ARGUMENT", `guest memory of ${memoryBytes} bytes: want whole MiB, 64 at least`);
}

export function overheadBytes(machine: Machine, accel: "kvm" | "tcg"): Bytes {
  return bytes(QEMU_BASE_BYTES + machine.vcpus * PER_VCPU_BYTES + (accel === "tcg" ? TB_CACHE_MIB * MIB : 0));
}

/** A comma separates QEMU options; doubled it is a comma. */
const value = (text: string): string => text.replaceAll(",", ",,");

/** Console and panic handling of every guest: a panic restarts at once, which -no-reboot turns into an exit. */
export const CONSOLE_CMDLINE = "console=ttyS0 panic=-1 reboot=t quiet";

/**
 * What a guest under emulation has to be told; under KVM it has kvm-clock and a real CPU.
 *
 * The emulated counter is the host's, so it is reliable. The kernel would check it against its own ticks, which are late on
 * a busy host, call the counter unstable, and from then on keep time by ticks: 250 interrupts a second in an idle guest,
 * and a clock that runs slow. Mitigations of CPU faults cost time and protect nothing on a CPU that is software.
 */
function emulationCmdline(traits: QemuTraits): string {
  if (traits.accel !== "tcg") return "";
  return ` tsc=reliable mitigations=off${traits.tscKhz === undefined ? "" : ` tsc_early_khz=${traits.tscKhz}`}`;
}

/**
 * The command line of a VM. Parent and child of a snapshot must agree on everything the device state depends on: all but
 * the memory file's mode, `-incoming`, and the paths.
 */
export function qemuArgv(traits: QemuTraits, spec: VmSpec): string[] {
  const { machine, memory } = spec;
  const { accel } = traits;
  const waiting = memory.mode === "map";
  const paths = runPaths(spec.runDir);
  const share = waiting ? `share=off${traits.readOnlyMemory ? ",readonly=on,rom=off" : ""}` : "share=on";
  const argv = [
    traits.binary,
    "-name",
    `aenv-${spec.run}`,
    "-M",
    "microvm,pcie=off,memory-backend=mem,suppress-vmdesc=on",
    "-accel",
    accel === "kvm" ? "kvm" : `tcg,thread=multi,tb-size=${TB_CACHE_MIB}`,
    "-cpu",
    accel === "kvm" ? "host" : "max",
    "-m",
    `${machine.memoryBytes / MIB}`,
    "-smp",
    `${machine.vcpus}`,
    "-object",
    `memory-backend-file,id=mem,size=${machine.memoryBytes},mem-path=${value(memory.file)},${share}`,
    "-nodefaults",
    "-no-user-config",
    "-nographic",
    "-no-reboot",
    // Standard output is the console log: opened by the spawner, appended to, and bounded by RLIMIT_FSIZE.
    "-chardev",
    "stdio,id=s0,signal=off,mux=off",
    "-serial",
    "chardev:s0",
    "-chardev",
    `socket,id=qmp,path=${value(paths.qmp)},server=on,wait=off`,
    "-mon",
    "chardev=qmp,mode=control",
    "-object",
    "rng-builtin,id=rng0",
    "-device",
    "virtio-rng-device,rng=rng0",
  ];
  // A balloon's pages and free pages that a guest reports are punched out of the memory file, even where it is mapped
  // privately. That file is shared by all siblings, and a hostile guest fills a balloon unasked: only a QEMU that cannot
  // write the file, and so refuses to punch, gets a balloon. Reporting would only make it log a refusal per free page.
  if (traits.readOnlyMemory)
    argv.push("-device", "virtio-balloon-device,id=balloon0,deflate-on-oom=on,free-page-reporting=off");
  if (spec.diskSocket !== undefined)
    argv.push(
      "-blockdev",
      `driver=nbd,node-name=disk0,server.type=unix,server.path=${value(spec.diskSocket)},export=disk,reconnect-delay=${DISK_PATIENCE_S},` +
        "discard=unmap,detect-zeroes=off,cache.direct=off,cache.no-flush=off",
      "-device",
      // The default stops the whole machine when the host's disk is full; the guest is told instead.
      "virtio-blk-device,id=blk0,drive=disk0,discard=on,write-zeroes=on,werror=report,rerror=report",
    );
  if (spec.tap !== undefined)
    argv.push(
      "-netdev",
      `tap,id=net0,ifname=${value(spec.tap)},script=no,downscript=no,vhost=off`,
      "-device",
      `virtio-net-device,id=nic0,netdev=net0${spec.mac === undefined ? "" : `,mac=${spec.mac}`}`,
    );
  argv.push(
    "-global",
    "migration.send-configuration=off",
    "-sandbox",
    "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny",
  );
  // A launched guest has its kernel in memory: a copy of kernel and initramfs in every VMM would only cost memory and time.
  if (waiting) argv.push("-S", "-incoming", "defer");
  else
    argv.push(
      "-kernel",
      machine.kernel,
      "-initrd",
      machine.initrd,
      "-append",
      `${CONSOLE_CMDLINE}${emulationCmdline(traits)} ${machine.cmdline}`,
    );
  return argv;
}
