// A chart: curves over the last minutes, with a reader for the pointer and the arrow keys.
import { make, span } from "./common.js";

const SVG = "http://www.w3.org/2000/svg";
const HEIGHT = 128;
const FOOT = 20;

function draw(name, given, text) {
  const one = document.createElementNS(SVG, name);
  for (const [field, value] of Object.entries(given)) one.setAttribute(field, value);
  if (text !== undefined) one.textContent = text;
  return one;
}

// The least of 1, 2, 4, 10, 20, ... that holds a value; half of it is a round number, too.
function above(value) {
  if (!(value > 0)) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 4, 10].map((step) => step * power).find((top) => top >= value * 0.999);
}

export class Chart {
  // curves: {name, classes, area}. format: of a value. top: of the scale, where it is fixed. bridge: a gap is drawn over.
  constructor(place, label, curves, { format, top = null, bridge = false, least = 0 }) {
    Object.assign(this, { place, label, curves, format, top, bridge, least, values: [], step: 1, at: null });
    this.svg = draw("svg", { role: "img", "aria-label": label });
    this.none = make("div", { classes: "none", textContent: "waiting for figures" });
    this.tip = make("div", { classes: "tip", hidden: true });
    this.said = make("div", { classes: "sr" });
    this.said.setAttribute("aria-live", "polite");
    place.classList.add("chart");
    place.tabIndex = 0;
    place.setAttribute("role", "group");
    place.setAttribute("aria-label", `${label}; arrow keys read the curves`);
    place.append(this.svg, this.none, this.tip, this.said);
    new ResizeObserver(() => this.draw()).observe(place);
    place.addEventListener("pointermove", (event) => {
      const box = this.svg.getBoundingClientRect();
      this.read(Math.round(((event.clientX - box.left) / box.width) * (this.length - 1)));
    });
    place.addEventListener("pointerleave", () => this.read(null));
    place.addEventListener("blur", () => this.read(null));
    place.addEventListener("keydown", (event) => this.press(event));
  }

  get length() {
    return this.values.length ? this.values[0].length : 0;
  }

  update(step, values, empty) {
    Object.assign(this, { step, values });
    const some = values.some((curve) => curve.some((value) => value !== null));
    this.none.hidden = some;
    this.none.textContent = empty;
    this.draw();
    const last = this.curves.map(({ name }, i) => `${name} ${this.format(values[i].findLast((value) => value !== null))}`);
    this.svg.setAttribute("aria-label", some ? `${this.label}: ${last.join(", ")}` : `${this.label}: ${empty}`);
  }

  press(event) {
    const moves = { ArrowLeft: -1, ArrowRight: 1 };
    if (event.key === "Escape") this.read(null);
    if (!(event.key in moves)) return;
    event.preventDefault();
    this.read((this.at ?? this.length - 1) + moves[event.key]);
    this.said.textContent = this.tip.textContent;
  }

  read(at) {
    this.at = at === null || !this.length ? null : Math.max(0, Math.min(this.length - 1, at));
    this.draw();
  }

  draw() {
    const width = this.place.clientWidth;
    if (!width || !this.length) return;
    const bottom = HEIGHT - FOOT;
    const highest = Math.max(this.least, ...this.values.flat().filter((value) => value !== null));
    const top = this.top ?? above(highest);
    const x = (i) => (i / Math.max(this.length - 1, 1)) * width;
    const y = (value) => bottom - (Math.min(value, top) / top) * (bottom - 14);
    this.svg.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
    const parts = [0.5, 1].flatMap((part) => [
      draw("line", { class: "rule", x1: 0, x2: width, y1: y(top * part), y2: y(top * part) }),
      draw("text", { x: 0, y: y(top * part) - 3 }, this.format(top * part)),
    ]);
    parts.push(draw("line", { class: "base", x1: 0, x2: width, y1: bottom, y2: bottom }));
    parts.push(draw("text", { x: 0, y: HEIGHT - 4 }, `${span(this.length * this.step)} ago`));
    parts.push(draw("text", { x: width, y: HEIGHT - 4, "text-anchor": "end" }, "now"));
    this.curves.forEach((curve, i) => parts.push(...this.line(curve, this.values[i], x, y, bottom)));
    if (this.at !== null) parts.push(draw("line", { class: "cross", x1: x(this.at), x2: x(this.at), y1: 10, y2: bottom }));
    this.svg.replaceChildren(...parts);
    this.point(x, width);
  }

  line({ classes, area }, values, x, y, bottom) {
    const runs = [];
    let open = null;
    values.forEach((value, i) => {
      if (value === null) {
        if (!this.bridge) open = null;
        return;
      }
      if (!open) runs.push((open = []));
      open.push([x(i), y(value)]);
    });
    return runs.flatMap((run) => {
      if (run.length === 1) return [draw("circle", { class: `dot ${classes}`, cx: run[0][0], cy: run[0][1], r: 2.2 })];
      const path = run.map(([a, b], i) => `${i ? "L" : "M"}${a.toFixed(1)} ${b.toFixed(1)}`).join("");
      const found = [draw("path", { class: `line ${classes}`, d: path })];
      const [first, last] = [run[0][0], run[run.length - 1][0]];
      if (area) found.unshift(draw("path", { class: `area ${classes}`, d: `${path}L${last} ${bottom}L${first} ${bottom}Z` }));
      return found;
    });
  }

  point(x, width) {
    this.tip.hidden = this.at === null;
    if (this.at === null) return;
    const ago = (this.length - 1 - this.at) * this.step;
    const rows = this.curves.map(({ name }, i) => make("div", {}, `${name} `, make("b", {}, this.format(this.values[i][this.at]))));
    this.tip.replaceChildren(make("div", { classes: "plain" }, ago ? `${span(ago)} ago ` : "now "), ...rows);
    const left = Math.min(Math.max(x(this.at) + 12, 0), width - this.tip.offsetWidth);
    this.tip.style.left = `${x(this.at) > width / 2 ? Math.max(x(this.at) - 12 - this.tip.offsetWidth, 0) : left}px`;
  }
}
