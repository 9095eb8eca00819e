import assert from "node:assert/strict";
import { test } from "node:test";
import fc from "fast-check";
import { ENVD_PORT, isEnvdInternal, parseSandboxHost, routeOf } from "./route.ts";

const DOMAIN = "sb.example.test";
const bad = (r: unknown): boolean => typeof r === "object" && r !== null && "bad" in r;

const ids = fc.stringMatching(/^[a-z0-9]{1,64}$/);
const ports = fc.integer({ min: 1, max: 65535 });
const names = fc.domain();

test("every port and id survives the way through a host name, in any letter case and with any domain and port", () => {
  fc.assert(
    fc.property(ids, ports, names, fc.option(ports), fc.boolean(), (sandboxId, port, domain, at, upper) => {
      const text = `${port}-${sandboxId}.${domain}`;
      const authority = (upper ? text.toUpperCase() : text) + (at === null ? "" : `:${at}`);
      fc.pre(authority.length <= 253);
      assert.deepEqual(routeOf(authority, undefined, undefined, domain.toLowerCase()), { sandboxId, port });
      assert.deepEqual(routeOf(authority, undefined, undefined, "other.test"), { sandboxId, port });
    }),
  );
});

test("no text makes the parser throw, and what it accepts is canonical", () => {
  const text = fc.oneof(fc.string(), fc.string({ unit: "binary" }), fc.stringMatching(/^[0-9a-z.:-]{0,40}$/));
  fc.assert(
    fc.property(text, fc.option(text, { nil: undefined }), fc.option(text, { nil: undefined }), (host, id, port) => {
      const r = routeOf(host, id, port, DOMAIN);
      if (r === undefined || "bad" in r) return;
      assert.match(r.sandboxId, /^[a-z0-9]{1,64}$/);
      assert.ok(Number.isInteger(r.port) && r.port > 0 && r.port < 65536);
    }),
    { numRuns: 2000 },
  );
});

test("the host parser looks before the first dot and cuts at the first dash", () => {
  assert.deepEqual(parseSandboxHost("3000-abc.x"), { sandboxId: "abc", port: 3000 });
  assert.deepEqual(parseSandboxHost("3000-abc.1.2.3.4.sslip.io"), { sandboxId: "abc", port: 3000 });
  for (const no of [
    "3000-abc",
    "3000-a-b.x",
    "3000-.x",
    "-abc.x",
    "abc.x-y",
    "0-abc.x",
    "03000-abc.x",
    "65536-abc.x",
    "1e3-abc.x",
    "3000-a_b.x",
  ]) {
    assert.equal(parseSandboxHost(no), undefined, no);
  }
});

test("a host under our domain wins over the headers, and the headers win over a foreign host of the same form", () => {
  const ours = `3000-aaa.${DOMAIN}`;
  const headers = ["bbb", "8080"] as const;
  assert.deepEqual(routeOf(ours, ...headers, DOMAIN), { sandboxId: "aaa", port: 3000 });
  assert.deepEqual(routeOf("3000-aaa.elsewhere", ...headers, DOMAIN), { sandboxId: "bbb", port: 8080 });
  for (const host of ["localhost:8000", "10.0.0.1:8000", "[::1]:8000", `sandbox.${DOMAIN}`, DOMAIN, undefined]) {
    assert.deepEqual(routeOf(host, ...headers, DOMAIN), { sandboxId: "bbb", port: 8080 });
  }
  assert.deepEqual(routeOf("localhost", "bbb", undefined, DOMAIN), { sandboxId: "bbb", port: ENVD_PORT });
  assert.deepEqual(routeOf("localhost", "bbb-client1", "80", DOMAIN), { sandboxId: "bbb", port: 80 });
});

test("the API's hosts name no sandbox, and what tries to name one wrongly is refused", () => {
  for (const host of [
    DOMAIN,
    `api.${DOMAIN}`,
    `api.${DOMAIN}:8000`,
    "localhost:8000",
    "127.0.0.1",
    "my-box.corp",
    undefined,
  ]) {
    assert.equal(routeOf(host, undefined, undefined, DOMAIN), undefined, host);
  }
  for (const host of [
    `99999-abc.${DOMAIN}`,
    `0-abc.${DOMAIN}`,
    `3000-.${DOMAIN}`,
    `3000-a-b.${DOMAIN}`,
    `sandbox.${DOMAIN}`,
  ]) {
    assert.ok(bad(routeOf(host, undefined, undefined, DOMAIN)), host);
  }
  for (const id of ["", "../x", "a.b", "a b", "a, b", "A"]) assert.ok(bad(routeOf("localhost", id, "80", DOMAIN)), id);
  for (const port of ["", "0", "-1", "65536", "80, 81", "0x50", " 80"]) {
    assert.ok(bad(routeOf("localhost", "abc", port, DOMAIN)), port);
  }
  // A suffix is only ours at a dot.
  assert.equal(routeOf(`99999-abc.evil${DOMAIN}`, undefined, undefined, DOMAIN), undefined);
});

test("the node's own routes of envd are recognised in every spelling", () => {
  for (const path of [
    "/init",
    "/init/",
    "//init",
    "/init?a=b",
    "/INIT",
    "/%69nit",
    "/./init",
    "/a/../init",
    "/%2e/init",
    "/a/%2e%2e/init",
    "/x%2f..%2finit",
    "\\init",
    "/freeze",
    "/fsthaw",
    "/collapse",
    "/upgrade",
    "/%",
  ]) {
    assert.equal(isEnvdInternal(path), true, path);
  }
  for (const path of ["/", "/initial", "/files?path=/init", "/health", "/process.Process/Start", "/a/init"]) {
    assert.equal(isEnvdInternal(path), false, path);
  }
});
