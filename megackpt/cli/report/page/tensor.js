// What is shown of one tensor: facts, problems, the drawing with its controls, and the list of its pieces.

/**
 * What the page offers to its parts.
 * @typedef {object} Page
 * @property {Contents} contents
 * @property {Keys} keys
 * @property {(node: Node_) => void} go
 * @property {(file: number) => void} onlyFile  restricts the tree to what is in a file
 * @property {(rank: number) => void} onlyRank
 * @property {(label: string, tensors: Set<number>) => void} onlyTensors
 */

/** The button that says a part of a path. @param {Page} page @param {Node_} node */
function crumbs(page, node) {
  const path = page.keys.path(node).flatMap((branch) => {
    const name = (branch.above ? branch.name : "Everything") || "(empty)";
    const button = make("button", { type: "button", click: () => page.go(branch) }, name);
    return [button, make("span", { "aria-hidden": "true" }, "›")];
  });
  return make("nav", { class: "crumbs", "aria-label": "Path" }, ...path);
}

class TensorView {
  /** @param {Page} page @param {Leaf} leaf @param {boolean} [titled] */
  constructor(page, leaf, titled = true) {
    this.page = page;
    this.contents = page.contents;
    this.t = leaf.tensor;
    this.shape = this.contents.shapes[this.t];
    this.pieces = this.contents.piecesOf(this.t);
    this.flaws = this.contents.flaws.get(this.t) ?? [];
    this.word = this.contents.declared ? "box" : "chunk";
    const { declared, told } = this.contents;
    /** What colours may stand for. */
    this.ways = [
      ...(declared || this.pieces.some((piece) => piece.writer >= 0) ? ["writer"] : []),
      ...(told.files.length ? ["file"] : []),
      ...(declared ? ["copies"] : []),
    ];
    this.by = this.ways[0] ?? "writer";
    const copies = largest(this.pieces.map((piece) => this.contents.copies(piece.number))) + 1;
    /** @type {Record<string, number>} */
    this.totals = { writer: this.contents.world, file: told.files.length, copies };
    this.axes = usualAxes(this.shape.length, (axis) => this.intervals(axis).length);
    /** @type {Map<number, number>} */
    this.steps = new Map(); // axis that is not drawn -> which interval of it
    this.scale = make("p", { class: "note" });
    this.legend = make("ul", { class: "legend", "aria-label": "Colours" });
    const hint = make("p", { class: "note" }, `Choose a ${this.word} in the drawing or the list to see all about it.`);
    this.picked = make("div", { class: "picked", "aria-live": "polite" }, hint);
    this.controls = make("div", { class: "controls" });
    this.drawing = new Drawing({
      pick: (piece) => this.choose(piece, "drawing"),
      tell: (drawn) => this.told(drawn),
      moved: () => this.explain(),
    });
    this.list = this.pieceList();
    this.element = make(
      "article",
      {},
      titled && crumbs(page, leaf),
      titled && make("h2", { class: "key" }, this.contents.keys[this.t] || "(empty)"),
      this.facts(),
      this.problem(),
      (this.shape.every((n) => n > 0) || this.flaws.length > 0) && this.drawingSection(),
      this.listSection(),
    );
    if (this.flaws.length) this.stepTo(this.flaws[0]);
    this.control();
    this.redraw();
    this.list.show(this.pieces.length, -1);
  }

  drawingSection() {
    const under = make("div", { class: "under" }, this.legend, this.scale, this.picked);
    const both = make("div", { class: this.axes.down === null ? "" : "beside" }, this.drawing.element, under);
    return make("section", { class: "block", "aria-label": "Drawing" }, this.controls, both);
  }

  listSection() {
    const { declared, told } = this.contents;
    const heads = declared
      ? ["box", "writer", "bytes", "held by"]
      : ["box", "rank", "bytes", "file", "bytes of the file", "digests"];
    const cells = ["", ...heads].map((head) => make("span", {}, head));
    const title = plural(this.pieces.length, this.word, declared ? "boxes" : "chunks");
    return make(
      "section",
      { class: "block" },
      make("header", {}, make("h3", {}, title)),
      make("div", { class: `piece head ${told.kind}`, "aria-hidden": "true" }, ...cells),
      this.list.element,
    );
  }

  facts() {
    const { contents, t } = this;
    const { declared, told } = contents;
    const writers = this.pieces.map((piece) => piece.writer).filter((rank) => rank >= 0);
    const files = new Set(this.pieces.map((piece) => piece.file).filter((file) => file >= 0));
    const grid = told.tensors.grid[t];
    const copies = [...new Set(this.pieces.map((piece) => contents.copies(piece.number)))].sort((a, b) => a - b);
    const object = contents.isObject(t);
    return facts([
      [object ? "grid of objects" : "shape", object && !this.shape.length ? "a single object" : shapeText(this.shape)],
      ["dtype", contents.dtype(t)],
      ["bytes", bytes(contents.tensorBytes[t])],
      ["elements", object ? null : count(contents.elements(t))],
      ["cells of", grid && shapeText(grid)],
      [declared ? "writers" : "written by", writers.length ? rankText(writers) : declared ? "nobody" : null],
      ["in", files.size ? plural(files.size, "file") : null],
      ["digests", declared ? null : told.block ? "xxh3-128 of each MiB" : "none"],
      ["copies", declared ? [copies[0], ...copies.slice(1).slice(-1)].join(" to ") : null],
    ]);
  }

  problem() {
    if (!this.contents.problems.has(this.t)) return null;
    const text = this.contents.problems.get(this.t) || "The chunks of this tensor do not cover it exactly once.";
    const { declared, told } = this.contents;
    const items = this.flaws.map((flaw) => {
      const show = { type: "button", class: "key", title: "show it", click: () => this.lookAt(flaw) };
      return make("li", {}, make("button", show, flawText(flaw, declared)));
    });
    const { most } = told.flaws;
    const more = make("p", { class: "note" }, `No more than ${most} regions of a kind are listed.`);
    const list = make("ul", {}, ...items);
    return make("section", { class: "problem" }, make("p", { class: "key" }, text), list, items.length >= most && more);
  }

  /**
   * Where this axis is cut: what lies between two neighbouring cuts.
   * @param {number} axis
   * @returns {[number, number][]}
   */
  intervals(axis) {
    const cuts = new Set([0, this.shape[axis]]);
    for (const { offset, extent } of [...this.pieces, ...this.flaws]) {
      cuts.add(offset[axis]).add(offset[axis] + extent[axis]);
    }
    const sorted = [...cuts].sort((a, b) => a - b);
    return sorted.slice(1).map((cut, i) => [sorted[i], cut]);
  }

  /** The controls: which axes are drawn, where the others are cut, what colours mean, zoom. */
  control() {
    const ndim = this.shape.length;
    const { down, across } = this.axes;
    const parts = [];
    if (ndim > 2) {
      parts.push(this.axisChoice("down", "axis drawn down"), this.axisChoice("across", "across"));
      for (let axis = 0; axis < ndim; axis++) if (axis !== down && axis !== across) parts.push(this.stepper(axis));
    }
    /** @type {[string, string][]} */
    const ways = this.ways.map((way) => [way, way]);
    const choice = select(ways, this.by, (way) => this.colourBy(way));
    const buttons = /** @type {[string, string, () => void][]} */ ([
      ["−", "Zoom out", () => this.drawing.zoom(0.5)],
      ["+", "Zoom in", () => this.drawing.zoom(2)],
      ["whole", "Show the whole tensor", () => this.drawing.fit()],
    ]);
    const zooms = buttons.map(([text, label, click]) =>
      make("button", { type: "button", "aria-label": label, title: label, click }, text),
    );
    const zoom = make("div", { class: "choice", role: "group", "aria-label": "Zoom" }, ...zooms);
    const colours = this.ways.length > 1 && make("label", {}, "colours by ", choice);
    this.controls.replaceChildren(...parts, make("div", { class: "right" }, colours, zoom));
  }

  /** @param {"down" | "across"} side @param {string} label */
  axisChoice(side, label) {
    /** @type {[string, string][]} */
    const options = this.shape.map((extent, axis) => [`${axis}`, `${axis} (${count(extent)})`]);
    const change = (/** @type {string} */ chosen) => {
      const axis = Number(chosen);
      const other = side === "down" ? "across" : "down";
      if (this.axes[other] === axis) this.axes[other] = this.axes[side];
      this.axes[side] = axis;
      this.control();
      this.redraw();
    };
    return make("label", {}, `${label} `, select(options, `${this.axes[side]}`, change));
  }

  /** @param {number} axis */
  stepper(axis) {
    const intervals = this.intervals(axis);
    const uncut = `axis ${axis} (${count(this.shape[axis])}) is not cut`;
    if (intervals.length < 2) return make("span", { class: "uncut" }, uncut);
    const at = Math.min(this.steps.get(axis) ?? 0, intervals.length - 1);
    const place = make("output", { class: "key" }, stepText(intervals, at));
    const input = (/** @type {Event} */ event) => {
      const to = Number(/** @type {HTMLInputElement} */ (event.target).value);
      this.steps.set(axis, to);
      place.textContent = stepText(intervals, to);
      this.redraw();
    };
    const slider = make("input", { type: "range", min: 0, max: intervals.length - 1, value: at, input });
    return make("label", { class: "stepper" }, `axis ${axis} `, slider, place);
  }

  redraw() {
    const { down, across } = this.axes;
    /** @type {Map<number, [number, number]>} */
    const slice = new Map();
    this.shape.forEach((_, axis) => {
      if (axis !== down && axis !== across) slice.set(axis, this.intervals(axis)[this.steps.get(axis) ?? 0] ?? [0, 0]);
    });
    const scene = {
      shape: this.shape,
      pieces: this.pieces,
      flaws: this.flaws,
      down,
      across,
      slice,
      colour: (/** @type {Piece} */ piece) => (this.value(piece) < 0 ? null : this.colour(this.value(piece))),
      labels: (/** @type {Piece} */ piece) => {
        const value = this.value(piece);
        return [this.meaning(value), ...(this.by === "file" || value < 0 ? [] : [`${value}`])];
      },
    };
    const inside = `${plural(this.pieces.length, "piece")}, ${plural(this.flaws.length, "flaw")}`;
    const what = `${this.contents.keys[this.t]}, ${shapeText(this.shape)}: ${inside}`;
    this.drawing.show(scene, `${what}; the list below tells each`);
    this.showLegend();
  }

  /** @param {Piece} piece */
  value(piece) {
    return this.by === "writer" ? piece.writer : this.by === "file" ? piece.file : this.contents.copies(piece.number);
  }

  /** @param {number} value */
  colour(value) {
    return colourOf(value, this.totals[this.by]);
  }

  /** A square in the colour of a rank, file or number of copies; below 0: hatched. @param {number} value */
  swatch(value) {
    return swatch(value < 0 ? null : this.colour(value));
  }

  /** @param {number} value  what a colour stands for */
  meaning(value) {
    if (this.by === "copies") return plural(value, "copy", "copies");
    if (this.by === "file") return value < 0 ? "no file" : this.contents.told.files[value];
    return value < 0 ? (this.contents.declared ? "nobody writes" : "unknown rank") : `rank ${value}`;
  }

  showLegend() {
    const values = [...new Set(this.pieces.map((piece) => this.value(piece)))].sort((a, b) => a - b);
    const items = values.slice(0, 16).map((value) => make("li", {}, this.swatch(value), this.meaning(value)));
    if (values.length > 16) items.push(make("li", {}, `and ${values.length - 16} more`));
    const kinds = /** @type {[string, string, boolean][]} */ ([
      ["hole", "hole", this.flaws.some((flaw) => flaw.count === 0)],
      ["overlap", "overlap", this.flaws.some((flaw) => flaw.count > 1)],
      ["outside", "outside of the tensor", this.flaws.some((flaw) => flaw.count < 0)],
    ]);
    const bad = kinds.filter(([, , there]) => there);
    this.legend.replaceChildren(
      ...items,
      ...bad.map(([kind, text]) => make("li", { class: "bad" }, swatch(null, kind), text)),
    );
  }

  /** What a drawing does not show by itself. */
  explain() {
    const zoomed = Object.keys(this.drawing.view).length > 0;
    const told = [];
    if (zoomed) told.push("zoomed: drag to move");
    if (!this.drawing.exact) told.push("small pieces are drawn larger than they are");
    else if (!this.drawing.even) told.push("the axes have different scales");
    this.scale.textContent = told.join(" · ");
  }

  /** @param {string} by */
  colourBy(by) {
    this.by = by;
    this.redraw();
    this.list.draw();
  }

  /** Brings the slice to where a region is. @param {Box} box */
  stepTo(box) {
    for (let axis = 0; axis < this.shape.length; axis++) {
      if (axis === this.axes.down || axis === this.axes.across) continue;
      const found = this.intervals(axis).findIndex((range) => meets(box, axis, range));
      if (found >= 0) this.steps.set(axis, found);
    }
  }

  /** @param {Flaw} flaw */
  lookAt(flaw) {
    this.stepTo(flaw);
    this.control();
    this.redraw();
    this.drawing.look(flaw);
    this.drawing.element.scrollIntoView({ block: "nearest" });
  }

  /** @param {Piece} piece @param {"drawing" | "list"} from */
  choose(piece, from) {
    this.drawing.chosen = piece.number;
    if (from === "drawing") this.list.moveTo(piece.number - this.contents.first[this.t]);
    else {
      const before = `${[...this.steps]}`;
      if (!this.drawing.drawn.some((drawn) => drawn.piece === piece)) this.stepTo(piece);
      if (before !== `${[...this.steps]}`) {
        this.control();
        this.redraw();
      }
    }
    this.drawing.mark();
    this.picked.replaceChildren(pieceFacts(this.page, piece));
  }

  /** @param {Drawn} drawn */
  told({ piece, flaw }) {
    if (flaw) return [flawText(flaw, this.contents.declared)];
    if (!piece) return [];
    const { contents } = this;
    const lines = [
      writerText(contents, piece),
      boxText(piece),
      bytes(piece.length),
      placeText(contents, piece),
      holdersText(contents.holders(piece.number)),
      contents.declared ? "" : digestText(contents, piece),
    ];
    return lines.filter(Boolean);
  }

  pieceList() {
    const rows = new Rows({
      label: "Pieces",
      height: 24,
      row: (i) => this.pieceRow(this.pieces[i]),
      pick: (i) => this.choose(this.pieces[i], "list"),
    });
    rows.element.classList.add("pieces");
    rows.element.style.height = `${Math.max(1, Math.min(this.pieces.length, 16)) * 24}px`;
    return rows;
  }

  /** @param {Piece} piece */
  pieceRow(piece) {
    const { contents } = this;
    const { declared, told } = contents;
    const writer = declared ? `rank ${piece.writer}` : `${piece.writer}`;
    const place = piece.file >= 0 && piece.length ? spanText(piece) : "";
    const rest = declared
      ? [holdersText(contents.holders(piece.number))]
      : [told.files[piece.file] ?? "", place, digestText(contents, piece, true)];
    const nobody = declared ? "nobody" : "–";
    const texts = [boxText(piece), piece.writer < 0 ? nobody : writer, bytes(piece.length), ...rest];
    const cells = texts.map((text) => make("span", { title: text }, text));
    return make("div", { class: `piece ${told.kind}` }, this.swatch(this.value(piece)), ...cells);
  }
}

/** @param {[string, string][]} options  value, text @param {string} chosen @param {(way: string) => void} change */
function select(options, chosen, change) {
  const items = options.map(([value, text]) => make("option", { value, selected: value === chosen }, text));
  const changed = (/** @type {Event} */ event) => change(/** @type {HTMLSelectElement} */ (event.target).value);
  return make("select", { change: changed }, ...items);
}

/** A square of a colour; without one hatched, by kind. @param {string | null} colour @param {string} [kind] */
function swatch(colour, kind = "nobody") {
  const square = make("span", { class: colour ? "swatch" : `swatch ${kind}`, "aria-hidden": "true" });
  if (colour) square.style.background = colour;
  return square;
}

/**
 * The two axes that are cut most often, of equals the later ones.
 * @param {number} ndim
 * @param {(axis: number) => number} cuts  how often an axis is cut
 * @returns {{down: number | null, across: number | null}}
 */
function usualAxes(ndim, cuts) {
  const pieces = Array.from({ length: ndim }, (_, axis) => cuts(axis));
  const best = pieces.map((_, axis) => axis).sort((a, b) => pieces[b] - pieces[a] || b - a);
  const [first, second] = best.slice(0, 2).sort((a, b) => a - b);
  if (ndim < 2) return { down: null, across: ndim ? 0 : null };
  return { down: first, across: second };
}

/** @param {[number, number][]} intervals @param {number} at */
const stepText = (intervals, at) => `${intervals[at][0]}:${intervals[at][1]} (${at + 1} of ${intervals.length})`;
