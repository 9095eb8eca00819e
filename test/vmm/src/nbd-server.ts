import { spawn } from "node:child_process";
import { randomBytes } from "node:crypto";
import { once } from "node:events";
import { existsSync } from "node:fs";
import { chmod, open, truncate, writeFile } from "node:fs/promises";
import type { TestContext } from "node:test";
import { sleep } from "@aenv/base";
import type { QemuHarness } from "./harness.ts";

const POLL_MS = 20;

/** One NBD server by QEMU's own tool, for any client. */
export async function nbdServer(
  t: TestContext,
  h: QemuHarness,
  name: string,
): Promise<{ socket: string; file: string }> {
  const [socket, file] = [`${h.base}/${name}.sock`, `${h.base}/${name}.raw`];
  await writeFile(file, "");
  await truncate(file, 8 * 1024 * 1024);
  const handle = await open(file, "r+");
  await handle.write(randomBytes(1024 * 1024), 0, 1024 * 1024, 0);
  await handle.close();
  const args = [
    "--socket",
    socket,
    "--export-name=disk",
    "--format=raw",
    "--persistent",
    "--shared=0",
    "--discard=unmap",
  ];
  const server = spawn("qemu-nbd", [...args, file], { stdio: "inherit" });
  t.after(async () => {
    const ended = once(server, "exit");
    server.kill();
    await ended;
  });
  while (!existsSync(socket)) await sleep(POLL_MS);
  await chmod(socket, 0o666);
  return { socket, file };
}
