/** Short versions of the long scenarios: `npm run soak -- NAME` runs those. */
import { before, test, type TestContext } from "node:test";
import { Node } from "./node.ts";
import { chain, churn, cycles, forks } from "./scenarios.ts";
import { storm } from "./storm.ts";

const LIMIT = { timeout: 240_000 };
let node: Node;
before(async () => {
  node = await Node.find();
});
const say = (t: TestContext) => (line: string) => t.diagnostic(line);

test("pause and resume, twice: data equal, the program goes on", LIMIT, async (t) =>
  t.diagnostic(await cycles(node, { cycles: 2, bytes: 8 << 20 }, say(t))),
);

test("launches from any of a chain of captures are right", LIMIT, async (t) =>
  t.diagnostic(await chain(node, { captures: 4, launches: 2 }, say(t))),
);

test("children of one fork are equal in data and different in identity", LIMIT, async (t) =>
  t.diagnostic(await forks(node, { count: 3, bytes: 2 << 20 }, say(t))),
);

test("create, fork and kill leave the host as it was", LIMIT, async (t) =>
  t.diagnostic(await churn(node, { cycles: 5, atOnce: 2 }, say(t))),
);

test("requests of every kind at once leave sandboxes whole and the host as it was", LIMIT, async (t) =>
  t.diagnostic(await storm(node, { requests: 25, sandboxes: 2, atOnce: 3 }, say(t))),
);
