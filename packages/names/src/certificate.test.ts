import assert from "node:assert/strict";
import { execFileSync } from "node:child_process";
import { createPrivateKey, X509Certificate } from "node:crypto";
import { mkdtempSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { test, type TestContext } from "node:test";
import { issue, makeAuthority } from "./certificate.ts";

const NOW = Date.now();
const DAY = 86_400_000;

function folder(t: TestContext): string {
  const dir = mkdtempSync(join(tmpdir(), "aenv-names-"));
  t.after(() => rmSync(dir, { recursive: true }));
  return dir;
}

/** OpenSSL is the outside judge: strict about every rule of RFC 5280. */
function openssl(t: TestContext, ca: string, chain: string, ...more: string[]): string {
  const dir = folder(t);
  writeFileSync(join(dir, "ca.pem"), ca);
  writeFileSync(join(dir, "leaf.pem"), chain);
  const args = ["verify", "-x509_strict", "-purpose", "sslserver", "-CAfile", join(dir, "ca.pem"), ...more];
  return execFileSync("openssl", [...args, join(dir, "leaf.pem")], { encoding: "utf8", stdio: "pipe" });
}

test("openssl accepts what the authority issues, for each of its names", (t) => {
  const ca = makeAuthority("AgentENV test", NOW);
  const leaf = issue(ca, ["sb.example.test", "*.sb.example.test", "127.0.0.1", "::1", "2001:db8::a:0:1"], NOW);
  for (const name of ["sb.example.test", "3000-iabc.sb.example.test"]) {
    assert.match(openssl(t, ca.cert, leaf.cert, "-verify_hostname", name), /: OK/);
  }
  for (const ip of ["127.0.0.1", "::1", "2001:db8::a:0:1"]) {
    assert.match(openssl(t, ca.cert, leaf.cert, "-verify_ip", ip), /: OK/);
  }
  assert.throws(() => openssl(t, ca.cert, leaf.cert, "-verify_hostname", "a.b.sb.example.test"), /hostname mismatch/i);
  assert.throws(() => openssl(t, ca.cert, leaf.cert, "-verify_ip", "127.0.0.2"), /IP address mismatch/i);
});

test("another authority does not vouch for it", (t) => {
  const leaf = issue(makeAuthority("one", NOW), ["a.test"], NOW);
  assert.throws(() => openssl(t, makeAuthority("one", NOW).cert, leaf.cert));
});

test("the key fits, is used again when given, and serials differ", () => {
  const ca = makeAuthority("AgentENV test", NOW);
  const first = issue(ca, ["a.test"], NOW);
  const second = issue(ca, ["b.test"], NOW, first.key);
  assert.equal(second.key, first.key);
  const [a, b] = [new X509Certificate(first.cert), new X509Certificate(second.cert)];
  assert.ok(a.checkPrivateKey(createPrivateKey(first.key)) && b.checkPrivateKey(createPrivateKey(first.key)));
  assert.notEqual(a.serialNumber, b.serialNumber);
  assert.ok(a.verify(new X509Certificate(ca.cert).publicKey));
});

test("a server certificate lives at most 398 days and not longer than its authority, a date after 2049 is written right", () => {
  const span = (cert: string): number => {
    const c = new X509Certificate(cert);
    return Date.parse(c.validTo) - Date.parse(c.validFrom);
  };
  const ca = makeAuthority("AgentENV test", NOW);
  assert.ok(span(issue(ca, ["a.test"], NOW).cert) <= 398 * DAY);
  const late = new X509Certificate(issue(ca, ["a.test"], NOW + 3500 * DAY).cert);
  assert.ok(Date.parse(late.validTo) <= Date.parse(new X509Certificate(ca.cert).validTo));
  const far = makeAuthority("far", Date.UTC(2045, 0, 1));
  assert.equal(new Date(new X509Certificate(far.cert).validTo).getUTCFullYear(), 2054);
});
