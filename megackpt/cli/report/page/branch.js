// What is shown of a branch of the tree, or of everything: totals, problems, copies, and bars.

/** @param {Page} page @param {Branch} branch */
function branchView(page, branch) {
  const { contents, keys } = page;
  const tensors = keys.tensors(branch);
  const byRank = contents.byRank(tensors, !branch.above);
  const byFile = contents.byFile(tensors);
  const byDtype = contents.byDtype(tensors);
  const parts = partsOf(page, branch);
  const hint = "show its tensors";
  const section = (/** @type {any} */ options) => options.bars.length > 0 && barSection(options);
  return make(
    "article",
    {},
    branch.above && crumbs(page, branch),
    make("h2", { class: branch.above ? "key" : "" }, branch.above ? keys.wholeName(branch) : "Everything"),
    branch.above && branchFacts(contents, tensors),
    problemSection(page, tensors),
    !branch.above && contents.size > 0 && new Overview(page).element,
    make(
      "div",
      { class: "sections" },
      make(
        "div",
        {},
        section({
          title: "Bytes per branch",
          bars: parts,
          sort: "largest",
          hint: "go there",
          pick: (/** @type {Bar} */ bar) => page.go(branch.children[bar.number]),
        }),
        section({ title: "Bytes per dtype", bars: byDtype, sort: "largest" }),
        contents.declared && copiesSection(contents, tensors),
        section({ title: "Small files", bars: branch.above ? [] : smallFiles(contents) }),
      ),
      make(
        "div",
        {},
        section({
          title: "Bytes per rank",
          bars: byRank,
          spread: true,
          colour: (/** @type {number} */ rank) => colourOf(rank, contents.world),
          hint,
          pick: (/** @type {Bar} */ bar) => page.onlyRank(bar.number),
        }),
        section({
          title: "Bytes per file",
          bars: byFile,
          spread: true,
          hint,
          pick: (/** @type {Bar} */ bar) => page.onlyFile(bar.number),
        }),
      ),
    ),
  );
}

/** The children of a branch as bars. @param {Page} page @param {Branch} branch @returns {Bar[]} */
function partsOf({ contents, keys }, branch) {
  return branch.children.map((child, number) => {
    const tensors = "tensor" in child ? [child.tensor] : keys.tensors(child);
    return { label: child.name, number, held: 0, value: tensors.reduce((sum, t) => sum + contents.tensorBytes[t], 0) };
  });
}

/** @param {Contents} contents @param {number[]} tensors */
function branchFacts(contents, tensors) {
  const total = tensors.reduce((sum, t) => sum + contents.tensorBytes[t], 0);
  const pieces = tensors.reduce((sum, t) => sum + contents.first[t + 1] - contents.first[t], 0);
  const objects = tensors.filter((t) => contents.isObject(t)).length;
  return facts([
    ["tensors", count(tensors.length - objects)],
    ["objects", objects ? count(objects) : null],
    ["bytes", bytes(total)],
    [contents.declared ? "boxes" : "chunks", count(pieces)],
  ]);
}

/** @param {Page} page @param {number[]} tensors */
function problemSection({ contents, keys, go }, tensors) {
  const wrong = tensors.filter((t) => contents.problems.has(t));
  if (!wrong.length) return null;
  const open = (/** @type {number} */ i) => go(/** @type {Leaf} */ (keys.leaves.get(wrong[i])));
  const rows = new Rows({
    label: "Tensors that are not covered exactly",
    height: 26,
    row: (i) => {
      const key = make("span", { class: "key" }, contents.keys[wrong[i]] || "(empty)");
      return make("div", { class: "wrong" }, key, make("span", { class: "what" }, firstFlaw(contents, wrong[i])));
    },
    pick: (i, by) => by === "click" && open(i),
    key: (event, i) => event.key === "Enter" && (open(i), true),
  });
  rows.element.style.height = `${Math.min(wrong.length, 8) * 26}px`;
  rows.show(wrong.length);
  const title = `${plural(wrong.length, "key")} ${wrong.length === 1 ? "is" : "are"} not covered exactly once`;
  return make("section", { class: "problem", role: "alert" }, make("h3", {}, title), rows.element);
}

/** @param {Contents} contents @param {number} t */
function firstFlaw(contents, t) {
  const flaws = contents.flaws.get(t) ?? [];
  const more = flaws.length > 1 ? `; and ${flaws.length - 1} more` : "";
  if (flaws.length) return flawText(flaws[0], contents.declared) + more;
  const [first] = (contents.problems.get(t) ?? "").split("\n");
  const start = `'${contents.keys[t]}' is `;
  return first.startsWith(start) ? first.slice(start.length) : first;
}

/** How often the boxes are held, and that each is written once. @param {Contents} contents @param {number[]} tensors */
function copiesSection(contents, tensors) {
  const rows = contents.byCopies(tensors);
  if (!rows.length) return null;
  const held = rows.reduce((sum, row) => sum + row.copies * row.size, 0);
  const once = rows.reduce((sum, row) => sum + row.size, 0);
  const times = once ? (held / once).toFixed(2) : "1.00";
  const told = `${bytes(held)} held, ${bytes(once)} to be written: each byte is held ${times} times on average`;
  const body = rows.map((row) => [count(row.copies), count(row.shards), bytes(row.copies * row.size), bytes(row.size)]);
  return make(
    "section",
    { class: "block" },
    make("header", {}, make("h3", {}, "Replicas")),
    make("p", { class: "spread" }, told),
    table(["copies", "boxes", "held", "written"], body),
  );
}

/** @param {Contents} contents @returns {Bar[]} */
function smallFiles({ told }) {
  return told.small.map((/** @type {[string, number]} */ [label, value], /** @type {number} */ number) => ({
    label,
    value,
    number,
    held: 0,
  }));
}
