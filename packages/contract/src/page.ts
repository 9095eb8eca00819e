import { z } from "zod";

export const MAX_PAGE = 100;

export const limit = z.int().min(1).max(MAX_PAGE).optional().describe(`1 to ${MAX_PAGE}, default ${MAX_PAGE}.`);
export const nextToken = z.string().optional().describe("X-Next-Token of the page before.");
export const PAGE_HEADERS = { "X-Next-Token": "Send it as nextToken for the next page; absent on the last page." };
