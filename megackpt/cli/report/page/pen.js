// How pieces and flaws look on a canvas, and how the pointer and the keys reach them.

const darkness = matchMedia("(prefers-color-scheme: dark)");

/** @type {number[][]} */
let ramp = []; // colours from the first to the last rank, ever lighter: told apart without their hues, too

/** @param {string[]} colours */
function setRamp(colours) {
  ramp = colours.map((text) => [0, 2, 4].map((at) => parseInt(text.slice(at, at + 2), 16)));
}

/**
 * The colour of a rank, a file or a number of copies.
 * @param {number} number
 * @param {number} total  of all that have colours
 */
function colourOf(number, total) {
  const at = (ramp.length - 1) * Math.min(1, number / Math.max(1, total - 1));
  const from = Math.min(Math.floor(at), ramp.length - 2);
  const mixed = ramp[from].map((n, i) => n + (ramp[from + 1][i] - n) * (at - from));
  const dark = darkness.matches ? 0.85 : 1; // large areas do not glare
  return `rgb(${mixed.map((n) => Math.round(dark * n)).join(", ")})`;
}

/** Ink that can be read on a colour. @param {string} colour */
function inkOn(colour) {
  const [red, green, blue] = (colour.match(/\d+/g) ?? []).map(Number);
  return 0.3 * red + 0.59 * green + 0.11 * blue > 135 ? "#1d1d1b" : "#fcfcfb";
}

class Pen {
  /** @param {HTMLCanvasElement} canvas @param {HTMLElement} host  whose style tells the colours */
  constructor(canvas, host) {
    this.canvas = canvas;
    this.pen = /** @type {CanvasRenderingContext2D} */ (canvas.getContext("2d"));
    const style = getComputedStyle(host);
    /** @param {string} name */
    this.token = (name) => style.getPropertyValue(name).trim();
    this.font = `11px ${this.token("--mono")}`;
    this.pen.font = this.font;
  }

  /** @param {number} width @param {number} height */
  size(width, height) {
    const ratio = devicePixelRatio || 1;
    this.canvas.width = Math.round(width * ratio);
    this.canvas.height = Math.round(height * ratio);
    this.pen.scale(ratio, ratio);
    this.pen.font = this.font;
  }

  /** Pixels that numbers beside the drawing need. @param {number[]} cuts */
  room(cuts) {
    const ends = [cuts[0], cuts[cuts.length - 1]];
    return Math.ceil(Math.max(...ends.map((cut) => this.pen.measureText(`${cut}`).width))) + 12;
  }

  /** @param {number} x @param {number} y @param {number} width @param {number} height */
  frame(x, y, width, height) {
    this.pen.fillStyle = this.token("--well");
    this.pen.fillRect(x, y, width, height);
  }

  /** @param {number} x @param {number} y @param {number} width @param {number} height @param {number} [line] */
  border(x, y, width, height, line = 1) {
    this.pen.lineWidth = line;
    this.pen.strokeStyle = this.token("--ink");
    const inset = Math.min(line / 2, width / 2, height / 2);
    this.pen.strokeRect(x + inset, y + inset, Math.max(0, width - 2 * inset), Math.max(0, height - 2 * inset));
  }

  /** @param {Drawn} drawn @param {string | null} colour  null: nobody's */
  piece({ x, y, width, height }, colour) {
    const gap = Math.min(width, height) >= 6 ? 1 : 0;
    this.pen.fillStyle = colour ?? this.hatch(this.token("--faint"), 6);
    this.pen.fillRect(x, y, width - gap, height - gap);
  }

  /**
   * In the middle of a piece that has room for it, readable on what is hatched, too.
   * @param {Drawn} drawn
   * @param {string | null} colour  the piece's
   * @param {string[]} labels  the first that fits
   */
  label({ x, y, width, height }, colour, labels) {
    const { pen } = this;
    const label = height >= 15 && width >= 15 && labels.find((text) => pen.measureText(text).width + 8 <= width);
    if (!label) return;
    pen.textAlign = "center";
    pen.textBaseline = "middle";
    pen.lineJoin = "round";
    pen.lineWidth = 6;
    pen.strokeStyle = colour ?? this.token("--well");
    pen.strokeText(label, x + width / 2, y + height / 2);
    pen.fillStyle = colour ? inkOn(colour) : this.token("--ink");
    pen.fillText(label, x + width / 2, y + height / 2);
  }

  /** A hole is hatched on a pale ground, an overlap crossed on what overlaps. @param {Drawn} drawn */
  flaw({ x, y, width, height, flaw }) {
    const red = this.token("--red");
    const { pen } = this;
    pen.fillStyle = flaw?.count === 0 ? this.token("--hole") : this.token("--overlap");
    pen.fillRect(x, y, width, height);
    for (const mirrored of flaw && flaw.count > 1 ? [false, true] : [false]) {
      pen.fillStyle = this.hatch(red, 9, mirrored);
      pen.fillRect(x, y, width, height);
    }
    pen.strokeStyle = red;
    pen.lineWidth = 1.5;
    pen.strokeRect(x + 0.75, y + 0.75, Math.max(0, width - 1.5), Math.max(0, height - 1.5));
  }

  /** Diagonal lines. @param {string} colour @param {number} step @param {boolean} [mirrored] */
  hatch(colour, step, mirrored = false) {
    const tile = document.createElement("canvas");
    tile.width = tile.height = step;
    const pen = /** @type {CanvasRenderingContext2D} */ (tile.getContext("2d"));
    pen.strokeStyle = colour;
    if (mirrored) pen.transform(-1, 0, 0, 1, step, 0);
    for (const shift of [-step, 0, step]) {
      pen.moveTo(shift, step);
      pen.lineTo(shift + step, 0);
    }
    pen.stroke();
    return /** @type {CanvasPattern} */ (this.pen.createPattern(tile, "repeat"));
  }

  /**
   * Numbers at the cuts, as many as there is room for.
   * @param {{across: Ruler, down: Ruler}} rulers
   * @param {number} left
   * @param {number} top
   * @param {boolean} across  are there any?
   * @param {boolean} down
   */
  ticks(rulers, left, top, across, down) {
    const { pen } = this;
    pen.fillStyle = this.token("--dim");
    pen.textBaseline = "middle";
    if (across) {
      for (const [cut, x] of spread(rulers.across, (cut) => pen.measureText(`${cut}`).width + 14)) {
        const last = x >= rulers.across.places[rulers.across.places.length - 1] - 1;
        pen.textAlign = x < 1 ? "left" : last ? "right" : "center";
        pen.fillText(`${cut}`, left + x, 9);
      }
    }
    if (!down) return;
    pen.textAlign = "right";
    for (const [cut, y] of spread(rulers.down, () => 15, 0.75)) {
      const end = rulers.down.places[rulers.down.places.length - 1];
      pen.fillText(`${cut}`, left - 6, top + Math.min(Math.max(y, 6), end - 6));
    }
  }
}

/**
 * The first and the last cut, and of those between as many as keep their distance.
 * @param {Ruler} ruler
 * @param {(cut: number) => number} room  that a number needs
 * @param {number} [edge]  how much of it the first and the last one take away from those between
 * @returns {[number, number][]}
 */
function spread({ cuts, places }, room, edge = 1) {
  const end = cuts.length - 1;
  /** @type {[number, number][]} */
  const told = [[cuts[0], 0]];
  let free = edge * room(cuts[0]);
  for (let i = 1; i < end; i++) {
    const half = room(cuts[i]) / 2;
    if (places[i] - half < free || places[i] + half > places[end] - edge * room(cuts[end])) continue;
    told.push([cuts[i], places[i]]);
    free = places[i] + half;
  }
  told.push([cuts[end], places[end]]);
  return told;
}

/** Pointer and keys. @param {Drawing} drawing */
function listen(drawing) {
  const { base, tip } = drawing;
  /** @type {{x: number, y: number, moved: boolean} | null} */
  let held = null;

  /** @param {Drawn | null} drawn @param {PointerEvent} [event] */
  const hover = (drawn, event) => {
    if (drawn !== drawing.hovered) {
      drawing.hovered = drawn;
      drawing.mark();
      tip.replaceChildren(...(drawn ? drawing.tell(drawn).map((line) => make("div", {}, line)) : []));
    }
    tip.hidden = !drawn;
    if (!drawn || !event) return;
    const { clientWidth, clientHeight } = drawing.element;
    const below = event.offsetY + 18;
    const above = event.offsetY - tip.offsetHeight - 10;
    tip.style.left = `${Math.max(0, Math.min(event.offsetX + 14, clientWidth - tip.offsetWidth))}px`;
    tip.style.top = `${below + tip.offsetHeight > clientHeight + 60 ? above : below}px`;
  };

  base.addEventListener("pointermove", (event) => {
    if (held && (event.buttons & 1) === 1) {
      const [dx, dy] = [event.offsetX - held.x, event.offsetY - held.y];
      if (!held.moved && Math.hypot(dx, dy) < 4) return;
      hover(null);
      drawing.pan(-dx / base.clientWidth, -dy / base.clientHeight);
      held = { x: event.offsetX, y: event.offsetY, moved: true };
    } else hover(drawing.under(event.offsetX, event.offsetY), event);
  });
  base.addEventListener("pointerleave", () => hover(null));
  base.addEventListener("pointerdown", (event) => {
    held = { x: event.offsetX, y: event.offsetY, moved: false };
  });
  base.addEventListener("click", (event) => {
    const drawn = held?.moved ? null : drawing.under(event.offsetX, event.offsetY);
    if (drawn?.piece) drawing.pick(drawn.piece);
  });
  base.addEventListener("dblclick", (event) => {
    const drawn = drawing.under(event.offsetX, event.offsetY);
    const box = drawn?.piece ?? drawn?.flaw;
    if (box) drawing.look(box);
  });
  base.addEventListener(
    "wheel",
    (event) => {
      if (!event.ctrlKey && !event.metaKey) return; // else the page scrolls, as everywhere
      event.preventDefault();
      drawing.zoom(event.deltaY < 0 ? 1.25 : 0.8, event.offsetX, event.offsetY);
    },
    { passive: false },
  );
  base.addEventListener("keydown", (event) => {
    const acts = /** @type {Record<string, () => void>} */ ({
      "+": () => drawing.zoom(2),
      "=": () => drawing.zoom(2),
      "-": () => drawing.zoom(0.5),
      0: () => drawing.fit(),
      ArrowLeft: () => drawing.pan(-0.2, 0),
      ArrowRight: () => drawing.pan(0.2, 0),
      ArrowUp: () => drawing.pan(0, -0.2),
      ArrowDown: () => drawing.pan(0, 0.2),
    });
    if (!(event.key in acts) || event.ctrlKey || event.metaKey) return;
    event.preventDefault();
    acts[event.key]();
  });
}
