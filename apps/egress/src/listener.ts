import { randomInt } from "node:crypto";
import { createServer } from "node:net";

export interface Ports {
  tcpPort: number;
  dnsPort: number;
}

/** Below what the kernel gives to outgoing connections, so that nobody takes them while the gateway is away. */
const RANGE = { first: 20_000, last: 29_998 } as const;
const TRIES = 100;

/** Two neighbouring ports that are free. */
export async function choosePorts(): Promise<Ports> {
  for (let i = 0; i < TRIES; i++) {
    const tcpPort = randomInt(RANGE.first, RANGE.last);
    if ((await isFree(tcpPort)) && (await isFree(tcpPort + 1))) return { tcpPort, dnsPort: tcpPort + 1 };
  }
  throw new Error(`no free ports from ${RANGE.first} to ${RANGE.last}`);
}

function isFree(port: number): Promise<boolean> {
  return new Promise((resolve) => {
    const server = createServer();
    server.once("error", () => resolve(false));
    server.listen(port, "0.0.0.0", () => server.close(() => resolve(true)));
  });
}

export const TRANSPARENT_FD = 3;
const MARK = "AENV_EGRESS_LISTENS";

/**
 * Node cannot set IP_TRANSPARENT, with which a listener gets connections to any address. Perl, which every Debian has,
 * makes the listener and becomes this program again, with the listener as descriptor 3 and the same pid.
 */
const LISTEN = `
  use strict; use warnings; use Socket;
  my ($port, @argv) = @ARGV;
  $^F = ${TRANSPARENT_FD};
  socket(my $s, PF_INET, SOCK_STREAM, 0) or die "socket: $!";
  setsockopt($s, SOL_SOCKET, SO_REUSEADDR, 1) or die "SO_REUSEADDR: $!";
  setsockopt($s, 0, 19, 1) or die "IP_TRANSPARENT: $!";
  bind($s, sockaddr_in($port, INADDR_LOOPBACK)) or die "port $port: $!";
  listen($s, 1024) or die "listen: $!";
  die "descriptor " . fileno($s) if fileno($s) != ${TRANSPARENT_FD};
  exec { $argv[0] } @argv;
  die "exec: $!";
`;

/** Returns only in the process that has the listener. */
export function reenter(tcpPort: number): void {
  if (process.env[MARK] === "1") return;
  const again = [process.execPath, ...process.execArgv, ...process.argv.slice(1)];
  const env: Record<string, string> = { [MARK]: "1" };
  for (const [name, value] of Object.entries(process.env)) if (value !== undefined) env[name] ??= value;
  process.execve?.("/usr/bin/perl", ["perl", "-e", LISTEN, String(tcpPort), ...again], env);
  throw new Error("this Node has no process.execve");
}
