export { authorityFile, bundleFile, ensureAuthority, machineAuthorities } from "./authority.ts";
export { issue, makeAuthority } from "./certificate.ts";
export { Certificates } from "./certificates.ts";
export { DnsServer } from "./dns.ts";
