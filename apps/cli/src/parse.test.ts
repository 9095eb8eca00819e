import assert from "node:assert/strict";
import { test } from "node:test";
import { parseCommand } from "./parse.ts";
import { COMMANDS, invocation } from "./table.ts";

/** Fits every operand before the last of its command. */
const ID = "iaaaabbbbccccdddd000";

test("every operand that a command needs is asked for when it is left out", () => {
  let looked = 0;
  for (const command of COMMANDS) {
    const operands = Object.values(command.positionals);
    for (const [i, operand] of operands.entries()) {
      if (operand.optional) break;
      looked++;
      const given = Array.from({ length: i }, () => ID);
      assert.throws(() => parseCommand(command, given), /is missing/, `${invocation(command)}: operand ${i}`);
    }
  }
  assert.ok(looked > 20, String(looked));
});
