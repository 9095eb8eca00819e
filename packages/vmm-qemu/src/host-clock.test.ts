import assert from "node:assert/strict";
import { mkdir, mkdtemp, rm, writeFile } from "node:fs/promises";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { type TestContext, test } from "node:test";
import { hostTscKhz } from "./host-clock.ts";

async function fakeRoot(t: TestContext, files: Record<string, string>): Promise<string> {
  const root = await mkdtemp(join(tmpdir(), "aenv-clock-"));
  t.after(() => rm(root, { recursive: true }));
  for (const [path, text] of Object.entries(files)) {
    await mkdir(join(root, path, ".."), { recursive: true });
    await writeFile(join(root, path), text);
  }
  return `${root}/`;
}
const CPUFREQ = "sys/devices/system/cpu/cpu0/cpufreq";

test("a machine without clock scaling tells its counter in cpuinfo", async (t) => {
  const root = await fakeRoot(t, { "proc/cpuinfo": "processor\t: 0\ncpu MHz\t\t: 2596.120\nflags\t: fpu\n" });
  assert.equal(hostTscKhz(root), 2_596_120);
});

test("a scaled clock is not taken for the counter; the base frequency is", async (t) => {
  const cpuinfo = { "proc/cpuinfo": "cpu MHz\t\t: 4812.003\n" };
  assert.equal(hostTscKhz(await fakeRoot(t, { ...cpuinfo, [`${CPUFREQ}/base_frequency`]: "2600000\n" })), 2_600_000);
  assert.equal(
    hostTscKhz(await fakeRoot(t, { ...cpuinfo, [`${CPUFREQ}/scaling_governor`]: "powersave\n" })),
    undefined,
  );
});

test("nonsense and absence give nothing", async (t) => {
  assert.equal(hostTscKhz(await fakeRoot(t, { "proc/cpuinfo": "cpu MHz : 0.000\n" })), undefined);
  assert.equal(hostTscKhz(await fakeRoot(t, { "proc/cpuinfo": "Processor: other\n" })), undefined);
  assert.equal(hostTscKhz(await fakeRoot(t, { x: "" })), undefined);
});
