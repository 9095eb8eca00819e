export { eventOf, LIFECYCLE_MESSAGES } from "./event.ts";
export { WebhookSender } from "./sender.ts";
