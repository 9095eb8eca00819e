import { existsSync, readFileSync } from "node:fs";

/**
 * The frequency of the host's time-stamp counter in kHz, or undefined where no file tells it.
 *
 * A guest under emulation reads the host's counter but has only an emulated PIT to find its frequency by: on a busy host
 * that calibration fails, and with it the boot hangs. Where the CPU's clock is scaled, /proc/cpuinfo shows the momentary
 * clock, which is another thing: then only the base frequency of intel_pstate will do.
 */
export function hostTscKhz(root = "/"): number | undefined {
  const scaling = `${root}sys/devices/system/cpu/cpu0/cpufreq`;
  try {
    if (existsSync(scaling)) return plausible(Number(readFileSync(`${scaling}/base_frequency`, "utf8")));
    const mhz = /^cpu MHz\s*:\s*([\d.]+)$/m.exec(readFileSync(`${root}proc/cpuinfo`, "utf8"))?.[1];
    return plausible(Math.round(Number(mhz) * 1000));
  } catch {
    return undefined;
  }
}

/** 400 MHz to 10 GHz; anything else is no time-stamp counter. */
function plausible(khz: number): number | undefined {
  return Number.isInteger(khz) && khz >= 400_000 && khz <= 10_000_000 ? khz : undefined;
}
