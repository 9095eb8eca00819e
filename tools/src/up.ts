/** `npm run up`: from a clone to a running node, with a short demonstration. Every step is skipped where its work is done. */
import { symlink, lstat, rm, readlink } from "node:fs/promises";
import { join } from "node:path";
import { aenvHome } from "@aenv/host";
import { rebuildDamaged } from "./base.ts";
import { demonstrate } from "./demo.ts";
import { LINK, readKey, root, runningServer } from "./node.ts";
import { setupSteps } from "./setup.ts";
import { runSteps } from "./steps.ts";

const DEFAULT_PORT = 8000;

/** Makes `aenv` a command; leaves alone what is not our own link. Returns how to call it. */
async function linkCli(): Promise<string> {
  const target = join(root, "bin/aenv");
  const found = await lstat(LINK).catch(() => undefined);
  if (found?.isSymbolicLink()) {
    if ((await readlink(LINK)) === target) return "aenv";
    await rm(LINK);
  } else if (found) return target;
  return symlink(target, LINK).then(
    () => "aenv",
    () => target,
  );
}

if (process.argv.length > 2) {
  console.error(
    `npm run up takes no options, and was given ${process.argv[2]}. AENV_HOME and AENV_PORT are read from the environment.`,
  );
  process.exit(2);
}
// `npm run up | head` shall end quietly.
process.stdout.on("error", () => process.exit(0));

const home = aenvHome();
const port = Number(process.env["AENV_PORT"] ?? DEFAULT_PORT);
if (!Number.isInteger(port) || port < 1 || port > 65_535) {
  console.error(`AENV_PORT must be a port number, not ${JSON.stringify(process.env["AENV_PORT"])}`);
  process.exit(2);
}
const signal = new AbortController().signal;
let answers: string[] = [];
const ok = await runSteps([
  ...setupSteps({ home, port, movePort: process.env["AENV_PORT"] !== undefined }, signal),
  {
    name: "demonstration",
    hint: `The node runs, but the demonstration failed: read ${home}/log/server.log and run aenv doctor.`,
    run: async (say) => {
      const shown = await demonstrate(home, say).catch(async (e: unknown) => {
        // What a create finds damaged may look whole from outside.
        if ((await rebuildDamaged(home, say, signal)) === undefined) throw e;
        return await demonstrate(home, say);
      });
      answers = shown.children;
      return shown.summary;
    },
  },
]);
if (!ok) process.exit(1);
const url = `http://127.0.0.1:${runningServer(home)?.port ?? port}`;
const cli = `${process.env["AENV_HOME"] === undefined ? "" : `AENV_HOME=${home} `}${await linkCli()}`;
console.log(`
One program with its numbers in memory, forked four ways; each child was asked something else:

${answers.map((a) => `  ${a}`).join("\n")}

The node runs in the background. To use it from an E2B SDK:

  export E2B_API_KEY=${await readKey(home)}
  export E2B_API_URL=${url}
  export E2B_SANDBOX_URL=${url}

"${cli} env" prints these lines again; "${cli} start" opens a shell in a new sandbox.
Documentation of the API: ${url}/docs      Stop: npm run down`);
