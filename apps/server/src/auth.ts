import type { IncomingHttpHeaders } from "node:http";
import { AenvError } from "@aenv/base";
import type { State } from "@aenv/state";

/** Where API keys and their teams live; the state's fit as they are. */
export interface KeyStore {
  keys: Pick<State["keys"], "create" | "verify" | "list" | "rename" | "revoke">;
  teams: Pick<State["teams"], "get">;
}

export interface Caller {
  team: string;
  keyId: string;
  /** As it was presented. */
  key: string;
}

function presented(headers: IncomingHttpHeaders): string | undefined {
  const own = headers["x-api-key"];
  if (typeof own === "string" && own !== "") return own;
  return /^Bearer +(\S+)$/i.exec(headers.authorization ?? "")?.[1];
}

/** Throws UNAUTHENTICATED unless the headers carry a key that the store knows. */
export function authenticate(headers: IncomingHttpHeaders, keys: KeyStore): Caller {
  const key = presented(headers);
  if (key === undefined) throw new AenvError("UNAUTHENTICATED", "the request has no API key");
  const known = keys.keys.verify(key);
  if (!known) throw new AenvError("UNAUTHENTICATED", "this node does not know the API key");
  return { team: known.team, keyId: known.id, key };
}
