import { driverContract } from "@aenv/vmm/contract-suite";
import { QemuHarness } from "./harness.ts";

driverContract("qemu", () => QemuHarness.open());
