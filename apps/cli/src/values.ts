import * as z from "zod";

/** Schemas of what people type. Their messages follow "--timeout: " or "<ID>: ". */

export const sandboxId = z
  .string()
  .regex(/^[a-z0-9]{1,40}(-[a-z0-9]+)?$/, { error: "is not a sandbox id (aenv list shows them)" })
  .transform((id) => id.split("-")[0] ?? id);

const UNITS: Readonly<Record<string, number>> = { "": 1, s: 1, m: 60, h: 3600, d: 86_400 };

/** Whole seconds: `90`, or with a unit: `90s`, `15m`, `2h`, `1d`. */
export const seconds = z.string().transform((text, context) => {
  const match = /^(\d{1,9})([smhd]?)$/.exec(text);
  if (match) return Number(match[1]) * (UNITS[match[2] ?? ""] ?? 1);
  context.addIssue(`${JSON.stringify(text)} is not a time; write seconds (90) or 90s, 15m, 2h, 1d`);
  return z.NEVER;
});

export const count = z.string().transform((text, context) => {
  if (/^[1-9]\d{0,8}$/.test(text)) return Number(text);
  context.addIssue(`${JSON.stringify(text)} is not a positive whole number`);
  return z.NEVER;
});

const MAX_PORT = 65_535;

/** `PORT`, `LOCAL:PORT` or `:PORT`; `local` 0 is any that is free. */
export const forward = z.string().transform((text, context) => {
  const match = /^(?:(\d{0,5}):)?([1-9]\d{0,4})$/.exec(text);
  const remote = Number(match?.[2]);
  const local = match?.[1] === undefined ? remote : Number(match[1]);
  if (match && remote <= MAX_PORT && local <= MAX_PORT) return { local, remote };
  context.addIssue(
    `${JSON.stringify(text)} is not a port; write PORT, LOCAL:PORT or :PORT, each from 1 to ${MAX_PORT}`,
  );
  return z.NEVER;
});

/** Repeated KEY=VALUE; undefined when the option was not given. */
export const pairs = z
  .array(z.string())
  .transform((list, context) => {
    const out: Record<string, string> = {};
    for (const text of list) {
      const at = text.indexOf("=");
      if (at < 1) {
        context.addIssue(`${JSON.stringify(text)} is not KEY=VALUE`);
        return z.NEVER;
      }
      out[text.slice(0, at)] = text.slice(at + 1);
    }
    return out;
  })
  .optional();

export const flag = z.boolean().default(false);
export const text = z.string().min(1, { error: "is empty" });
