import { AenvError } from "@aenv/base";
import { encodeCursor, MAX_PAGE, parseCursor } from "@aenv/contract";
import type { TemplateView } from "@aenv/engine";
import { type Handlers, noContent, ok } from "../call.ts";
import { templateOf, templateWithBuildsOf } from "../wire.ts";
import type { RouteDeps } from "./sandboxes.ts";

type TemplateRoutes = Pick<
  Handlers,
  "listTemplates" | "listTemplatesV2" | "resolveTemplateAlias" | "getTemplate" | "deleteTemplate"
>;

const newestFirst = (a: TemplateView, b: TemplateView): number =>
  b.createdAt - a.createdAt || (a.templateId < b.templateId ? 1 : -1);

export function templateRoutes({ engine }: RouteDeps): TemplateRoutes {
  const resolve = (name: string): TemplateView => {
    const t = engine.templates.resolve(name);
    if (!t)
      throw new AenvError("NOT_FOUND", `there is no template ${JSON.stringify(name.slice(0, 128))}`, {
        hint: "aenv template list shows what this node has.",
      });
    return t;
  };

  return {
    listTemplates: ({ caller }) => ok(engine.templates.list(caller.team).toSorted(newestFirst).map(templateOf)),

    listTemplatesV2: ({ caller, query }) => {
      const after = query.nextToken === undefined ? undefined : parseCursor(query.nextToken);
      const limit = query.limit ?? MAX_PAGE;
      const rest = engine.templates
        .list(caller.team)
        .toSorted(newestFirst)
        .filter((t) => !after || t.createdAt < after.at || (t.createdAt === after.at && t.templateId < after.id));
      const page = rest.slice(0, limit);
      const last = page.at(-1);
      const more = last && rest.length > limit;
      return ok(
        page.map(templateOf),
        more ? { "x-next-token": encodeCursor({ at: last.createdAt, id: last.templateId, order: "desc" }) } : {},
      );
    },

    resolveTemplateAlias: ({ params }) => {
      const t = resolve(params.alias);
      return ok({ templateID: t.templateId, public: t.public });
    },

    getTemplate: ({ params }) => ok(templateWithBuildsOf(resolve(params.templateID))),

    deleteTemplate: async ({ params }) => {
      if (await engine.deleteSnapshot(params.templateID)) return noContent();
      const { templateId } = resolve(params.templateID);
      if (!(await engine.templates.delete(templateId))) resolve(params.templateID);
      return noContent();
    },
  };
}
