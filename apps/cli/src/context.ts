import { AenvError } from "@aenv/base";
import type { AenvClient } from "@aenv/client";
import type { Output } from "./output.ts";
import type { Flags, Settings } from "./settings.ts";

/** What a command works with. Everything costly is made when it is first asked for. */
export interface Context {
  readonly out: Output;
  readonly env: Readonly<Record<string, string | undefined>>;
  /** As given on the command line. */
  readonly flags: Flags;
  readonly settings: () => Settings;
  /** The control API; closed by the frame after the command. */
  readonly client: () => Promise<AenvClient>;
  /** Runs when the command is over, however it ended. */
  readonly defer: (fn: () => void | Promise<void>) => void;
  /**
   * Aborts at the first Ctrl-C, SIGTERM or hangup; asking for it takes over those signals until the command is over. Ask
   * before the first await and before anything is printed: a signal may follow at once.
   */
  readonly interrupted: () => AbortSignal;
}

export function requireKey(settings: Settings): string {
  if (settings.apiKey !== undefined) return settings.apiKey.value;
  throw new AenvError("UNAUTHENTICATED", "There is no API key", {
    hint: "Save one with aenv auth login, set AENV_API_KEY, or run as the owner of the node (its key is in $AENV_HOME/auth.json).",
  });
}
