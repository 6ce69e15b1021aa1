// Numbers, places and ranks in words.

const grouped = new Intl.NumberFormat("en");

/** @param {number} n */
const count = (n) => grouped.format(n);

/** "1 tensor", "10,000 tensors". @param {number} n @param {string} one @param {string} [many] */
const plural = (n, one, many = `${one}s`) => `${count(n)} ${n === 1 ? one : many}`;

/** @param {number} n */
function bytes(n) {
  let power = 0;
  while (n / 1024 ** power >= 1024 && power < 6) power++;
  const value = n / 1024 ** power;
  const unit = ["B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"][power];
  return `${power && value < 100 ? value.toFixed(1) : Math.round(value)} ${unit}`;
}

/** @param {number} part @param {number} whole */
const percent = (part, whole) => (whole ? `${((100 * part) / whole).toFixed(1)} %` : "");

/** @param {readonly number[]} shape */
const shapeText = (shape) => (shape.length ? shape.map(count).join(" × ") : "scalar");

/** A box as Python slices it: "[0:512, 1024:2048]". @param {Box} box */
const boxText = ({ offset, extent }) => `[${offset.map((o, axis) => `${o}:${o + extent[axis]}`).join(", ")}]`;

/** "rank 3"; "ranks 0–7, 16". @param {Iterable<number>} ranks */
function rankText(ranks) {
  /** @type {number[][]} */
  const spans = [];
  for (const rank of [...new Set(ranks)].sort((a, b) => a - b)) {
    const last = spans.at(-1);
    if (last && rank === last[1] + 1) last[1] = rank;
    else spans.push([rank, rank]);
  }
  const told = spans.slice(0, 8).map(([a, b]) => (a === b ? `${a}` : a + 1 === b ? `${a}, ${b}` : `${a}–${b}`));
  if (spans.length > 8) told.push("…");
  return `${spans.length === 1 && spans[0][0] === spans[0][1] ? "rank" : "ranks"} ${told.join(", ")}`;
}

/** What is wrong with a region. @param {Flaw} flaw @param {boolean} declared */
function flawText(flaw, declared) {
  const where = flaw.offset.length ? boxText(flaw) : "its only element";
  if (flaw.count < 0) return `${where} lies outside of the tensor`;
  if (declared) return `${where} has ${flaw.count ? `${count(flaw.count)} main replicas` : "no main replica"}`;
  return `${where} is in ${flaw.count ? `${count(flaw.count)} chunks` : "no chunk"}`;
}

/**
 * The test that a key contains each word of a query; "*" stands for anything, "?" for one character.
 * @param {string} query
 * @returns {(key: string) => boolean}
 */
function matcher(query) {
  const words = query
    .trim()
    .split(/\s+/)
    .map((word) => word.split("*").filter(Boolean).map(literal));
  return (key) =>
    words.every((parts) => {
      let at = 0; // parts are found one after the other: no backtracking, whatever the key
      return parts.every((part) => {
        part.lastIndex = at;
        const found = part.test(key);
        at = part.lastIndex;
        return found;
      });
    });
}

/** @param {string} text */
const literal = (text) =>
  new RegExp(text.replace(/[\\^$.|?*+()[\]{}]/g, (c) => (c === "?" ? "." : `\\${c}`)), "gis");
