/** What libraries log through; apps give a pino logger. One line per transition, closed sets of labels. */
export interface Logger {
  debug(fields: Record<string, unknown>, message: string): void;
  info(fields: Record<string, unknown>, message: string): void;
  warn(fields: Record<string, unknown>, message: string): void;
  error(fields: Record<string, unknown>, message: string): void;
}

const nothing = (): void => {};
export const silentLogger: Logger = { debug: nothing, info: nothing, warn: nothing, error: nothing };
