// The page of a run: charts that share one x-axis, the events of its daemons, its samples.
// All text comes from the JSON block and goes into the page as text, never as markup.
"use strict";

const data = JSON.parse(document.getElementById("data").textContent);
const COLORS = ["#4477dd", "#e08a1e", "#2fa36b", "#c94fb0", "#d64545", "#17a2b8", "#8a6de0", "#a0793d", "#7f8c9b", "#9bbf2e"];
const WIDTH = 600, HEIGHT = 210, LEFT = 48, RIGHT = 24, TOP = 8, BOTTOM = 22;
const view = { x: "step", range: null, smoothing: 0, events: true };
const charts = [];

function node(name, properties = {}, ...children) {
  const made = document.createElement(name);
  Object.assign(made, properties);
  made.append(...children);
  return made;
}

function shape(name, attributes, text = "") {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.textContent = text;
  return made;
}

function short(value) {
  if (value === null || value === undefined) return "";
  const size = Math.abs(value);
  if (size >= 1e6) return value.toExponential(2);
  if (size >= 1000) return Math.round(value).toLocaleString("en");
  return size && size < 1e-3 ? value.toExponential(1) : String(Number(value.toPrecision(4)));
}

// About `count` round numbers from low to high.
function ticks(low, high, count) {
  const rough = (high - low) / count || 1, power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((n) => n * power).find((n) => n >= rough);
  const found = [];
  for (let at = Math.ceil(low / step) * step; at <= high + step / 1e6; at += step) found.push(at);
  return found;
}

// ---- the x-axis: steps, or seconds since the first line -------------------------------------

const zero = data.steps.time[0] || 0;

function places(series) {
  return view.x === "step" || series !== data.steps ? series.step : series.time.map((t) => t - zero);
}

function placeOfEvent(event) {
  if (view.x === "time") return event.time - zero;
  const { time, step } = data.steps, next = time.findIndex((t) => t >= event.time);
  if (next < 0) return step.at(-1);
  if (next === 0) return step[0];
  const part = (event.time - time[next - 1]) / Math.max(1e-9, time[next] - time[next - 1]);
  return step[next - 1] + part * (step[next] - step[next - 1]);
}

// Seconds in the unit that suits the range.
function unit() {
  const [from, to] = view.range || fullRange(), range = to - from;
  return view.x === "step" ? [1, ""] : range < 300 ? [1, " s"] : range < 18000 ? [60, " min"] : [3600, " h"];
}

function xText(value) {
  const [size, name] = unit();
  return short(value / size) + name;
}

function xTicks(from, to, count) {
  const [size] = unit();
  return ticks(from / size, to / size, count).map((tick) => tick * size);
}

function fullRange() {
  const all = [data.steps, data.versions].flatMap((s) => places(s)).concat(view.x === "time" ? data.events.map(placeOfEvent) : []);
  return all.length ? [Math.min(...all), Math.max(...all, Math.min(...all) + 1e-6)] : [0, 1];
}

// ---- one chart -------------------------------------------------------------------------------

function smooth(values) {
  let state = null;
  return values.map((v) => (v === null ? null : (state = state === null ? v : view.smoothing * state + (1 - view.smoothing) * v)));
}

// The rows that are drawn: lines as they are, stacked kinds one upon the other.
function drawnRows(chart) {
  const kept = chart.rows.filter((row) => !row.off && (chart.kind === "lines" || row.mean.some((v) => v)));
  const rows = kept.map((row) => ({ ...row, values: smooth(row.mean) }));
  if (chart.kind === "lines") return rows.map((row) => ({ ...row, top: row.values, base: null }));
  const total = rows.length ? rows[0].values.map((_, i) => rows.reduce((sum, row) => sum + (row.values[i] || 0), 0)) : [];
  let base = total.map(() => 0);
  return rows.map((row) => {
    const scale = (i) => (chart.kind === "shares" ? 1 / (total[i] || 1) : 1);
    const top = base.map((b, i) => b + (row.values[i] || 0) * scale(i)), below = base;
    base = top;
    return { ...row, top, base: below };
  });
}

function draw(chart) {
  const { svg, series } = chart, xs = places(series);
  const [from, to] = view.range || fullRange();
  const rows = drawnRows(chart), seen = (i) => xs[i] >= from && xs[i] <= to;
  const shown = rows.flatMap((row) => [...row.top, ...(row.base ? [0] : []), ...bandOf(chart, row)].filter((v, i) => v !== null && (i >= xs.length || seen(i))));
  let low = Math.min(...shown), high = Math.max(...shown);
  if (!shown.length) [low, high] = [0, 1];
  if (low > 0 && low < 0.6 * high) low = 0;
  if (high === low) [low, high] = [low - Math.abs(low) * 0.1 - 0.5 * !low, high + Math.abs(high) * 0.1 + 0.5 * !high];
  high += (high - low) * 0.04;
  const x = (v) => LEFT + ((v - from) / (to - from || 1)) * (WIDTH - LEFT - RIGHT);
  const y = (v) => HEIGHT - BOTTOM - ((v - low) / (high - low)) * (HEIGHT - TOP - BOTTOM);
  Object.assign(chart, { xs, x, y, drawn: rows, from, to });
  svg.replaceChildren();
  for (const tick of ticks(low, high, 4)) {
    svg.append(shape("line", { class: "grid", x1: LEFT, x2: WIDTH - RIGHT, y1: y(tick), y2: y(tick) }));
    svg.append(shape("text", { x: LEFT - 6, y: y(tick) + 4, "text-anchor": "end" }, short(tick)));
  }
  for (const tick of xTicks(from, to, 5)) svg.append(shape("text", { x: x(tick), y: HEIGHT - 5, "text-anchor": "middle" }, xText(tick)));
  if (view.events && series === data.steps) drawEvents(svg, x, from, to);
  const clip = shape("g", {});
  svg.append(clip);
  for (const row of rows) {
    const band = bandOf(chart, row);
    if (band.length) clip.append(shape("path", { d: area(row.high, row.low, xs, x, y, seen), fill: row.color, opacity: 0.15 }));
    if (row.base) clip.append(shape("path", { d: area(row.top, row.base, xs, x, y, seen), fill: row.color, opacity: 0.55 }));
    else if (row.top.filter((v) => v !== null).length < 3) for (const [i, v] of row.top.entries()) { if (v !== null && seen(i)) clip.append(shape("circle", { cx: x(xs[i]), cy: y(v), r: 3, fill: row.color })); }
    clip.append(shape("path", { d: line(row.top, xs, x, y, seen), fill: "none", stroke: row.color, "stroke-width": 1.5, "stroke-linejoin": "round" }));
  }
}

// Smallest and largest values of lines that are not smoothed: noise is what smoothing hides.
function bandOf(chart, row) {
  return chart.kind === "lines" && row.low && !view.smoothing ? [...row.low, ...row.high] : [];
}

// What is not measured is left out, and the line goes on to the next point.
function line(values, xs, x, y, seen) {
  return values.flatMap((v, i) => (v === null || !seen(i) ? [] : [`${x(xs[i]).toFixed(1)} ${y(v).toFixed(1)}`])).map((p, i) => (i ? "L" : "M") + p).join("");
}

// One for each stretch of points that are measured.
function area(top, base, xs, x, y, seen) {
  const stretches = [[]], point = (values) => (i) => `${x(xs[i]).toFixed(1)} ${y(values[i]).toFixed(1)}`;
  for (const i of top.keys()) {
    if (top[i] !== null && base[i] !== null && seen(i)) stretches.at(-1).push(i);
    else if (stretches.at(-1).length) stretches.push([]);
  }
  const found = stretches.filter((indices) => indices.length);
  return found.map((indices) => `M${indices.map(point(top)).join("L")}L${indices.reverse().map(point(base)).join("L")}Z`).join("");
}

function drawEvents(svg, x, from, to) {
  for (const event of data.events) {
    const at = placeOfEvent(event);
    if (event.kind !== "fault" || at < from || at > to) continue;
    svg.append(shape("line", { class: "event", x1: x(at), x2: x(at), y1: TOP, y2: HEIGHT - BOTTOM, stroke: "var(--fault)" }));
  }
}

function makeChart(title, kind, note, series, labels) {
  const rows = Object.entries(labels).map(([name, label], i) => ({ label, color: COLORS[i % COLORS.length], off: false, ...series.metrics[name] }));
  const svg = shape("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": title });
  const chart = { svg, series, kind, rows };
  const buttons = rows.map((row) => {
    const button = node("button", { type: "button", textContent: row.label });
    button.style.setProperty("--color", row.color);
    button.onclick = () => { row.off = button.classList.toggle("off"); draw(chart); };
    return button;
  });
  const legend = node("div", { className: "legend" }, ...(rows.length > 1 ? buttons : []));
  const figure = node("figure", {}, node("figcaption", { textContent: title }), ...(note ? [node("p", { textContent: note })] : []), svg, legend);
  listen(chart);
  charts.push(chart);
  draw(chart);
  return figure;
}

// ---- hovering and zooming -------------------------------------------------------------------

const tip = node("div", { id: "tip", hidden: true });

function showTip(event, lines) {
  tip.replaceChildren(...lines.flatMap(([color, text], i) => {
    const mark = node("span");
    mark.style.background = color;
    return [...(i ? ["\n"] : []), ...(color ? [mark] : []), text];
  }));
  tip.hidden = false;
  const { width, height } = tip.getBoundingClientRect();
  tip.style.left = `${Math.min(event.clientX + 14, innerWidth - width - 8)}px`;
  tip.style.top = `${Math.max(8, Math.min(event.clientY + 14, innerHeight - height - 8))}px`;
}

function listen(chart) {
  const { svg } = chart;
  let start = null, marks = [];
  const clear = () => { for (const mark of marks) mark.remove(); marks = []; };
  const mark = (name, attributes) => { const made = shape(name, attributes); marks.push(made); svg.append(made); };
  const valueAt = (event) => {
    const box = svg.getBoundingClientRect(), px = ((event.clientX - box.left) / box.width) * WIDTH;
    const value = chart.from + ((px - LEFT) / (WIDTH - LEFT - RIGHT)) * (chart.to - chart.from);
    return Math.max(chart.from, Math.min(chart.to, value));
  };
  svg.onpointermove = (event) => {
    clear();
    const at = valueAt(event), { xs, x, y } = chart;
    if (!xs.length) return;
    const near = xs.reduce((best, v, i) => (Math.abs(v - at) < Math.abs(xs[best] - at) ? i : best), 0);
    mark("line", { class: "cursor", x1: x(xs[near]), x2: x(xs[near]), y1: TOP, y2: HEIGHT - BOTTOM });
    if (start !== null) mark("rect", { class: "chosen", x: Math.min(x(start), x(at)), width: Math.abs(x(at) - x(start)), y: TOP, height: HEIGHT - TOP - BOTTOM });
    const lines = chart.drawn.filter((row) => row.values[near] !== null).map((row) => {
      if (!row.base) mark("circle", { cx: x(xs[near]), cy: y(row.top[near]), r: 3, fill: row.color });
      const band = row.low && row.low[near] !== row.high[near] ? ` (${short(row.low[near])} to ${short(row.high[near])})` : "";
      return [row.color, `${row.label}: ${short(row.values[near])}${band}`];
    });
    const happened = !view.events || chart.series !== data.steps ? [] : data.events.filter((e) => e.kind === "fault" && Math.abs(x(placeOfEvent(e)) - x(at)) < 4);
    const name = chart.series === data.versions ? "version" : "step";
    showTip(event, [["", `${name} ${chart.series.step[near]}${view.x === "time" && name === "step" ? `, ${xText(xs[near])}` : ""}`], ...lines, ...happened.slice(0, 4).map((e) => ["var(--fault)", `${e.role}: ${e.text}`])]);
  };
  svg.onpointerleave = () => { clear(); start = null; tip.hidden = true; };
  svg.onpointerdown = (event) => { start = valueAt(event); };
  svg.onpointerup = (event) => {
    const end = valueAt(event), wide = start !== null && Math.abs(chart.x(end) - chart.x(start)) > 8;
    if (wide) zoom([Math.min(start, end), Math.max(start, end)]);
    start = null;
  };
  svg.ondblclick = () => zoom(null);
}

function zoom(range) {
  view.range = range;
  redraw();
}

function redraw() {
  for (const chart of charts) draw(chart);
  drawTimeline();
}

// ---- the timeline of events -----------------------------------------------------------------

const timeline = shape("svg", { id: "events", role: "img", "aria-label": "events" });

function drawTimeline() {
  const roles = [...new Set(data.events.map((event) => event.role))].sort();
  const [from, to] = view.range || fullRange(), width = 1200, left = 110, right = 30, step = 22;
  const x = (v) => left + ((v - from) / (to - from || 1)) * (width - left - right);
  timeline.setAttribute("viewBox", `0 0 ${width} ${roles.length * step + 24}`);
  timeline.replaceChildren();
  for (const [i, role] of roles.entries()) {
    const y = 12 + i * step;
    timeline.append(shape("line", { class: "grid", x1: left, x2: width - right, y1: y, y2: y }), shape("text", { x: left - 10, y: y + 4, "text-anchor": "end" }, role));
    for (const event of data.events.filter((e) => e.role === role)) {
      const at = placeOfEvent(event);
      if (at < from || at > to) continue;
      const dot = shape("circle", { cx: x(at), cy: y, r: event.kind === "fault" ? 6 : 4, fill: `var(--${event.kind})`, class: event.kind });
      dot.onpointermove = (pointer) => showTip(pointer, [[`var(--${event.kind})`, `${new Date(event.time * 1000).toLocaleString()}  ${event.role}`], ["", event.text]]);
      dot.onpointerleave = () => { tip.hidden = true; };
      timeline.append(dot);
    }
  }
  for (const tick of xTicks(from, to, 8)) timeline.append(shape("text", { x: x(tick), y: roles.length * step + 18, "text-anchor": "middle" }, xText(tick)));
}

// ---- samples ---------------------------------------------------------------------------------

// Blue below 1, red above it; the full color at a factor of 4.
function weightColor(weight) {
  const level = weight > 0 ? Math.max(-1, Math.min(1, Math.log2(weight) / 2)) : -1;
  const strength = Math.round(75 * Math.sqrt(Math.abs(level)));
  return Math.abs(level) < 0.01 ? "transparent" : `color-mix(in srgb, ${level < 0 ? "#3b82f6" : "#ef4444"} ${strength}%, transparent)`;
}

function makeMessage(message) {
  const text = node("pre", { className: message.role });
  for (const [piece, weight] of message.pieces) {
    const token = node("span", { textContent: piece, title: `importance weight ${short(weight)}` });
    token.style.background = weightColor(weight);
    text.append(token);
  }
  text.append(message.rest);
  return text;
}

// Of several versions the responses to one prompt stand side by side.
function makeSample(sample) {
  const said = [sample.verdict, sample.facts].filter(Boolean).map((text) => node("p", { textContent: text }));
  const prompt = sample.prompt ? [node("pre", { className: "prompt", textContent: sample.prompt })] : [];
  const versions = sample.versions ? [node("div", { className: "versions" }, ...sample.versions.map(makeSample))] : [];
  return node("div", { className: sample.versions ? "sample wide" : "sample" }, node("b", { textContent: sample.title }), ...said, ...prompt, ...sample.messages.map(makeMessage), ...versions);
}

function makeScale() {
  const scale = node("span", { className: "scale" });
  for (const weight of [0.25, 0.5, 0.8, 1, 1.25, 2, 4]) {
    const cell = node("i", { textContent: String(weight) });
    cell.style.background = weightColor(weight);
    scale.append(cell);
  }
  return node("p", {}, "Importance weight of each token, as the loss has used it: ", scale);
}

// ---- the page --------------------------------------------------------------------------------

function choice(name, options, change) {
  const select = node("select", { onchange: () => { change(select.value); redraw(); } }, ...options.map(([value, text]) => node("option", { value, textContent: text })));
  return node("label", {}, `${name} `, select);
}

function makeControls() {
  const dark = node("button", { type: "button", textContent: "light / dark" });
  const style = document.documentElement.style;
  dark.onclick = () => {
    const isDark = (style.colorScheme || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light")) === "dark";
    style.colorScheme = isDark ? "light" : "dark";
  };
  document.getElementById("controls").append(
    choice("x-axis", [["step", "steps"], ["time", "time"]], (value) => { view.x = value; view.range = null; }),
    choice("smoothing", [["0", "none"], ["0.7", "some"], ["0.95", "much"]], (value) => { view.smoothing = Number(value); }),
    choice("faults", [["1", "in all charts"], ["", "in the timeline"]], (value) => { view.events = Boolean(value); }),
    node("button", { type: "button", textContent: "whole run", onclick: () => zoom(null) }),
    dark,
  );
}

function seriesOf(names) {
  return names.some((name) => name in data.versions.metrics) ? data.versions : data.steps;
}

function makeGroup(group) {
  const drawn = node("div", { className: "charts" }, ...group.charts.map((c) => makeChart(c.title, c.kind, c.note, seriesOf(Object.keys(c.series)), c.series)));
  const found = [node("h2", { textContent: group.title, id: group.name }), drawn];
  if (group.more.length) {
    const small = node("div", { className: "charts small" });
    const more = node("details", {}, node("summary", { textContent: `${group.more.length} more of ${group.name}/` }), small);
    more.addEventListener("toggle", () => small.append(...group.more.map((name) => makeChart(name, "lines", "", seriesOf([name]), { [name]: name }))), { once: true });
    found.push(more);
  }
  return found;
}

function makePage() {
  const main = document.querySelector("main");
  main.append(node("dl", { className: "summary" }, ...data.summary.map(([name, value]) => node("div", {}, node("dt", { textContent: name || "books" }), node("dd", { textContent: value })))));
  const [first, ...others] = data.groups;
  if (first) main.append(...makeGroup(first));
  if (data.events.length) {
    drawTimeline();
    main.append(node("h2", { textContent: "What happened to the daemons" }), node("figure", {}, node("p", { textContent: "Starts (green), ends (gray), faults (red) and warnings (yellow), from their logs." }), timeline));
  }
  for (const group of others) main.append(...makeGroup(group));
  for (const { title, samples } of data.samples) {
    const weighed = samples.some((s) => s.messages.some((m) => m.pieces.length));
    main.append(node("h2", { textContent: title }), ...(weighed ? [makeScale()] : []), node("div", { className: "samples" }, ...samples.map(makeSample)));
  }
  document.body.append(tip);
}

makeControls();
makePage();
