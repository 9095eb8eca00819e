import assert from "node:assert/strict";
import { describe, test } from "node:test";
import { covers, formatCidr, lastOf, parseCidr, parseIp, subtractCidrs } from "./address.ts";
import {
  alwaysDenied,
  domainMatches,
  type EgressRules,
  egressPolicy,
  MAX_EGRESS_ENTRIES,
  parseOpened,
} from "./egress.ts";

const ALL = "0.0.0.0/0";
const policy = (rules: Partial<EgressRules>): ReturnType<typeof egressPolicy> =>
  egressPolicy({ allowInternet: null, ...rules });

describe("the policy of a sandbox", () => {
  test("is open where nothing is said, and closed where the internet is off or everything denied", () => {
    assert.deepEqual(policy({}), { allowInternet: true, allow: [], deny: [], domains: [] });
    const closed = { allowInternet: false, allow: [], deny: [], domains: [] };
    assert.deepEqual(policy({ allowInternet: false }), closed);
    assert.deepEqual(policy({ denyOut: [ALL] }), closed);
    assert.deepEqual(policy({ allowInternet: true, denyOut: ["128.0.0.0/1", "0.0.0.0/1", "1.1.1.1"] }), closed);
    assert.equal(policy({ denyOut: ["0.0.0.0/1", "128.0.0.0/2"] }).allowInternet, true);
  });

  test("keeps addresses and ranges, merged", () => {
    const p = policy({ allowOut: ["8.8.8.8", "9.9.9.9/24", "9.9.9.1"], denyOut: ["1.2.3.4", "1.2.0.0/16"] });
    assert.deepEqual([p.allow, p.deny], [["8.8.8.8/32", "9.9.9.0/24"], ["1.2.0.0/16"]]);
  });

  test("keeps domains in one spelling", () => {
    const { domains } = policy({
      allowOut: ["Example.COM.", "*.Example.com", "example.com", "bücher.example", "a_b.xn--p1ai", "1.1.1.1"],
      denyOut: [ALL],
    });
    assert.deepEqual(domains, ["*.example.com", "a_b.xn--p1ai", "example.com", "xn--bcher-kva.example"]);
    assert.deepEqual(policy({ allowInternet: false, allowOut: ["example.com"] }).domains, ["example.com"]);
  });

  test("takes IPv6 as denied already, and does not promise it", () => {
    assert.deepEqual(policy({ denyOut: ["::/0", "2001:db8::1", "::ffff:1.2.3.4"] }).deny, []);
    assert.throws(() => policy({ allowOut: ["2001:db8::/32"] }), { code: "INVALID_ARGUMENT", message: /IPv6/ });
  });

  test("is refused where an entry means nothing, by its name", () => {
    const bad = [
      ..."1.2.3 1.2.3.4.5 1.2.3.256 01.2.3.4 1.2.3.4/33 1.2.3.4/ 1.2.3.4/8/8 1.2.3.4/-1 1.2.3.4/x".split(" "),
      ..."localhost http://example.com example.com:443 example.com/path user@example.com *example.com a.*.com".split(
        " ",
      ),
      ..."* *. . -a.example a-.example a..example *.*.example example.123".split(" "),
      "",
      " example.com",
      "exa mple.com",
      "example.com\n",
      "bü\ncher.example",
      "example.com\0",
      `${"a".repeat(64)}.example`,
      `${"a.".repeat(127)}example`,
    ];
    for (const entry of bad)
      assert.throws(() => policy({ allowOut: [entry], denyOut: [ALL] }), { code: "INVALID_ARGUMENT" }, entry);
    for (const entry of [...bad, "example.com", "*.example.com"])
      assert.throws(
        () => policy({ denyOut: [entry] }),
        { code: "INVALID_ARGUMENT", message: /network\.denyOut/ },
        JSON.stringify(entry),
      );
    assert.throws(() => policy({ allowOut: ["example.com:443"], denyOut: [ALL] }), /example\.com:443/);
  });

  test("needs everything else denied where it names domains", () => {
    for (const rules of [{}, { denyOut: ["10.0.0.0/8"] }, { allowInternet: true }])
      assert.throws(() => policy({ ...rules, allowOut: ["example.com"] }), {
        code: "INVALID_ARGUMENT",
        message: /domains/,
      });
  });

  test("keeps a proxy, and refuses one that is none", () => {
    const proxy = (address: string, login: object = {}): unknown =>
      policy({ egressProxy: { address, ...login } }).proxy;
    assert.deepEqual(proxy("Proxy.Example.com:1080"), { host: "proxy.example.com", port: 1080 });
    assert.deepEqual(proxy("socks5://9.9.9.9:1", { username: "u", password: "p" }), {
      host: "9.9.9.9",
      port: 1,
      username: "u",
      password: "p",
    });
    for (const bad of [
      "",
      "proxy.example.com",
      "x:1",
      "a.test:0",
      "a.test:65536",
      "9.9.9:1",
      "http://a.test:1",
      "*.a.test:1",
    ])
      assert.throws(() => proxy(bad), { code: "INVALID_ARGUMENT" }, bad);
    assert.throws(() => proxy("a.test:1", { password: "p" }), /username/);
    assert.throws(() => proxy("a.test:1", { username: "u".repeat(256) }), /255/);
    assert.equal(policy({ egressProxy: null }).proxy, undefined);
  });

  test("keeps headers by domain, in one spelling, later ones winning", () => {
    const rules = {
      "*.Example.com": [
        { transform: { headers: { "X-A": "1" } } },
        { transform: { headers: { "x-a": "2", "X-B": "3" } } },
      ],
      "api.example.com": [{ transform: { headers: { Authorization: "Bearer x" } } }, {}],
      "nothing.test": [],
    };
    assert.deepEqual(policy({ rules }).transforms, [
      { domain: "*.example.com", headers: { "x-a": "2", "x-b": "3" } },
      { domain: "api.example.com", headers: { authorization: "Bearer x" } },
    ]);
    assert.equal(policy({ rules: {} }).transforms, undefined);
    const bad = (domain: string, headers: Record<string, string>): void => {
      assert.throws(() => policy({ rules: { [domain]: [{ transform: { headers } }] } }), { code: "INVALID_ARGUMENT" });
    };
    bad("1.2.3.4", { "x-a": "1" });
    for (const name of ["Host", "content-length", "Transfer-Encoding", "connection", "a b", "", "x:y"])
      bad("a.test", { [name]: "1" });
    for (const value of ["a\r\nb", "a\nb", "a\0", "x".repeat(9000), "${e2b.secrets.x}"])
      bad("a.test", { "x-a": value });
    assert.throws(
      () =>
        policy({
          rules: {
            "a.test": [{ transform: { headers: { a: "1" } } }],
            "A.test": [{ transform: { headers: { a: "1" } } }],
          },
        }),
      /twice/,
    );
  });

  test("has an end", () => {
    const list = Array.from({ length: MAX_EGRESS_ENTRIES + 1 }, () => "1.1.1.1");
    assert.throws(() => policy({ allowOut: list }), { code: "INVALID_ARGUMENT", message: /1000/ });
    assert.throws(() => policy({ denyOut: list }), { code: "INVALID_ARGUMENT", message: /1000/ });
  });
});

test("a domain is itself, a wildcard every name below", () => {
  const matches = (name: string, ...domains: string[]): boolean => domainMatches(new Set(domains), name);
  assert.ok(matches("example.com", "example.com"));
  assert.ok(!matches("www.example.com", "example.com"));
  assert.ok(matches("www.example.com", "*.example.com"));
  assert.ok(matches("a.b.example.com", "*.example.com"));
  assert.ok(!matches("example.com", "*.example.com"));
  assert.ok(!matches("badexample.com", "*.example.com", "example.com"));
  assert.ok(!matches("example.com.evil.test", "*.example.com", "example.com"));
  assert.ok(!matches("", "*.example.com"));
  assert.ok(!matches("*.example.com.", "*.com.example"));
});

test("subtraction leaves exactly what is in no hole", () => {
  const list = ["10.0.0.0/8", "192.168.0.0/16", "1.1.1.1"].map(parseCidr);
  const holes = ["10.3.0.0/16", "10.200.7.9", "192.0.0.0/8", "2.0.0.0/8"].map(parseCidr);
  const left = subtractCidrs(list, holes);
  const inside = (ip: number): boolean => left.some((c) => c.base <= ip && ip <= lastOf(c));
  for (const c of [...list, ...holes, ...left])
    for (const ip of [c.base - 1, c.base, c.base + 1, lastOf(c) - 1, lastOf(c), lastOf(c) + 1]) {
      const one = { base: ip, bits: 32 };
      assert.equal(inside(ip), covers(list, one) && !covers(holes, one), formatCidr(one));
    }
  assert.deepEqual(subtractCidrs(list, [parseCidr(ALL)]), []);
});

describe("what is always denied", () => {
  const own = ["93.184.1.1", "10.134.224.0/19"].map(parseCidr);
  const has = (opened: string[], ip: string): boolean =>
    covers(alwaysDenied(opened.map(parseOpened), own), { base: parseIp(ip), bits: 32 });

  test("is private space, metadata, multicast and the host, until the operator opens a range", () => {
    for (const ip of ["10.1.2.3", "172.31.0.1", "192.168.1.1", "169.254.169.254", "100.100.100.200", "224.0.0.1"])
      assert.ok(has([], ip), ip);
    assert.ok(!has([], "8.8.8.8"));
    assert.ok(!has(["10.0.0.0/8"], "10.1.2.3"));
    assert.ok(has(["10.1.0.0/16"], "10.2.0.0"));
    assert.ok(!has(["169.254.169.254"], "169.254.169.254"));
  });

  test("stays so for the host itself and the slots", () => {
    assert.ok(has(["10.0.0.0/8"], "10.134.225.7"));
    assert.ok(has(["93.184.1.1"], "93.184.1.1"));
    for (const range of [ALL, "127.0.0.1", "169.254.0.0/16", "169.254.0.21", "224.0.0.0/4", "0.0.0.0"])
      assert.throws(() => parseOpened(range), { code: "INVALID_ARGUMENT" }, range);
  });
});
