import { AenvError } from "@aenv/base";
import { type Cidr, formatIp, MAX_SLOTS } from "./address.ts";
import type { Slot } from "./types.ts";

/** All names and addresses of one slot; follows from instance, block and index alone. */
export interface SlotPlan extends Slot {
  /** Host side of the veth. */
  veth: string;
  /** Address of the host side; the source of everything that the host sends to the guest. */
  hostSide: string;
}

/** Names and numbers of an instance. */
export interface Instance {
  readonly id: string;
  readonly block: Cidr;
  readonly uidBase: number;
}

export function checkInstanceId(id: string): string {
  if (!/^[0-9a-f]{4}$/.test(id))
    throw new AenvError("INVALID_ARGUMENT", `instance ${JSON.stringify(id)} is not 4 hex digits`);
  return id;
}

export const netnsPrefix = (instance: string): string => `aenv-${instance}-`;
export const vethPrefix = (instance: string): string => `av${instance}-`;
export const tableName = (instance: string): string => `aenv_${instance}`;

export function planSlot(instance: Instance, index: number): SlotPlan {
  if (!Number.isInteger(index) || index < 0 || index >= MAX_SLOTS)
    throw new AenvError("INVALID_ARGUMENT", `${index} is not a slot index`);
  const even = instance.block.base + index * 2;
  const uid = instance.uidBase + index;
  return {
    index,
    netns: `${netnsPrefix(instance.id)}${index}`,
    tap: "tap0",
    hostIp: formatIp(even + 1),
    uid,
    gid: uid,
    veth: `${vethPrefix(instance.id)}${index}`,
    hostSide: formatIp(even),
  };
}

/** The index in a name of ours, else undefined. */
export function indexOf(name: string, prefix: string): number | undefined {
  if (!name.startsWith(prefix)) return undefined;
  const rest = name.slice(prefix.length);
  if (!/^(0|[1-9]\d{0,3})$/.test(rest)) return undefined;
  const index = Number(rest);
  return index < MAX_SLOTS ? index : undefined;
}
