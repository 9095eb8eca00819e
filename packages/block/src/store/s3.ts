import {
  AbortMultipartUploadCommand,
  CompleteMultipartUploadCommand,
  CreateMultipartUploadCommand,
  DeleteObjectCommand,
  GetObjectCommand,
  HeadObjectCommand,
  ListMultipartUploadsCommand,
  ListObjectsV2Command,
  PutObjectCommand,
  S3Client,
  UploadPartCommand,
} from "@aws-sdk/client-s3";
import { NodeHttpHandler } from "@smithy/node-http-handler";
import { AenvError, errnoOf, sleep } from "@aenv/base";
import { type BlobInfo, type BlobSource, type BlobStore, checkKey, inPieces, missing, tooShort } from "./port.ts";

const MIB = 1024 * 1024;
const PARALLEL = 4;
/** Smaller objects go in one request. */
const PART_BYTES = 16 * MIB;
const MAX_PARTS = 10_000;
const RANGE_BYTES = 8 * MIB;
/** One request, answer included. */
const REQUEST_MS = 60_000;
/** With the pauses between them they take about 15 s where the store refuses at once. */
const ATTEMPTS = 9;
const FIRST_PAUSE_MS = 100;
const LONGEST_PAUSE_MS = 3000;

export interface S3Options {
  bucket: string;
  /** Put before every key, with its slash. */
  prefix: string;
  /** Of another store than Amazon's. */
  endpoint?: string;
  region?: string;
  /** The bucket's name in the path: what most stores other than Amazon's want. */
  pathStyle?: boolean;
  /** Milliseconds of one request. */
  requestMs?: number;
  attempts?: number;
}

/** Any store that speaks S3. Credentials come from where the AWS tools look: environment, files, roles. */
export class S3Store implements BlobStore {
  readonly name: string;
  readonly #client: S3Client;
  readonly #bucket: string;
  readonly #prefix: string;
  readonly #requestMs: number;
  readonly #attempts: number;

  constructor(options: S3Options) {
    const {
      bucket,
      prefix,
      endpoint,
      region,
      pathStyle = false,
      requestMs = REQUEST_MS,
      attempts = ATTEMPTS,
    } = options;
    this.name = `s3://${bucket}/${prefix}`;
    this.#bucket = bucket;
    this.#prefix = prefix;
    this.#requestMs = requestMs;
    this.#attempts = attempts;
    this.#client = new S3Client({
      ...(endpoint === undefined ? {} : { endpoint }),
      ...(region === undefined ? {} : { region }),
      forcePathStyle: pathStyle,
      // Retrying is ours: the client does not repeat a body that broke off.
      maxAttempts: 1,
      // Every object of ours is checked by its own digest; many stores refuse the newer checksums.
      requestChecksumCalculation: "WHEN_REQUIRED",
      responseChecksumValidation: "WHEN_REQUIRED",
      requestHandler: new NodeHttpHandler({ connectionTimeout: 10_000 }),
    });
  }

  async put(key: string, content: Buffer | BlobSource, signal?: AbortSignal): Promise<void> {
    const Key = this.#key(key);
    const at = { Bucket: this.#bucket, Key };
    const source = Buffer.isBuffer(content) ? bufferSource(content) : content;
    if (source.bytes <= PART_BYTES) {
      const Body = await source.read(0, source.bytes);
      await this.#try(key, signal, (abortSignal) =>
        this.#client.send(new PutObjectCommand({ ...at, Body }), { abortSignal }),
      );
      return;
    }
    const { UploadId } = await this.#try(key, signal, (abortSignal) =>
      this.#client.send(new CreateMultipartUploadCommand(at), { abortSignal }),
    );
    try {
      const partBytes = Math.max(PART_BYTES, Math.ceil(source.bytes / MAX_PARTS / MIB) * MIB);
      const Parts: { PartNumber: number; ETag: string | undefined }[] = [];
      await inPieces(
        source.bytes,
        partBytes,
        PARALLEL,
        async (position, length, index, either) => {
          const Body = await source.read(position, length);
          const PartNumber = index + 1;
          const { ETag } = await this.#try(key, either, (abortSignal) =>
            this.#client.send(new UploadPartCommand({ ...at, UploadId, PartNumber, Body }), { abortSignal }),
          );
          Parts[index] = { PartNumber, ETag };
        },
        signal,
      );
      await this.#try(key, signal, (abortSignal) =>
        this.#client.send(new CompleteMultipartUploadCommand({ ...at, UploadId, MultipartUpload: { Parts } }), {
          abortSignal,
        }),
      );
    } catch (e) {
      // What cannot be aborted now is swept later.
      await this.#client
        .send(new AbortMultipartUploadCommand({ ...at, UploadId }), { abortSignal: AbortSignal.timeout(5000) })
        .catch(() => {});
      throw e;
    }
  }

  async stat(key: string, signal?: AbortSignal): Promise<BlobInfo | undefined> {
    const Key = this.#key(key);
    try {
      const { ContentLength = 0, LastModified } = await this.#try(key, signal, (abortSignal) =>
        this.#client.send(new HeadObjectCommand({ Bucket: this.#bucket, Key }), { abortSignal }),
      );
      return { key, bytes: ContentLength, modifiedAt: LastModified?.getTime() ?? 0 };
    } catch (e) {
      if (e instanceof AenvError && e.code === "NOT_FOUND") return undefined;
      throw e;
    }
  }

  async read(key: string, position: number, length: number, signal?: AbortSignal): Promise<Buffer> {
    const Key = this.#key(key);
    if (length === 0) return Buffer.alloc(0);
    const get = async (from: number, bytes: number, either: AbortSignal | undefined): Promise<Buffer> =>
      await this.#try(key, either, async (abortSignal) => {
        const Range = `bytes=${from}-${from + bytes - 1}`;
        const command = new GetObjectCommand({ Bucket: this.#bucket, Key, Range });
        const { Body, ContentLength } = await this.#client.send(command, { abortSignal });
        if (!Body) throw new Error("an answer without a body");
        if (ContentLength !== bytes) {
          (Body as { destroy?: () => void }).destroy?.();
          throw tooShort(this.name, key);
        }
        const data = Buffer.from(await Body.transformToByteArray());
        if (data.length !== bytes) throw new Error(`the answer ended after ${data.length} of ${bytes} bytes`);
        return data;
      });
    if (length <= RANGE_BYTES) return await get(position, length, signal);
    const { bytes } = (await this.stat(key, signal)) ?? { bytes: undefined };
    if (bytes === undefined) throw missing(this.name, key);
    if (position + length > bytes) throw tooShort(this.name, key);
    const into = Buffer.allocUnsafeSlow(length);
    await inPieces(
      length,
      RANGE_BYTES,
      PARALLEL,
      async (at, n, _index, either) => void (await get(position + at, n, either)).copy(into, at),
      signal,
    );
    return into;
  }

  async *list(prefix: string, signal?: AbortSignal): AsyncGenerator<BlobInfo> {
    let ContinuationToken: string | undefined;
    do {
      const at = { Bucket: this.#bucket, Prefix: this.#prefix + prefix, ContinuationToken };
      const page = await this.#try(prefix, signal, (abortSignal) =>
        this.#client.send(new ListObjectsV2Command(at), { abortSignal }),
      );
      for (const { Key, Size = 0, LastModified } of page.Contents ?? []) {
        if (Key === undefined || Key.endsWith("/")) continue;
        yield { key: Key.slice(this.#prefix.length), bytes: Size, modifiedAt: LastModified?.getTime() ?? 0 };
      }
      ContinuationToken = page.IsTruncated === true ? page.NextContinuationToken : undefined;
    } while (ContinuationToken !== undefined);
  }

  async delete(key: string, signal?: AbortSignal): Promise<void> {
    const Key = this.#key(key);
    await this.#try(key, signal, (abortSignal) =>
      this.#client.send(new DeleteObjectCommand({ Bucket: this.#bucket, Key }), { abortSignal }),
    );
  }

  async sweep(before: number, signal?: AbortSignal): Promise<number> {
    const { Uploads = [] } = await this.#try("uploads", signal, (abortSignal) =>
      this.#client.send(new ListMultipartUploadsCommand({ Bucket: this.#bucket, Prefix: this.#prefix }), {
        abortSignal,
      }),
    );
    let swept = 0;
    for (const { Key, UploadId, Initiated } of Uploads) {
      if (Key === undefined || (Initiated?.getTime() ?? 0) >= before) continue;
      const at = { Bucket: this.#bucket, Key, UploadId };
      await this.#try(Key, signal, (abortSignal) =>
        this.#client.send(new AbortMultipartUploadCommand(at), { abortSignal }),
      );
      swept++;
    }
    return swept;
  }

  [Symbol.dispose](): void {
    this.#client.destroy();
  }

  #key(key: string): string {
    return this.#prefix + checkKey(key);
  }

  /** One request, and again after a pause when it may succeed then. */
  async #try<T>(
    key: string,
    signal: AbortSignal | undefined,
    fn: (abortSignal: AbortSignal) => Promise<T>,
  ): Promise<T> {
    for (let attempt = 1; ; attempt++) {
      signal?.throwIfAborted();
      const deadline = AbortSignal.timeout(this.#requestMs);
      try {
        return await fn(signal === undefined ? deadline : AbortSignal.any([signal, deadline]));
      } catch (e) {
        signal?.throwIfAborted();
        const error = this.#explain(e, key);
        if (!error.retry || attempt === this.#attempts) throw error;
      }
      // Nodes that were refused together come back one by one.
      const pause = Math.min(LONGEST_PAUSE_MS, FIRST_PAUSE_MS * 2 ** (attempt - 1));
      await sleep(pause * (0.5 + Math.random()), signal);
    }
  }

  #explain(e: unknown, key: string): AenvError {
    if (e instanceof AenvError) return e;
    const {
      name = "",
      message = String(e),
      $metadata,
    } = e as {
      name?: string;
      message?: string;
      $metadata?: { httpStatusCode?: number };
    };
    const status = $metadata?.httpStatusCode;
    const text = `${this.name}${key}: ${message === "UnknownError" ? `status ${status}` : message}`;
    const data = { store: this.name, key };
    if (name === "NoSuchBucket") {
      const hint = `Make the bucket ${this.#bucket}, or correct the address of the store.`;
      return new AenvError("INVALID_ARGUMENT", text, { cause: e, data, hint });
    }
    if (status === 404 || name === "NoSuchKey" || name === "NotFound") return missing(this.name, key, e);
    if (status === 416) return tooShort(this.name, key);
    if (name === "CredentialsProviderError" || status === 401 || status === 403) {
      const hint =
        "Set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE, for the node, with the right to this bucket.";
      return new AenvError("PERMISSION_DENIED", text, { cause: e, data, hint });
    }
    if (status !== undefined && status >= 400 && status < 500 && status !== 408 && status !== 429) {
      return new AenvError("INVALID_ARGUMENT", text, { cause: e, data });
    }
    const hint = "Check the object store and the network to it; what was asked for may be repeated.";
    const reason = errnoOf(e) === undefined ? text : `${text} (${errnoOf(e)})`;
    return new AenvError("UNAVAILABLE", reason, { cause: e, data, hint });
  }
}

function bufferSource(b: Buffer): BlobSource {
  return { bytes: b.length, read: (position, length) => Promise.resolve(b.subarray(position, position + length)) };
}
