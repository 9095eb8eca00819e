import { AenvError } from "@aenv/base";
import type { Sandbox } from "@aenv/client";
import type { GuestClient } from "@aenv/guest";
import type { RunningNode } from "./node.ts";

/** Changes one byte in each page of a file in memory: what a capture then stores is that many pages and what the guest does by itself. */
const SCRIPT = `
import mmap, os, sys
size, first, value = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
fd = os.open("/dev/shm/aenv-bench", os.O_RDWR | os.O_CREAT)
if os.fstat(fd).st_size < first + size:
    os.ftruncate(fd, first + size)
m = mmap.mmap(fd, first + size)
m[first::4096] = bytes([value]) * (size // 4096)
`;

/** A sandbox whose memory is written on demand. */
export class Writer implements Disposable {
  readonly sandbox: Sandbox;
  #guest: GuestClient;
  readonly #node: RunningNode;
  #round = 0;

  private constructor(node: RunningNode, sandbox: Sandbox) {
    this.#node = node;
    this.sandbox = sandbox;
    this.#guest = node.guest(sandbox);
  }

  static async create(node: RunningNode, signal: AbortSignal): Promise<Writer> {
    const sandbox = await node.create(signal);
    const writer = new Writer(node, sandbox);
    await writer.run(["/bin/mount", "-o", "remount,size=95%", "/dev/shm"], signal);
    return writer;
  }

  get id(): string {
    return this.sandbox.sandboxID;
  }

  /** Writes each page of `bytes` once, from `first` on. */
  async dirty(bytes: number, signal: AbortSignal, first = 0): Promise<void> {
    this.#round = (this.#round % 250) + 1;
    await this.run(["/usr/bin/python3", "-c", SCRIPT, `${bytes}`, `${first}`, `${this.#round}`], signal);
  }

  /** It is another VM now: connections of the former are gone. */
  reconnect(): void {
    this.#guest.close();
    this.#guest = this.#node.guest(this.sandbox);
  }

  async run([cmd = "", ...args]: readonly string[], signal: AbortSignal): Promise<void> {
    const r = await this.#guest.exec({ cmd, args, user: "root" }, signal);
    if (r.exitCode !== 0) throw new AenvError("GUEST_FAILED", `${cmd} gave ${r.status}: ${r.stderr.slice(-300)}`);
  }

  [Symbol.dispose](): void {
    this.#guest.close();
  }
}
