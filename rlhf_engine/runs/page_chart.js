"use strict";
const SOURCE = `<!doctype html>\n${document.documentElement.outerHTML}\n`;  // before anything of it is changed
const DATA = JSON.parse(document.getElementById("data").textContent);
const COLOURS = DATA.colours;
const DASHES = ["", "7 4", "2 3"];
const SMOOTHED_FROM = 20, DECAY = 0.8;
const redraws = [];
const many = DATA.runs.length > 1;

// ---- what stays over a reload ---------------------------------------------------------------------------------------

const before = history.state || {}, kept = {};

// value of a control, or the one that it had before the page was read again
function keep(name, control) {
  const part = control.type === "checkbox" ? "checked" : control.tagName === "DETAILS" ? "open" : "value";
  if (before[name] !== undefined) control[part] = before[name];
  kept[name] = () => part === "value" && control.type === "range" && control.value === control.max ? undefined : control[part];
  return control;
}

function reload() {
  const state = { top: scrollY };
  for (const [name, read] of Object.entries(kept)) state[name] = read();
  history.replaceState(state, "");
  location.reload();
}

// ---- small things ---------------------------------------------------------------------------------------------------

function element(tag, properties = {}, ...children) {
  const made = document.createElement(tag);
  Object.assign(made, properties);
  made.append(...children);
  return made;
}

function svg(tag, attributes, text) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  if (text !== undefined) made.textContent = text;
  return made;
}

function number(x) {
  if (x === null || x === undefined) return "–";
  const size = Math.abs(x);
  if (size >= 1e9) return `${(x / 1e9).toFixed(2)} G`;
  if (size >= 1e6) return `${(x / 1e6).toFixed(1)} M`;
  if (size >= 1000) return Math.round(x).toLocaleString("en");
  if (size !== 0 && size < 0.01) return x.toExponential(1);
  return String(Number(x.toFixed(3)));
}

// text in which no invisible character can reorder or hide what is around it
const UNSEEN = /[\u0000-\u0008\u000b\u000c\u000e-\u001f\u007f-\u009f\u00ad\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u2069\ufeff]/g;
const plain = (text) => text.replace(UNSEEN, (c) => `⟨U+${c.charCodeAt(0).toString(16).toUpperCase().padStart(4, "0")}⟩`);
const named = DATA.runs.map((run) => plain(run.name));
const shown = new Set(DATA.runs.map((_, i) => i));

const colour = (run) => COLOURS[run % COLOURS.length];
const mean = (values) => values.reduce((a, b) => a + b, 0) / values.length;

function swatchOf(background) {
  const swatch = element("span", { className: "swatch" });
  swatch.style.background = background;
  return swatch;
}

function smooth(values) {
  let total = 0, weight = 0;
  return values.map((x) => (total = DECAY * total + x) / (weight = DECAY * weight + 1));
}

function ticks(low, high, wanted) {
  const raw = (high - low) / wanted, power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((m) => m * power).find((s) => s >= raw * 0.999);
  const first = Math.ceil(low / step - 1e-9), count = Math.min(20, Math.floor(high / step + 1e-9) - first + 1);
  return Array.from({ length: count }, (_, i) => (first + i) * step);
}

function range(values) {
  let low = Infinity, high = -Infinity;
  for (const x of values) { if (x < low) low = x; if (x > high) high = x; }
  // equal but for rounding, as means of a constant are
  if (high - low <= 1e-9 * Math.max(Math.abs(low), Math.abs(high))) { const pad = Math.abs(low) * 0.1 || 1; return [low - pad, high + pad]; }
  const pad = (high - low) * 0.04;
  return [low - pad, high + pad];
}

// ---- a chart --------------------------------------------------------------------------------------------------------

// series: {run, label, dash, xs, ys, low, high}, the last two where a point is the mean of several steps; raw: not smoothed; path: points follow each other in any direction
function chart(title, unit, xLabel, series, { path = false, raw = path } = {}) {
  const card = element("div", { className: "card" });
  card.append(element("h3", { textContent: title }), element("div", { className: "unit", textContent: unit }));
  const W = 440, H = 240, L = 52, R = 10, T = 8, B = 34;
  const holder = element("div"), legend = element("div", { className: "legend" });
  const tip = element("div", { className: "tip", hidden: true, ariaLive: "polite" });
  card.append(holder, legend, tip);

  function draw() {
    holder.replaceChildren();
    legend.replaceChildren();
    tip.hidden = true;
    const visible = series.filter((s) => shown.has(s.run));
    const picture = svg("svg", { viewBox: `0 0 ${W} ${H}`, role: "img", tabindex: 0, "aria-label": `${title}; arrow keys read values` });
    holder.append(picture);
    if (!visible.length) return;
    const drawn = visible.map((s) => ({ ...s, line: raw || s.ys.length < SMOOTHED_FROM ? s.ys : smooth(s.ys) }));
    const [x0, x1] = range(drawn.flatMap((s) => s.xs)), [y0, y1] = range(drawn.flatMap((s) => [...s.ys, ...s.line, ...(s.low || []), ...(s.high || [])]));
    const x = (v) => L + (W - L - R) * (v - x0) / (x1 - x0), y = (v) => H - B - (H - T - B) * (v - y0) / (y1 - y0);
    for (const v of ticks(y0, y1, 5)) {
      picture.append(svg("line", { x1: L, x2: W - R, y1: y(v), y2: y(v), stroke: "currentColor", "stroke-opacity": 0.12 }));
      picture.append(svg("text", { x: L - 6, y: y(v) + 4, "text-anchor": "end" }, number(v)));
    }
    for (const v of ticks(x0, x1, 6)) picture.append(svg("text", { x: x(v), y: H - B + 16, "text-anchor": "middle" }, number(v)));
    picture.append(svg("line", { x1: L, x2: W - R, y1: H - B, y2: H - B, stroke: "currentColor", "stroke-opacity": 0.4 }));
    picture.append(svg("text", { x: (L + W - R) / 2, y: H - 4, "text-anchor": "middle" }, xLabel));
    const points = (xs, ys) => xs.map((v, i) => `${x(v).toFixed(1)},${y(ys[i]).toFixed(1)}`).join(" ");
    for (const s of drawn) {
      const look = { fill: "none", stroke: colour(s.run), "stroke-dasharray": DASHES[s.dash % 3], "stroke-linejoin": "round" };
      if (s.low) {
        const band = `${points(s.xs, s.high)} ${points([...s.xs].reverse(), [...s.low].reverse())}`;
        picture.append(svg("polygon", { points: band, fill: colour(s.run), "fill-opacity": 0.12 }));
      }
      if (s.line !== s.ys) picture.append(svg("polyline", { ...look, points: points(s.xs, s.ys), "stroke-opacity": 0.25, "stroke-width": 1 }));
      picture.append(svg("polyline", { ...look, points: points(s.xs, s.line), "stroke-width": 1.8 }));
      if (s.ys.length < SMOOTHED_FROM) {
        s.xs.forEach((v, i) => picture.append(svg("circle", { cx: x(v), cy: y(s.ys[i]), r: 2.4, fill: colour(s.run) })));
      } else if (path) {
        picture.append(svg("circle", { cx: x(s.xs.at(-1)), cy: y(s.ys.at(-1)), r: 4, fill: colour(s.run) }));
      }
    }
    if (visible.length > 1) {
      for (const s of visible) {
        const entry = element("span", { className: `dash${s.dash % 3}` }, element("i"), s.label);
        entry.firstChild.style.color = colour(s.run);
        legend.append(entry);
      }
    }
    const cursor = svg("line", { y1: T, y2: H - B, stroke: "currentColor", "stroke-opacity": 0, "stroke-width": 1 });
    picture.append(cursor);
    // the nearest point of each line to a place in the picture; of paths, of one alone
    function read(px, py) {
      const found = visible.map((s) => {
        let best = 0, nearest = Infinity;
        s.xs.forEach((v, i) => {
          const far = Math.abs(x(v) - px) + (path ? Math.abs(y(s.ys[i]) - py) : 0);
          if (far < nearest) { nearest = far; best = i; }
        });
        return { s, best, nearest };
      }).sort((a, b) => a.nearest - b.nearest);
      mark(path ? found.slice(0, 1) : found);
    }
    function mark(found) {
      const where = found[0].s.xs[found[0].best], px = x(where), py = y(found[0].s.ys[found[0].best]);
      cursor.setAttribute("x1", px);
      cursor.setAttribute("x2", px);
      cursor.setAttribute("stroke-opacity", 0.4);
      tip.replaceChildren(element("b", { textContent: `${xLabel} ${number(where)}` }));
      for (const { s, best } of found) {
        const step = path ? `step ${s.steps[best]}: ` : "";
        tip.append(element("div", {}, swatchOf(colour(s.run)), `${s.label}: ${step}${number(s.ys[best])}`));
      }
      tip.hidden = false;
      const scale = picture.getBoundingClientRect().width / W, left = px * scale + 12, width = tip.offsetWidth;
      tip.style.left = `${left + width + 24 > card.clientWidth ? Math.max(4, left - width - 12) : left + 12}px`;
      tip.style.top = `${holder.offsetTop + py * scale + 12}px`;
    }
    const leave = () => { tip.hidden = true; cursor.setAttribute("stroke-opacity", 0); };
    picture.addEventListener("pointermove", (event) => {
      const box = picture.getBoundingClientRect();
      read((event.clientX - box.left) * W / box.width, (event.clientY - box.top) * H / box.height);
    });
    let at = -1;
    picture.addEventListener("keydown", (event) => {
      const n = visible[0].xs.length, to = { ArrowLeft: at - 1, ArrowRight: at + 1, Home: 0, End: n - 1 }[event.key];
      if (event.key === "Escape") leave();
      if (to === undefined) return;
      event.preventDefault();
      at = Math.max(0, Math.min(n - 1, to));
      if (path) mark([{ s: visible[0], best: at }]);
      else read(x(visible[0].xs[at]), 0);
    });
    picture.addEventListener("pointerleave", leave);
    picture.addEventListener("blur", leave);
  }
  redraws.push(draw);
  draw();
  return card;
}

const label = (run, line) => many ? (line ? `${named[run]}, ${line}` : named[run]) : line || named[run];

function seriesOf(lines) {
  return DATA.runs.flatMap((run, i) => lines.flatMap(([name, text], dash) => {
    const found = run.curves[name];
    return found ? [{ run: i, label: label(i, lines.length > 1 ? text : ""), dash, xs: found[0], ys: found[1], low: found[2], high: found[3] }] : [];
  }));
}
