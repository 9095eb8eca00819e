import type * as commands from "../commands/node.ts";
import { completionScript } from "../completion.ts";
import type { Context } from "../context.ts";
import type { Args, Exit } from "../define.ts";

export async function completion(args: Args<typeof commands.completion>, { out }: Context): Promise<Exit> {
  const script = completionScript(args.shell);
  if (out.json) return out.value({ shell: args.shell, script });
  out.stdout.write(script);
}

/** More would not help anybody who completes by hand. */
const MOST = 200;

export async function complete(args: Args<typeof commands.complete>, { out, client }: Context): Promise<Exit> {
  const api = await client();
  const words: string[] = [];
  if (args.kind === "sandbox")
    for await (const s of api.list({ pageSize: 100 })) {
      words.push(s.sandboxID);
      if (words.length >= MOST) break;
    }
  else if (args.kind === "snapshot")
    for await (const s of api.snapshots({ pageSize: 100 })) {
      words.push(s.snapshotID);
      if (words.length >= MOST) break;
    }
  else for (const t of await api.templates()) words.push(t.names[0] ?? t.aliases[0] ?? t.templateID);
  if (out.json) return out.value(words);
  for (const word of words) out.line(word);
}
