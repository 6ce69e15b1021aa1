// A comparison of two checkpoints: which keys differ, by how much, and how each side cuts them.

const STATES = /** @type {const} */ ({
  same: ["the same", "var(--held)"],
  values: ["other values", "#d9b04f"],
  meta: ["another shape or dtype", "#a873a8"],
  a: ["only in A", "#4477aa"],
  b: ["only in B", "#4aa291"],
});

/**
 * What differs of a key. Numbers are texts, since those of a checkpoint may be larger than JavaScript's.
 * @typedef {object} Difference
 * @property {keyof typeof STATES} state
 * @property {string} text
 * @property {any} [values]
 * @property {any[]} [objects]
 *
 * @typedef {{name: string, contents: Contents, numbers: Map<string, number>}} Side
 */

/** Offers the tree what it asks of Contents: keys, shapes and bytes of both sides. */
class Compared {
  /** @param {any} told */
  constructor(told) {
    this.told = told;
    this.declared = false;
    this.flaw = "differs";
    /** @type {string[]} */
    this.keys = told.keys;
    this.size = this.keys.length;
    /** @type {Side[]} */
    this.sides = [["A", told.a], ["B", told.b]].map(([name, side]) => {
      const contents = new Contents(side);
      return { name, contents, numbers: new Map(contents.keys.map((key, t) => [key, t])) };
    });
    /** @type {Map<string, Difference>} */
    this.differences = differencesOf(told.found);
    /** @type {Map<number, string>} */
    this.problems = new Map();
    this.tensorBytes = new Float64Array(this.size);
    /** @type {number[][]} */
    this.shapes = [];
    /** @type {string[]} */
    this.labels = [];
    this.keys.forEach((key, t) => {
      const found = this.differences.get(key);
      if (found) this.problems.set(t, found.text);
      const side = this.side(key);
      const n = side.numbers.get(key) ?? 0;
      this.tensorBytes[t] = side.contents.tensorBytes[n];
      this.shapes.push(side.contents.shapes[n]);
      this.labels.push(side.contents.told.overview.labels[side.contents.row[n]]);
    });
  }

  /** The side that shows a key in the tree: A, where it has it. @param {string} key */
  side(key) {
    return this.sides[0].numbers.has(key) ? this.sides[0] : this.sides[1];
  }

  /** @param {number} t */
  isObject(t) {
    const side = this.side(this.keys[t]);
    return side.contents.isObject(side.numbers.get(this.keys[t]) ?? 0);
  }

  /** @param {number} t */
  state(t) {
    return this.differences.get(this.keys[t])?.state ?? "same";
  }
}

/** @param {any} found  the answer of megackpt diff @returns {Map<string, Difference>} */
function differencesOf(found) {
  /** @type {Map<string, Difference>} */
  const all = new Map();
  /** @param {string} key @param {Difference} difference */
  const add = (key, difference) => {
    const known = all.get(key);
    const text = known ? `${known.text}; ${difference.text}` : difference.text;
    all.set(key, { ...difference, ...known, text, values: difference.values ?? known?.values });
  };
  for (const key of found.only_a) add(key, { state: "a", text: STATES.a[0] });
  for (const key of found.only_b) add(key, { state: "b", text: STATES.b[0] });
  for (const { key, a, b } of found.described) {
    const [in_a, in_b] = [a, b].map(({ dtype, shape: s }) => `${dtype} ${s.length ? s.join("×") : "scalar"}`);
    add(key, { state: "meta", text: `${in_a} in A, ${in_b} in B` });
  }
  for (const values of found.tensors) {
    if (values.elements === null) {
      add(values.key, { state: "values", text: "other digests", values });
      continue;
    }
    const [some, total] = [Number(values.elements), Number(values.total)];
    const much = values.max === "nan" ? "" : `, by up to ${values.max}`;
    const far = Number(values.distance) / Number(values.norm);
    const norm = Number.isFinite(far) ? `relative norm ${far.toPrecision(2)}, ` : "";
    const part = some < total / 1000 ? "< 0.1 %" : percent(some, total);
    const share = `${count(some)} of ${plural(total, "element")} (${part})`;
    add(values.key, { state: "values", text: norm + share + much, values });
  }
  for (const { key, changes } of found.objects) {
    const objects = [...(all.get(key)?.objects ?? []), ...changes];
    all.delete(key);
    add(key, { state: "values", text: `${plural(objects.length, "part")} of the object`, objects });
  }
  return all;
}

/** @param {Compared} compared */
function comparisonHeader({ told, keys, differences, sides }) {
  const differing = keys.filter((key) => differences.has(key)).length;
  const verdict = `${count(differing)} of ${plural(keys.length, "key")} ${differing === 1 ? "differs" : "differ"}`;
  const { found } = told;
  const names = sides.map(({ name, contents }) => {
    const [, format] = contents.told.facts[0];
    const where = make("span", { class: "key" }, contents.told.title);
    return make("span", {}, make("span", { class: "dim" }, `${name} `), where, ` ${format}`);
  });
  return top("Comparison of two checkpoints", differing ? verdict : "Nothing differs", names, [
    ["keys", count(keys.length)],
    ["the same", count(keys.length - differing)],
    ["compared by digest", count(Number(found.by_digest))],
    ["by data", count(Number(found.by_data))],
    ["read", bytes(Number(found.bytes_read))],
  ]);
}

/** Of a branch, or of everything. @param {Page} page @param {Branch} branch @param {Compared} compared */
function comparisonView(page, branch, compared) {
  const { keys } = page;
  const tensors = keys.tensors(branch);
  const counts = Object.entries(STATES).map(([state, [name]]) => {
    const fits = tensors.filter((t) => compared.state(t) === state).length;
    return /** @type {[string, string | null]} */ ([name, fits ? count(fits) : null]);
  });
  const whole = !branch.above;
  return make(
    "article",
    {},
    branch.above && crumbs(page, branch),
    make("h2", { class: whole ? "" : "key" }, whole ? "Everything" : keys.wholeName(branch)),
    facts([["keys", count(tensors.length)], ...counts]),
    whole && compared.size > 0 && stateStrip(page, compared),
    differingList(page, compared, tensors),
    whole &&
      make(
        "div",
        { class: "sections" },
        ...compared.sides.map((side) => make("div", {}, sideTitle(side), sideOverview(page, compared, side))),
      ),
  );
}

/** @param {Side} side */
const sideTitle = ({ name, contents }) =>
  make("h3", { class: "side" }, `${name} `, make("span", { class: "key dim" }, contents.told.title));

/** @param {Page} page @param {Compared} compared @param {Side} side */
function sideOverview(page, compared, side) {
  if (!side.contents.size) return make("p", { class: "note" }, "It is empty.");
  return new Overview(sidePage(page, compared, side), true).element;
}

/** The page for what is about one side only: its tensors have other numbers. @param {Page} page @param {Compared} compared @param {Side} side */
function sidePage(page, compared, { name, contents }) {
  /** @param {string} label @param {Set<number>} tensors */
  const onlyTensors = (label, tensors) => {
    const wanted = new Set([...tensors].map((t) => contents.keys[t]));
    const found = compared.keys.flatMap((key, t) => (wanted.has(key) ? [t] : []));
    page.onlyTensors(`${name}: ${label}`, new Set(found));
  };
  return {
    ...page,
    contents,
    onlyTensors,
    onlyFile: (/** @type {number} */ file) => onlyTensors(contents.told.files[file], contents.tensorsWith({ file })),
    onlyRank: (/** @type {number} */ rank) => onlyTensors(`rank ${rank}`, contents.tensorsWith({ rank })),
  };
}

/** @param {Page} page @param {Compared} compared @param {number[]} tensors */
function differingList(page, compared, tensors) {
  const differing = tensors.filter((t) => compared.problems.has(t));
  if (!differing.length) return make("p", { class: "note" }, "Nothing differs here.");
  const open = (/** @type {number} */ i) => page.go(/** @type {Leaf} */ (page.keys.leaves.get(differing[i])));
  const rows = new Rows({
    label: "Keys that differ",
    height: 26,
    row: (i) => {
      const t = differing[i];
      const key = make("span", { class: "key" }, compared.keys[t] || "(empty)");
      const text = compared.problems.get(t) ?? "";
      const square = swatch(STATES[compared.state(t)][1]);
      return make("div", { class: "wrong", title: text }, square, key, make("span", { class: "what" }, text));
    },
    pick: (i, by) => by === "click" && open(i),
    key: (event, i) => event.key === "Enter" && (open(i), true),
  });
  rows.element.style.height = `${Math.min(differing.length, 12) * 26}px`;
  rows.show(differing.length);
  const title = `${plural(differing.length, "key")} ${differing.length === 1 ? "differs" : "differ"}`;
  return make("section", { class: "block differing" }, make("h3", {}, title), rows.element);
}

/** A row for each layer, as wide as all its bytes: how much of it is in which state. @param {Page} page @param {Compared} compared */
function stateStrip(page, compared) {
  const collator = new Intl.Collator("en", { numeric: true });
  const labels = [...new Set(compared.labels)].sort(collator.compare);
  const states = /** @type {(keyof typeof STATES)[]} */ (Object.keys(STATES));
  const place = new Map(labels.map((label, r) => [label, r]));
  /** @type {number[][][]} */
  const cells = labels.map(() => states.map(() => []));
  compared.keys.forEach((_, t) => {
    cells[place.get(compared.labels[t]) ?? 0][states.indexOf(compared.state(t))].push(t);
  });
  const size = (/** @type {number[]} */ tensors) => tensors.reduce((sum, t) => sum + compared.tensorBytes[t], 0);
  const rows = labels.map((label, r) => {
    const all = size(cells[r].flat()) || 1;
    const parts = states.flatMap((state, s) => {
      const tensors = cells[r][s];
      if (!tensors.length) return [];
      const [name, colour] = STATES[state];
      const click = () => page.onlyTensors(`${label || "(empty)"}, ${name}`, new Set(tensors));
      const title = `${label}: ${plural(tensors.length, "key")}, ${bytes(size(tensors))}, ${name}`;
      const part = make("button", { type: "button", title, "aria-label": title, click });
      part.style.flexGrow = `${size(tensors) / all}`;
      part.style.background = colour;
      return [part];
    });
    const text = make("span", { class: "label key", title: label }, label || "(empty)");
    return make("div", { class: "states-row" }, text, make("span", { class: "states-bar" }, ...parts), make("span", { class: "size" }, bytes(all)));
  });
  const used = states.filter((_, s) => cells.some((row) => row[s].length));
  const legend = used.map((state) => make("li", {}, swatch(STATES[state][1]), STATES[state][0]));
  return make(
    "section",
    { class: "block" },
    make("h3", {}, "What differs where"),
    make("p", { class: "note" }, "Each row is a layer or branch with its optimizer state. Colours take the share of its bytes."),
    make("div", { class: "states" }, ...rows),
    make("ul", { class: "legend", "aria-label": "Colours" }, ...legend),
  );
}

/** One key on both sides. @param {Page} page @param {Leaf} leaf @param {Compared} compared */
function comparedTensor(page, leaf, compared) {
  const key = compared.keys[leaf.tensor];
  const found = compared.differences.get(key);
  const views = compared.sides.map((side) => {
    const t = side.numbers.get(key);
    const missing = make("p", { class: "note" }, "It does not have this key.");
    const view = t !== undefined && new TensorView(sidePage(page, compared, side), { ...leaf, tensor: t }, false).element;
    return make("div", {}, sideTitle(side), view || missing);
  });
  const state = found?.state ?? "same";
  return make(
    "article",
    {},
    crumbs(page, leaf),
    make("h2", { class: "key" }, key || "(empty)"),
    make("p", { class: "state" }, swatch(STATES[state][1]), found ? found.text : "The same on both sides."),
    found?.values && notedTable(found.values),
    found?.values && elementsTable(found.values),
    found?.objects && changesTable(found.objects),
    make("div", { class: "sections" }, ...views),
  );
}

/** What the saves have noted about the values. @param {any} values */
function notedTable({ noted_a: a, noted_b: b }) {
  if (!a && !b) return null;
  const rows = [
    ["NaN or infinite", a ? a.nonfinite : "-", b ? b.nonfinite : "-"],
    ["largest magnitude", a ? shown(a.largest) : "-", b ? shown(b.largest) : "-"],
  ];
  const head = make("h3", {}, "Noted when they were saved");
  return make("section", { class: "block" }, head, table(["", "A", "B"], rows));
}

/** @param {any} values */
function elementsTable({ elements, first }) {
  if (elements === null) return make("p", { class: "note" }, "It was not read: megackpt diff --read lists the elements that differ.");
  const rows = first.map((/** @type {any} */ { index, a, b }) => [`[${index.join(", ")}]`, shown(a), shown(b)]);
  const head = make("h3", {}, "The first elements that differ");
  return make("section", { class: "block" }, head, table(["element", "A", "B"], rows));
}

const LISTED = 200; // parts of an object

/** @param {any[]} changes */
function changesTable(changes) {
  const rows = changes.slice(0, LISTED).map(({ path, a, b }) => [path.map(shown).join(" › ") || "(all)", shown(a), shown(b)]);
  const more = changes.length > LISTED && make("p", { class: "note" }, `and ${count(changes.length - LISTED)} more`);
  const body = make("div", { class: "changes" }, table(["part", "A", "B"], rows));
  return make("section", { class: "block" }, make("h3", {}, "Parts that differ"), body, more);
}

/** A value of a checkpoint in one line. @param {any} value */
function shown(value) {
  if (value === undefined) return "absent";
  const text = typeof value === "string" ? value : JSON.stringify(value);
  return text.length > 200 ? `${text.slice(0, 200)}…` : text;
}
