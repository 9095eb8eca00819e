import { AenvError } from "@aenv/base";
import type { GuestClient } from "@aenv/guest";
import type { Context } from "./context.ts";

const ENVD_PORT = 49983;
/** A resumed sandbox lives at least so long: enough for what a person does next. */
const RESUME_S = 300;

export interface Token {
  sandboxID: string;
  envdAccessToken?: string | undefined;
}

/** The agent of a sandbox, through the node's edge. A paused sandbox is resumed first. */
export async function openGuest(context: Context, id: string, user: string | undefined): Promise<GuestClient> {
  const client = await context.client();
  const [detail] = await Promise.all([client.get(id), import("@aenv/guest")]);
  const token = detail.state === "paused" ? (await client.connect(id, RESUME_S)).sandbox : detail;
  return await guestOf(context, token, user);
}

export async function guestOf(context: Context, sandbox: Token, user: string | undefined): Promise<GuestClient> {
  const { GuestClient } = await import("@aenv/guest");
  const headers: Record<string, string> = {
    "e2b-sandbox-id": sandbox.sandboxID,
    "e2b-sandbox-port": String(ENVD_PORT),
    "user-agent": "aenv-cli",
  };
  if (user !== undefined) headers["authorization"] = `Basic ${Buffer.from(`${user}:`).toString("base64")}`;
  const guest = new GuestClient({
    baseUrl: context.settings().sandboxUrl.value,
    headers,
    ...(sandbox.envdAccessToken === undefined ? {} : { accessToken: sandbox.envdAccessToken }),
  });
  context.defer(() => guest.close());
  return guest;
}

/** A failed call to a guest, told as what it means: the guest cannot say that its machine has ended, the node can. */
export async function explainLoss(e: unknown, context: Context, id: string): Promise<AenvError> {
  const error = AenvError.from(e, "sandbox");
  if (error.code !== "GUEST_FAILED") return error;
  try {
    await (await context.client()).get(id);
  } catch (why) {
    if (!(why instanceof AenvError)) throw why;
    if (why.code === "NOT_FOUND")
      return new AenvError("NOT_FOUND", `The sandbox ${id} has ended: it was deleted or its time was over`, {
        cause: e,
        hint: "aenv timeout ID TIME gives a sandbox more time.",
      });
    if (why.code === "UNAVAILABLE") return why;
  }
  return new AenvError("GUEST_FAILED", `The connection to the sandbox ${id} broke: ${error.message}`, {
    cause: e,
    hint: "What ran in the sandbox may still be running.",
  });
}
