import { AenvError, type ErrorCode } from "@aenv/base";

/** An error as it passes between threads. */
export interface PlainError {
  code: ErrorCode;
  message: string;
  hint: string;
  data: Record<string, unknown>;
}

export function toPlain(e: unknown): PlainError {
  const { code, message, hint, data } = AenvError.from(e, "guest memory");
  return { code, message, hint, data };
}

export const fromPlain = ({ code, message, hint, data }: PlainError): AenvError =>
  new AenvError(code, message, { hint, data });
