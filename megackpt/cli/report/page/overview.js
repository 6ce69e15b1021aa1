// The overview: a row for each layer or branch, a column for each rank, and bars for the bytes.

const PICTURE = document.getElementById("picture")?.namespaceURI ?? ""; // of the elements of SVG
const KINDS = ["#4477aa", "#d9b04f", "#4aa291", "#a873a8", "#88b8dd", "#8a8a85"]; // the last: all others
const MOST = 256; // columns: more ranks share them
const [ROW_LEAST, ROW_USUAL, ALL_ROWS, LYING] = [15, 30, 420, 22]; // pixels

/**
 * What colours stand for, and the bytes of each kind: rows x columns, per rank of a column.
 * @typedef {{names: string[], values: Float64Array[]}} Kinds
 */

class Overview {
  /** @param {Page} page @param {boolean} [brief]  without the explanation */
  constructor(page, brief = false) {
    this.page = page;
    this.brief = brief;
    const { contents } = page;
    const { told } = contents;
    /** @type {string[]} */
    this.labels = told.overview.labels;
    this.unit = contents.world > 0 || contents.declared ? "rank" : "file";
    /** @type {number[]} */
    this.column = this.unit === "rank" ? contents.pieces.writer : contents.pieces.file;
    this.many = this.unit === "rank" ? contents.world : told.files.length;
    this.step = Math.max(1, Math.ceil(this.many / MOST));
    this.wide = Math.max(1, Math.ceil(this.many / this.step));
    this.single = this.many === 1; // a column would be a wall
    this.total = new Float64Array(this.labels.length);
    contents.keys.forEach((_, t) => (this.total[contents.row[t]] += contents.tensorBytes[t]));
    const none = contents.keys.map(() => 0);
    const held = this.unit === "rank" && contents.declared;
    this.held = held ? this.sum([""], none, told.holders.rank, contents.heldBy).values[0] : null;
    const byDtype = contents.byDtype(none.keys()).sort((a, b) => b.value - a.value);
    const place = new Map(byDtype.map((bar, i) => [bar.number, Math.min(i, KINDS.length - 1)]));
    const names = byDtype.slice(0, KINDS.length).map((bar) => bar.label);
    if (byDtype.length > KINDS.length) names[KINDS.length - 1] = "others";
    /** @type {Record<string, Kinds>} */
    this.kinds = {
      [this.unit]: this.sum([""], none),
      dtype: this.sum(names, told.tensors.dtype.map((/** @type {number} */ d) => place.get(d))),
      "weights, optimizer": this.sum(ROLES, contents.keys.map((_, t) => contents.role(t))),
    };
    // What divides the bytes most evenly tells most.
    const largest = (/** @type {string} */ way) =>
      Math.max(...this.kinds[way].values.map((kind) => kind.reduce((sum, n) => sum + n, 0)));
    this.by = this.unit;
    if (this.single) this.by = Object.keys(this.kinds).reduce((a, b) => (largest(b) < largest(a) ? b : a));
    this.picture = /** @type {SVGSVGElement} */ (shape("svg", { role: "img", class: "overview" }));
    this.legend = make("ul", { class: "legend", "aria-label": "Colours" });
    this.tip = make("div", { class: "tip", hidden: true });
    this.stage = make("div", { class: "stage" }, this.picture, this.tip);
    this.element = this.section();
    this.picture.addEventListener("pointermove", (event) => this.hover(event));
    this.picture.addEventListener("pointerleave", () => this.hover(null));
    this.picture.addEventListener("click", (event) => this.clicked(event));
    new ResizeObserver(() => this.draw()).observe(this.stage);
  }

  section() {
    const ways = Object.keys(this.kinds).filter((way) => (way === this.unit ? !this.single : this.kinds[way].names.length > 1));
    const buttons = ways.map((way) => {
      const click = () => {
        this.by = way;
        for (const button of buttons) button.setAttribute("aria-pressed", `${button.textContent === way}`);
        this.draw();
      };
      return make("button", { type: "button", "aria-pressed": `${way === this.by}`, click }, way);
    });
    const choice = make("div", { class: "choice", role: "group", "aria-label": "Colours" }, ...buttons);
    const { declared } = this.page.contents;
    const written = declared ? "Who holds what, and who writes it" : "Who wrote what";
    const several = this.unit === "file" ? "Which file holds what" : written;
    const title = make("h3", {}, this.single ? "Bytes of each branch" : several);
    const column = this.step > 1 ? `${this.step} ${this.unit}s` : `a ${this.unit}`;
    const bar = declared ? "written (coloured) and held (grey)" : this.unit === "file" ? "in it" : "that it wrote";
    const row = "Each row is a layer or branch with its optimizer state";
    const many = `: the taller, the more bytes. Each column is ${column}. A bar is the bytes ${bar}, in proportion to the largest in the row.`;
    const text = row + (this.single ? ". A bar is its bytes." : many);
    const colours = ways.length > 1 && make("div", { class: "colours" }, "colours by ", choice);
    const head = make("header", {}, title, colours);
    const body = [!this.brief && make("p", { class: "note" }, text), this.stage, this.legend];
    return make("section", { class: "block" }, head, ...body);
  }

  /**
   * Bytes by kind, row and column.
   * @param {string[]} names
   * @param {number[]} kind  of each tensor
   * @param {number[]} [column]  rank or file of each of these; by default of each piece
   * @param {ArrayLike<number> | null} [piece]  the piece that each is about; by default each piece
   * @returns {Kinds}
   */
  sum(names, kind, column = this.column, piece = null) {
    const { contents } = this.page;
    const { row } = contents;
    const values = names.map(() => new Float64Array(this.labels.length * this.wide));
    for (let n = 0; n < column.length; n++) {
      if (column[n] < 0) continue;
      const i = piece ? piece[n] : n;
      const t = contents.owner[i];
      const at = Math.floor(column[n] / this.step);
      const ranks = Math.min(this.step, this.many - at * this.step);
      values[kind[t]][row[t] * this.wide + at] += contents.pieces.length[i] / ranks;
    }
    const used = names.map((_, k) => k).filter((k) => names.length === 1 || values[k].some((n) => n > 0));
    return { names: used.map((k) => names[k]), values: used.map((k) => values[k]) };
  }

  /** Where rows and columns are, in pixels. @param {number} width */
  layout(width) {
    const longest = this.labels.reduce((n, label) => Math.max(n, label.length), 5);
    const left = Math.min(width < 620 ? 120 : 260, Math.ceil(6.7 * longest) + 14);
    const rows = this.labels.length;
    const across = (width - left - 76) / this.wide;
    if (this.single) return { left, tops: starts(this.labels.map(() => LYING)), across };
    const space = Math.max(ROW_LEAST * rows, Math.min(ROW_USUAL * rows, ALL_ROWS)) - ROW_LEAST * rows;
    const all = this.total.reduce((sum, n) => sum + n, 0) || 1;
    const tops = starts(Array.from(this.total, (n) => ROW_LEAST + (space * n) / all)).map((y) => y + 20);
    return { left, tops, across };
  }

  draw() {
    const width = this.stage.clientWidth;
    if (!width) return;
    const { left, tops, across } = (this.place = this.layout(width));
    const height = tops[this.labels.length] + 2;
    const label = `${count(this.labels.length)} rows of ${plural(this.many, this.unit)}; the bars below tell the sums`;
    for (const [name, value] of Object.entries({ width, height, "aria-label": label })) {
      this.picture.setAttribute(name, `${value}`);
    }
    const room = Math.floor((left - 12) / 6.7);
    const rows = this.labels.flatMap((text, r) => {
      const [y, tall] = [tops[r], tops[r + 1] - tops[r]];
      const baseline = y + tall / 2 + 3.5;
      return [
        shape("rect", { class: "ground", x: left, y, width: across * this.wide, height: tall - 1 }),
        shape("text", { class: "end", x: left - 8, y: baseline }, shortened(text || "(empty)", room)),
        shape("text", { class: "end", x: width - 2, y: baseline }, bytes(this.total[r])),
      ];
    });
    this.mark = shape("rect", { class: "mark", visibility: "hidden" });
    const inside = this.single ? [...rows, ...this.lyingBars()] : [...this.ticks(), ...rows, ...this.bars()];
    this.picture.replaceChildren(...inside, this.mark);
    this.showLegend();
  }

  ticks() {
    const { left, across } = /** @type {{left: number, across: number}} */ (this.place);
    let step = 1;
    while (step * across < 40) step *= 2;
    const found = [];
    for (let c = 0; c < this.wide; c += step) {
      found.push(shape("text", { class: "mid", x: left + across * (c + 0.5), y: 12 }, `${c * this.step}`));
    }
    return found;
  }

  /** Of a single rank or file: all bars have one scale, and lie. */
  lyingBars() {
    const { left, tops, across } = /** @type {{left: number, tops: Float64Array, across: number}} */ (this.place);
    const { names, values } = this.kinds[this.by];
    const most = this.total.reduce((n, m) => Math.max(n, m), 1);
    return this.labels.flatMap((_, r) => {
      let x = left;
      return values.flatMap((kind, k) => {
        const width = (across * kind[r]) / most;
        const fill = names.length > 1 ? KINDS[k] : colourOf(0, 1);
        const bar = shape("rect", { class: "bar", fill, x, y: tops[r] + 4, width, height: LYING - 9 });
        x += width;
        return width > 0 ? [bar] : [];
      });
    });
  }

  /** One path for all bars of a colour. */
  bars() {
    const { left, tops, across } = /** @type {{left: number, tops: Float64Array, across: number}} */ (this.place);
    const { names, values } = this.kinds[this.by];
    const paths = new Map();
    const least = across > 3 ? 1 : across / 8;
    /** @param {string} colour @param {number} c @param {number} from @param {number} to */
    const add = (colour, c, from, to) => {
      const x = left + c * across;
      const bar = `M${x.toFixed(1)} ${from.toFixed(1)}H${(x + across - least).toFixed(2)}V${to.toFixed(1)}H${x.toFixed(1)}z`;
      paths.set(colour, (paths.get(colour) ?? "") + bar);
    };
    for (let r = 0; r < this.labels.length; r++) {
      const cells = Array.from({ length: this.wide }, (_, c) => r * this.wide + c);
      const sums = cells.map((i) => values.reduce((sum, kind) => sum + kind[i], 0));
      const most = cells.reduce((n, i, c) => Math.max(n, sums[c], this.held?.[i] ?? 0), 0) || 1;
      const [bottom, tall] = [tops[r + 1] - 1, tops[r + 1] - tops[r] - 1];
      const height = (/** @type {number} */ n) => (n > 0 ? Math.max(1, (tall * n) / most) : 0);
      cells.forEach((i, c) => {
        if (this.held?.[i]) add("", c, bottom, bottom - height(this.held[i]));
        if (!sums[c]) return;
        if (names.length < 2) return add(colourOf(c * this.step, this.many), c, bottom, bottom - height(sums[c]));
        let y = bottom;
        values.forEach((kind, k) => {
          const part = (height(sums[c]) * kind[i]) / sums[c];
          if (part > 0) add(KINDS[k], c, y, (y -= part));
        });
      });
    }
    return [...paths].map(([fill, d]) => shape("path", fill ? { fill, d } : { class: "kept", d }));
  }

  showLegend() {
    const { names, values } = this.kinds[this.by];
    const sums = values.map((kind) => kind.reduce((sum, n) => sum + n, 0));
    const all = sums.reduce((sum, n) => sum + n, 0);
    const items = names.map((name, k) => {
      return make("li", {}, swatch(KINDS[k]), `${name} ${percent(sums[k], all)}`);
    });
    this.legend.replaceChildren(...(names.length > 1 ? items : []));
  }

  /** Row and column under the pointer. @param {MouseEvent} event */
  under({ offsetX, offsetY }) {
    if (!this.place) return null;
    const { left, tops, across } = this.place;
    const c = Math.floor((offsetX - left) / across);
    const r = lastNotAbove(tops, offsetY);
    if (offsetY < tops[0] || r >= this.labels.length || c >= this.wide) return null;
    return { r, c: c < 0 ? -1 : c };
  }

  /** @param {number} c */
  ranks(c) {
    const [from, to] = [c * this.step, Math.min(this.many, (c + 1) * this.step)];
    if (this.unit === "file") {
      return to - from > 1 ? `files ${from}–${to - 1}` : this.page.contents.told.files[from];
    }
    return rankText(Array.from({ length: to - from }, (_, i) => from + i));
  }

  /** @param {PointerEvent | null} event */
  hover(event) {
    const at = event && this.under(event);
    this.tip.hidden = !at;
    this.mark?.setAttribute("visibility", at ? "visible" : "hidden");
    if (!event || !at || !this.place) return;
    const { left, tops, across } = this.place;
    const { r, c } = at;
    const i = r * this.wide + c;
    const sides = c < 0 ? [left, across * this.wide] : [left + c * across, across];
    const box = { x: sides[0], width: sides[1], y: tops[r], height: tops[r + 1] - tops[r] - 1 };
    for (const [name, value] of Object.entries(box)) this.mark?.setAttribute(name, `${value}`);
    const each = this.step > 1 ? " each" : "";
    const { names, values } = this.kinds[this.by];
    const sum = values.reduce((n, kind) => n + kind[i], 0);
    const lines = [this.labels[r] || "(empty)"];
    if (c < 0) lines.push(bytes(this.total[r]));
    else {
      lines.push(`${this.ranks(c)}: ${bytes(sum)}${each}`);
      if (this.held) lines.push(`held: ${bytes(this.held[i])}${each}`);
      if (names.length > 1) values.forEach((kind, k) => kind[i] && lines.push(`${names[k]}: ${bytes(kind[i])}`));
    }
    this.tip.replaceChildren(...lines.map((line) => make("div", {}, line)));
    const { clientWidth } = this.stage;
    this.tip.style.left = `${Math.max(0, Math.min(event.offsetX + 14, clientWidth - this.tip.offsetWidth))}px`;
    this.tip.style.top = `${event.offsetY + 18}px`;
  }

  /** Shows only the tensors of the row, or of a rank's or file's part of it. @param {MouseEvent} event */
  clicked(event) {
    const at = this.under(event);
    if (!at) return;
    const { contents } = this.page;
    const inside = new Set(contents.told.overview.tensors[at.r]);
    let label = this.labels[at.r] || "(empty)";
    if (at.c >= 0 && this.step === 1) {
      const part = contents.tensorsWith({ [this.unit]: at.c });
      for (const t of inside) if (!part.has(t)) inside.delete(t);
      label += `, ${this.ranks(at.c)}`;
    }
    this.page.onlyTensors(label, inside);
  }
}

/**
 * An element of a picture; children that are text become text.
 * @param {string} tag
 * @param {Record<string, string | number>} attributes
 * @param {...(Node | string)} children
 */
function shape(tag, attributes, ...children) {
  const element = document.createElementNS(PICTURE, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, `${value}`);
  element.append(...children);
  return element;
}

/** A long text without its middle. @param {string} text @param {number} most */
function shortened(text, most) {
  const letters = [...text];
  if (letters.length <= most) return text;
  const front = Math.floor(most / 3);
  return `${letters.slice(0, front).join("")}…${letters.slice(letters.length - (most - front - 1)).join("")}`;
}
