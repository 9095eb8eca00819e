/** Messages of the events that outsiders are told of. */
export const LIFECYCLE = {
  created: "sandbox created",
  paused: "sandbox paused",
  resumed: "sandbox resumed",
  updated: "sandbox updated",
  checkpointed: "sandbox checkpointed",
  killed: "sandbox ended",
  died: "sandbox ended: its virtual machine is gone",
} as const;
