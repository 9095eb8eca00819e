import assert from "node:assert/strict";
import { execFile } from "node:child_process";
import { readFileSync, rmSync } from "node:fs";
import { join } from "node:path";
import { test } from "node:test";
import { promisify } from "node:util";
import { api, home, sandboxFor } from "./node.ts";

const repo = join(import.meta.dirname, "../../..");

interface Doctor {
  checks: { name: string; ok: boolean; detail: string; fix?: string }[];
  resources: { kind: string; name: string; owner: string | null }[];
}
const doctor = async (): Promise<Doctor> => (await (await api("GET", "/v1/doctor")).json()) as Doctor;

/** The snapshot that new sandboxes of base are made of. */
async function baseMemory(): Promise<string> {
  const { resources } = await doctor();
  const folders = resources.filter((r) => r.kind === "snapshot" && r.owner !== null).map((r) => r.name);
  const built = folders
    .map((folder) => JSON.parse(readFileSync(join(folder, "manifest.json"), "utf8")) as Record<string, unknown>)
    .filter((m) => m["cause"] === "build")
    .toSorted((a, b) => Number(b["createdAt"]) - Number(a["createdAt"]));
  const files = built[0]?.["memory"] as { path: string }[] | undefined;
  assert.ok(files?.[0], `no built snapshot with a memory file in ${folders.join(", ")}`);
  return files[0].path;
}

test("a damaged base is named by the doctor and built again by set-up; what runs goes on", {
  timeout: 300_000,
}, async (t) => {
  const before = await sandboxFor(t);
  await before.files.write("kept.txt", "still here");
  const memory = await baseMemory();
  rmSync(memory);

  const finding = (await doctor()).checks.find((c) => c.name === "template base is whole");
  assert.equal(finding?.ok, false);
  assert.ok(finding?.detail.includes(memory), finding?.detail);
  assert.match(finding?.fix ?? "", /npm run up/);

  const env = { ...process.env, AENV_HOME: home };
  await promisify(execFile)(process.execPath, [join(repo, "tools/src/base.ts")], { env });

  assert.notEqual(await baseMemory(), memory);
  assert.equal(
    (await doctor()).checks.find((c) => c.name.startsWith("template base is")),
    undefined,
  );
  const after = await sandboxFor(t);
  assert.equal((await after.commands.run("echo new")).stdout, "new\n");
  assert.equal(await before.files.read("kept.txt"), "still here");
});
