// What plots share: elements, numbers, axes, marks, and pointing at a mark with the mouse, a finger or the keys.
// Text from files only ever becomes text nodes and attribute values, never markup.
const SVG = ["http:", "", "www.w3.org", "2000", "svg"].join("/");  // a name, not an address: nothing is loaded
const COLOURS = [0, 1, 2, 3, 4, 5, 6].map((i) => `var(--hue${i})`);  // the style has them, for light and for dark
const OUTLINES = [
  "M-4.6 0a4.6 4.6 0 1 0 9.2 0a4.6 4.6 0 1 0 -9.2 0Z", "M-4.2 -4.2H4.2V4.2H-4.2Z", "M0 -5.4L5 4.2H-5Z",
  "M0 -6L5 0L0 6L-5 0Z", "M-5 -2L-2 -2L-2 -5L2 -5L2 -2L5 -2L5 2L2 2L2 5L-2 5L-2 2L-5 2Z",
  "M0 -6.2L1.6 -2L6 -1.9L2.5 .9L3.7 5.1L0 2.6L-3.7 5.1L-2.5 .9L-6 -1.9L-1.6 -2Z", "M0 5.4L5 -4.2H-5Z",
];
const isNumber = (value) => typeof value === "number" && Number.isFinite(value);
const words = (name) => String(name).replaceAll("_", " ");

function filled(node, attributes, inside) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === true) node.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) node.setAttribute(name, value);
  }
  node.append(...inside);
  return node;
}
const element = (name, attributes = {}, ...inside) => filled(document.createElement(name), attributes, inside);
const shape = (name, attributes = {}, ...inside) => filled(document.createElementNS(SVG, name), attributes, inside);

function short(value) {  // four digits, as the tables have
  if (typeof value === "boolean" || value === null || value === undefined) return value ? "yes" : value === false ? "no" : "";
  if (!isNumber(value)) return String(value);
  const size = Math.abs(value);
  if (value === 0 || (size >= 1e4 && size < 1e6)) return value.toFixed(0);
  return size < 1e-4 || size >= 1e6 ? value.toExponential(3) : value.toPrecision(4);
}
// A hyperparameter as it was written: 0.05 and not 0.05000.
const plain = (value) => isNumber(value) ? String(Number(value.toPrecision(7))) : short(value);

// How group number i looks; when colours come again, they come with other shapes.
const lookOf = (i) => [COLOURS[i % 7], OUTLINES[(i + Math.floor(i / 7)) % 7]];

const markClass = ([, , hollow]) => hollow ? "mark hollow" : "mark";

// ---- axes: a range with a little room, round numbers on it
function scaleOf(values, logarithmic) {
  let low = Infinity, high = -Infinity;
  for (const value of values) {
    if (value < low) low = value;
    if (value > high) high = value;
  }
  if (low > high) { low = logarithmic ? 1 : 0; high = logarithmic ? 10 : 1; }
  if (logarithmic) {
    const room = Math.exp(Math.max(0.06 * Math.log(high / low), 0.05));
    low /= room; high *= room;
    return { low, high, ticks: logTicks(low, high), share: (v) => Math.log(v / low) / Math.log(high / low) };
  }
  const room = Math.max(0.06 * (high - low), 1e-6 * Math.abs(high), 1e-12);
  low -= room; high += room;
  return { low, high, ticks: evenTicks(low, high), share: (v) => (v - low) / (high - low) };
}
function logTicks(low, high) {
  const first = Math.floor(Math.log10(low)), last = Math.ceil(Math.log10(high));
  const every = Math.max(1, Math.ceil((last - first) / 8));
  let found = [];
  for (const steps of [[1], [1, 2, 5], [1, 1.5, 2, 3, 5, 7]]) {
    found = [];
    for (let power = first; power <= last; power += every)
      for (const step of steps) found.push(Number(step + "e" + power));
    found = found.filter((tick) => tick >= low && tick <= high);
    if (found.length >= 3) return found;
  }
  return evenTicks(low, high);
}
function evenTicks(low, high) {
  const power = Math.floor(Math.log10(high - low));
  for (const down of [0, 1])
    for (const step of [5, 2, 1].map((s) => Number(s + "e" + (power - down)))) {
      const first = Math.ceil(low / step), count = Math.floor(high / step) - first + 1;
      if (count >= 4) return Array.from({ length: count }, (_, i) => Number(((first + i) * step).toPrecision(12)));
    }
  return [low, high];
}
function tickText(value) {
  const size = Math.abs(value);
  return value !== 0 && (size < 1e-3 || size >= 1e5) ? value.toExponential().replace("e+", "e") : String(value);
}

// ---- a plot: axes, lines and marks, redrawn when its width changes
class Plot {
  constructor(holder, height) {
    this.holder = holder; this.height = height; this.at = -1; this.points = [];
    this.svg = shape("svg", { role: "application", "aria-roledescription": "plot", tabindex: 0 });
    this.tip = element("div", { class: "tip", "aria-hidden": "true", hidden: true });
    holder.replaceChildren(this.svg, this.tip);
    new ResizeObserver(() => { if (this.spec && holder.clientWidth !== this.width) this.show(this.spec); }).observe(holder);
    this.svg.addEventListener("pointermove", (event) => this.point(this.nearest(event)));
    this.svg.addEventListener("pointerleave", () => this.point(-1));
    this.svg.addEventListener("click", (event) => {
      const found = this.nearest(event);
      this.point(found);
      if (found >= 0 && this.spec.open) this.spec.open(this.points[found].mark);
    });
    this.svg.addEventListener("keydown", (event) => this.key(event));
    this.svg.addEventListener("blur", () => this.point(-1));
  }

  // spec: x, y scales; xLabel, yLabel; xTicks [[value, text]] or none; lines [{points, colour, dash}]; marks [{x, y, look: [colour, outline, hollow]}];
  // tell(mark, others in its place) gives [heading, [[name, value], ...]]; open(mark); summary for screen readers; level: a line at this height.
  show(spec) {
    this.spec = spec;
    this.width = this.holder.clientWidth || 640;
    const left = 66, top = 10, right = this.width - 14, bottom = this.height - 48;
    this.across = (value) => left + spec.x.share(value) * (right - left);
    this.up = (value) => bottom - spec.y.share(value) * (bottom - top);
    this.svg.setAttribute("viewBox", `0 0 ${this.width} ${this.height}`);
    this.svg.setAttribute("height", this.height);
    this.svg.setAttribute("aria-label", spec.summary + " Arrow keys go from point to point" + (spec.open ? ", Enter opens one." : "."));
    this.halo = shape("circle", { class: "halo", r: 9, visibility: "hidden" });
    this.svg.replaceChildren(...this.axes(left, top, right, bottom), ...(spec.lines || []).map((line) => this.line(line)),
      ...this.marks(), this.halo);
    this.at = -1; this.tip.hidden = true;
  }
  axes(left, top, right, bottom) {
    const { x, y, level } = this.spec, parts = [];
    const text = (at, height, inside, anchor, more) => shape("text", { x: at, y: height, "text-anchor": anchor, ...more }, inside);
    const every = (list, room) => list.filter((_, i) => i % Math.max(1, Math.ceil(list.length * room / (right - left))) === 0);
    for (const tick of y.ticks) {
      parts.push(shape("path", { class: "rule", d: `M${left} ${this.up(tick)}H${right}` }),
        text(left - 8, this.up(tick) + 4, tickText(tick), "end"));
    }
    for (const [tick, label] of every(this.spec.xTicks || x.ticks.map((t) => [t, tickText(t)]), 46)) {
      parts.push(shape("path", { class: "rule", d: `M${this.across(tick)} ${top}V${bottom}` }),
        text(this.across(tick), bottom + 18, label, "middle"));
    }
    if (level !== undefined && level > y.low && level < y.high)
      parts.push(shape("path", { class: "level", d: `M${left} ${this.up(level)}H${right}` }));
    const middle = (top + bottom) / 2;
    parts.push(shape("path", { class: "axis", d: `M${left} ${top}V${bottom}H${right}` }),
      text((left + right) / 2, this.height - 8, this.spec.xLabel, "middle", { class: "name" }),
      text(14, middle, this.spec.yLabel, "middle", { class: "name", transform: `rotate(-90 14 ${middle})` }));
    return parts;
  }
  line({ points, colour, dash }) {
    const path = points.map(([x, y]) => `${this.across(x).toFixed(1)} ${this.up(y).toFixed(1)}`).join("L");
    return shape("path", { class: "line", d: "M" + path, stroke: colour, "stroke-dasharray": dash });
  }
  marks() {
    const nodes = this.spec.marks.map((mark) => {
      const x = this.across(mark.x), y = this.up(mark.y);
      return [{ x, y, mark }, shape("path", { class: markClass(mark.look) + (mark.chosen ? " chosen" : ""), d: mark.look[1], fill: mark.look[0], color: mark.look[0],
        transform: `translate(${x.toFixed(1)} ${y.toFixed(1)})` })];
    });
    this.points = nodes.map(([point]) => point).sort((a, b) => a.x - b.x || a.y - b.y);
    return nodes.map(([, node]) => node);
  }

  nearest(event) {
    const box = this.svg.getBoundingClientRect();
    const x = event.clientX - box.left, y = event.clientY - box.top;
    let found = -1, least = 26 ** 2;
    this.points.forEach((point, i) => {
      const far = (point.x - x) ** 2 + (point.y - y) ** 2;
      if (far < least) { least = far; found = i; }
    });
    return found;
  }
  key(event) {
    const last = this.points.length - 1;
    if (last < 0) return;
    const to = { ArrowRight: this.at + 1, ArrowUp: this.at + 1, ArrowLeft: this.at < 0 ? last : this.at - 1,
      ArrowDown: this.at < 0 ? last : this.at - 1, Home: 0, End: last, Escape: -1 }[event.key];
    if (to !== undefined) {
      event.preventDefault();
      this.point(event.key === "Escape" ? -1 : Math.min(Math.max(to, 0), last));
      if (this.at >= 0) said.textContent = this.told().map((part) => part.join(" ")).join(", ");
    } else if ((event.key === "Enter" || event.key === " ") && this.at >= 0 && this.spec.open) {
      event.preventDefault();
      this.spec.open(this.points[this.at].mark, true);
    }
  }
  told() {  // of the point and of those that it hides
    const here = this.points[this.at];
    const others = this.points.filter((one) => one !== here && Math.hypot(one.x - here.x, one.y - here.y) < 3);
    const [heading, pairs] = this.spec.tell(here.mark, others.map((one) => one.mark));
    return [[heading], ...pairs];
  }
  point(index) {  // show what a point is; -1 for none
    this.at = index;
    this.tip.hidden = index < 0;
    this.halo.setAttribute("visibility", index < 0 ? "hidden" : "visible");
    if (index < 0) return;
    const { x, y } = this.points[index];
    this.halo.setAttribute("cx", x); this.halo.setAttribute("cy", y);
    const [[heading], ...pairs] = this.told();
    this.tip.replaceChildren(element("strong", {}, heading),
      element("dl", {}, ...pairs.flatMap(([name, value]) => [element("dt", {}, name), element("dd", {}, value)])));
    const wide = this.tip.offsetWidth, tall = this.tip.offsetHeight, right = x + 14, left = x - 14 - wide;
    const beside = right + wide <= this.width ? right : left >= 0 ? left : null;  // else above the point, or below it
    this.tip.style.left = (beside ?? Math.max(0, Math.min(x - wide / 2, this.width - wide))) + "px";
    this.tip.style.top = (beside !== null ? Math.max(0, Math.min(y - 12, this.height - tall)) : y > tall ? y - tall - 14 : y + 14) + "px";
  }
}

// A labelled choice; options are [value, text].
function chooser(label, options, value, change) {
  const select = element("select", {}, ...options.map(([key, text]) => element("option", { value: key }, text)));
  select.value = value;
  select.addEventListener("change", () => change(select.value));
  return element("label", { class: "choose" }, element("span", {}, label), select);
}
function ticker(label, checked, change) {
  const box = element("input", { type: "checkbox", checked });
  box.addEventListener("change", () => change(box.checked));
  return element("label", { class: "tick" }, box, " ", label);
}
const symbol = (look) => shape("svg", { class: "symbol", viewBox: "-8 -8 16 16", "aria-hidden": "true" },
  shape("path", { class: markClass(look), d: look[1], fill: look[0], color: look[0] }));
