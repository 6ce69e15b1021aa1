// The tree of keys, cut at dots; and the search in it.

const DEEPEST = 32; // dots at which a key is cut; the rest of a deeper one is its last part

/**
 * @typedef {object} Branch
 * @property {string} name  the last part of its keys' common beginning; more parts where there is no fork
 * @property {Branch | null} above
 * @property {number} depth
 * @property {Node_[]} children
 * @property {number} from  its tensors are keys.order[from] to keys.order[to - 1]
 * @property {number} to
 * @property {number} id
 * @property {boolean} open
 *
 * @typedef {{name: string, tensor: number, depth: number, above: Branch}} Leaf
 * @typedef {Branch | Leaf} Node_
 */

class Keys {
  /** @param {Contents} contents */
  constructor(contents) {
    this.contents = contents;
    /** @type {number[]} */
    this.order = [];
    /** @type {Branch[]} */
    this.branches = [];
    /** @type {Map<number, Leaf>} */
    this.leaves = new Map();
    this.root = this.branch("", null);
    this.counts = this.sizes = new Float64Array(1); // of the keys that are asked for, summed up along `order`
    /** @type {Map<Branch, Map<string, Branch>>} */
    const inside = new Map();
    contents.keys.forEach((key, tensor) => {
      const parts = key.split(".", DEEPEST);
      const name = key.slice(parts.slice(0, -1).reduce((n, part) => n + part.length + 1, 0));
      let at = this.root;
      for (const part of parts.slice(0, -1)) {
        let below = inside.get(at);
        if (!below) inside.set(at, (below = new Map()));
        let next = below.get(part);
        if (!next) {
          below.set(part, (next = this.branch(part, at)));
          at.children.push(next);
        }
        at = next;
      }
      at.children.push({ name, tensor, depth: 0, above: at });
    });
    this.joined(this.root);
    this.settle(this.root, 0, new Intl.Collator("en", { numeric: true }));
    this.wrong = starts(this.order.map((tensor) => Number(contents.problems.has(tensor))));
    this.openSome(24);
  }

  /** @param {string} name @param {Branch | null} above @returns {Branch} */
  branch(name, above) {
    return { name, above, depth: 0, children: [], from: 0, to: 0, id: 0, open: false };
  }

  /** Sorts and numbers. @param {Branch} at @param {number} depth @param {Intl.Collator} collator */
  settle(at, depth, collator) {
    at.depth = depth;
    at.id = this.branches.push(at) - 1;
    at.from = this.order.length;
    const first = (/** @type {Node_} */ node) => node.name.slice(0, node.name.indexOf(".") >>> 0);
    at.children.sort((a, b) => collator.compare(first(a), first(b)) || collator.compare(a.name, b.name));
    for (const child of at.children) {
      child.above = at;
      child.depth = depth + 1;
      if ("children" in child) this.settle(child, depth + 1, collator);
      else {
        this.order.push(child.tensor);
        this.leaves.set(child.tensor, child);
      }
    }
    at.to = this.order.length;
  }

  /** A branch with nothing below but one key gives way to that key. @param {Node_} node @returns {Node_} */
  joined(node) {
    if (!("children" in node)) return node;
    node.children = node.children.map((child) => this.joined(child));
    if (!node.above || node.children.length !== 1) return node;
    const only = node.children[0];
    only.name = `${node.name}.${only.name}`;
    return only;
  }

  /** Opens branches, the upper ones first, as long as no more than so many rows appear. @param {number} rows */
  openSome(rows) {
    const waiting = [this.root];
    for (let at = waiting.shift(); at; at = waiting.shift()) {
      if (at !== this.root && at.children.length > rows) continue;
      at.open = true;
      rows -= at.children.length;
      for (const child of at.children) if ("children" in child) waiting.push(child);
    }
  }

  /** The keys' common beginning, or the key. @param {Node_} node */
  wholeName(node) {
    if ("tensor" in node) return this.contents.keys[node.tensor];
    return [...this.path(node).slice(1), node].map((branch) => branch.name).join(".");
  }

  /** The part of the page's address that opens a node: "#key=" and its key, or a branch's with a dot. @param {Node_} node */
  address(node) {
    if (!node.above) return "#";
    const name = this.wholeName(node) + ("tensor" in node ? "" : ".");
    return `#key=${encodeURIComponent(name.replace(/[\ud800-\udfff]/gu, "\ufffd"))}`;
  }

  /** What such an address opens: a tensor, or the first branch whose keys begin so. @param {string} hash @returns {Node_} */
  addressed(hash) {
    const [, text] = /^#key=(.*)$/s.exec(hash) ?? [];
    if (text === undefined) return this.root;
    for (const leaf of this.leaves.values()) if (this.address(leaf) === hash) return leaf;
    let name = "";
    try {
      name = decodeURIComponent(text);
    } catch {
      return this.root;
    }
    const tensor = this.contents.keys.indexOf(name);
    const begins = (/** @type {Branch} */ branch) => `${this.wholeName(branch)}.`.startsWith(`${name}.`.replace(/\.+$/, "."));
    return this.leaves.get(tensor) ?? this.branches.slice(1).find(begins) ?? this.root;
  }

  /** Is a key here that is not covered exactly? @param {Node_} node */
  broken(node) {
    return "tensor" in node ? this.contents.problems.has(node.tensor) : this.wrong[node.to] > this.wrong[node.from];
  }

  /** @param {Branch} branch */
  tensors(branch) {
    return this.order.slice(branch.from, branch.to);
  }

  /** The branches above, from the outermost. @param {Node_} node @returns {Branch[]} */
  path(node) {
    const found = [];
    for (let at = node.above; at; at = at.above) found.unshift(at);
    return found;
  }

  /**
   * The rows to be seen: everything open or, where some tensors are asked for, the way to each of them.
   * @param {Set<number> | null} wanted
   */
  rows(wanted) {
    /** @type {Node_[]} */
    const found = [];
    const { contents } = this;
    const inside = this.order.map((tensor) => !wanted || wanted.has(tensor));
    const sums = (this.counts = starts(inside.map(Number)));
    this.sizes = starts(this.order.map((tensor, i) => (inside[i] ? contents.tensorBytes[tensor] : 0)));
    /** @param {Branch} at */
    const walk = (at) => {
      for (const child of at.children) {
        if (!("children" in child)) {
          if (!wanted || wanted.has(child.tensor)) found.push(child);
        } else if (sums[child.to] > sums[child.from]) {
          found.push(child);
          if (child.open || wanted) walk(child);
        }
      }
    };
    found.push(this.root);
    if (this.root.open || wanted) walk(this.root);
    return found;
  }
}

class Tree {
  /** @param {Keys} keys @param {(node: Node_, by: "key" | "click") => void} pick */
  constructor(keys, pick) {
    this.keys = keys;
    this.contents = keys.contents;
    /** @type {Node_[]} */
    this.shown = [];
    /** @type {Node_} */
    this.current = keys.root;
    /** @type {Set<number> | null} */
    this.found = null;
    /** @type {{label: string, tensors: Set<number>} | null} */
    this.only = null;
    this.rows = new Rows({
      label: "Tensors and objects by key",
      height: 26,
      role: "tree",
      row: (i) => this.row(this.shown[i]),
      key: (event, i) => this.pressed(event, i),
      pick: (i, by) => pick(this.shown[i], by),
    });
    this.rows.element.addEventListener("click", (event) => this.clicked(event), true);
    this.input = /** @type {HTMLInputElement} */ (
      make("input", {
        type: "search",
        placeholder: "Search keys: layers.*.weight",
        "aria-label": "Search keys",
        spellcheck: "false",
        autocomplete: "off",
        input: () => this.refresh(),
        keydown: (/** @type {KeyboardEvent} */ event) => this.typed(event),
      })
    );
    this.status = make("p", { class: "found", role: "status" });
    this.chip = make("div", { class: "chips" });
    const search = make("div", { class: "search" }, this.input, make("kbd", { "aria-hidden": "true" }, "/"));
    this.element = make("nav", { "aria-label": "Keys" }, search, this.chip, this.status, this.rows.element);
    this.refresh();
  }

  /** Shows only these tensors, until told otherwise. @param {{label: string, tensors: Set<number>} | null} only */
  restrict(only) {
    this.only = only;
    this.chip.replaceChildren();
    if (only) {
      const label = `Show all again, not only ${only.label}`;
      const remove = make("button", { type: "button", "aria-label": label, click: () => this.restrict(null) }, "×");
      this.chip.append(make("span", { class: "chip" }, make("span", { class: "key" }, only.label), remove));
    }
    this.refresh();
  }

  refresh() {
    const query = this.input.value.trim();
    const fits = query && matcher(query);
    const { order, contents } = this.keys;
    const wanted = order.filter((t) => (!fits || fits(contents.keys[t])) && (!this.only || this.only.tensors.has(t)));
    const cleared = this.found !== null && !fits && !this.only;
    this.found = fits || this.only ? new Set(wanted) : null;
    const { current } = this;
    if (cleared) for (const branch of this.keys.path(current)) branch.open = true;
    this.shown = this.keys.rows(this.found);
    const some = wanted.length ? `${count(wanted.length)} of ${plural(order.length, "key")}` : "No key matches.";
    this.status.textContent = this.found ? some : "";
    const index = this.shown.indexOf(current);
    this.rows.show(this.shown.length, index);
    if (cleared && index >= 0) this.rows.moveTo(index);
  }

  /** Puts the cursor on a node, opening what is above it. @param {Node_} node */
  reveal(node) {
    this.current = node;
    if (!this.shown.includes(node)) {
      for (const branch of this.keys.path(node)) branch.open = true;
      if (this.found && "tensor" in node && !this.found.has(node.tensor)) {
        this.input.value = "";
        this.only = null;
        this.chip.replaceChildren();
      }
      this.refresh();
    }
    const index = this.shown.indexOf(node);
    if (index >= 0 && index !== this.rows.cursor) this.rows.moveTo(index);
  }

  /** @param {Node_} node */
  row(node) {
    const { contents, keys } = this;
    const leaf = "tensor" in node;
    const open = !leaf && (node.open || this.found !== null);
    const broken = keys.broken(node);
    const name = (node.above ? node.name : "Everything") || "(empty)";
    const shape = leaf && (contents.isObject(node.tensor) ? "object" : contents.shapes[node.tensor].join("×"));
    const [keysInside, size] = leaf
      ? [1, contents.tensorBytes[node.tensor]]
      : [keys.counts, keys.sizes].map((sums) => sums[node.to] - sums[node.from]);
    const indent = make("span", { class: "indent", "aria-hidden": "true" });
    indent.style.width = `${Math.max(0, node.depth - 1) * 14}px`;
    return make(
      "div",
      {
        class: `${leaf ? "leaf" : "branch"}${broken ? " broken" : ""}`,
        "aria-level": node.depth + 1,
        "aria-expanded": !leaf && `${open}`,
        "aria-label": broken && `${name}, ${contents.flaw}`,
      },
      indent,
      make("span", { class: "twist", "aria-hidden": "true" }, !leaf && node.above && (open ? "▾" : "▸")),
      make("span", { class: "name", title: leaf ? contents.keys[node.tensor] : name }, name),
      make("span", { class: "shape" }, leaf ? shape : count(keysInside)),
      make("span", { class: "size" }, bytes(size)),
    );
  }

  /** @param {Node_} node @param {boolean} open */
  fold(node, open) {
    if (!("children" in node) || node.open === open || this.found || !node.above) return false;
    node.open = open;
    this.refresh();
    return true;
  }

  /** A click on the triangle folds, without moving the cursor. @param {MouseEvent} event */
  clicked(event) {
    const target = /** @type {HTMLElement} */ (event.target);
    const row = /** @type {HTMLElement | null} */ (target.closest(".branch"));
    if (!row || !target.closest(".twist")) return;
    const node = this.shown[Number(row.dataset.index)];
    if ("children" in node && this.fold(node, !node.open)) event.stopPropagation();
  }

  /** @param {KeyboardEvent} event @param {number} index */
  pressed(event, index) {
    const node = this.shown[index];
    if (event.key === "ArrowRight") {
      if (!this.fold(node, true) && "children" in node && index + 1 < this.shown.length) this.go(index + 1);
      return true;
    }
    if (event.key === "ArrowLeft") {
      if (!this.fold(node, false) && node.above) this.go(this.shown.indexOf(node.above));
      return true;
    }
    if (event.key !== "Enter" && event.key !== " ") return false;
    if ("children" in node) this.fold(node, !node.open);
    this.rows.pick?.(index, "click");
    return true;
  }

  /** @param {number} index */
  go(index) {
    this.rows.moveTo(index);
    this.rows.pick?.(index, "key");
  }

  /** @param {KeyboardEvent} event */
  typed(event) {
    if (event.key === "Escape") {
      this.input.value = "";
      this.refresh();
    } else if (event.key === "ArrowDown" || event.key === "Enter") {
      this.rows.element.focus();
      const first = this.shown.findIndex((node) => "tensor" in node);
      if (first >= 0) this.go(first);
    } else return;
    event.preventDefault();
  }
}
