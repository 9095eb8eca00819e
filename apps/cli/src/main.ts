import { runProgram } from "./program.ts";

const code = await runProgram(process.argv.slice(2), process.env);
// Exit only when a pipe has taken everything; an input that never ends must not hold the process.
await new Promise((done) => process.stdout.write("", done));
process.exit(code);
