import assert from "node:assert/strict";
import { test } from "node:test";
import { usableResolvers } from "./resolvers.ts";

test("resolvers that a guest can reach are taken from resolv.conf", () => {
  assert.deepEqual(usableResolvers("search x\nnameserver 10.0.0.2\nnameserver  9.9.9.9 \n"), ["10.0.0.2", "9.9.9.9"]);
});

test("a resolver on the host's loopback is replaced by public ones", () => {
  assert.deepEqual(usableResolvers("nameserver 127.0.0.53\nnameserver ::1\n"), ["1.1.1.1", "8.8.8.8"]);
  assert.deepEqual(usableResolvers(""), ["1.1.1.1", "8.8.8.8"]);
});
