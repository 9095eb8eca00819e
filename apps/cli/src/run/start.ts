import type { AenvClient } from "@aenv/client";
import { explainLoss, guestOf, type Token } from "../access.ts";
import type * as commands from "../commands/sandbox.ts";
import type { Context } from "../context.ts";
import type { Args, Exit } from "../define.ts";
import { usageError } from "../exit.ts";
import { duration } from "../output.ts";
import { runShell } from "../session/terminal.ts";

/** A lease: while a shell is open the end is never nearer than this. Renewed well before, and before the shell opens. */
const KEEP_S = 60;
const RENEW_MS = 20_000;

export async function start(args: Args<typeof commands.start>, context: Context): Promise<Exit> {
  const { out } = context;
  const detached = args.detach || out.json;
  if (detached && args.rm) throw usageError("--rm needs a shell to wait for", "Leave out --detach and --json.");
  if (args.autoResume && !args.autoPause)
    throw usageError("--auto-resume wakes a paused sandbox, and without --auto-pause none is", "Give both.");
  const signal = context.interrupted();
  const client = await context.client();
  const metadata = { ...args.metadata, ...(args.name === undefined ? {} : { name: args.name }) };
  const sandbox = await client.create(
    {
      templateID: args.template,
      timeout: args.timeout,
      metadata,
      envVars: args.env ?? {},
      ...(args.autoPause ? { autoPause: true } : {}),
      ...(args.autoResume ? { autoResume: { enabled: true } } : {}),
      ...(args.internet === "off" ? { allow_internet_access: false } : {}),
    },
    signal,
  );
  const id = sandbox.sandboxID;
  if (out.json) return out.value(sandbox);
  if (detached) return out.line(id);
  out.note(`${out.styleError("dim", "sandbox")} ${id} ${out.styleError("dim", `of ${args.template}`)}`);
  if (args.rm)
    context.defer(async () => {
      await client.kill(id);
    });
  const code = await attach(context, client, sandbox, args, signal);
  if (!args.rm)
    out.note(
      out.styleError(
        "dim",
        `The sandbox stays: aenv connect ${id}, aenv delete ${id}. Its time was set to ${duration(args.timeout * 1000)}.`,
      ),
    );
  return code;
}

export async function connect(args: Args<typeof commands.connect>, context: Context): Promise<Exit> {
  const signal = context.interrupted();
  const client = await context.client();
  const { sandbox, resumed } = await client.connect(args.id, args.timeout, signal);
  if (resumed) context.out.note(context.out.styleError("dim", "resumed"));
  return await attach(context, client, sandbox, args, signal);
}

async function attach(
  context: Context,
  client: AenvClient,
  sandbox: Token,
  o: { user?: string | undefined; cwd?: string | undefined },
  signal: AbortSignal,
): Promise<number> {
  const guest = await guestOf(context, sandbox, o.user);
  await client.extend(sandbox.sandboxID, KEEP_S, signal);
  // A lost renewal is repaired by the next one; that the sandbox is gone is told by the shell's stream.
  const renew = (): void => void client.extend(sandbox.sandboxID, KEEP_S).catch(() => {});
  const timer = setInterval(renew, RENEW_MS);
  try {
    const spec = { ...(o.user === undefined ? {} : { user: o.user }), ...(o.cwd === undefined ? {} : { cwd: o.cwd }) };
    return await runShell(guest, spec, signal);
  } catch (e) {
    throw await explainLoss(e, context, sandbox.sandboxID);
  } finally {
    clearInterval(timer);
  }
}
