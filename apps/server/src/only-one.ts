import { createServer } from "node:net";
import { AenvError, errnoOf } from "@aenv/base";

/**
 * Holds the name of an instance for the life of this process: two servers over one data folder would take each other's
 * machines for leftovers. An abstract socket: the kernel frees it however the process ends.
 */
export async function onlyServer(instance: string): Promise<Disposable> {
  const lock = createServer((socket) => socket.destroy());
  lock.unref();
  await new Promise<void>((resolve, reject) => {
    lock.once("error", (e) => {
      const taken = errnoOf(e) === "EADDRINUSE";
      reject(
        taken
          ? new AenvError("CONFLICT", "another server runs on this data folder", {
              hint: "Use that one, or stop it first: npm run down.",
            })
          : AenvError.from(e, "lock the data folder"),
      );
    });
    lock.listen(`\0aenv-${instance}-server`, resolve);
  });
  return { [Symbol.dispose]: () => void lock.close() };
}
