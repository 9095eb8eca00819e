/**
 * Loaded before aenv (NODE_OPTIONS=--import): after its first byte the program stands still for a while. What it should
 * have done before it printed, and has not, then shows.
 */
const STILL_MS = 400;

let first = true;
for (const stream of [process.stdout, process.stderr]) {
  const write = stream.write.bind(stream) as (...args: unknown[]) => boolean;
  stream.write = (...args: unknown[]): boolean => {
    const done = write(...args);
    if (first && args[0] !== "") {
      first = false;
      Atomics.wait(new Int32Array(new SharedArrayBuffer(4)), 0, 0, STILL_MS);
    }
    return done;
  };
}
