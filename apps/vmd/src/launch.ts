import type { Cgroups } from "@aenv/host";
import type { SpawnSpec } from "@aenv/vmm";

/** Of the host's processes a VMM is among the first the kernel should end, and our daemons among the last. */
const OOM_SCORE_ADJ = 300;
/** `ulimit -f` of a POSIX shell counts blocks of this size. */
const FSIZE_BLOCK_BYTES = 512;

/**
 * Limits and control groups are entered by a shell that then becomes the command: the pid stays. Arguments: blocks of the
 * file size limit, oom_score_adj, number of cgroup.procs files, the files, the command. SIGXFSZ is ignored (which
 * survives exec), so that a write beyond the limit is only an error.
 */
const ENTER = `
trap "" XFSZ
ulimit -c 0; ulimit -f "$1"
echo "$2" > /proc/self/oom_score_adj || exit 126
n=$3; shift 3
while [ "$n" -gt 0 ]; do echo $$ > "$1" || exit 126; shift; n=$((n - 1)); done
exec "$@"
`;

/** argv that enters everything the spec names, drops all privileges and becomes `spec.argv`. */
export function launchArgv(spec: SpawnSpec, cgroups: Pick<Cgroups, "procsFiles">): string[] {
  const procs = spec.cgroup === undefined ? [] : cgroups.procsFiles(spec.cgroup);
  const blocks = Math.ceil(spec.maxFileBytes / FSIZE_BLOCK_BYTES);
  return [
    "/bin/sh",
    "-c",
    ENTER,
    "vmd-launch",
    `${blocks}`,
    `${OOM_SCORE_ADJ}`,
    `${procs.length}`,
    ...procs,
    ...(spec.netns === undefined ? [] : ["nsenter", `--net=/run/netns/${spec.netns}`, "--"]),
    "setpriv",
    `--reuid=${spec.uid}`,
    `--regid=${spec.gid}`,
    spec.groups?.length ? `--groups=${spec.groups.join(",")}` : "--clear-groups",
    "--inh-caps=-all",
    "--bounding-set=-all",
    "--no-new-privs",
    "--",
    ...spec.argv,
  ];
}
