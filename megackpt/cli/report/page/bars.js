// Bars: how much of something each of many has, sortable, with how evenly it is spread.

const SEEN = 12; // bars that are seen at once

const ORDERS = /** @type {Record<string, (a: Bar, b: Bar) => number>} */ ({
  "in order": (a, b) => a.number - b.number,
  largest: (a, b) => b.value - a.value || a.number - b.number,
  smallest: (a, b) => a.value - b.value || a.number - b.number,
});

/**
 * A section with one bar for each row.
 * @param {object} options
 * @param {string} options.title
 * @param {Bar[]} options.bars
 * @param {boolean} [options.spread]  tell min, mean, max and imbalance
 * @param {string} [options.sort]  one of ORDERS
 * @param {(number: number) => string} [options.colour]
 * @param {string} [options.hint]  what a click does
 * @param {(bar: Bar) => void} [options.pick]
 */
function barSection({ title, bars, spread = false, sort = "in order", colour, hint, pick }) {
  let shown = bars.toSorted(ORDERS[sort]);
  const longest = bars.reduce((most, bar) => Math.max(most, bar.value, bar.held), 0);
  const total = bars.reduce((sum, bar) => sum + bar.value, 0);
  const rows = new Rows({
    label: title,
    height: 24,
    row: (i) => barRow(shown[i], longest, total, colour),
    pick: (i, by) => by === "click" && pick?.(shown[i]),
    key: (event, i) => event.key === "Enter" && (pick?.(shown[i]), true),
  });
  rows.element.classList.add("bars");
  rows.element.style.height = `${Math.min(bars.length, SEEN) * 24}px`;
  if (hint) rows.element.title = hint;
  const buttons = Object.keys(ORDERS).map((name) => {
    const state = { "aria-pressed": `${name === sort}`, "data-sort": name };
    return make("button", { type: "button", ...state, click: () => order(name) }, name);
  });
  /** @param {string} name */
  const order = (name) => {
    shown = bars.toSorted(ORDERS[name]);
    for (const button of buttons) button.setAttribute("aria-pressed", `${button.dataset.sort === name}`);
    rows.element.scrollTop = 0;
    rows.show(shown.length, -1);
    strip?.draw(shown);
  };
  const strip = bars.length > 2 * SEEN ? new Strip(longest, (i) => rows.moveTo(i)) : null;
  strip?.draw(shown);
  rows.show(shown.length);
  const choice = make("div", { class: "choice", role: "group", "aria-label": "Sort" }, ...buttons);
  const head = make("header", {}, make("h3", {}, title), bars.length > 1 && choice);
  return make("section", { class: "block" }, head, spread && spreadText(bars), strip?.canvas, rows.element);
}

/** All bars side by side where there are many: the largest of those that share a pixel. A click goes there. */
class Strip {
  /** @param {number} longest @param {(index: number) => void} go */
  constructor(longest, go) {
    this.longest = longest || 1;
    /** @type {Bar[]} */
    this.bars = [];
    this.canvas = /** @type {HTMLCanvasElement} */ (make("canvas", { class: "strip", "aria-hidden": "true" }));
    this.canvas.addEventListener("click", ({ offsetX }) => {
      go(Math.floor((offsetX / this.canvas.clientWidth) * this.bars.length));
    });
    new ResizeObserver(() => this.draw(this.bars)).observe(this.canvas);
  }

  /** @param {Bar[]} bars */
  draw(bars) {
    this.bars = bars;
    const { clientWidth: width, clientHeight: height } = this.canvas;
    if (!width) return;
    const pen = new Pen(this.canvas, this.canvas);
    pen.size(width, height);
    const wide = Math.max(1, width / bars.length);
    const fill = (/** @type {string} */ colour, /** @type {(bar: Bar) => number} */ size) => {
      pen.pen.fillStyle = pen.token(colour);
      bars.forEach((bar, i) => {
        const tall = (height * size(bar)) / this.longest;
        pen.pen.fillRect((i * width) / bars.length, height - tall, wide, tall);
      });
    };
    fill("--held", (bar) => bar.held);
    fill("--bar", (bar) => bar.value);
  }
}

/**
 * @param {Bar} bar
 * @param {number} longest
 * @param {number} total
 * @param {(number: number) => string} [colour]
 */
function barRow(bar, longest, total, colour) {
  const filled = make("span", { class: "filled" });
  filled.style.width = longest ? `${(100 * bar.value) / longest}%` : "0";
  if (colour) filled.style.background = colour(bar.number);
  const held = bar.held > 0 && make("span", { class: "held" });
  if (held) held.style.width = `${(100 * bar.held) / longest}%`;
  const of = bar.held ? `${bytes(bar.value)} of ${bytes(bar.held)} held` : bytes(bar.value);
  return make(
    "div",
    { title: `${bar.label}: ${of} (${percent(bar.value, total)} of all)` },
    make("span", { class: "label key" }, bar.label || "(empty)"),
    make("span", { class: "track", "aria-hidden": "true" }, held, filled),
    make("span", { class: "size" }, bytes(bar.value)),
  );
}

/** @param {Bar[]} bars */
function spreadText(bars) {
  const values = bars.map((bar) => bar.value);
  const least = values.reduce((a, b) => Math.min(a, b));
  const most = values.reduce((a, b) => Math.max(a, b));
  const mean = values.reduce((a, b) => a + b) / values.length;
  const held = bars.some((bar) => bar.held) && make("span", {}, "coloured: written, grey: held · ");
  if (bars.length < 2) return held && make("p", { class: "spread" }, held);
  const imbalance = mean ? (most / mean).toFixed(2) : "1.00";
  const told = `min ${bytes(least)} · mean ${bytes(mean)} · max ${bytes(most)} · imbalance ${imbalance}`;
  return make("p", { class: "spread", title: "imbalance: max over mean" }, held, told);
}
