import {
  createHash,
  createPrivateKey,
  createPublicKey,
  generateKeyPairSync,
  type KeyObject,
  randomBytes,
  sign,
  X509Certificate,
} from "node:crypto";
import { isIP } from "node:net";
import { AenvError } from "@aenv/base";
import { addressBytes } from "./address.ts";
import { bits, bool, context, integer, octets, oid, sequence, set, time, utf8 } from "./der.ts";

/** A certificate (or a chain, the server's first) and its private key, both PEM. */
export interface CertAndKey {
  cert: string;
  key: string;
}

const DAY_MS = 86_400_000;
/** Clocks of clients may be behind. */
const BACKDATE_MS = DAY_MS;
const CA_DAYS = 3650;
/** Some clients refuse server certificates that live longer than 398 days, their first day included. */
const LEAF_DAYS = 396;

const ECDSA_SHA256 = sequence(oid("1.2.840.10045.4.3.2"));
const COMMON_NAME = "2.5.4.3";
const EXTENSION = {
  subjectKey: "2.5.29.14",
  keyUsage: "2.5.29.15",
  altName: "2.5.29.17",
  basicConstraints: "2.5.29.19",
  authorityKey: "2.5.29.35",
  extendedKeyUsage: "2.5.29.37",
} as const;
const SERVER_AUTH = "1.3.6.1.5.5.7.3.1";
/** Bits of KeyUsage (RFC 5280, 4.2.1.3) with the number of bits that do not count. */
const CAN_SIGN_CERTIFICATES = [Buffer.from([0x06]), 1] as const;
const CAN_SIGN = [Buffer.from([0x80]), 7] as const;

const newKey = (): KeyObject => generateKeyPairSync("ec", { namedCurve: "P-256" }).privateKey;
const pemOfKey = (key: KeyObject): string => key.export({ type: "pkcs8", format: "pem" }).toString();
const spkiOf = (key: KeyObject): Buffer => createPublicKey(key).export({ type: "spki", format: "der" });
/** RFC 7093, method 1. */
const keyId = (spki: Buffer): Buffer => createHash("sha256").update(spki).digest().subarray(0, 20);
const nameOf = (commonName: string): Buffer => sequence(set(sequence(oid(COMMON_NAME), utf8(commonName))));

function extension(id: string, critical: boolean, value: Buffer): Buffer {
  return sequence(oid(id), ...(critical ? [bool(true)] : []), octets(value));
}

function pem(der: Buffer): string {
  const lines = der.toString("base64").match(/.{1,64}/g) ?? [];
  return `-----BEGIN CERTIFICATE-----\n${lines.join("\n")}\n-----END CERTIFICATE-----\n`;
}

function certificate(o: {
  issuer: string;
  subject: string;
  key: KeyObject;
  signer: KeyObject;
  from: number;
  days: number;
  extensions: readonly Buffer[];
}): string {
  const serial = randomBytes(16);
  // Positive, and never short.
  serial[0] = ((serial[0] ?? 0) & 0x7f) | 0x40;
  const toBeSigned = sequence(
    context(0, true, integer(Buffer.from([2]))),
    integer(serial),
    ECDSA_SHA256,
    nameOf(o.issuer),
    sequence(time(o.from), time(o.from + o.days * DAY_MS)),
    nameOf(o.subject),
    spkiOf(o.key),
    context(3, true, sequence(...o.extensions)),
  );
  return pem(sequence(toBeSigned, ECDSA_SHA256, bits(sign("sha256", toBeSigned, o.signer))));
}

/** A certificate authority of its own, for ten years from `now` (ms since the epoch). */
export function makeAuthority(name: string, now: number): CertAndKey {
  const key = newKey();
  const cert = certificate({
    issuer: name,
    subject: name,
    key,
    signer: key,
    from: now - BACKDATE_MS,
    days: CA_DAYS,
    extensions: [
      // It signs servers, no further authorities.
      extension(EXTENSION.basicConstraints, true, sequence(bool(true), integer(Buffer.from([0])))),
      extension(EXTENSION.keyUsage, true, bits(...CAN_SIGN_CERTIFICATES)),
      extension(EXTENSION.subjectKey, false, octets(keyId(spkiOf(key)))),
    ],
  });
  return { cert, key: pemOfKey(key) };
}

function generalName(name: string): Buffer {
  if (isIP(name) !== 0) return context(7, false, addressBytes(name));
  return context(2, false, Buffer.from(name, "latin1"));
}

/**
 * A server certificate for DNS names (wildcards among them) and IP addresses. `key` (PEM) is used again when given.
 * `cert` is the chain: the server's certificate, then the authority's.
 */
export function issue(authority: CertAndKey, names: readonly string[], now: number, key?: string): CertAndKey {
  const [first] = names;
  if (first === undefined) throw new AenvError("INVALID_ARGUMENT", "a certificate needs a name");
  const own = key === undefined ? newKey() : createPrivateKey(key);
  const ca = new X509Certificate(authority.cert);
  const signer = createPrivateKey(authority.key);
  const cert = certificate({
    issuer: ca.subject.replace(/^CN=/, ""),
    subject: first.length <= 64 ? first : "AgentENV",
    key: own,
    signer,
    from: now - BACKDATE_MS,
    // Never longer than its authority.
    days: Math.min(LEAF_DAYS, Math.floor((Date.parse(ca.validTo) - now + BACKDATE_MS) / DAY_MS)),
    extensions: [
      extension(EXTENSION.basicConstraints, true, sequence()),
      extension(EXTENSION.keyUsage, true, bits(...CAN_SIGN)),
      extension(EXTENSION.extendedKeyUsage, false, sequence(oid(SERVER_AUTH))),
      extension(EXTENSION.altName, false, sequence(...names.map(generalName))),
      extension(EXTENSION.subjectKey, false, octets(keyId(spkiOf(own)))),
      extension(EXTENSION.authorityKey, false, sequence(context(0, false, keyId(spkiOf(signer))))),
    ],
  });
  return { cert: cert + authority.cert, key: pemOfKey(own) };
}
