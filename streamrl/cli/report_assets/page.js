// The page of a run. All text comes from the JSON block and goes into the page as text, never as markup.
"use strict";

const data = JSON.parse(document.getElementById("data").textContent);
const main = document.querySelector("main");
const TIME = { day: "numeric", month: "short", hour: "2-digit", minute: "2-digit", second: "2-digit" };
const view = { x: "steps", smoothing: 0 };
const charts = [];

function node(name, properties = {}, ...children) {
  const made = document.createElement(name);
  Object.assign(made, properties);
  made.append(...children);
  return made;
}

function number(value) {
  const size = Math.abs(value);
  if (size >= 1e6) return value.toLocaleString("en", { notation: "compact", maximumSignificantDigits: 4 });
  if (size >= 1000) return value.toLocaleString("en", { maximumFractionDigits: 0 });
  return size && size < 1e-3 ? value.toExponential(1) : String(Number(value.toPrecision(4)));
}

// ---- charts: data and options for uPlot, which draws them -------------------------------------

const { step: steps, time: times } = data.steps;
const span = (times.at(-1) || 0) - (times[0] || 0);
const [unitSize, unit] = span < 300 ? [1, "s"] : span < 18000 ? [60, "min"] : [3600, "h"];

// A version has the time of its step.
function placesOf(series) {
  if (view.x === "steps") return series.step;
  const timeOf = (step) => times[Math.max(0, steps.findLastIndex((s) => s <= step))] || times[0];
  return series.step.map((step) => (timeOf(step) - times[0]) / unitSize);
}

function smooth(values) {
  let state = null;
  return values.map((v) => (v === null ? null : (state = state === null ? v : view.smoothing * state + (1 - view.smoothing) * v)));
}

// Lines stay as they are; series of a stacked chart are added up.
function rowsOf({ kind, series }) {
  const rows = Object.entries(series).map(([name, label]) => {
    const source = data.steps.metrics[name] ? data.steps : data.versions;
    return { label, places: placesOf(source), ...source.metrics[name], values: smooth(source.metrics[name].mean) };
  });
  if (kind === "lines") return rows.map((row) => ({ ...row, top: row.values }));
  const sums = rows[0].values.map((_, i) => rows.reduce((sum, row) => sum + (row.values[i] || 0), 0));
  const base = sums.map(() => 0);
  const add = (row, i) => (base[i] += (row.values[i] || 0) / (kind === "shares" ? sums[i] || 1 : 1));
  return rows.map((row) => ({ label: row.label, places: row.places, values: row.values, top: sums.map((_, i) => add(row, i)) }));
}

const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const padded = (u, low, high) => {
  if (low === null) return [0, 1];
  const from = low > 0 && low < 0.6 * high ? 0 : low, room = 0.08 * (high - from) || 0.1 * Math.abs(high) || 0.5;
  return [from === 0 ? 0 : from - room, high + room];
};

// The value at a point, or the last value measured before it.
function valueAt(values, i) {
  while (i >= 0 && (values[i] ?? null) === null) i -= 1;
  return i < 0 ? "-" : number(values[i]);
}

// Data, series and bands; a band goes from the smallest to the largest value, and smoothing hides it.
function drawnOf(spec) {
  const rows = rowsOf(spec), isStack = spec.kind !== "lines", tables = [], bands = [];
  const series = [{ label: view.x === "steps" ? "step" : unit, value: (u, _, __, i) => number(u.data[0][i ?? u.data[0].length - 1]) }];
  for (const [i, row] of rows.entries()) {
    const at = series.length, color = `--${i % 8}`, isMarked = row.top.filter((v) => v !== null).length <= 60;
    const value = (u, _, k, at) => valueAt(isStack ? row.values : u.data[k], at ?? u.data[0].length - 1);
    series.push({ label: row.label, color, value, stroke: () => css(color), width: isStack ? 0.5 : 1.5, spanGaps: true, points: { show: isMarked, size: 6, fill: () => css(color) } });
    tables.push([row.places, row.top]);
    if (isStack) series[at].fill = () => `${css(color)}99`;
    if (isStack && i) bands.push({ series: [at, at - 1] });
    if (isStack || !row.low || view.smoothing) continue;
    for (const edge of [row.low, row.high]) {
      series.push({ class: "band", width: 0, spanGaps: true, points: { show: false } });
      tables.at(-1).push(edge);
    }
    bands.push({ series: [at + 2, at + 1], fill: () => `${css(color)}2e` });
  }
  return { table: uPlot.join(tables), series, bands };
}

const xText = (value) => (view.x === "steps" ? number(value) : `${number(value)} ${unit}`);

function drawFaults(u) {
  const places = placesOf(data.steps), { left, top, width, height } = u.bbox;
  u.ctx.fillStyle = css("--fault");
  for (const event of data.events.filter((e) => e.kind === "fault" && places.length)) {
    const x = u.valToPos(places.at(times.findIndex((t) => t >= event.time)), "x", true);
    for (let y = top; x >= left && x <= left + width && y < top + height; y += 7) u.ctx.fillRect(x, y, devicePixelRatio, 3);
  }
}

function draw(chart) {
  const { spec, host } = chart, { table, series, bands } = drawnOf(spec);
  const axis = { stroke: () => css("--faint"), grid: { stroke: () => css("--line"), width: 1 }, ticks: { show: false }, font: "12px system-ui, sans-serif" };
  const whole = Array.from({ length: 30 }, (_, i) => [1, 2, 5][i % 3] * 10 ** Math.floor(i / 3));
  const xAxis = { ...axis, size: 26, space: 80, values: (u, ticks) => ticks.map(xText) };
  chart.plot?.destroy();
  chart.plot = new uPlot({
    width: host.clientWidth,
    height: spec.height || 210,
    padding: [10, 8 + 3.6 * xText(table[0].at(-1)).length, 0, 0],
    cursor: { y: false, sync: { key: "run", scales: ["x", null] }, drag: { x: true, y: false } },
    legend: { markers: { width: 0, fill: (u, i) => `var(${series[i].color})` } },
    scales: { x: { time: false, range: (u, low, high) => (low === high ? [low - 1, high + 1] : [low, high]) }, y: { range: padded } },
    axes: [view.x === "steps" ? { ...xAxis, incrs: whole } : xAxis, { ...axis, space: 40, size: (u, ticks) => 16 + 7 * Math.max(1, ...(ticks || []).map((t) => t.length)), values: (u, ticks) => ticks.map(number) }],
    series,
    bands,
    hooks: { draw: [drawFaults], setSeries: [(u, i, { show }) => { for (let k = i + 1; show !== undefined && u.series[k]?.class === "band"; k += 1) u.setSeries(k, { show }); }] },
  }, table, host);
  host.querySelector("canvas").setAttribute("aria-label", spec.title);
}

// Draw a chart once it has a width: a folded one when it is unfolded.
const resized = new ResizeObserver((entries) => {
  for (const { target: host } of entries) {
    const chart = charts.find((c) => c.host === host), width = host.clientWidth;
    if (width && !chart.plot) draw(chart);
    else if (width) chart.plot.setSize({ width, height: chart.plot.height });
  }
});

function makeChart(spec) {
  const host = node("div", { className: spec.kind }), note = spec.note ? [node("small", { textContent: spec.note })] : [];
  charts.push({ spec, host });
  resized.observe(host);
  return node("figure", {}, node("figcaption", { textContent: spec.title }, ...note), host);
}

function makeCharts(specs) {
  return node("div", { className: "charts" }, ...specs.map(makeChart));
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
    const token = node("span", { textContent: piece, title: `importance weight ${number(weight)}` });
    token.style.background = weightColor(weight);
    text.append(token);
  }
  text.append(message.rest);
  return text;
}

// The responses of several versions to one prompt, side by side.
function makeSample(sample) {
  const said = [sample.verdict, sample.facts].filter(Boolean).map((text) => node("p", { textContent: text }));
  const prompt = sample.prompt ? [node("pre", { className: "prompt", textContent: sample.prompt })] : [];
  const versions = sample.versions ? [node("div", { className: "versions" }, ...sample.versions.map(makeSample))] : [];
  return node("div", { className: sample.versions ? "sample card wide" : "sample card" }, node("b", { textContent: sample.title }), ...said, ...prompt, ...sample.messages.map(makeMessage), ...versions);
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

function pairs(className, rows) {
  return node("dl", { className }, ...rows.map(([name, value]) => node("div", {}, node("dt", { textContent: name }), node("dd", { textContent: value }))));
}

function makeTile({ name, value, detail, is_first }) {
  const small = detail ? [node("small", { textContent: detail })] : [];
  return node("div", { className: is_first ? "card first" : "card" }, node("span", { className: "faint", textContent: name }), node("b", { textContent: value }), ...small);
}

function makeAbout() {
  const settings = node("ul", { className: "settings" }, ...data.settings.map(([name, value]) => node("li", {}, node("span", { className: "faint", textContent: `${name} ` }), value)));
  const folded = node("details", { open: innerWidth > 700 }, node("summary", { textContent: `${data.settings.length} settings that are not the default` }), settings);
  return node("section", { className: "card" }, pairs("about", data.about), ...(data.settings.length ? [folded] : []));
}

function choice(name, key, options) {
  const select = node("select", {}, ...options.map(([value, textContent]) => node("option", { value, textContent })));
  select.onchange = () => { view[key] = key === "x" ? select.value : Number(select.value); redraw(); };
  return node("label", {}, `${name} `, select);
}

function redraw() {
  for (const chart of charts) if (chart.plot) draw(chart);
}

function makeControls() {
  return node("div", { className: "controls" },
    choice("x-axis", "x", [["steps", "steps"], ["time", "time"]]),
    choice("smoothing", "smoothing", [["0", "none"], ["0.7", "some"], ["0.95", "much"]]),
    "Drag over a range to enlarge it, double-click for the whole; click on a name to hide its line.");
}

function makeEvents() {
  const cells = (e) => [node("td", { textContent: new Date(e.time * 1000).toLocaleString("en-GB", TIME) }), node("td", { textContent: e.role }), node("td", { className: e.kind, textContent: e.text })];
  const rows = data.events.map((e) => node("tr", {}, ...cells(e)));
  return node("div", { className: "card scroll" }, node("table", { className: "events" }, node("tbody", {}, ...rows)));
}

function makeCheck({ holds, text, page }) {
  const where = node("span", { className: "faint", textContent: page });
  return node("li", {}, node("b", { className: holds ? "good" : "fault", textContent: holds ? "\u2713" : "\u2717" }), `${text} `, where);
}

function section(title, ...children) {
  const id = title.toLowerCase().replaceAll(" ", "-");
  main.append(node("h2", { id, textContent: title }), ...children);
}

function makePage() {
  const broken = data.checks.filter((check) => !check.holds).length;
  const state = node("a", { href: "#integrity", className: broken ? "fault" : "good", textContent: broken ? `\u2717 ${broken} of ${data.checks.length} checks of integrity failed` : "\u2713 integrity" });
  document.getElementById("state").append(data.state, ...(data.checks.length ? [" \u00b7 ", state] : []));
  main.append(makeAbout(), ...[true, false].map((first) => node("div", { className: "tiles" }, ...data.tiles.filter((t) => t.is_first === first).map(makeTile))));
  if (data.notes.length) main.append(node("ul", {}, ...data.notes.map(([name, text]) => node("li", {}, node("b", { className: name === "launch failed" ? "fault" : "", textContent: `${name}: ` }), text))));
  if (data.overview.length) main.append(makeControls(), makeCharts(data.overview.slice(0, 1)), makeCharts(data.overview.slice(1)));
  for (const { title, samples } of data.samples) {
    const weighed = samples.some((s) => s.messages.some((m) => m.pieces.length));
    const shown = [samples.slice(0, 6), samples.slice(6)].map((part) => node("div", { className: "samples" }, ...part.map(makeSample)));
    const more = node("details", {}, node("summary", { textContent: `${samples.length - 6} more` }), shown[1]);
    section(title, ...(weighed ? [makeScale()] : []), shown[0], ...(samples.length > 6 ? [more] : []));
  }
  if (data.events.length) section("What happened to the processes", makeEvents());
  if (data.checks.length) section("Integrity", node("ul", { className: "checks card" }, ...data.checks.map(makeCheck)));
  if (data.groups.length) section("All metrics", ...data.groups.map((group) => node("details", { id: group.name }, node("summary", { textContent: `${group.title} (${group.charts.length})` }), makeCharts(group.charts))));
}

makePage();
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
