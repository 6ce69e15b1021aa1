// The page itself: header, tree and what is chosen in it. Runs last.

/** @param {Contents} contents */
function header(contents) {
  const { told } = contents;
  const all = contents.keys.map((_, t) => t);
  const objects = all.filter((t) => contents.isObject(t)).length;
  const elements = all.reduce((sum, t) => sum + (contents.isObject(t) ? 0 : contents.elements(t)), 0);
  const total = contents.tensorBytes.reduce((sum, n) => sum + n, 0);
  /** @type {[string, string | null][]} */
  const figures = [
    ["bytes", bytes(total)],
    ["tensors", count(contents.size - objects)],
    ["objects", objects ? count(objects) : null],
    ["elements", short(elements)],
    [contents.declared ? "boxes" : "chunks", count(contents.owner.length)],
    ["files", contents.declared ? null : count(told.files.length)],
    ["ranks", told.ranks ? count(told.ranks) : null],
  ];
  const about = told.facts.map((/** @type {[string, string]} */ [name, value]) => {
    const kind = name === "save" || name === "in" ? "key" : "";
    return value && make("span", {}, make("span", { class: "dim" }, `${name} `), make("span", { class: kind }, value));
  });
  return top(`Shard map of a ${told.kind}`, told.title, about, figures);
}

/** @param {string} eyebrow @param {string} title @param {Node[]} about @param {[string, string | null][]} figures */
function top(eyebrow, title, about, figures) {
  const known = figures.filter(([, value]) => value !== null);
  const items = known.map(([name, value]) => make("div", {}, make("dd", {}, value), make("dt", {}, name)));
  return make(
    "header",
    { class: "top" },
    make(
      "div",
      {},
      make("p", { class: "eyebrow" }, eyebrow),
      make("h1", {}, title),
      make("p", { class: "about" }, ...about),
    ),
    make("dl", { class: "figures" }, ...items),
  );
}

/** 7,012,345,678 as "7.01 G". @param {number} n */
function short(n) {
  const power = Math.min(5, Math.floor(Math.log10(Math.max(1, n)) / 3));
  return power ? `${(n / 1000 ** power).toPrecision(3)} ${["", "k", "M", "G", "T", "P"][power]}` : count(n);
}

/** @param {any} told */
function start(told) {
  const compared = told.kind === "comparison" ? new Compared(told) : null;
  const contents = /** @type {Contents} */ (/** @type {unknown} */ (compared) ?? new Contents(told));
  setRamp((told.overview ?? told.a.overview).ramp);
  const keys = new Keys(contents);
  const detail = make("main", { id: "detail", tabindex: -1 });
  /** @type {Node_} */
  let current = keys.root;

  const view = () => {
    if (!compared) return "tensor" in current ? new TensorView(page, current).element : branchView(page, current);
    return "tensor" in current ? comparedTensor(page, current, compared) : comparisonView(page, current, compared);
  };
  const show = () => {
    detail.replaceChildren(view());
    detail.scrollTop = 0;
  };
  /** @param {Node_} node @param {"key" | "click"} [by] */
  const go = (node, by = "click") => {
    if (node === current) return;
    current = node;
    tree.reveal(node);
    show();
    if (document.activeElement === document.body) detail.focus({ preventScroll: true }); // what was clicked is gone
    if (by === "click") detail.scrollIntoView(); // on a narrow screen the tree is below
    if (by === "click") location.hash = keys.address(node);
    // Moving about with keys leaves no trail. In a frame of a notebook, an address alone would be the notebook's.
    else location.replace(location.href.split("#")[0] + keys.address(node));
  };
  /** @type {Page} */
  const page = {
    contents,
    keys,
    go,
    onlyFile: (file) => page.onlyTensors(contents.told.files[file], contents.tensorsWith({ file })),
    onlyRank: (rank) => page.onlyTensors(`rank ${rank}`, contents.tensorsWith({ rank })),
    onlyTensors: (label, tensors) => {
      tree.restrict({ label, tensors });
      tree.element.scrollIntoView({ block: "nearest" });
    },
  };
  const tree = new Tree(keys, go);

  const above = compared ? comparisonHeader(compared) : header(contents);
  if (compared) document.body.className = "comparison";
  document.body.replaceChildren(above, make("div", { class: "middle" }, tree.element, detail));
  addEventListener("hashchange", () => location.hash !== keys.address(current) && go(keys.addressed(location.hash)));
  darkness.addEventListener("change", show);
  addEventListener("keydown", (event) => {
    const typing = event.target instanceof HTMLInputElement || event.target instanceof HTMLSelectElement;
    if (typing || event.ctrlKey || event.metaKey) return;
    if (event.key === "/") {
      event.preventDefault();
      tree.input.select();
    } else if (event.target === document.body && event.key.startsWith("Arrow")) {
      tree.rows.element.focus();
      tree.rows.pressed(event);
    }
  });
  current = keys.addressed(location.hash);
  tree.reveal(current);
  show();
}

try {
  start(await unpacked(/** @type {HTMLElement} */ (document.getElementById("data")).textContent ?? ""));
  document.documentElement.dataset.ready = "yes";
} catch (error) {
  document.body.append(make("p", { class: "failed", role: "alert" }, `This page cannot be shown: ${error}`));
  throw error;
}
