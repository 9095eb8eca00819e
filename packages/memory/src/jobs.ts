/** What is done with the memory of guests, each a synchronous call: reads and writes of megabytes, for a worker thread. */
import { DeltaWriter } from "./delta-file.ts";
import { type FlatOwner, FlatWriter } from "./flat-file.ts";
import { type GuestMapping, GuestMemory } from "./guest-memory.ts";
import { MemoryStack, type StackFiles } from "./stack.ts";

/**
 * Makes a VMM that maps the flat file hold the whole state, before it loads a device state: loading reads the queues of
 * virtio devices from guest memory. Returns the bytes written. CORRUPT names the file that is damaged.
 */
export function inject(mappings: readonly GuestMapping[], files: StackFiles): number {
  using stack = new MemoryStack(files);
  // A driver without host memory to show: its device states carry it.
  if (mappings.length === 0) return 0;
  using memory = new GuestMemory(mappings, "r+");
  let total = 0;
  let zeros = Buffer.alloc(0);
  for (const piece of stack.overlay()) {
    if (!piece.data && zeros.length < piece.length) zeros = Buffer.alloc(piece.length);
    memory.write(piece.offset, piece.data ?? zeros.subarray(0, piece.length));
    total += piece.length;
  }
  return total;
}

/** Several deltas, oldest first, as one. Returns the bytes of data in it. */
export async function mergeDeltas(files: StackFiles, target: string, durable: boolean): Promise<number> {
  using stack = new MemoryStack(files);
  using writer = new DeltaWriter(target, files.memoryBytes);
  for (const piece of stack.overlay()) writer.add(piece);
  await writer.seal(durable);
  return writer.bytes;
}

/** A stack as one flat file: a clone of the flat one where the file system shares blocks, else a sparse copy. */
export async function flatten(files: StackFiles, target: string, owner: FlatOwner, durable: boolean): Promise<number> {
  using stack = new MemoryStack(files);
  const clone = files.flat === undefined ? undefined : FlatWriter.clone(files.flat, target);
  using writer = clone ?? FlatWriter.create(target, files.memoryBytes);
  if (!clone && files.flat !== undefined) {
    using flat = new MemoryStack({ ...files, deltas: [] });
    for (const { offset, data } of flat.content()) writer.fill(offset, data);
  }
  for (const piece of stack.overlay()) writer.put(piece);
  await writer.seal(owner, durable);
  return writer.bytes;
}
