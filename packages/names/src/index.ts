export { authorityFile, bundleFile, ensureAuthority, machineAuthorities } from "./authority.ts";
export { Certificates } from "./certificates.ts";
export { DnsServer } from "./dns.ts";
