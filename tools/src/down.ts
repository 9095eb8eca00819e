/** `npm run down`: ends every sandbox and process of the node. `-- --purge` also removes its data folder. */
import { spawn } from "node:child_process";
import { readlink, rm } from "node:fs/promises";
import { join } from "node:path";
import { AenvError } from "@aenv/base";
import { aenvHome, readNodeConfig, releaseUids } from "@aenv/host";
import { LINK, root, runningServer, stopServer } from "./node.ts";
import { runSteps } from "./steps.ts";

/** Frees what the node holds on this host: VMs, network, cgroups, blockd and vmd. The server must not run. */
export function releaseNode(home: string): Promise<void> {
  return new Promise((resolve, reject) => {
    const child = spawn(process.execPath, [join(root, "apps/server/src/main.ts"), "--home", home, "--release"], {
      stdio: ["ignore", "pipe", "pipe"],
    });
    let output = "";
    child.stdout.on("data", (d: Buffer) => (output += d.toString()));
    child.stderr.on("data", (d: Buffer) => (output += d.toString()));
    child.on("error", reject);
    child.on("close", (code) => {
      if (code === 0) resolve();
      else reject(new AenvError("INTERNAL", `releasing the node ended with ${code}:\n${output.trim().slice(-2000)}`));
    });
  });
}

export async function down(home: string, purge: boolean): Promise<boolean> {
  const config = await readNodeConfig(home);
  if (!config) {
    console.log(`no node in ${home}`);
    return true;
  }
  return runSteps([
    {
      name: "stop the server",
      hint: `End the process named in ${home}/server.json.`,
      run: async () => {
        const server = runningServer(home);
        if (!server) return "was not running";
        await stopServer(server);
        return `pid ${server.pid}`;
      },
    },
    {
      name: "end sandboxes, free the host",
      hint: "Run npm run up and npm run down again; aenv doctor lists what is left.",
      run: async () => {
        await releaseNode(home);
        return undefined;
      },
    },
    ...(purge
      ? [
          {
            name: "remove all data",
            hint: `Remove ${home} by hand.`,
            run: async () => {
              await releaseUids({ home, instance: config.instance });
              await rm(home, { recursive: true, force: true });
              if ((await readlink(LINK).catch(() => "")) === join(root, "bin/aenv")) await rm(LINK);
              return home;
            },
          },
        ]
      : []),
  ]);
}

if (import.meta.main) {
  const args = process.argv.slice(2);
  const unknown = args.filter((a) => a !== "--purge");
  if (unknown.length > 0) {
    console.error(`unknown option ${unknown[0]}; usage: npm run down [-- --purge]`);
    process.exit(2);
  }
  process.exit((await down(aenvHome(), args.includes("--purge"))) ? 0 : 1);
}
