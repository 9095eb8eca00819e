import * as z from "zod";
import { defineCommand } from "../define.ts";
import { sandboxId, text } from "../values.ts";

const id = { schema: sandboxId, about: "Sandbox id.", complete: "sandbox" } as const;
const entries = z.array(text).default([]);

/** `DOMAIN/NAME=VALUE`. */
const headers = z
  .array(z.string())
  .default([])
  .transform((list, context) => {
    const out: { domain: string; name: string; value: string }[] = [];
    for (const given of list) {
      const match = /^([^/=\s]+)\/([^/=\s]+)=(.*)$/s.exec(given);
      if (!match) {
        context.addIssue(`${JSON.stringify(given)} is not DOMAIN/NAME=VALUE, as in api.example.com/Authorization=KEY`);
        return z.NEVER;
      }
      out.push({ domain: match[1] ?? "", name: match[2] ?? "", value: match[3] ?? "" });
    }
    return out;
  });

/** `HOST:PORT`, with `USER:PASSWORD@` before it where the proxy asks for them. */
const proxy = z
  .string()
  .transform((given, context) => {
    const match = /^(?:([^:@/]+):([^@/]*)@)?([^@]+)$/.exec(given);
    if (match) {
      const [, username, password, address = ""] = match;
      return { address, ...(username === undefined ? {} : { username, password: password ?? "" }) };
    }
    context.addIssue(`${JSON.stringify(given)} is not [USER:PASSWORD@]HOST:PORT`);
    return z.NEVER;
  })
  .optional();

export const networkSet = defineCommand({
  name: "network set",
  group: "Sandboxes",
  about: "Set what a sandbox may reach",
  details: [
    "Replaces all rules of the sandbox at once; without options it may reach the internet again. Open connections that the new rules deny are cut.",
    "Names are checked in TLS and HTTP; they need --internet off, or everything denied. Private ranges, this host and other sandboxes stay out of reach whatever the rules say.",
    "With --header requests over HTTPS to the domain get the header in place of the sandbox's own; a key then need not be in the sandbox.",
  ],
  examples: [
    { run: "aenv network set ID --internet off", about: "Nothing, and no names" },
    { run: "aenv network set ID --internet off --allow pypi.org --allow '*.pythonhosted.org'", about: "Two names" },
    { run: "aenv network set ID --deny 203.0.113.0/24", about: "Everything but a range" },
    {
      run: 'aenv network set ID --header "api.example.com/Authorization=Bearer $KEY"',
      about: "A key that it never sees",
    },
    { run: "aenv network set ID", about: "Everything again" },
  ],
  positionals: { id },
  options: {
    internet: {
      schema: z.enum(["on", "off"]).optional(),
      value: "on|off",
      complete: ["on", "off"],
      about: "off: nothing but what --allow names. Default on.",
    },
    allow: {
      schema: entries,
      value: "WHAT",
      repeat: true,
      about: "Address, CIDR, domain or *.domain that it may reach. Wins over --deny.",
    },
    deny: { schema: entries, value: "CIDR", repeat: true, about: "Address or CIDR that it may not reach." },
    proxy: {
      schema: proxy,
      value: "HOST:PORT",
      about: "SOCKS5 proxy for everything over TCP, as [USER:PASSWORD@]HOST:PORT; nothing else leaves.",
    },
    header: {
      schema: headers,
      value: "DOMAIN/NAME=VALUE",
      repeat: true,
      about: "Header of every HTTPS request to the domain.",
    },
  },
});

export const networkShow = defineCommand({
  name: "network show",
  group: "Sandboxes",
  about: "Show what a sandbox may reach",
  examples: [
    { run: "aenv network show ID", about: "Its rules" },
    { run: "aenv network show ID --json", about: "As the API has them" },
  ],
  positionals: { id },
  options: {},
});
