/** Fails when a package imports what boundaries.ts does not allow, or reaches into another package's folder by path. */
import { existsSync, globSync, readFileSync } from "node:fs";
import { dirname, join, relative, resolve } from "node:path";
import { parseSync } from "oxc-parser";
import { ALLOWED, WIRING } from "./boundaries.ts";

const root = resolve(import.meta.dirname, "../..");
const problems: string[] = [];

function ownerOf(file: string): string {
  const [a, b] = relative(root, file).split("/");
  return a === "tools" || a === "bench" ? a : `${a}/${b}`;
}

function checkFile(file: string): void {
  const owner = ownerOf(file);
  const wiring = WIRING.some((w) => owner.startsWith(w));
  const allowed = ALLOWED[owner];
  if (!wiring && !allowed) {
    problems.push(`${owner} has no row in tools/src/boundaries.ts`);
    return;
  }
  const { module } = parseSync(file, readFileSync(file, "utf8"));
  const specifiers = [
    ...module.staticImports.map((i) => i.moduleRequest.value),
    ...module.staticExports.flatMap((e) => e.entries.flatMap((x) => (x.moduleRequest ? [x.moduleRequest.value] : []))),
  ];
  for (const spec of new Set(specifiers)) {
    const where = relative(root, file);
    if (spec.startsWith(".")) {
      const target = ownerOf(resolve(dirname(file), spec));
      if (target !== owner) problems.push(`${where} reaches into ${target} by path; import @aenv/… instead`);
    } else if (spec.startsWith("@aenv/")) {
      const target = spec.split("/")[1] ?? "";
      if (wiring) continue;
      // A package's own test may import the package by name.
      if (owner.endsWith(`/${target}`)) continue;
      if (!allowed?.includes(target))
        problems.push(`${where} may not import @aenv/${target} (tools/src/boundaries.ts)`);
    }
  }
}

const files = globSync("{packages,apps,test,bench,tools}/**/*.ts", {
  cwd: root,
  exclude: (name) => name === "node_modules" || name.includes("/node_modules"),
}).filter((f) => !f.includes("node_modules"));
for (const file of files) checkFile(join(root, file));
if (files.length === 0) problems.push("no source file found");
for (const name of Object.keys(ALLOWED)) {
  if (!existsSync(join(root, name))) console.log(`note: ${name} is allowed but does not exist yet`);
}
for (const p of problems.toSorted()) console.error(p);
process.exit(problems.length > 0 ? 1 : 0);
