export { BlockdClient } from "./client.ts";
export {
  type DiskSpec,
  diskSpecSchema,
  importSchema,
  type LayerInfo,
  type LayerRef,
  layerRefSchema,
  mergeSchema,
  restackSchema,
  type PingInfo,
} from "./control.ts";
export { Disk, type DiskExtent, EMPTY_STACK, type Stack } from "./disk.ts";
export { EMPTY_MAP, ExtentBuilder, type ExtentMap, findExtent, mergeStack, overlay, ZEROED } from "./extents.ts";
export { importRaw } from "./import.ts";
export { type LayerForm, openLayer, type SealedLayer } from "./layer.ts";
export { LayerWriter, type LayerWriterOptions } from "./layer-writer.ts";
export { mergeLayers, type MergeOptions } from "./merge.ts";
export { fileSink, type Sink } from "./sink.ts";
export { FileSource, openSource, type SharedFile, type Source } from "./source.ts";
export { type Durability, Upper, type UpperFiles } from "./upper.ts";
export { type ZFileOptions, ZFileWriter } from "./zfile.ts";
export type { Compression } from "./zfile-codec.ts";
export { TarWriter, tarBytes } from "./tar.ts";
export { exportSnapshot, importSnapshot } from "./store/archive.ts";
export { collectGarbage, type Collected, type CollectOptions, type SnapshotUse, storeUse } from "./store/collect.ts";
export { type Encoding, storedAlready } from "./store/encode.ts";
export { FolderStore } from "./store/folder.ts";
export { openStore } from "./store/open.ts";
export type { BlobInfo, BlobSource, BlobStore } from "./store/port.ts";
export {
  type PublishFile,
  type PublishOptions,
  type SnapshotManifest,
  SnapshotRepository,
  type StoredBlob,
} from "./store/repository.ts";
export type { CacheStats } from "./cache/cache.ts";
export { openRemoteSource, type RemoteLayer, RemoteLayers, type SharedRemote } from "./cache/remote.ts";
export type { LoadPieces } from "./cache/slots.ts";
export { type LayerStub, readStub, writeStub } from "./cache/stub.ts";
