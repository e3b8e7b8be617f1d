// What test_report_page.py asks a page, whose first script this is. A chart is a canvas: its texts are
// no elements, so they are noted when they are drawn.
"use strict";

const labels = new Set(), clipped = [];
const fillText = CanvasRenderingContext2D.prototype.fillText;

CanvasRenderingContext2D.prototype.fillText = function (text, x, y, ...rest) {
  const box = this.measureText(text), to = this.getTransform(), { width, height } = this.canvas;
  const px = to.e + to.a * x, py = to.f + to.d * y;
  const isIn = px >= box.actualBoundingBoxLeft && px + box.actualBoundingBoxRight <= width
    && py >= box.actualBoundingBoxAscent && py + box.actualBoundingBoxDescent <= height;
  labels.add(text);
  if (!isIn) clipped.push([text, px, py, width, height]);
  fillText.call(this, text, x, y, ...rest);
};

// As canvases whose pixels are read are to be made; it warns otherwise.
const getContext = HTMLCanvasElement.prototype.getContext;
HTMLCanvasElement.prototype.getContext = function (kind) {
  return getContext.call(this, kind, { willReadFrequently: true });
};

function rgb(name) {
  const digits = css(name).slice(1), whole = digits.length === 3 ? digits.replace(/./g, "$&$&") : digits;
  return whole.match(/../g).map((h) => parseInt(h, 16));
}

// Series without a pixel of their color, or of a series above them, at their last point.
function notDrawn() {
  return charts.filter((c) => c.plot).flatMap(({ spec, plot }) => {
    const colors = plot.series.filter((s) => s.color).map((s) => rgb(s.color));
    const missing = plot.series.filter((s, k) => s.color && !hasPixel(plot, k, colors));
    return missing.map((s) => `${spec.title}: ${s.label}`);
  });
}

function hasPixel(plot, k, colors) {
  const i = plot.data[k].findLastIndex((v) => (v ?? null) !== null);
  const x = plot.valToPos(plot.data[0][i], "x", true), y = plot.valToPos(plot.data[k][i], "y", true);
  const { data: found } = plot.ctx.getImageData(Math.round(x) - 4, Math.round(y) - 4, 9, 9);
  const isNear = (at, color) => found[at + 3] > 60 && color.every((v, j) => Math.abs(v - found[at + j]) < 40);
  return colors.some((color) => found.some((_, at) => at % 4 === 0 && isNear(at, color)));
}

function tooWide() {
  const isCut = (e) => getComputedStyle(e).overflowX !== "visible" && e.scrollWidth > e.clientWidth + 1;
  const elements = [document.documentElement, ...document.querySelectorAll("body *")];
  const wide = elements.filter((e) => e.getBoundingClientRect().right > innerWidth + 0.5 || isCut(e));
  return wide.map((e) => e.outerHTML.slice(0, 120));
}

// Rows of charts that do not reach the right edge.
function holes() {
  return [...document.querySelectorAll(".charts")].flatMap((grid) => {
    const edge = grid.getBoundingClientRect().right, rows = {};
    for (const box of [...grid.children].map((f) => f.getBoundingClientRect())) rows[box.top] = Math.max(rows[box.top] || 0, box.right);
    return Object.values(rows).filter((right) => Math.abs(right - edge) > 1);
  });
}

// The least contrast of the colors of texts with their grounds, as WCAG counts it.
function contrast() {
  const linear = (v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
  const light = (name) => rgb(name).reduce((sum, v, i) => sum + linear(v / 255) * [0.2126, 0.7152, 0.0722][i], 0);
  const ratio = (a, b) => (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
  const texts = ["--text", "--faint", "--accent", "--good", "--fault", "--warning"];
  return Math.min(...texts.flatMap((name) => ["--back", "--card"].map((ground) => ratio(light(name), light(ground)))));
}
