import assert from "node:assert/strict";
import { execFile } from "node:child_process";
import { test } from "node:test";
import { promisify } from "node:util";

const SCRIPT = `
import { openLogger } from ${JSON.stringify(new URL("./log.ts", import.meta.url).href)};
const log = openLogger("info", process.argv[1]);
for (let i = 0; i < 20; i++) log.info({ i }, "a line");
setTimeout(() => {
  log.error({}, "another");
  console.log("still here");
  process.exit(0);
}, 50);
`;

test("a log on a full disk costs its lines, not the process, which also ends in order", {
  timeout: 30_000,
}, async () => {
  const run = promisify(execFile);
  const args = ["--disable-warning=ExperimentalWarning", "--input-type=module-typescript", "-e", SCRIPT, "/dev/full"];
  const { stdout } = await run(process.execPath, args, { timeout: 20_000 });
  assert.equal(stdout, "still here\n");
});
