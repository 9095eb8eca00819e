/** A real registry (Debian's docker-registry) on loopback, and images made on the spot. */
import { type ChildProcess, spawn } from "node:child_process";
import { createHash } from "node:crypto";
import { once } from "node:events";
import { existsSync, mkdtempSync, rmSync, writeFileSync } from "node:fs";
import { createServer } from "node:net";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { gzipSync, zstdCompressSync } from "node:zlib";

const BINARY = "/usr/bin/docker-registry";
const READY_TRIES = 2000;

export const digestOf = (b: Buffer): string => `sha256:${createHash("sha256").update(b).digest("hex")}`;

function freePort(): Promise<number> {
  return new Promise((done, failed) => {
    const probe = createServer();
    probe.on("error", failed);
    probe.listen(0, "127.0.0.1", () => {
      const address = probe.address();
      probe.close(() => done(typeof address === "object" && address ? address.port : 0));
    });
  });
}

export interface TestImage {
  layers: { tar: Buffer; compression: "none" | "gzip" | "zstd" }[];
  config?: Record<string, unknown>;
  architecture?: string;
}

export interface Pushed {
  digest: string;
  /** As the registry has them. */
  layers: { digest: string; bytes: Buffer }[];
}

export class TestRegistry implements AsyncDisposable {
  readonly host: string;
  readonly dir: string;
  readonly #authorization: string | undefined;
  #child: ChildProcess | undefined;

  private constructor(port: number, authorization: string | undefined) {
    this.host = `127.0.0.1:${port}`;
    this.dir = mkdtempSync(join(tmpdir(), "aenv-registry-"));
    this.#authorization = authorization;
  }

  /** `htpasswd`: a line of such a file (bcrypt), and the authorization that fits it. */
  static async start(auth?: { htpasswd: string; authorization: string }): Promise<TestRegistry> {
    if (!existsSync(BINARY)) throw new Error("docker-registry is not installed: apt-get install docker-registry");
    const port = await freePort();
    const registry = new TestRegistry(port, auth?.authorization);
    const config = {
      version: 0.1,
      storage: { filesystem: { rootdirectory: join(registry.dir, "data") } },
      http: { addr: `127.0.0.1:${port}` },
      log: { level: "error" },
      ...(auth ? { auth: { htpasswd: { realm: "test", path: join(registry.dir, "htpasswd") } } } : {}),
    };
    if (auth) writeFileSync(join(registry.dir, "htpasswd"), `${auth.htpasswd}\n`);
    // JSON is YAML.
    writeFileSync(join(registry.dir, "config.yml"), JSON.stringify(config));
    await registry.up();
    return registry;
  }

  async up(): Promise<void> {
    const child = spawn(BINARY, ["serve", join(this.dir, "config.yml")], { stdio: "ignore" });
    this.#child = child;
    for (let i = 0; i < READY_TRIES; i++) {
      if (child.exitCode !== null) throw new Error(`docker-registry ended with ${child.exitCode}`);
      const answers = await fetch(`http://${this.host}/v2/`).then(
        () => true,
        () => false,
      );
      if (answers) return;
      await new Promise((r) => setTimeout(r, 10));
    }
    throw new Error("docker-registry did not become ready");
  }

  async down(): Promise<void> {
    const child = this.#child;
    if (!child || child.exitCode !== null || child.signalCode !== null) return;
    const exited = once(child, "exit");
    child.kill("SIGKILL");
    await exited;
  }

  /** Where the registry keeps a blob. */
  file(digest: string): string {
    const hex = digest.slice("sha256:".length);
    return join(this.dir, "data/docker/registry/v2/blobs/sha256", hex.slice(0, 2), hex, "data");
  }

  async push(repository: string, tag: string, image: TestImage): Promise<Pushed> {
    const layers: Pushed["layers"] = [];
    const descriptors: unknown[] = [];
    for (const { tar, compression } of image.layers) {
      const bytes = compression === "gzip" ? gzipSync(tar) : compression === "zstd" ? zstdCompressSync(tar) : tar;
      const suffix = compression === "none" ? "" : `+${compression}`;
      layers.push({ digest: digestOf(bytes), bytes });
      await this.#upload(repository, bytes);
      const mediaType = `application/vnd.oci.image.layer.v1.tar${suffix}`;
      descriptors.push({ mediaType, digest: digestOf(bytes), size: bytes.length });
    }
    const config = Buffer.from(
      JSON.stringify({
        architecture: image.architecture ?? "amd64",
        os: "linux",
        config: image.config ?? {},
        rootfs: { type: "layers", diff_ids: image.layers.map((l) => digestOf(l.tar)) },
      }),
    );
    await this.#upload(repository, config);
    const manifest = {
      schemaVersion: 2,
      mediaType: "application/vnd.oci.image.manifest.v1+json",
      config: { mediaType: "application/vnd.oci.image.config.v1+json", digest: digestOf(config), size: config.length },
      layers: descriptors,
    };
    return { digest: await this.putManifest(repository, tag, manifest), layers };
  }

  /** Returns its digest. */
  async putManifest(repository: string, tag: string, manifest: { mediaType: string }): Promise<string> {
    const body = Buffer.from(JSON.stringify(manifest));
    await this.#call("PUT", `/v2/${repository}/manifests/${tag}`, body, { "content-type": manifest.mediaType });
    return digestOf(body);
  }

  async #upload(repository: string, bytes: Buffer): Promise<void> {
    const begun = await this.#call("POST", `/v2/${repository}/blobs/uploads/`);
    const location = new URL(begun.headers.get("location") ?? "", `http://${this.host}`);
    location.searchParams.set("digest", digestOf(bytes));
    const headers = { "content-type": "application/octet-stream" };
    await this.#call("PUT", `${location.pathname}${location.search}`, bytes, headers);
  }

  async #call(method: string, path: string, body?: Buffer, headers: Record<string, string> = {}): Promise<Response> {
    const auth = this.#authorization === undefined ? {} : { authorization: this.#authorization };
    const init = { method, headers: { ...headers, ...auth }, ...(body ? { body: new Uint8Array(body) } : {}) };
    const res = await fetch(`http://${this.host}${path}`, init);
    await res.arrayBuffer();
    if (!res.ok) throw new Error(`${method} ${path}: ${res.status}`);
    return res;
  }

  async [Symbol.asyncDispose](): Promise<void> {
    await this.down();
    rmSync(this.dir, { recursive: true, force: true });
  }
}
