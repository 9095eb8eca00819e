import assert from "node:assert/strict";
import { mkdir, mkdtemp, rm, writeFile } from "node:fs/promises";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { test } from "node:test";
import { AenvError } from "@aenv/base";
import { aptSources, mainSource, parseDeb822, parseOneLine, renderDeb822 } from "./apt.ts";

test("one-line sources keep their keyring and ignore comments and source archives", () => {
  const text = [
    "# deb http://mirror.test/old stable main",
    "deb-src http://mirror.test/debian trixie main",
    "deb [arch=amd64 signed-by=/usr/share/keyrings/k.gpg] http://mirror.test/debian trixie main contrib # note",
    "deb http://mirror.test/plain sid main",
  ].join("\n");
  assert.deepEqual(parseOneLine(text), [
    {
      uri: "http://mirror.test/debian",
      suite: "trixie",
      components: ["main", "contrib"],
      signedBy: "/usr/share/keyrings/k.gpg",
    },
    { uri: "http://mirror.test/plain", suite: "sid", components: ["main"], signedBy: undefined },
  ]);
});

test("deb822 sources multiply out and skip what is disabled", () => {
  const text = [
    "Types: deb deb-src\n# a comment\nURIs: http://mirror.test/debian\nSuites: trixie trixie-updates\nComponents: main\nSigned-By: /k.gpg",
    "Types: deb\nURIs: http://mirror.test/off\nSuites: sid\nComponents: main\nEnabled: no",
    "Types: deb\nURIs: http://mirror.test/inline\nSuites: sid\nComponents: main\n  contrib\nSigned-By:\n -----BEGIN",
  ].join("\n\n");
  assert.deepEqual(
    parseDeb822(text).map((s) => [s.uri, s.suite, s.components.join(), s.signedBy]),
    [
      ["http://mirror.test/debian", "trixie", "main", "/k.gpg"],
      ["http://mirror.test/debian", "trixie-updates", "main", "/k.gpg"],
      ["http://mirror.test/inline", "sid", "main,contrib", undefined],
    ],
  );
});

test("what is rendered is parsed to the same", () => {
  const source = {
    uri: "http://mirror.test/debian",
    suite: "trixie",
    components: ["main", "contrib"],
    signedBy: "/k.gpg",
  };
  assert.deepEqual(parseDeb822(renderDeb822(source)), [source]);
});

test("both formats are read from a root, and a machine without the release's archive gets a hint", async () => {
  await using undo = new AsyncDisposableStack();
  const root = await mkdtemp(join(tmpdir(), "aenv-apt-"));
  undo.defer(() => rm(root, { recursive: true }));
  const dir = join(root, "etc/apt/sources.list.d");
  await mkdir(dir, { recursive: true });
  await writeFile(
    join(dir, "debian.sources"),
    "Types: deb\nURIs: http://mirror.test/d\nSuites: trixie\nComponents: main\n",
  );
  await writeFile(join(dir, "more.list"), "deb http://mirror.test/more trixie extra\n");
  await writeFile(join(dir, "ignored.txt"), "deb http://mirror.test/no trixie main\n");
  const sources = await aptSources(root);
  assert.equal(sources.length, 2);
  assert.equal(mainSource(sources, "trixie").uri, "http://mirror.test/d");
  assert.throws(
    () => mainSource(sources, "forky"),
    (e: unknown) => e instanceof AenvError && e.code === "UNAVAILABLE" && e.hint.includes("forky"),
  );
});
