// Elements, and long lists of them: only the rows that can be seen are in the page.

/**
 * An element with attributes, event handlers and children. Children that are text become text, never markup.
 * @param {string} tag
 * @param {Record<string, any>} [attributes]  "class", "aria-..."; functions are event handlers
 * @param {...(Node | string | null | false | undefined)} children
 */
function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === "function") element.addEventListener(name, value);
    else if (value !== false) element.setAttribute(name, value === true ? "" : `${value}`);
  }
  for (const child of children) if (child || child === "") element.append(child);
  return element;
}

/** @param {string[]} heads @param {string[][]} rows @param {(index: number) => string} [kind]  the class of a row */
function table(heads, rows, kind = () => "") {
  const head = make("tr", {}, ...heads.map((text) => make("th", { scope: "col" }, text)));
  const body = rows.map((row, i) => make("tr", { class: kind(i) }, ...row.map((text) => make("td", {}, text))));
  return make("table", {}, make("thead", {}, head), make("tbody", {}, ...body));
}

/** Terms, and what they are where that is known. @param {[string, string | Node | null][]} pairs */
function facts(pairs) {
  const told = pairs.filter(([, value]) => value);
  const items = told.map(([term, value]) => make("div", {}, make("dt", {}, term), make("dd", {}, value)));
  return make("dl", { class: "facts" }, ...items);
}

const PRINTED = 200; // rows of a list that are printed

class Rows {
  /**
   * A list with a cursor, moved by keys and clicks.
   * @param {object} options
   * @param {string} options.label  for those who hear the page
   * @param {number} options.height  of a row, in pixels
   * @param {(index: number) => HTMLElement} options.row
   * @param {(index: number, by: "key" | "click") => void} [options.pick]  the cursor came here
   * @param {(event: KeyboardEvent, index: number) => boolean} [options.key]  has it dealt with this key?
   * @param {"tree" | "listbox"} [options.role]
   */
  constructor({ label, height, row, pick, key, role = "listbox" }) {
    this.height = height;
    this.row = row;
    this.pick = pick;
    this.key = key;
    this.itemRole = role === "tree" ? "treeitem" : "option";
    this.count = 0;
    this.cursor = -1;
    this.name = `rows${Rows.made++}`;
    this.body = make("div", { class: "rows-body", role: "presentation" });
    this.element = make("div", { class: "rows", role, "aria-label": label, tabindex: 0 }, this.body);
    this.element.addEventListener("scroll", () => this.later());
    this.element.addEventListener("click", (event) => this.clicked(event));
    this.element.addEventListener("keydown", (event) => this.pressed(event));
    this.pending = 0;
    this.watch = new ResizeObserver(() => this.later());
    this.watch.observe(this.element);
    Rows.all.add(new WeakRef(this));
  }

  /** @param {number} count @param {number} [cursor] */
  show(count, cursor = this.cursor) {
    this.count = count;
    this.cursor = Math.min(cursor, count - 1);
    this.draw();
  }

  later() {
    this.pending ||= requestAnimationFrame(() => {
      this.pending = 0;
      this.draw();
    });
  }

  /** @param {boolean} [all]  as many as are printed, wherever the list is scrolled to */
  draw(all = false) {
    const seen = Math.ceil(this.element.clientHeight / this.height);
    const from = all ? 0 : Math.max(0, Math.floor(this.element.scrollTop / this.height) - 4);
    const to = all ? Math.min(this.count, PRINTED) : Math.min(this.count, from + seen + 8);
    const shown = [];
    for (let i = from; i < to; i++) {
      const row = this.row(i);
      row.classList.add("row");
      row.id = `${this.name}-${i}`;
      row.dataset.index = `${i}`;
      row.setAttribute("role", this.itemRole);
      row.setAttribute("aria-selected", `${i === this.cursor}`);
      row.setAttribute("aria-posinset", `${i + 1}`);
      row.setAttribute("aria-setsize", `${this.count}`);
      row.style.top = `${i * this.height}px`;
      shown.push(row);
    }
    this.body.style.height = `${(all ? to : this.count) * this.height}px`;
    this.body.replaceChildren(...shown);
    if (this.cursor >= 0) this.element.setAttribute("aria-activedescendant", `${this.name}-${this.cursor}`);
    else this.element.removeAttribute("aria-activedescendant");
  }

  /** Puts the cursor there, and the row into sight. @param {number} index */
  moveTo(index) {
    this.cursor = index;
    const top = index * this.height;
    const { scrollTop, clientHeight } = this.element;
    if (top < scrollTop) this.element.scrollTop = top;
    else if (top + this.height > scrollTop + clientHeight) this.element.scrollTop = top + this.height - clientHeight;
    this.draw();
  }

  /** @param {Event} event */
  clicked(event) {
    const row = /** @type {HTMLElement | null} */ (/** @type {HTMLElement} */ (event.target).closest(".row"));
    if (!row) return;
    this.moveTo(Number(row.dataset.index));
    this.pick?.(this.cursor, "click");
  }

  /** @param {KeyboardEvent} event */
  pressed(event) {
    if (event.altKey || event.ctrlKey || event.metaKey || !this.count) return;
    const page = Math.max(1, Math.floor(this.element.clientHeight / this.height) - 1);
    const steps = { ArrowDown: 1, ArrowUp: -1, PageDown: page, PageUp: -page, Home: -this.count, End: this.count };
    if (this.cursor >= 0 && this.key?.(event, this.cursor)) return event.preventDefault();
    if (!(event.key in steps)) return;
    event.preventDefault();
    const to = this.cursor + steps[/** @type {keyof steps} */ (event.key)];
    this.moveTo(Math.max(0, Math.min(this.count - 1, to)));
    this.pick?.(this.cursor, "key");
  }
}

Rows.made = 0;
/** @type {Set<WeakRef<Rows>>} */
Rows.all = new Set();

for (const [event, all] of /** @type {[string, boolean][]} */ ([["beforeprint", true], ["afterprint", false]])) {
  addEventListener(event, () => {
    for (const reference of Rows.all) {
      const rows = reference.deref();
      if (rows?.element.isConnected) rows.draw(all);
      else Rows.all.delete(reference);
    }
  });
}
