/**
 * Go code of the wire definitions: `node tools/src/generate-guest.ts` makes guest/gen from proto/ (needs the network once:
 * buf and the two plugins, all pinned here). `--check` only compares what they were made from, which is instant.
 */
import { execFileSync } from "node:child_process";
import { createHash } from "node:crypto";
import { globSync, readFileSync, writeFileSync } from "node:fs";
import { join, resolve } from "node:path";

const BUF = "@bufbuild/buf@1.75.0";
const PLUGINS = [
  "google.golang.org/protobuf/cmd/protoc-gen-go@v1.36.12",
  "connectrpc.com/connect/cmd/protoc-gen-connect-go@v1.21.1",
];

const root = resolve(import.meta.dirname, "../..");
const stamp = join(root, "guest/gen/STAMP");

/** Over the definitions, the tools, and the code that they made: an edit of either side shows. */
function fingerprint(): string {
  const hash = createHash("sha256").update([BUF, ...PLUGINS].join("\n"));
  const files = globSync(["proto/**/*.{proto,yaml}", "guest/gen/**/*.go"], { cwd: root });
  for (const file of files.toSorted()) hash.update(`\0${file}\0`).update(readFileSync(join(root, file)));
  return hash.digest("hex");
}

if (process.argv.includes("--check")) {
  if (readFileSync(stamp, "utf8").trim() !== fingerprint()) {
    console.error("guest/gen does not belong to proto/: run node tools/src/generate-guest.ts");
    process.exit(1);
  }
} else {
  const bin = join(root, ".cache/go-bin");
  const run = (cmd: string, args: string[], cwd: string, env: NodeJS.ProcessEnv = {}): void => {
    execFileSync(cmd, args, { cwd, env: { ...process.env, ...env }, stdio: "inherit" });
  };
  for (const plugin of PLUGINS) run("go", ["install", plugin], root, { GOBIN: bin });
  const path = `${bin}:${process.env["PATH"] ?? ""}`;
  run("npm", ["exec", "--yes", "--package", BUF, "--", "buf", "generate"], join(root, "proto"), { PATH: path });
  writeFileSync(stamp, `${fingerprint()}\n`);
}
