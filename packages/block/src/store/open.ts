import { isAbsolute } from "node:path";
import { AenvError } from "@aenv/base";
import { FolderStore } from "./folder.ts";
import type { BlobStore } from "./port.ts";

/**
 * The store at an address: a folder (an absolute path) or `s3://BUCKET/PREFIX?endpoint=URL&region=NAME`. With an endpoint
 * the bucket's name goes into the path, unless `pathStyle=false`.
 */
export async function openStore(address: string): Promise<BlobStore> {
  if (isAbsolute(address)) return new FolderStore(address.replace(/\/+$/, ""));
  const wrong = (what: string): AenvError =>
    new AenvError("INVALID_ARGUMENT", `the store ${address} ${what}`, {
      hint: "Name a folder by its absolute path, or a bucket as s3://BUCKET/PREFIX?endpoint=URL&region=NAME.",
    });
  if (!URL.canParse(address)) throw wrong("is neither a folder nor an address");
  const url = new URL(address);
  if (url.protocol !== "s3:") throw wrong("is neither a folder nor s3://");
  if (!/^[a-z0-9][a-z0-9.-]{1,62}$/.test(url.hostname)) throw wrong("names no bucket");
  for (const key of url.searchParams.keys()) {
    if (!["endpoint", "region", "pathStyle"].includes(key)) throw wrong(`has an unknown option ${key}`);
  }
  const endpoint = url.searchParams.get("endpoint");
  if (endpoint !== null && !/^https?:\/\/[^/]/.test(endpoint)) throw wrong("has an endpoint that is not a URL");
  const region = url.searchParams.get("region") ?? (endpoint === null ? undefined : "us-east-1");
  const prefix = url.pathname.replace(/^\/+|\/+$/g, "");
  // The client library takes 20 MB: only for who uses it.
  const { S3Store } = await import("./s3.ts");
  return new S3Store({
    bucket: url.hostname,
    prefix: prefix === "" ? "" : `${prefix}/`,
    ...(endpoint === null ? {} : { endpoint }),
    ...(region === undefined ? {} : { region }),
    pathStyle:
      url.searchParams.get("pathStyle") === "true" ||
      (endpoint !== null && url.searchParams.get("pathStyle") !== "false"),
  });
}
