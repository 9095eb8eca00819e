/**
 * `npm run down`: pauses every sandbox and ends every process of the node. `-- --purge` ends the sandboxes instead and
 * removes the data folder.
 */
import { spawn } from "node:child_process";
import { readlink, rm } from "node:fs/promises";
import { join } from "node:path";
import { AenvError } from "@aenv/base";
import { aenvHome, readNodeConfig, releaseUids } from "@aenv/host";
import { LINK, root, runningServer, stopServer } from "./node.ts";
import { runSteps } from "./steps.ts";

/**
 * Frees what the node holds on this host: VMs, network, cgroups, blockd and vmd. The server must not run. Resolves with
 * the number of VMs that ran.
 */
export function releaseNode(home: string): Promise<number> {
  return new Promise((resolve, reject) => {
    const child = spawn(process.execPath, [join(root, "apps/server/src/main.ts"), "--home", home, "--release"], {
      stdio: ["ignore", "pipe", "pipe"],
    });
    let output = "";
    child.stdout.on("data", (d: Buffer) => (output += d.toString()));
    child.stderr.on("data", (d: Buffer) => (output += d.toString()));
    child.on("error", reject);
    child.on("close", (code) => {
      if (code === 0) resolve(Number(/"machines":(\d+)/.exec(output)?.[1] ?? 0));
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
      run: async (say) => {
        const server = runningServer(home);
        if (!server) return "was not running";
        if (!purge && server.stopMs > 0) say(`pausing what runs, for at most ${server.stopMs / 1000} s`);
        await stopServer(server, purge ? "keep" : "pause");
        return `pid ${server.pid}`;
      },
    },
    {
      name: "free the host",
      hint: "Run npm run up and npm run down again; aenv doctor lists what is left.",
      run: async () => {
        const ended = await releaseNode(home);
        return ended > 0 && !purge ? `${ended} virtual machines ran still and were ended` : undefined;
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
  // npm keeps an option for itself where -- was forgotten, and tells it in the environment.
  const purge = args.includes("--purge") || process.env["npm_config_purge"] === "true";
  process.exit((await down(aenvHome(), purge)) ? 0 : 1);
}
