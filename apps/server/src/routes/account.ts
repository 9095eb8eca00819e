import { AenvError } from "@aenv/base";
import type { KeyStore } from "../auth.ts";
import { created, type Handlers, noContent, ok } from "../call.ts";
import { apiKeyOf } from "../wire.ts";

type AccountRoutes = Pick<Handlers, "listTeams" | "listApiKeys" | "createApiKey" | "renameApiKey" | "deleteApiKey">;

export function accountRoutes({ keys, teams }: KeyStore): AccountRoutes {
  return {
    listTeams: ({ caller }) =>
      ok([
        {
          teamID: caller.team,
          name: teams.get(caller.team)?.name ?? caller.team,
          apiKey: caller.key,
          isDefault: true,
        },
      ]),

    listApiKeys: ({ caller }) => ok(keys.list(caller.team).map(apiKeyOf)),

    createApiKey: ({ caller, body }) => {
      const { key, record } = keys.create(caller.team, body.name);
      return created({ ...apiKeyOf(record), key });
    },

    renameApiKey: ({ caller, params, body }) => {
      keys.rename(caller.team, params.apiKeyID, body.name);
      const record = keys.list(caller.team).find((k) => k.id === params.apiKeyID);
      if (!record) throw new AenvError("NOT_FOUND", `there is no API key ${params.apiKeyID}`);
      return ok(apiKeyOf(record));
    },

    deleteApiKey: ({ caller, params }) => {
      if (keys.list(caller.team).length === 1 && caller.keyId === params.apiKeyID)
        throw new AenvError("CONFLICT", "this is the last key of the team", {
          hint: "Create another key first: without one nobody could use the node.",
        });
      if (!keys.revoke(caller.team, params.apiKeyID))
        throw new AenvError("NOT_FOUND", `there is no API key ${JSON.stringify(params.apiKeyID.slice(0, 64))}`);
      return noContent();
    },
  };
}
