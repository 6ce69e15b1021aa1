// The drawing of one tensor: its pieces and flaws in two of its axes, on a canvas, with zoom.

/**
 * @typedef {object} Scene
 * @property {number[]} shape
 * @property {Piece[]} pieces
 * @property {Flaw[]} flaws
 * @property {number | null} down    the axis drawn downwards; null: none
 * @property {number | null} across  the axis drawn to the right
 * @property {Map<number, [number, number]>} slice  of the other axes: from, to
 * @property {(piece: Piece) => string | null} colour  null: nobody writes it
 * @property {(piece: Piece) => string[]} labels  the first that fits is drawn
 *
 * @typedef {{x: number, y: number, width: number, height: number, piece?: Piece, flaw?: Flaw}} Drawn
 */

const NARROWEST = 360; // pixels of an axis, however short it is beside the other one
const LOWEST = 140;
const HIGHEST = 420;
const BAND = 72; // height of what has one axis
const LABELLED = 3000; // more pieces than this bear no labels

/** Elements of one axis to pixels. What lies between two cuts stays visible, so it may be drawn larger than it is. */
class Ruler {
  /** @param {number[]} cuts  ascending, at least two @param {number} pixels */
  constructor(cuts, pixels) {
    this.cuts = cuts;
    const sizes = cuts.slice(1).map((cut, i) => cut - cuts[i]);
    const least = Math.min(14, pixels / sizes.length / 2);
    let widths = widened(sizes, pixels, least >= 1 ? least : 0);
    this.exact = widths === null;
    const all = cuts[cuts.length - 1] - cuts[0];
    widths ??= sizes.map((n) => (pixels * n) / all);
    this.places = starts(widths);
  }

  /** @param {number} element */
  at(element) {
    const { cuts, places } = this;
    if (element <= cuts[0]) return 0;
    if (element >= cuts[cuts.length - 1]) return places[places.length - 1];
    const i = lastNotAbove(cuts, element);
    return places[i] + ((places[i + 1] - places[i]) * (element - cuts[i])) / (cuts[i + 1] - cuts[i]);
  }

  /** The element at a pixel, as a fraction. @param {number} pixel */
  element(pixel) {
    const { cuts, places } = this;
    const i = Math.min(Math.max(lastNotAbove(places, pixel), 0), cuts.length - 2);
    const part = (pixel - places[i]) / (places[i + 1] - places[i] || 1);
    return cuts[i] + (cuts[i + 1] - cuts[i]) * Math.min(Math.max(part, 0), 1);
  }
}

/** Is some of a box in this range of an axis? @param {Box} box @param {number} axis @param {[number, number]} range */
const meets = ({ offset, extent }, axis, [from, to]) => offset[axis] < to && offset[axis] + extent[axis] > from;

/** @param {ArrayLike<number>} sorted @param {number} value */
function lastNotAbove(sorted, value) {
  let [low, high] = [0, sorted.length];
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (sorted[middle] <= value) low = middle;
    else high = middle;
  }
  return low;
}

/**
 * Widths in proportion to sizes, but none below `least`; null where plain proportion has none below.
 * @param {number[]} sizes
 * @param {number} pixels
 * @param {number} least
 */
function widened(sizes, pixels, least) {
  const small = new Set();
  for (;;) {
    const room = pixels - small.size * least;
    const rest = sizes.reduce((sum, n, i) => (small.has(i) ? sum : sum + n), 0);
    const fresh = sizes.flatMap((n, i) => (!small.has(i) && (room * n) / rest < least ? [i] : []));
    if (!fresh.length) return small.size ? sizes.map((n, i) => (small.has(i) ? least : (room * n) / rest)) : null;
    for (const i of fresh) small.add(i);
  }
}

class Drawing {
  /** @param {{pick: (piece: Piece) => void, tell: (drawn: Drawn) => string[], moved: () => void}} options */
  constructor({ pick, tell, moved }) {
    this.pick = pick;
    this.tell = tell;
    this.moved = moved;
    const keys = { tabindex: 0, "aria-keyshortcuts": "+ - 0" };
    this.base = /** @type {HTMLCanvasElement} */ (make("canvas", { role: "img", ...keys }));
    this.over = /** @type {HTMLCanvasElement} */ (make("canvas", { class: "over", "aria-hidden": "true" }));
    this.tip = make("div", { class: "tip", hidden: true });
    this.element = make("div", { class: "stage" }, this.base, this.over, this.tip);
    /** @type {Scene | null} */
    this.scene = null;
    /** @type {Drawn[]} */
    this.drawn = [];
    /** @type {Drawn | null} */
    this.hovered = null;
    /** @type {number | null} */
    this.chosen = null;
    /** @type {Record<string, [number, number]>} */
    this.view = {}; // what is zoomed to, by "down" and "across"; nothing: all
    this.left = this.top = 0; // pixels that the numbers beside it take
    this.exact = true; // each axis is to scale
    this.even = true; // both axes are to one scale
    new ResizeObserver(() => this.draw()).observe(this.element);
    listen(this);
  }

  /** @param {Scene} scene @param {string} label */
  show(scene, label) {
    this.scene = scene;
    this.view = {};
    this.base.setAttribute("aria-label", label);
    this.draw();
  }

  /**
   * The range of an axis that is drawn when nothing is zoomed: the tensor, and boxes that leave it.
   * @param {number | null} axis
   * @returns {[number, number]}
   */
  whole(axis) {
    const { shape, pieces } = /** @type {Scene} */ (this.scene);
    if (axis === null) return [0, 1];
    let [from, to] = [0, Math.max(1, shape[axis])];
    for (const { offset, extent } of pieces) {
      from = Math.min(from, offset[axis]);
      to = Math.max(to, offset[axis] + extent[axis]);
    }
    return [from, to];
  }

  /** @param {"down" | "across"} side @param {Box[]} boxes */
  cuts(side, boxes) {
    const axis = /** @type {Scene} */ (this.scene)[side];
    const [from, to] = this.view[side] ?? this.whole(axis);
    const found = new Set([from, to]);
    if (axis !== null) {
      for (const cut of [0, /** @type {Scene} */ (this.scene).shape[axis]]) if (cut > from && cut < to) found.add(cut);
      for (const { offset, extent } of boxes) {
        for (const cut of [offset[axis], offset[axis] + extent[axis]]) if (cut > from && cut < to) found.add(cut);
      }
    }
    return [...found].sort((a, b) => a - b);
  }

  /**
   * Those that the slice of the other axes goes through, and that have elements.
   * @template {Box} T
   * @param {T[]} boxes
   * @returns {T[]}
   */
  sliced(boxes) {
    const slice = [.../** @type {Scene} */ (this.scene).slice];
    return boxes.filter(
      (box) => box.extent.every((n) => n > 0) && slice.every(([axis, range]) => meets(box, axis, range)),
    );
  }

  draw() {
    const width = this.element.clientWidth;
    if (!this.scene || !width) return;
    const pen = new Pen(this.base, this.element);
    const { down, across } = this.scene;
    const [pieces, flaws] = [this.sliced(this.scene.pieces), this.sliced(this.scene.flaws)];
    const boxes = [...pieces, ...flaws];
    const [rows, columns] = [this.cuts("down", boxes), this.cuts("across", boxes)];
    this.left = down === null ? 0 : pen.room(rows);
    this.top = across === null ? 0 : 22;
    const [w, h] = this.extent(width - this.left - 1, rows, columns);
    pen.size(width, h + this.top + 1);
    for (const canvas of [this.base, this.over]) {
      Object.assign(canvas.style, { width: `${width}px`, height: `${h + this.top + 1}px` });
    }
    this.rulers = { across: new Ruler(columns, w), down: new Ruler(rows, h) };
    this.place(pieces, flaws);
    pen.frame(this.left, this.top, w, h);
    const { colour, labels } = this.scene;
    for (const drawn of this.drawn) {
      if (drawn.piece) pen.piece(drawn, colour(drawn.piece));
      else pen.flaw(drawn);
    }
    for (const drawn of pieces.length <= LABELLED ? this.drawn : []) {
      if (drawn.piece) pen.label(drawn, colour(drawn.piece), labels(drawn.piece));
    }
    pen.ticks(this.rulers, this.left, this.top, across !== null, down !== null);
    this.outline(pen, w, h);
    this.mark();
    this.moved();
  }

  /**
   * Pixels of both axes: to scale where that leaves both long enough.
   * @param {number} width
   * @param {number[]} rows
   * @param {number[]} columns
   */
  extent(width, rows, columns) {
    const { down, across } = /** @type {Scene} */ (this.scene);
    if (down === null) return across === null ? [Math.min(width, 120), 120] : [width, BAND];
    const [across_, down_] = [columns, rows].map((cuts) => cuts[cuts.length - 1] - cuts[0]);
    const scale = Math.min(width / across_, HIGHEST / down_);
    const [w, h] = [Math.min(width, Math.max(NARROWEST, across_ * scale)), Math.max(LOWEST, down_ * scale)];
    this.even = Math.abs((w * down_) / (h * across_) - 1) < 0.02;
    return [w, h];
  }

  /** @param {Piece[]} pieces @param {Flaw[]} flaws */
  place(pieces, flaws) {
    const { down, across } = /** @type {Scene} */ (this.scene);
    const rulers = /** @type {{across: Ruler, down: Ruler}} */ (this.rulers);
    /**
     * @param {Ruler} ruler
     * @param {number | null} axis
     * @param {Box} box
     * @param {number} least
     */
    const span = (ruler, axis, { offset, extent }, least) => {
      if (axis === null) return [0, ruler.at(1)];
      const [begin, end] = [ruler.at(offset[axis]), ruler.at(offset[axis] + extent[axis])];
      return [begin, end > begin ? Math.max(least, end - begin) : 0];
    };
    /** @param {Box} box @param {number} least @returns {Drawn} */
    const rectangle = (box, least) => {
      const [x, width] = span(rulers.across, across, box, least);
      const [y, height] = span(rulers.down, down, box, least);
      return { x: x + this.left, y: y + this.top, width, height };
    };
    const all = [
      ...pieces.map((piece) => ({ ...rectangle(piece, 1), piece })),
      ...flaws.map((flaw) => ({ ...rectangle(flaw, 4), flaw })),
    ];
    this.drawn = all.filter((drawn) => drawn.width > 0 && drawn.height > 0);
    this.exact = rulers.across.exact && rulers.down.exact;
  }

  /** Where boxes leave the tensor, its own border. @param {Pen} pen @param {number} w @param {number} h */
  outline(pen, w, h) {
    const { shape, down, across } = /** @type {Scene} */ (this.scene);
    const rulers = /** @type {{across: Ruler, down: Ruler}} */ (this.rulers);
    const [x0, x1] = across === null ? [0, w] : [rulers.across.at(0), rulers.across.at(shape[across])];
    const [y0, y1] = down === null ? [0, h] : [rulers.down.at(0), rulers.down.at(shape[down])];
    if (x0 <= 0 && y0 <= 0 && x1 >= w - 0.5 && y1 >= h - 0.5) return;
    pen.border(x0 + this.left, y0 + this.top, x1 - x0, y1 - y0);
  }

  /** What is pointed at, and what is chosen, on the upper canvas. */
  mark() {
    const pen = new Pen(this.over, this.element);
    pen.size(this.element.clientWidth, this.base.clientHeight);
    const chosen = this.drawn.find((drawn) => drawn.piece && drawn.piece.number === this.chosen);
    if (chosen) pen.border(chosen.x, chosen.y, chosen.width, chosen.height, 2.5);
    if (this.hovered) pen.border(this.hovered.x, this.hovered.y, this.hovered.width, this.hovered.height, 1.5);
  }

  /** @param {number} x @param {number} y @returns {Drawn | null} */
  under(x, y) {
    return this.drawn.findLast((d) => x >= d.x && x <= d.x + d.width && y >= d.y && y <= d.y + d.height) ?? null;
  }

  /**
   * @param {number} factor  above 1: nearer
   * @param {number} [x]  the pixel that stays where it is
   * @param {number} [y]
   */
  zoom(factor, x, y) {
    const { across, down } = /** @type {{across: Ruler, down: Ruler}} */ (this.rulers);
    this.range("across", across, factor, x === undefined ? undefined : x - this.left);
    this.range("down", down, factor, y === undefined ? undefined : y - this.top);
    this.draw();
  }

  /** @param {"down" | "across"} side @param {Ruler} ruler @param {number} factor @param {number} [pixel] */
  range(side, ruler, factor, pixel) {
    const axis = /** @type {Scene} */ (this.scene)[side];
    if (axis === null) return;
    const length = ruler.places[ruler.places.length - 1];
    const middle = ruler.element(pixel ?? length / 2);
    const [from, to] = [ruler.cuts[0], ruler.cuts[ruler.cuts.length - 1]];
    const [least, most] = this.whole(axis);
    const begin = Math.max(least, Math.floor(middle - (middle - from) / factor));
    const end = Math.min(most, Math.max(begin + 1, Math.ceil(middle + (to - middle) / factor)));
    if (begin <= least && end >= most) delete this.view[side];
    else this.view[side] = [begin, end];
  }

  /** Moves a zoomed view by parts of itself. @param {number} right @param {number} below */
  pan(right, below) {
    for (const [side, part] of /** @type {["across" | "down", number][]} */ ([["across", right], ["down", below]])) {
      const view = this.view[side];
      if (!view) continue;
      const [least, most] = this.whole(/** @type {Scene} */ (this.scene)[side]);
      const wide = view[1] - view[0];
      const from = Math.round(Math.min(Math.max(view[0] + part * wide, least), most - wide));
      this.view[side] = [from, from + wide];
    }
    this.draw();
  }

  /** Zooms to a region with some of what is around it. @param {Box} box */
  look({ offset, extent }) {
    for (const side of /** @type {("across" | "down")[]} */ (["across", "down"])) {
      const axis = /** @type {Scene} */ (this.scene)[side];
      if (axis === null) continue;
      const [least, most] = this.whole(axis);
      const room = Math.ceil(extent[axis] / 4);
      const end = offset[axis] + Math.max(1, extent[axis]) + room;
      this.view[side] = [Math.max(least, offset[axis] - room), Math.min(most, end)];
    }
    this.draw();
  }

  fit() {
    this.view = {};
    this.draw();
  }
}
