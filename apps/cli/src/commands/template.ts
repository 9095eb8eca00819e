import * as z from "zod";
import { defineCommand } from "../define.ts";
import { flag, text } from "../values.ts";

export const templateList = defineCommand({
  name: "template list",
  aliases: ["template ls", "templates"],
  group: "Templates",
  about: "List templates",
  examples: [{ run: "aenv template list", about: "Names, sizes, use" }],
  positionals: {},
  options: { quiet: { schema: flag, short: "q", about: "Print ids only." } },
});

export const templateInfo = defineCommand({
  name: "template info",
  group: "Templates",
  about: "Show one template",
  examples: [{ run: "aenv template info base", about: "By name or id" }],
  positionals: { template: { schema: text, about: "Name or id.", complete: "template" } },
  options: {},
});

export const templateDelete = defineCommand({
  name: "template delete",
  aliases: ["template rm"],
  group: "Templates",
  about: "Delete templates",
  examples: [{ run: "aenv template delete old", about: "By name or id; refused while sandboxes of it exist" }],
  positionals: {
    templates: {
      schema: z.array(text).min(1, { error: "is missing" }),
      variadic: true,
      about: "Names or ids.",
      complete: "template",
      label: "TEMPLATE",
    },
  },
  options: { yes: { schema: flag, short: "y", about: "Do not ask." } },
});
