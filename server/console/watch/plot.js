// Moving plots with axes and units, and arithmetic on histograms. Nothing here knows of HTTP.
import { el } from "../parts/dom.js";
import { short } from "../parts/units.js";

const POINTS = 120; // seconds, one point for each
const LEFT = 44, RIGHT = 8, TOP = 8, BOTTOM = 20;

// What a cumulative histogram gained since an earlier one.
export function sinceLast(now, before) {
  return { bounds: now.bounds, counts: now.counts.map((count, i) => count - before.counts[i]) };
}

// The upper bounds of the buckets that hold these parts of all observations; null where there are none.
export function quantiles(histogram, parts) {
  const total = histogram.counts.reduce((sum, count) => sum + count, 0);
  return parts.map((part) => {
    let seen = 0;
    for (let i = 0; total > 0 && i < histogram.counts.length; i++) {
      seen += histogram.counts[i];
      if (seen >= part * total) return histogram.bounds[Math.min(i, histogram.bounds.length - 1)];
    }
    return null;
  });
}

// The next of 1, 2, 5, 10, 20, 50 … that is no less.
export function niceTop(value) {
  const power = 10 ** Math.floor(Math.log10(Math.max(value, 1e-9)));
  return [1, 2, 5, 10].map((step) => step * power).find((step) => step >= value - 1e-12);
}

// Draws in the size that the canvas has on the page, sharply.
export function prepare(canvas, height) {
  const scale = window.devicePixelRatio || 1;
  const width = canvas.clientWidth;
  canvas.style.height = `${height}px`;
  canvas.width = width * scale;
  canvas.height = height * scale;
  const pen = canvas.getContext("2d");
  pen.scale(scale, scale);
  return { pen, width, height };
}

export const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

export class Plot {
  // lines: [{ name, colour }], where the colour is a variable of the style sheet.
  constructor(title, unit, lines) {
    this.unit = unit;
    this.lines = lines;
    this.points = [];
    this.canvas = el("canvas", { role: "img" });
    this.values = lines.map(() => el("b", {}, "–"));
    const keys = lines.map((line, i) => el("span.key", {}, el(`i.line-${line.colour}`), `${line.name} `, this.values[i]));
    this.element = el("figure.plot", {}, el("figcaption", {}, el("span", {}, title, el("small", {}, ` ${unit}`)), el("span.keys", {}, keys)), this.canvas);
  }

  // One value per line; null leaves a gap.
  add(values) {
    this.points.push(values);
    if (this.points.length > POINTS) this.points.shift();
  }

  draw() {
    const { pen, width, height } = prepare(this.canvas, 120);
    const known = this.points.flat().filter((value) => value !== null);
    const top = niceTop(Math.max(...known, 1e-3));
    const y = (value) => TOP + (1 - value / top) * (height - TOP - BOTTOM);
    const x = (i) => width - RIGHT - ((this.points.length - 1 - i) * (width - LEFT - RIGHT)) / (POINTS - 1);
    this.axes(pen, width, height, top, y);
    this.lines.forEach((line, number) => this.trace(pen, number, x, y));
    const newest = this.points.at(-1) ?? [];
    const texts = this.lines.map((line, i) => (newest[i] == null ? "–" : short(newest[i])));
    texts.forEach((text, i) => { this.values[i].textContent = text; });
    this.canvas.setAttribute("aria-label", this.lines.map((line, i) => `${line.name} ${texts[i]} ${this.unit}`).join(", "));
  }

  axes(pen, width, height, top, y) {
    pen.font = "11px system-ui, sans-serif";
    pen.fillStyle = colour("dim");
    pen.strokeStyle = colour("line");
    pen.lineWidth = 1;
    pen.textAlign = "right";
    for (const part of [0, 0.5, 1]) {
      const at = Math.round(y(top * part)) + 0.5;
      pen.beginPath();
      pen.moveTo(LEFT, at);
      pen.lineTo(width - RIGHT, at);
      pen.stroke();
      pen.fillText(short(top * part), LEFT - 6, at + 4);
    }
    pen.textAlign = "left";
    pen.fillText("2 min ago", LEFT, height - 4);
    pen.textAlign = "center";
    pen.fillText("1 min ago", (LEFT + width - RIGHT) / 2, height - 4);
    pen.textAlign = "right";
    pen.fillText("now", width - RIGHT, height - 4);
  }

  trace(pen, number, x, y) {
    pen.strokeStyle = pen.fillStyle = colour(this.lines[number].colour);
    pen.lineWidth = 1.5;
    pen.beginPath();
    let drawing = false;
    this.points.forEach((values, i) => {
      const value = values[number];
      if (value === null) { drawing = false; return; }
      if (drawing) pen.lineTo(x(i), y(value));
      else pen.moveTo(x(i), y(value));
      if (!drawing && this.points[i + 1]?.[number] == null) pen.fillRect(x(i) - 1, y(value) - 1, 2, 2); // alone
      drawing = true;
    });
    pen.stroke();
  }
}
