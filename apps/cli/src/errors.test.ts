import assert from "node:assert/strict";
import { test } from "node:test";
import { AenvError, ERROR_CODES, type ErrorCode } from "@aenv/base";
import { hintOf, messageFor } from "./errors.ts";
import { size } from "./output.ts";
import { COMMANDS, invocation } from "./table.ts";

const command = (name: string) => COMMANDS.find((c) => invocation(c) === name);

test("what to do is told in terms of the command line, and with commands that exist", () => {
  const known = COMMANDS.flatMap((c) => [c.name, invocation(c), ...(c.aliases ?? [])]);
  for (const code of Object.keys(ERROR_CODES) as ErrorCode[])
    for (const c of [undefined, ...COMMANDS]) {
      const hint = hintOf(new AenvError(code, "it failed"), c);
      assert.doesNotMatch(hint, /request|header|body|Retry-After|X-API-KEY|caller|endpoint|POST|GET /i, code);
      for (const [, words = ""] of hint.matchAll(/aenv ([a-z-]+(?: [a-z-]+)?)/g))
        assert.ok(known.includes(words) || known.includes(words.split(" ")[0] ?? ""), `${code}: aenv ${words}`);
    }
});

test("a hint fits its command, and one that somebody thought about is kept", () => {
  assert.match(hintOf(new AenvError("NOT_FOUND", "x"), command("template info")), /template list/);
  assert.match(hintOf(new AenvError("NOT_FOUND", "x"), command("info")), /aenv list/);
  assert.match(hintOf(new AenvError("INVALID_ARGUMENT", "x"), command("start")), /aenv start --help/);
  assert.equal(
    hintOf(new AenvError("NOT_FOUND", "x", { hint: "Look elsewhere." }), command("info")),
    "Look elsewhere.",
  );
  assert.equal(hintOf(new AenvError("CANCELLED", "x"), undefined), "");
});

test("a value that the node refuses is named as on the command line", () => {
  const refused = (what: string, name: string) =>
    messageFor(new AenvError("INVALID_ARGUMENT", `the body is not valid: ${what}`), command(name));
  assert.equal(
    refused("count: Too big: expected number to be <=100", "fork"),
    "--count: Too big: expected number to be <=100",
  );
  assert.equal(refused("name: must look: so; timeout: no", "snapshot create"), "NAME: must look: so; timeout: no");
  assert.equal(refused("timeout: must be at least 1 second", "start"), "--timeout: must be at least 1 second");
  assert.equal(refused("network.allowOut: odd", "start"), "network.allowOut: odd");
});

test("sizes and rates are whole numbers of bytes, and three digits above", () => {
  assert.deepEqual([0, 0.4, 3.7777, 1023.4, 1024, 10_000, 1e6].map(size), [
    "0 B",
    "0 B",
    "4 B",
    "1023 B",
    "1.00 KiB",
    "9.77 KiB",
    "977 KiB",
  ]);
});
