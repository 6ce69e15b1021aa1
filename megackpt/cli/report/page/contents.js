// What the page is about: the columns that Python wrote, and what follows from them.

/**
 * @typedef {{offset: number[], extent: number[]}} Box
 * @typedef {Box & {count: number}} Flaw  a region, and how often it is covered (-1: no part of the tensor)
 * @typedef {Box & {number: number, writer: number, file: number, start: number, length: number}} Piece
 * @typedef {{rank: number, replica: string, main: boolean}} Holder
 * @typedef {{label: string, value: number, held: number, number: number}} Bar
 */

const ROLES = ["weights", "optimizer", "objects"];
const OPTIMIZER = /(^|[._])(optim(izers?)?|(max_)?exp_avg(_sq)?|fp32_param|momentum_buffer)([._]|$)/;

class Contents {
  /** @param {any} told  what megackpt/cli/report/contents.py wrote */
  constructor(told) {
    const { tensors, pieces, holders } = told;
    this.told = told;
    this.flaw = "not covered exactly";
    this.declared = told.kind === "declaration";
    /** @type {string[]} */
    this.keys = tensors.key;
    this.size = this.keys.length;
    this.shapes = ragged(tensors.shape, tensors.ndim);
    this.first = starts(pieces.count); // the pieces of tensor t: first[t] to first[t + 1]
    this.owner = new Int32Array(this.first[this.size]);
    for (let t = 0; t < this.size; t++) this.owner.fill(t, this.first[t], this.first[t + 1]);
    this.corner = starts(Array.from(this.owner, (t) => tensors.ndim[t]));
    this.pieces = pieces;
    this.held = holders && starts(holders.count);
    this.heldBy = holders && holders.count.flatMap((/** @type {number} */ n, /** @type {number} */ i) => Array(n).fill(i));
    this.world = 1 + largest(pieces.writer, holders ? holders.rank : [], told.idle ?? []);
    this.row = new Int32Array(this.size); // of the overview, by tensor
    told.overview.tensors.forEach((/** @type {number[]} */ own, /** @type {number} */ r) => own.forEach((t) => (this.row[t] = r)));
    this.tensorBytes = new Float64Array(this.size);
    pieces.length.forEach((/** @type {number} */ n, /** @type {number} */ i) => (this.tensorBytes[this.owner[i]] += n));
    /** @type {Map<number, string>} */
    this.problems = new Map(told.problems);
    this.flaws = this.readFlaws(told.flaws);
  }

  /** @param {any} told @returns {Map<number, Flaw[]>} */
  readFlaws(told) {
    const found = new Map();
    const ndims = told.tensor.map((/** @type {number} */ t) => this.shapes[t].length);
    const offsets = ragged(told.offset, ndims);
    const extents = ragged(told.extent, ndims);
    told.tensor.forEach((/** @type {number} */ t, /** @type {number} */ i) => {
      if (!found.has(t)) found.set(t, []);
      found.get(t).push({ offset: offsets[i], extent: extents[i], count: told.count[i] });
    });
    return found;
  }

  /** @param {number} t */
  dtype(t) {
    return this.told.dtypes[this.told.tensors.dtype[t]];
  }

  /** @param {number} t */
  isObject(t) {
    return this.dtype(t) === "object";
  }

  /** An index of ROLES. @param {number} t */
  role(t) {
    return this.isObject(t) ? 2 : Number(OPTIMIZER.test(this.keys[t]));
  }

  /** @param {number} t */
  elements(t) {
    return this.shapes[t].reduce((product, n) => product * n, 1);
  }

  /** @param {number} i @returns {Piece} */
  piece(i) {
    const [begin, end] = [this.corner[i], this.corner[i + 1]];
    const { offset, extent, writer, file, start, length } = this.pieces;
    return {
      number: i,
      offset: offset.slice(begin, end),
      extent: extent.slice(begin, end),
      writer: writer[i],
      file: file ? file[i] : -1,
      start: start ? start[i] : 0,
      length: length[i],
    };
  }

  /** @param {number} t @returns {Piece[]} */
  piecesOf(t) {
    return Array.from({ length: this.first[t + 1] - this.first[t] }, (_, i) => this.piece(this.first[t] + i));
  }

  /** Who holds a piece (declarations only). @param {number} i @returns {Holder[]} */
  holders(i) {
    if (!this.held) return [];
    const { rank, replica } = this.told.holders;
    return Array.from({ length: this.held[i + 1] - this.held[i] }, (_, n) => {
      const [name, main] = this.told.replicas[replica[this.held[i] + n]];
      return { rank: rank[this.held[i] + n], replica: name, main };
    });
  }

  /** @param {number} i */
  copies(i) {
    return this.held ? this.held[i + 1] - this.held[i] : 1;
  }

  /**
   * Calls `visit` with the number of each piece of these tensors.
   * @param {Iterable<number>} tensors
   * @param {(i: number) => void} visit
   */
  each(tensors, visit) {
    for (const t of tensors) for (let i = this.first[t]; i < this.first[t + 1]; i++) visit(i);
  }

  /**
   * Bytes that each rank writes, and holds.
   * @param {Iterable<number>} tensors
   * @param {boolean} all  tell ranks that declare nothing, too
   */
  byRank(tensors, all) {
    const { writer, length } = this.pieces;
    const bars = new Bars();
    for (const rank of (all && this.told.idle) || []) bars.of(rank, `rank ${rank}`);
    this.each(tensors, (i) => {
      if (writer[i] >= 0) bars.of(writer[i], `rank ${writer[i]}`).value += length[i];
      if (!this.held) return;
      for (let n = this.held[i]; n < this.held[i + 1]; n++) {
        const rank = this.told.holders.rank[n];
        bars.of(rank, `rank ${rank}`).held += length[i];
      }
    });
    return bars.sorted();
  }

  /** @param {Iterable<number>} tensors @returns {Bar[]} */
  byFile(tensors) {
    const { file, length } = this.pieces;
    const bars = new Bars();
    if (file) {
      this.each(tensors, (i) => {
        if (file[i] >= 0) bars.of(file[i], this.told.files[file[i]]).value += length[i];
      });
    }
    return bars.sorted();
  }

  /** @param {Iterable<number>} tensors @returns {Bar[]} */
  byDtype(tensors) {
    const bars = new Bars();
    for (const t of tensors) bars.of(this.told.tensors.dtype[t], this.dtype(t)).value += this.tensorBytes[t];
    return bars.sorted();
  }

  /** Bytes by number of copies of a box. @param {Iterable<number>} tensors */
  byCopies(tensors) {
    /** @type {Map<number, {copies: number, shards: number, size: number}>} */
    const rows = new Map();
    this.each(tensors, (i) => {
      const copies = this.copies(i);
      let row = rows.get(copies);
      if (!row) rows.set(copies, (row = { copies, shards: 0, size: 0 }));
      row.shards++;
      row.size += this.pieces.length[i];
    });
    return [...rows.values()].sort((a, b) => a.copies - b.copies);
  }

  /** The tensors with a piece in this file, or by this rank. @param {{file?: number, rank?: number}} wanted */
  tensorsWith({ file, rank }) {
    const found = new Set();
    for (let i = 0; i < this.owner.length; i++) {
      const fits = file === undefined ? this.concerns(i, /** @type {number} */ (rank)) : this.pieces.file[i] === file;
      if (fits) found.add(this.owner[i]);
    }
    return found;
  }

  /** @param {number} i @param {number} rank */
  concerns(i, rank) {
    if (!this.held) return this.pieces.writer[i] === rank;
    for (let n = this.held[i]; n < this.held[i + 1]; n++) if (this.told.holders.rank[n] === rank) return true;
    return false;
  }
}

/** Sums by number, each with a label. */
class Bars {
  constructor() {
    /** @type {Map<number, Bar>} */
    this.rows = new Map();
  }

  /** @param {number} number @param {string} label */
  of(number, label) {
    let bar = this.rows.get(number);
    if (!bar) this.rows.set(number, (bar = { label, number, value: 0, held: 0 }));
    return bar;
  }

  sorted() {
    return [...this.rows.values()].sort((a, b) => a.number - b.number);
  }
}

/** The largest of these numbers, or -1. @param {...number[]} columns */
const largest = (...columns) => columns.reduce((all, column) => column.reduce((n, m) => Math.max(n, m), all), -1);

/** Where each of these runs begins, and where the last ends. @param {ArrayLike<number>} counts */
function starts(counts) {
  const found = new Float64Array(counts.length + 1);
  for (let i = 0; i < counts.length; i++) found[i + 1] = found[i] + counts[i];
  return found;
}

/** @param {number[]} flat @param {number[]} lengths @returns {number[][]} */
function ragged(flat, lengths) {
  let at = 0;
  return lengths.map((n) => flat.slice(at, (at += n)));
}

/** Undoes what assembling.py did: base64, gzip, JSON. @param {string} packed */
async function unpacked(packed) {
  const compressed = Uint8Array.from(atob(packed), (c) => c.charCodeAt(0));
  const stream = new Blob([compressed]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Response(stream).json();
}
