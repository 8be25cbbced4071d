// Line charts in SVG: hover shows values, dragging zooms, a double click or the button takes it back, the legend hides
// lines. Charts of one group zoom together.
"use strict";

const SVG = "http://www.w3.org/2000/svg";
const HEIGHT = 210;
const MARGIN = { left: 50, right: 12, top: 8, bottom: 30 };
const DRAG = 8; // pixels from which a movement is meant as a selection
const COLOURS = 8;
const groups = new Map();

function element(tag, attributes, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value !== null && value !== undefined && value !== false) node.setAttribute(name, value);
  }
  node.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined));
  return node;
}

function shape(tag, attributes, text) {
  const node = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  if (text !== undefined) node.textContent = text;
  return node;
}

function format(value, digits = 4) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (typeof value !== "number") return String(value);
  if (Number.isInteger(value) && Math.abs(value) < 1e7) return value.toLocaleString("en").replaceAll(",", " ");
  const size = Math.abs(value);
  if (size >= 1e7 || (size > 0 && size < 1e-3)) return value.toExponential(2);
  return String(Number(value.toPrecision(digits)));
}

// Return a number for the edge of a chart, where there is room for six characters or so.
function tickText(value) {
  const size = Math.abs(value);
  if (size < 1e6 && (size >= 1e-3 || size === 0)) return format(value);
  return value.toExponential(1).replace(".0e", "e").replace("e+", "e");
}

function isKnown(value) {
  return value !== null && value !== undefined && Number.isFinite(value);
}

function colour(index) {
  return `var(--c${index % COLOURS})`;
}

// Return about `count` round numbers between low and high.
function ticks(low, high, count) {
  const span = high - low || 1;
  const power = 10 ** Math.floor(Math.log10(span / count));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((size) => span / size <= count) || power;
  const result = [];
  for (let value = Math.ceil(low / step) * step; value <= high + step * 1e-6; value += step) {
    result.push(Number(value.toPrecision(12)));
  }
  return result;
}

// Return levels (powers of ten) of round numbers: 1, 10, 100 …, over less than three decades 1, 2, 5, 10 …
function logTicks(low, high) {
  const factors = high - low > 2.5 ? [1] : [1, 2, 5];
  const result = [];
  for (let power = Math.floor(low); power <= high; power += 1) {
    for (const factor of factors) {
      const level = power + Math.log10(factor);
      if (level >= low - 1e-9 && level <= high + 1e-9) result.push(level);
    }
  }
  return result.length > 1 ? result : ticks(10 ** low, 10 ** high, 4).map(Math.log10);
}

class LineChart {
  // options: title, x (name of the axis), whole (no ticks between whole numbers), group, series [{name, x, y, colour, thin, dashed}], log, range [low, high],
  // events [{x, name}], points [{x, y, name}], legend (also for a single line)
  constructor(options) {
    this.options = options;
    this.series = options.series.map((line, index) => ({ colour: colour(index), ...line, hidden: false }));
    this.view = null;
    this.width = 480;
    this.plot = element("div", { class: "chart", role: "img", "aria-label": options.title });
    this.tip = element("div", { class: "tip", hidden: "" });
    this.reset = element("button", { class: "reset", hidden: "", onclick: () => this.zoom(null) }, "whole range");
    const head = element("div", { class: "chart-head" }, element("h3", {}, options.title), this.reset);
    this.node = element("div", { class: "card" }, head, this.plot, this.legend());
    this.listen();
    if (options.group) groups.set(options.group, [...(groups.get(options.group) || []), this]);
    new ResizeObserver(() => {
      const width = Math.round(this.plot.clientWidth);
      if (width && width !== this.width) { this.width = width; this.draw(); }
    }).observe(this.plot);
    this.draw();
  }

  legend() {
    if (this.series.length < 2 && !this.options.legend) return element("div", { class: "legend" });
    return element("div", { class: "legend" }, this.series.map((line) => {
      const swatch = element("span", { class: `key${line.dashed ? " dashes" : ""}`, style: `color:${line.colour}` });
      const button = element("button", { type: "button", title: line.name, "aria-pressed": "true" }, swatch, line.name);
      button.addEventListener("click", () => {
        line.hidden = !line.hidden;
        button.classList.toggle("off", line.hidden);
        button.setAttribute("aria-pressed", String(!line.hidden));
        this.draw();
      });
      return button;
    }));
  }

  // Scale in the vertical: values of logarithmic charts are drawn by their power of ten.
  level(value) {
    if (!isKnown(value)) return null;
    if (!this.options.log) return value;
    return value > 0 ? Math.log10(value) : null;
  }

  limits() {
    const lines = this.series.filter((line) => !line.hidden);
    let [left, right, low, high] = [Infinity, -Infinity, Infinity, -Infinity];
    for (const line of lines.length ? lines : this.series) {
      line.x.forEach((x, index) => {
        const level = this.level(line.y[index]);
        if (level === null) return;
        left = Math.min(left, x);
        right = Math.max(right, x);
        if (this.view && (x < this.view[0] || x > this.view[1])) return;
        low = Math.min(low, level);
        high = Math.max(high, level);
      });
    }
    if (!Number.isFinite(left)) [left, right] = [0, 1];
    if (!Number.isFinite(low)) [low, high] = [0, 1];
    if (this.view) [left, right] = this.view;
    if (this.options.range && !this.view) [low, high] = this.options.range;
    const space = (high - low) * 0.05 || Math.abs(high) * 0.1 || 1;
    if (!this.options.range || this.view) [low, high] = [low - (low === 0 ? 0 : space), high + space];
    if (left === right) [left, right] = [left - 0.5, right + 0.5];
    return { left, right, low, high };
  }

  draw() {
    const limits = this.limits();
    const inner = { width: this.width - MARGIN.left - MARGIN.right, height: HEIGHT - MARGIN.top - MARGIN.bottom };
    this.toX = (x) => MARGIN.left + ((x - limits.left) / (limits.right - limits.left)) * inner.width;
    this.toY = (level) => MARGIN.top + (1 - (level - limits.low) / (limits.high - limits.low)) * inner.height;
    this.fromX = (pixel) => limits.left + ((pixel - MARGIN.left) / inner.width) * (limits.right - limits.left);
    const svg = shape("svg", { viewBox: `0 0 ${this.width} ${HEIGHT}`, height: HEIGHT });
    this.drawAxes(svg, limits);
    const name = `clip${LineChart.count = (LineChart.count || 0) + 1}`;
    const clip = shape("clipPath", { id: name });
    clip.append(shape("rect", { x: MARGIN.left, y: 0, width: inner.width, height: HEIGHT - MARGIN.bottom + 1 }));
    const content = shape("g", { "clip-path": `url(#${name})` });
    for (const event of this.options.events || []) this.drawEvent(content, event);
    for (const line of this.series) if (!line.hidden) this.drawLine(content, line);
    for (const point of this.options.points || []) {
      content.append(shape("circle", { cx: this.toX(point.x), cy: this.toY(point.y), r: 4, fill: "var(--text)" }));
      const text = shape("text", { x: this.toX(point.x) - 7, y: this.toY(point.y) + 16, "text-anchor": "end" }, point.name);
      content.append(text);
    }
    this.cursor = shape("g", {});
    svg.append(clip, content, this.cursor);
    this.plot.replaceChildren(svg, this.tip);
    this.svg = svg;
  }

  drawAxes(svg, limits) {
    const bottom = HEIGHT - MARGIN.bottom;
    const levels = this.options.log ? logTicks(limits.low, limits.high) : ticks(limits.low, limits.high, 6);
    for (const level of levels) {
      const y = this.toY(level);
      if (y < MARGIN.top - 1 || y > bottom + 1) continue;
      svg.append(shape("line", { x1: MARGIN.left, x2: this.width - MARGIN.right, y1: y, y2: y, class: "grid" }));
      const value = this.options.log ? Number((10 ** level).toPrecision(3)) : level;
      svg.append(shape("text", { x: MARGIN.left - 6, y: y + 4, "text-anchor": "end" }, tickText(value)));
    }
    for (const x of ticks(limits.left, limits.right, Math.max(3, Math.min(9, Math.floor(this.width / 70))))) {
      if (this.toX(x) < MARGIN.left - 1 || (this.options.whole && !Number.isInteger(x))) continue;
      svg.append(shape("text", { x: this.toX(x), y: bottom + 14, "text-anchor": "middle" }, tickText(x)));
    }
    svg.append(shape("line", { x1: MARGIN.left, x2: this.width - MARGIN.right, y1: bottom, y2: bottom, class: "axis" }));
    svg.append(shape("text", { x: this.width - MARGIN.right, y: HEIGHT - 3, "text-anchor": "end" }, this.options.x));
  }

  drawEvent(content, event) {
    if (!isKnown(event.x)) return;
    const x = this.toX(event.x);
    content.append(shape("line", { x1: x, x2: x, y1: 0, y2: HEIGHT - MARGIN.bottom, class: "event" }));
    const isLate = x > this.width * 0.7;
    content.append(shape("text", { x: x + (isLate ? -4 : 4), y: 12, "text-anchor": isLate ? "end" : "start" }, event.name));
  }

  // Unknown values in between are bridged: epochs without validation would tear every line to dots.
  drawLine(content, line) {
    const points = [];
    line.x.forEach((x, index) => {
      const level = this.level(line.y[index]);
      if (level !== null) points.push(`${this.toX(x).toFixed(1)} ${this.toY(level).toFixed(1)}`);
    });
    const kind = `series${line.thin ? " thin" : ""}${line.dashed ? " dashed" : ""}`;
    const style = `stroke:${line.colour}`;
    content.append(shape("path", { d: points.length ? `M${points.join("L")}` : "", class: kind, style, "data-name": line.name }));
    if (points.length === 1) {
      const [cx, cy] = points[0].split(" ");
      content.append(shape("circle", { cx, cy, r: 3, style: `fill:${line.colour}` }));
    }
  }

  listen() {
    this.plot.addEventListener("pointerdown", (event) => {
      this.dragFrom = event.button === 0 ? this.pixel(event) : undefined;
    });
    this.plot.addEventListener("pointermove", (event) => this.hover(this.pixel(event)));
    this.plot.addEventListener("pointerup", (event) => {
      const pixel = this.pixel(event);
      if (this.dragFrom !== undefined && Math.abs(pixel - this.dragFrom) > DRAG) {
        this.zoom([this.fromX(Math.min(pixel, this.dragFrom)), this.fromX(Math.max(pixel, this.dragFrom))]);
      }
      this.dragFrom = undefined;
    });
    for (const name of ["pointerleave", "pointercancel"]) {
      this.plot.addEventListener(name, () => {
        this.dragFrom = undefined;
        this.tip.hidden = true;
        this.cursor.replaceChildren();
      });
    }
    this.plot.addEventListener("dblclick", () => this.zoom(null));
  }

  pixel(event) {
    return Math.min(Math.max(event.clientX - this.plot.getBoundingClientRect().left, MARGIN.left), this.width - MARGIN.right);
  }

  zoom(view) {
    for (const chart of groups.get(this.options.group) || [this]) {
      chart.view = view;
      chart.reset.hidden = view === null;
      chart.draw();
    }
  }

  hover(pixel) {
    const wanted = this.fromX(pixel);
    const rows = [];
    for (const line of this.series) {
      if (line.hidden) continue;
      let best = -1;
      line.x.forEach((x, index) => {
        if (this.level(line.y[index]) === null) return;
        if (best < 0 || Math.abs(x - wanted) < Math.abs(line.x[best] - wanted)) best = index;
      });
      if (best >= 0) rows.push({ line, x: line.x[best], y: line.y[best] });
    }
    this.cursor.replaceChildren();
    if (this.dragFrom !== undefined && Math.abs(pixel - this.dragFrom) > DRAG) {
      const left = Math.min(pixel, this.dragFrom);
      const width = Math.abs(pixel - this.dragFrom);
      const box = { x: left, y: MARGIN.top, width, height: HEIGHT - MARGIN.top - MARGIN.bottom, class: "selection" };
      this.cursor.append(shape("rect", box));
    }
    if (!rows.length) { this.tip.hidden = true; return; }
    const at = rows.reduce((near, row) => (Math.abs(row.x - wanted) < Math.abs(near - wanted) ? row.x : near), rows[0].x);
    const x = this.toX(at);
    this.cursor.append(shape("line", { x1: x, x2: x, y1: MARGIN.top, y2: HEIGHT - MARGIN.bottom, class: "cursor" }));
    const shown = rows.filter((row) => row.x === at).slice(0, 12);
    for (const row of shown) {
      const centre = { cx: x, cy: this.toY(this.level(row.y)), r: 3.5, style: `fill:${row.line.colour}` };
      this.cursor.append(shape("circle", centre));
    }
    this.showTip(x, at, shown);
  }

  showTip(x, at, rows) {
    const lines = rows.map((row) => {
      const swatch = element("span", { class: `key${row.line.dashed ? " dashes" : ""}`, style: `color:${row.line.colour}` });
      return element("div", {}, swatch, `${row.line.name} `, element("b", {}, format(row.y)));
    });
    this.tip.replaceChildren(element("div", { class: "at" }, `${this.options.x} ${format(at)}`), ...lines);
    this.tip.hidden = false;
    const isRight = x > this.width / 2;
    this.tip.style.left = isRight ? "auto" : `${x + 10}px`;
    this.tip.style.right = isRight ? `${this.width - x + 10}px` : "auto";
  }
}

// Return a chart of those lines that hold anything, or null.
function chart(options) {
  const series = options.series.filter((line) => line.y && line.y.some(isKnown));
  return series.length ? new LineChart({ ...options, series }).node : null;
}
