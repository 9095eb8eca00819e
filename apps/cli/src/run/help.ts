import type { help as command } from "../commands/node.ts";
import type { Context } from "../context.ts";
import type { Args, Exit } from "../define.ts";
import { commandHelp, mainHelp } from "../help.ts";
import { findCommand } from "../parse.ts";
import { unknownCommand } from "../suggest.ts";

export async function help(args: Args<typeof command>, { out }: Context): Promise<Exit> {
  const bold = (text: string): string => out.style("bold", text);
  if (args.command.length === 0) return out.line(mainHelp(bold));
  const found = findCommand(args.command);
  if (found === undefined) throw unknownCommand(args.command);
  out.line(commandHelp(found.command, bold));
}
