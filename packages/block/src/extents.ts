/**
 * An immutable, sorted map from virtual sectors to places in files, as typed arrays over shared memory, so that threads
 * share one copy. Extents do not overlap. Lengths are not limited here (the file format's limit is applied on writing).
 */
export interface ExtentMap {
  readonly count: number;
  /** First virtual sector. */
  readonly start: Float64Array;
  /** First virtual sector behind the extent. */
  readonly end: Float64Array;
  /** Sector in the file that `file` names. */
  readonly place: Float64Array;
  /** Index into the list of files of the stack, bottom first; ZEROED reads as zeros. */
  readonly file: Uint16Array;
}

export const ZEROED = 0xffff;

function allocate(count: number): ExtentMap {
  return {
    count,
    start: new Float64Array(new SharedArrayBuffer(count * 8)),
    end: new Float64Array(new SharedArrayBuffer(count * 8)),
    place: new Float64Array(new SharedArrayBuffer(count * 8)),
    file: new Uint16Array(new SharedArrayBuffer(count * 2)),
  };
}

export const EMPTY_MAP: ExtentMap = allocate(0);

/** Appends extents in order and merges those that continue each other. */
export class ExtentBuilder {
  #map: ExtentMap;
  #count = 0;

  constructor(capacity: number) {
    this.#map = allocate(Math.max(16, capacity));
  }

  /** `start` must not be below the end of the last extent. */
  add(start: number, end: number, place: number, file: number): void {
    if (start >= end) return;
    const m = this.#map;
    const last = this.#count - 1;
    if (
      last >= 0 &&
      m.end[last] === start &&
      m.file[last] === file &&
      (file === ZEROED || (m.place[last] as number) + start - (m.start[last] as number) === place)
    ) {
      m.end[last] = end;
      return;
    }
    if (this.#count === m.start.length) this.#grow();
    const at = this.#count++;
    this.#map.start[at] = start;
    this.#map.end[at] = end;
    this.#map.place[at] = place;
    this.#map.file[at] = file;
  }

  build(): ExtentMap {
    const n = this.#count;
    const m = this.#map;
    return {
      count: n,
      start: m.start.subarray(0, n),
      end: m.end.subarray(0, n),
      place: m.place.subarray(0, n),
      file: m.file.subarray(0, n),
    };
  }

  #grow(): void {
    const old = this.#map;
    const m = allocate(old.start.length * 2);
    m.start.set(old.start);
    m.end.set(old.end);
    m.place.set(old.place);
    m.file.set(old.file);
    this.#map = m;
  }
}

/** Index of the first extent whose end is above `sector`; `count` when there is none. */
export function findExtent(map: ExtentMap, sector: number): number {
  let low = 0;
  let high = map.count;
  const { end } = map;
  while (low < high) {
    const mid = (low + high) >>> 1;
    if ((end[mid] as number) > sector) high = mid;
    else low = mid + 1;
  }
  return low;
}

/** `upper` over `lower`: where both have an extent, the upper's wins. File numbers of `upper` are moved up by `shift`. */
export function overlay(lower: ExtentMap, upper: ExtentMap, shift: number): ExtentMap {
  const out = new ExtentBuilder(lower.count + upper.count);
  const file = (u: number): number => (upper.file[u] === ZEROED ? ZEROED : (upper.file[u] as number) + shift);
  let l = 0;
  /** The lower extent `l` is used up to here. */
  let from = 0;
  const lowerUntil = (limit: number): void => {
    while (l < lower.count && (lower.start[l] as number) < limit) {
      const start = lower.start[l] as number;
      const end = lower.end[l] as number;
      const a = Math.max(start, from);
      const b = Math.min(end, limit);
      if (a < b) {
        const f = lower.file[l] as number;
        out.add(a, b, f === ZEROED ? (lower.place[l] as number) : (lower.place[l] as number) + a - start, f);
      }
      if (end > limit) return;
      l++;
    }
  };
  for (let u = 0; u < upper.count; u++) {
    const start = upper.start[u] as number;
    const end = upper.end[u] as number;
    lowerUntil(start);
    out.add(start, end, upper.place[u] as number, file(u));
    from = end;
    while (l < lower.count && (lower.end[l] as number) <= end) l++;
  }
  lowerUntil(Number.POSITIVE_INFINITY);
  return out.build();
}

/** One map of a whole stack, bottom first; the file number is the position in `layers`. Merges in pairs, so depth costs a logarithm. */
export function mergeStack(layers: readonly ExtentMap[]): ExtentMap {
  const merge = (from: number, to: number): ExtentMap => {
    if (to - from === 0) return EMPTY_MAP;
    if (to - from === 1) return layers[from] as ExtentMap;
    const mid = (from + to) >>> 1;
    return overlay(merge(from, mid), merge(mid, to), mid - from);
  };
  return merge(0, layers.length);
}
