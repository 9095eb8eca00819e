/** Records in docs/adr have one number each, the same in name and heading; links between our documents lead somewhere. */
import { existsSync, globSync, readdirSync, readFileSync } from "node:fs";
import { dirname, join } from "node:path";
import { root } from "./node.ts";

const problems: string[] = [];
const seen = new Map<string, string>();
for (const name of readdirSync(join(root, "docs/adr")).toSorted()) {
  const number = /^(\d{4})-[a-z0-9-]+\.md$/.exec(name)?.[1];
  if (number === undefined) {
    problems.push(`docs/adr/${name}: the name is not NNNN-words.md`);
    continue;
  }
  const other = seen.get(number);
  if (other !== undefined) problems.push(`docs/adr/${name}: ${other} has the number ${number}, too`);
  seen.set(number, name);
  const heading = readFileSync(join(root, "docs/adr", name), "utf8").split("\n")[0] ?? "";
  if (!heading.startsWith(`# ${Number(number)}. `))
    problems.push(`docs/adr/${name}: the first line is not "# ${Number(number)}. Title"`);
}
for (const file of globSync(["*.md", "docs/**/*.md", "bench/*.md"], { cwd: root }))
  for (const [, target = ""] of readFileSync(join(root, file), "utf8").matchAll(/\]\(([^)\s#]+)(?:#[^)]*)?\)/g))
    if (!/^[a-z]+:/.test(target) && !existsSync(join(root, dirname(file), target)))
      problems.push(`${file}: ${target} does not exist`);
for (const problem of problems) console.error(problem);
process.exit(problems.length === 0 ? 0 : 1);
