/** `npm run soak -- NAME`: one of the long scenarios against the node of AENV_HOME. */
import { loadavg } from "node:os";
import { messageOf } from "@aenv/base";
import { Node } from "./node.ts";
import { chain, churn, cycles, forks } from "./scenarios.ts";
import { storm } from "./storm.ts";

type Run = (node: Node, n: number, say: (line: string) => void) => Promise<string>;

const SCENARIOS: Record<string, { about: string; n: number; run: Run }> = {
  cycles: {
    about: "N pauses and resumes of one sandbox with 64 MiB in memory",
    n: 100,
    run: (node, n, say) => cycles(node, { cycles: n, bytes: 64 << 20 }, say),
  },
  chain: {
    about: "N captures of one sandbox, launches from ten of them",
    n: 30,
    run: (node, n, say) => chain(node, { captures: n, launches: 10 }, say),
  },
  forks: {
    about: "N children of one fork",
    n: 16,
    run: (node, n, say) => forks(node, { count: n, bytes: 16 << 20 }, say),
  },
  storm: {
    about: "N requests of every kind for states, at random and at once",
    n: 300,
    run: (node, n, say) => storm(node, { requests: n, sandboxes: 3, atOnce: 6 }, say),
  },
  churn: {
    about: "N times create, fork, kill; then the host is as before",
    n: 500,
    run: (node, n, say) => churn(node, { cycles: n, atOnce: 2 }, say),
  },
};

const [name = "", count] = process.argv.slice(2);
const scenario = SCENARIOS[name];
const n = count === undefined ? scenario?.n : Number(count);
if (!scenario || n === undefined || !Number.isInteger(n) || n < 1) {
  console.error("usage: npm run soak -- NAME [N]\n");
  for (const [key, s] of Object.entries(SCENARIOS)) console.error(`  ${key.padEnd(8)} ${s.about} (N: ${s.n})`);
  process.exit(2);
}
const started = performance.now();
const seconds = (): string => ((performance.now() - started) / 1000).toFixed(0);
try {
  const node = await Node.find();
  const load = loadavg()[0]?.toFixed(1);
  console.log(`${name}: ${n}, node in ${node.home}, load ${load}`);
  const result = await scenario.run(node, n, (line) => console.log(`  ${seconds()} s  ${line}`));
  console.log(`${name}: ok in ${seconds()} s: ${result}`);
} catch (e) {
  console.error(`${name}: FAILED after ${seconds()} s: ${messageOf(e)}`);
  if (e instanceof Error && e.stack !== undefined) console.error(e.stack);
  process.exit(1);
}
