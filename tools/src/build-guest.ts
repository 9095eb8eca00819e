/** Builds the guest binary to .cache/guest/aenv-guest when its sources, the Go version or the flags changed. */
import { createHash } from "node:crypto";
import { existsSync, globSync, mkdirSync, readFileSync, renameSync, writeFileSync } from "node:fs";
import { execFileSync } from "node:child_process";
import { join, resolve } from "node:path";
import { pathToFileURL } from "node:url";

const root = resolve(import.meta.dirname, "../..");
const source = join(root, "guest");
const FLAGS = ["-trimpath", "-buildvcs=false", "-ldflags=-s -w -buildid="];

export interface BuiltGuest {
  path: string;
  /** sha256 over the sources, the compiler and the flags. */
  key: string;
  rebuilt: boolean;
}

/** Where the Go compiler is looked for: the PATH, then where its installer puts it. */
export const goPath = (): string => `${process.env["PATH"] ?? ""}:/usr/local/go/bin:/usr/lib/go/bin`;

function go(args: readonly string[], options: { cwd: string; env?: NodeJS.ProcessEnv }): string {
  return execFileSync("go", args, {
    cwd: options.cwd,
    env: { ...process.env, ...options.env, PATH: goPath() },
    encoding: "utf8",
    stdio: ["ignore", "pipe", "inherit"],
  });
}

export function buildGuest(): BuiltGuest {
  const out = join(root, ".cache/guest");
  const path = join(out, "aenv-guest");
  const hash = createHash("sha256")
    .update(FLAGS.join("\0"))
    .update(go(["env", "GOVERSION"], { cwd: source }));
  const files = globSync("**/*.{go,mod,sum}", { cwd: source }).filter((f) => !f.endsWith("_test.go"));
  for (const file of files.toSorted()) hash.update(`\0${file}\0`).update(readFileSync(join(source, file)));
  const key = hash.digest("hex");
  const keyFile = join(out, "key");
  if (existsSync(path) && existsSync(keyFile) && readFileSync(keyFile, "utf8") === key)
    return { path, key, rebuilt: false };
  mkdirSync(out, { recursive: true });
  const fresh = `${path}.${process.pid}`;
  go(["build", ...FLAGS, "-o", fresh, "."], { cwd: source, env: { CGO_ENABLED: "0", GOFLAGS: "" } });
  renameSync(fresh, path);
  writeFileSync(keyFile, key);
  return { path, key, rebuilt: true };
}

if (import.meta.url === pathToFileURL(process.argv[1] ?? "").href) {
  const built = buildGuest();
  console.log(`${built.rebuilt ? "built" : "unchanged"} ${built.path}`);
}
