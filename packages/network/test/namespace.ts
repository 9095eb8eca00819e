import { spawnSync } from "node:child_process";

const MARK = "AENV_TEST_OWN_NAMESPACES";

const OWN_NAMESPACES = "--pdeathsig KILL unshare --net --mount --pid --fork --mount-proc --kill-child".split(" ");

/**
 * The calling test file goes on in network, mount and pid namespaces of its own, where the network namespace stands for
 * the host, /run is empty and everything vanishes with the last process. Its results reach the test runner unchanged.
 */
export function goOnInOwnNamespaces(): void {
  if (process.env[MARK] === "1") return;
  const inner = 'mount -t tmpfs tmpfs /run && mkdir /run/netns && ip link set lo up && exec "$@"';
  const { status, error } = spawnSync(
    // Whoever ends this process, by a timeout say, ends everything in the namespaces.
    "setpriv",
    [...OWN_NAMESPACES, "sh", "-c", inner, "sh", process.execPath, ...process.execArgv, ...process.argv.slice(1)],
    { stdio: "inherit", env: { ...process.env, [MARK]: "1" } },
  );
  if (error) throw error;
  process.exit(status ?? 1);
}
