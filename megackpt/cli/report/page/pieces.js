// One piece in words: where its bytes are, who holds it, whether it has digests.

/** @param {Contents} contents @param {Piece} piece */
function placeText(contents, piece) {
  if (piece.file < 0) return "";
  const file = contents.told.files[piece.file];
  return piece.length ? `${file}, bytes ${spanText(piece)}` : file;
}

/** @param {Piece} piece */
const spanText = ({ start, length }) => `${count(start)} to ${count(start + length)}`;

/** @param {string} text @param {() => void} click */
const link = (text, click) => make("button", { type: "button", class: "link key", click }, text);

/** @param {Contents} contents @param {Piece} piece */
function writerText(contents, piece) {
  if (piece.writer < 0) return contents.declared ? "nobody writes this" : "";
  return `${contents.declared ? "to be written" : "written"} by rank ${piece.writer}`;
}

/** @param {Contents} contents @param {Piece} piece @param {boolean} [brief] */
function digestText(contents, piece, brief = false) {
  const { block } = contents.told;
  if (!block) return brief ? "none" : "no digests";
  const blocks = Math.ceil(piece.length / block);
  return brief ? `${blocks}` : `${plural(blocks, "digest")} (xxh3-128 of each MiB)`;
}

/** "main: rank 0 · held by ranks 0–7". @param {Holder[]} holders */
function holdersText(holders) {
  if (!holders.length) return "";
  const main = holders.filter((holder) => holder.main).map((holder) => holder.rank);
  const who = rankText(holders.map((holder) => holder.rank));
  return `${main.length ? `main: ${rankText(main)}` : "none is the main replica"} · held by ${who}`;
}

const NAMED = 64; // holders of a piece told one by one

/** @param {Page} page @param {Piece} piece */
function pieceFacts(page, piece) {
  const { contents } = page;
  const holders = contents.holders(piece.number);
  const file = contents.told.files[piece.file];
  const nobody = contents.declared ? "nobody" : "";
  const placed = file !== undefined && piece.length > 0;
  const all = facts([
    ["box", make("span", { class: "key" }, boxText(piece))],
    ["elements", shapeText(piece.extent)],
    ["bytes", `${bytes(piece.length)} (${count(piece.length)})`],
    ["writer", piece.writer < 0 ? nobody : link(`rank ${piece.writer}`, () => page.onlyRank(piece.writer))],
    ["file", file === undefined ? null : link(file, () => page.onlyFile(piece.file))],
    [contents.told.encoding === "raw" ? "its bytes" : "its record", placed ? spanText(piece) : null],
    ["digests", contents.declared ? null : digestText(contents, piece)],
  ]);
  if (!holders.length) return all;
  const writes = (/** @type {Holder} */ { rank }) => rank === piece.writer;
  const rows = holders.slice(0, NAMED).map((holder) => {
    const part = [holder.main && "main", writes(holder) && "writes"].filter(Boolean).join(", ");
    return [`rank ${holder.rank}`, holder.replica, part];
  });
  const who = table(["holder", "replica id", ""], rows, (i) => (writes(holders[i]) ? "writes" : ""));
  const more = `and ${count(holders.length - NAMED)} more: ${rankText(holders.map((holder) => holder.rank))}`;
  return make("div", {}, all, who, holders.length > NAMED && make("p", { class: "note" }, more));
}
