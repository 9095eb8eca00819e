import assert from "node:assert/strict";
import { once } from "node:events";
import { mkdtempSync, rmSync, statSync, writeFileSync } from "node:fs";
import type { AddressInfo } from "node:net";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { test, type TestContext } from "node:test";
import { connect, createServer } from "node:tls";
import { silentLogger } from "@aenv/base";
import { authorityFile, ensureAuthority } from "./authority.ts";
import { issue, makeAuthority } from "./certificate.ts";
import { Certificates, type CertificatesOptions } from "./certificates.ts";

const DAY = 86_400_000;

function folder(t: TestContext): string {
  const dir = mkdtempSync(join(tmpdir(), "aenv-names-"));
  t.after(() => rmSync(dir, { recursive: true }));
  return dir;
}

async function open(t: TestContext, o: Partial<CertificatesOptions> & { dir: string }): Promise<Certificates> {
  const c = await Certificates.open({ domain: "localhost:8000", names: [], logger: silentLogger, ...o });
  t.after(() => c[Symbol.dispose]());
  return c;
}

/** A server with these certificates; what a client that trusts `ca` makes of it: the serial number, or its error's code. */
async function dialer(
  t: TestContext,
  certificates: Certificates,
): Promise<(ca: string, name?: string) => Promise<string>> {
  const server = createServer({
    ...certificates.current(),
    SNICallback: (name, done) => done(null, certificates.forName(name)),
  });
  certificates.onChange(() => server.setSecureContext(certificates.current()));
  server.on("secureConnection", (s) => s.on("error", () => {}));
  server.listen(0, "127.0.0.1");
  await once(server, "listening");
  t.after(() => server.close());
  const { port } = server.address() as AddressInfo;
  return (ca, name) =>
    new Promise((resolve) => {
      const s = connect({ port, host: "127.0.0.1", ca, ...(name === undefined ? {} : { servername: name }) });
      s.on("secureConnect", () => {
        const { serialNumber } = s.getPeerCertificate();
        s.destroy();
        resolve(serialNumber);
      });
      s.on("error", (e: NodeJS.ErrnoException) => resolve(e.code ?? e.message));
    });
}

const SERIAL = /^[0-9A-F]{32}$/;

test("the authority is made once, its key is the owner's alone", async (t) => {
  const dir = folder(t);
  const first = await ensureAuthority(dir, Date.now());
  assert.deepEqual(await ensureAuthority(dir, Date.now()), first);
  assert.equal(statSync(join(dir, "ca.key")).mode & 0o777, 0o600);
  rmSync(join(dir, "ca.key"));
  await assert.rejects(ensureAuthority(dir, Date.now()), /no ca\.key/);
});

for (const domain of ["localhost:8000", "sb.example.test", "Sandboxes.LOCALHOST:1"]) {
  test(`clients accept every host under ${domain}, the address, and nothing else`, async (t) => {
    const dir = folder(t);
    const dial = await dialer(t, await open(t, { dir, domain }));
    const { cert } = await ensureAuthority(dir, Date.now());
    const bare = domain.toLowerCase().replace(/:.*/, "");
    for (const host of [bare, `api.${bare}`, `49983-iabc.${bare}`, `3000-iabc.${bare}`, "localhost"]) {
      assert.match(await dial(cert, host), SERIAL, host);
    }
    assert.match(await dial(cert), SERIAL, "no name");
    assert.equal(await dial(cert, "api.other.test"), "ERR_TLS_CERT_ALTNAME_INVALID");
    assert.match(await dial(makeAuthority("x", Date.now()).cert, bare), /SELF_SIGNED|UNABLE_TO/);
  });
}

test("names that nobody uses twice do not make the node sign without end", async (t) => {
  const now = Date.now();
  const dir = folder(t);
  const c = await open(t, { dir, now: () => now });
  const contexts = new Set(Array.from({ length: 200 }, (_, i) => c.forName(`1-i${i}.localhost`)));
  assert.ok(contexts.size <= 21, `${contexts.size} certificates in one second`);
  assert.equal(c.forName("1-i0.localhost"), c.forName("1-I0.localhost"));
});

test("our own certificate is made anew before it ends, signed by the same authority", async (t) => {
  let now = Date.now();
  const dir = folder(t);
  const c = await open(t, { dir, now: () => now });
  const dial = await dialer(t, c);
  const { cert } = await ensureAuthority(dir, now);
  const first = await dial(cert, "localhost");
  now += 10 * DAY;
  await c.check();
  assert.equal(await dial(cert, "localhost"), first);
  now += 51 * DAY;
  await c.check();
  const last = await dial(cert, "localhost");
  // The clock of the client stands still: tomorrow's certificate is not yet valid to it, which shows that it is another.
  assert.ok(last === "CERT_NOT_YET_VALID" || (SERIAL.test(last) && last !== first), last);
});

test("the operator's files are used, read again when they change, and kept when the new ones are wrong", async (t) => {
  const dir = folder(t);
  const ca = makeAuthority("operator", Date.now());
  const operator = { cert: join(dir, "site.crt"), key: join(dir, "site.key") };
  const write = (): void => {
    const { cert, key } = issue(ca, ["*.site.test"], Date.now());
    writeFileSync(operator.cert, cert);
    writeFileSync(operator.key, key);
  };
  write();
  const c = await open(t, { dir, domain: "site.test", operator });
  const dial = await dialer(t, c);
  const first = await dial(ca.cert, "1-iabc.site.test");
  assert.match(first, SERIAL);
  await c.check();
  assert.equal(await dial(ca.cert, "1-iabc.site.test"), first);

  write();
  await c.check();
  const second = await dial(ca.cert, "1-iabc.site.test");
  assert.match(second, SERIAL);
  assert.notEqual(second, first);

  writeFileSync(operator.cert, issue(ca, ["*.site.test"], Date.now()).cert);
  await c.check();
  assert.equal(await dial(ca.cert, "1-iabc.site.test"), second);
  rmSync(operator.key);
  await c.check();
  assert.equal(await dial(ca.cert, "1-iabc.site.test"), second);
  assert.throws(() => statSync(authorityFile(dir)), /ENOENT/);
});

test("files that are missing or no pair keep the node from starting, by name", async (t) => {
  const dir = folder(t);
  const operator = { cert: join(dir, "a.crt"), key: join(dir, "a.key") };
  await assert.rejects(open(t, { dir, operator }), /a\.crt/);
  const ca = makeAuthority("operator", Date.now());
  writeFileSync(operator.cert, issue(ca, ["a.test"], Date.now()).cert);
  writeFileSync(operator.key, issue(ca, ["a.test"], Date.now()).key);
  await assert.rejects(open(t, { dir, operator }), /a\.crt and .*a\.key/);
  writeFileSync(operator.key, "no key");
  await assert.rejects(open(t, { dir, operator }), /a\.key/);
});
