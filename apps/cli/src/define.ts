import type * as z from "zod";
import type { Context } from "./context.ts";

/** What a shell can offer for a value. */
export type Completion = "sandbox" | "template" | "snapshot" | "file" | readonly string[];

interface Argument {
  /** Receives a string, string[] (variadic, repeatable), boolean (flag) or undefined (left out). */
  schema: z.ZodType;
  about: string;
  complete?: Completion;
}

/** Positionals are given in the order of the record. */
export interface Positional extends Argument {
  variadic?: boolean;
  /** Left-out values are for the schema to judge; this only shapes the help text. */
  optional?: boolean;
  /** Name in help texts; the key in capitals is the default. */
  label?: string;
}

export interface Option extends Argument {
  /** Name of its value in help texts; without one the option is a flag. */
  value?: string;
  /** One letter. */
  short?: string;
  repeat?: boolean;
}

export interface Example {
  run: string;
  about: string;
}

type Output<T extends Record<string, Argument>> = { [K in keyof T]: z.output<T[K]["schema"]> };
/** The exit code of the process; 0 when a handler returns none. */
// oxlint-disable-next-line typescript/no-invalid-void-type -- handlers that end well return nothing
export type Exit = number | void;

export interface CommandSpec<P extends Record<string, Positional>, O extends Record<string, Option>> {
  /** Noun and verb, or one word. */
  name: string;
  /** A shorter way to write it, at the top level. */
  short?: string;
  aliases?: readonly string[];
  group: Group;
  about: string;
  /** Paragraphs of the help text. */
  details?: readonly string[];
  examples: readonly Example[];
  positionals: P;
  options: O;
  /** What the process's exit code means: "remote" passes a guest command's code on, own failures are 125. */
  exit?: "own" | "remote";
  /** Not in help, docs and completion. */
  hidden?: boolean;
}

export type Group = "Sandboxes" | "State" | "Files" | "Templates" | "Store" | "Node and set-up";
export const GROUPS: readonly Group[] = ["Sandboxes", "State", "Files", "Templates", "Store", "Node and set-up"];

/** A command with its types erased, for the tables. The handler's code is read when the command runs. */
export type Command = CommandSpec<Record<string, Positional>, Record<string, Option>> & {
  load: () => Promise<(args: never, context: Context) => Promise<Exit>>;
};

/** A command is data: help, completion, documentation and parsing are all made from this one record. */
export function defineCommand<P extends Record<string, Positional>, O extends Record<string, Option>>(
  spec: CommandSpec<P, O>,
): CommandSpec<P, O> {
  return spec;
}

/** Joins a command and its handler, whose arguments must be what the command's schemas give. */
export function bind<P extends Record<string, Positional>, O extends Record<string, Option>>(
  spec: CommandSpec<P, O>,
  load: () => Promise<(args: Output<P> & Output<O>, context: Context) => Promise<Exit>>,
): Command {
  return { ...spec, load };
}

export const flagName = (key: string): string => key.replace(/[A-Z]/g, (c) => `-${c.toLowerCase()}`);

export type Args<C> = C extends CommandSpec<infer P, infer O> ? Output<P> & Output<O> : never;
