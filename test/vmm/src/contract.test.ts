import { driverContract } from "@aenv/vmm/contract-suite";
import { QemuHarness } from "./harness.ts";

driverContract("qemu", () => QemuHarness.open());

// An older QEMU, named by its path: another set of capabilities behind the same contract.
const older = process.env["AENV_TEST_QEMU"];
if (older !== undefined) driverContract(older, () => QemuHarness.open({ binary: older }));
