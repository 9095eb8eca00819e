import assert from "node:assert/strict";
import { spawn } from "node:child_process";
import { once } from "node:events";
import { existsSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { test } from "node:test";
import { processes } from "@aenv/host";
import { root } from "./node.ts";

/** Command lines of all processes that name `text`. */
function processesWith(text: string): string[] {
  return [...processes()].map(({ argv }) => argv.join(" ")).filter((line) => line.includes(text));
}

// Once while the server starts, once while the template is made.
for (const at of ["a node for the end-to-end tests", "listening on"])
  test(`npm test that is interrupted at "${at}" takes its node down`, { timeout: 300_000 }, async () => {
    const child = spawn(process.execPath, [join(root, "tools/src/test.ts"), "test/e2e/src/lifecycle.test.ts"], {
      stdio: ["ignore", "pipe", "pipe"],
    });
    let output = "";
    let sent = false;
    const read = (data: Buffer): void => {
      output += data.toString();
      if (sent || !output.includes(at)) return;
      sent = true;
      child.kill("SIGINT");
    };
    child.stdout.on("data", read);
    child.stderr.on("data", read);
    const [code] = (await once(child, "close")) as [number | null];
    assert.equal(code, 130, output);
    const home = /aenv-test-\w+/.exec(output)?.[0];
    assert.ok(home, output);
    assert.deepEqual(processesWith(home), []);
    assert.equal(existsSync(join(tmpdir(), home)), false);
  });
