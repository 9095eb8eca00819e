export { QemuDriver, type QemuDriverOptions } from "./driver.ts";
export type { ProbeGuest } from "./probe.ts";
