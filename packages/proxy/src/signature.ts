/** Signed URLs of files (protocol, section 1.7). */
import { createHash } from "node:crypto";
import { sameToken } from "./token.ts";

interface Signature {
  /** Whether the token of this sandbox made it. */
  fits(token: string): boolean;
  /** It says until when it holds; what it says and cannot be read never holds. */
  expired(nowMs: number): boolean;
}

/** undefined: a request that no signature is for, or that has none. */
export function signatureOf(method: string, path: string): Signature | undefined {
  const operation = method === "GET" || method === "HEAD" ? "read" : method === "POST" ? "write" : undefined;
  const at = path.indexOf("?");
  if (operation === undefined || at < 0) return undefined;
  const query = new URLSearchParams(path.slice(at + 1));
  const given = query.get("signature");
  if (given === null) return undefined;
  const expiration = query.get("signature_expiration") ?? "";
  const before = `${query.get("path") ?? ""}:${operation}:${query.get("username") ?? ""}:`;
  const after = expiration === "" ? "" : `:${expiration}`;
  return {
    fits: (token) => {
      const sum = createHash("sha256").update(`${before}${token}${after}`).digest("base64").replace(/=+$/, "");
      return sameToken(`v1_${sum}`, given);
    },
    expired: (nowMs) =>
      expiration !== "" && !(/^[0-9]{1,15}$/.test(expiration) && Number(expiration) >= Math.floor(nowMs / 1000)),
  };
}

/** As envd checks it. */
export function isSigned(method: string, path: string, token: string, nowMs: number): boolean {
  const signature = signatureOf(method, path);
  return signature?.fits(token) === true && !signature.expired(nowMs);
}
