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

// ---- sections -------------------------------------------------------------------------------------------------------

const page = document.getElementById("page");

function section(title, ...content) {
  page.append(element("h2", { textContent: title }), ...content);
}

function runSwitches() {
  const place = document.getElementById("runs");
  if (!many) return;
  DATA.runs.forEach((run, i) => {
    const box = keep(`run ${i}`, element("input", { type: "checkbox", checked: true }));
    const use = () => box.checked ? shown.add(i) : shown.delete(i);
    use();
    box.addEventListener("change", () => { use(); redraws.forEach((draw) => draw()); });
    const state = run.state ? `, ${run.state}` : "";
    place.append(element("label", {}, box, swatchOf(colour(i)), `${named[i]}, ${run.steps} steps${state}`));
  });
}

function warnings() {
  DATA.runs.forEach(({ nonfinite }, i) => {
    if (!nonfinite.count) return;
    page.append(element("div", {
      className: "warning",
      textContent: `${named[i]}: not finite in ${nonfinite.count} steps, first at step ${nonfinite.first}: ${nonfinite.names.join(", ")}`,
    }));
  });
}

function curves() {
  const grid = element("div", { className: "grid" });
  for (const panel of DATA.panels) {
    const series = seriesOf(panel.lines);
    if (series.length) grid.append(chart(panel.title, panel.unit, "step", series));
  }
  const thinned = DATA.runs.flatMap((run, i) => run.every > 1 ? [`${many ? `${named[i]}: each` : "Each"} point is the mean of ${run.every} logged steps; the band is from their least to their most.`] : []);
  const smoothed = `Pale: as logged. Solid: exponential mean, decay ${DECAY}.`;
  section("Curves", element("p", { className: "unit", textContent: [smoothed, ...thinned].join(" ") }), grid);
}

// two metrics of the same steps against each other
function against(x, y) {
  return DATA.runs.flatMap((run, i) => {
    if (!run.curves[x] || !run.curves[y]) return [];
    const at = new Map(run.curves[x][0].map((step, j) => [step, run.curves[x][1][j]]));
    const pairs = run.curves[y][0].map((step, j) => [at.get(step), run.curves[y][1][j], step]).filter(([v]) => v !== undefined);
    const soft = (values) => values.length < SMOOTHED_FROM ? values : smooth(values);
    return [{ run: i, label: label(i, ""), dash: 0, xs: soft(pairs.map((p) => p[0])), ys: soft(pairs.map((p) => p[1])), steps: pairs.map((p) => p[2]) }];
  });
}

function overTime() {
  return DATA.runs.flatMap((run, i) => {
    const step = run.curves["seconds/step"], reward = run.curves.reward;
    if (!step || !reward) return [];
    let total = 0;
    const at = new Map(step[1].map((s, j) => [step[0][j], total += s * (step[0][j] - (j ? step[0][j - 1] : 0))]));
    const pairs = reward[0].map((n, j) => [at.get(n), reward[1][j], n]).filter(([v]) => v !== undefined);
    const ys = pairs.map((p) => p[1]);
    return [{ run: i, label: label(i, ""), dash: 0, xs: pairs.map((p) => p[0]), ys: ys.length < SMOOTHED_FROM ? ys : smooth(ys), steps: pairs.map((p) => p[2]) }];
  });
}

function rewardAgainst() {
  const grid = element("div", { className: "grid" });
  const kl = against("kl", "reward"), time = overTime();
  if (kl.length) grid.append(chart("Reward against KL", "score per answer; smoothed, the dot is the end", "KL, nats per answer", kl, { path: true }));
  if (time.length) grid.append(chart("Reward against time", "score per answer; smoothed", "seconds of training", time, { path: true }));
  if (grid.children.length) section("What the reward costs", grid);
}

function resources() {
  const grid = element("div", { className: "grid" });
  const phases = [...new Set(DATA.runs.flatMap((run) => Object.keys(run.curves)))]
    .filter((name) => name.startsWith("seconds/") && name !== "seconds/step");
  if (phases.length) {
    const table = element("table");
    table.append(element("tr", {}, element("th", { textContent: "seconds per step, mean" }),
      ...named.map((name) => element("th", { textContent: name }))));
    const row = (name, text) => element("tr", {}, element("th", {}, swatchOf(phaseColour(phases.indexOf(name))), text),
      ...DATA.runs.map((run) => element("td", { className: "number", textContent: run.curves[name] ? number(mean(run.curves[name][1])) : "–" })));
    phases.forEach((name) => table.append(row(name, name.slice("seconds/".length))));
    table.append(row("seconds/step", "all of a step"));
    grid.append(element("div", { className: "card" }, element("h3", { textContent: "Time per phase" }), bars(phases), element("div", { className: "scroll" }, table)));
    grid.append(chart("Time of a step", "seconds", "step", seriesOf([["seconds/step", ""]])));
  }
  const memory = seriesOf([["peak_memory_bytes", ""]]);
  if (memory.length) grid.append(chart("Peak memory so far", "bytes", "step", memory, { raw: true }));
  if (grid.children.length) section("Time and memory", grid);
}

const phaseColour = (j) => j < 0 ? "transparent" : COLOURS[(j + 2) % COLOURS.length];

function bars(phases) {
  const holder = element("div");
  function draw() {
    holder.replaceChildren();
    const runs = DATA.runs.map((run, i) => ({ run, i })).filter(({ i, run }) => shown.has(i) && phases.some((name) => run.curves[name]));
    const sums = runs.map(({ run }) => phases.map((name) => run.curves[name] ? mean(run.curves[name][1]) : 0));
    const most = Math.max(...sums.map((parts) => parts.reduce((a, b) => a + b, 0)));
    const H = 26 * runs.length + 8, picture = svg("svg", { viewBox: `0 0 440 ${H}`, role: "img", "aria-label": "Time per phase" });
    runs.forEach(({ run }, row) => {
      let left = 0;
      sums[row].forEach((part, j) => {
        const width = 440 * part / most;
        const bar = svg("rect", { x: left, y: 4 + 26 * row, width: Math.max(0, width - 1), height: 20, fill: phaseColour(j), rx: 2 });
        bar.append(svg("title", {}, `${plain(run.name)}, ${phases[j].slice(8)}: ${number(part)} s`));
        picture.append(bar);
        if (width > 60) picture.append(svg("text", { x: left + 6, y: 18 + 26 * row, style: "fill:#fff;opacity:1" }, phases[j].slice(8)));
        left += width;
      });
    });
    holder.append(picture);
  }
  redraws.push(draw);
  draw();
  return holder;
}

// words and single signs, each with the space behind it; of scripts without spaces each character
const pieces = (text) => text.match(/^\s+|(?:[\p{Script=Han}\p{Script=Hiragana}\p{Script=Katakana}\p{Script=Thai}]|[\p{L}\p{M}\p{N}_]+|[^\s\p{L}\p{M}\p{N}_])\s*/gu) || [];
const MOST_CELLS = 4e6;

// [is in both, text in the left, text in the right] from start to end; space alone makes no difference
function differences(left, right) {
  const a = pieces(left), b = pieces(right), found = [];
  const same = (i, j) => a[i].trim() === b[j].trim();
  function add(both, x, y) {
    if (found.length && found.at(-1)[0] === both) { found.at(-1)[1] += x; found.at(-1)[2] += y; } else found.push([both, x, y]);
  }
  let start = 0, m = a.length, n = b.length;
  while (start < m && start < n && same(start, start)) start++;
  while (m > start && n > start && same(m - 1, n - 1)) { m--; n--; }
  const width = n - start + 1, isShort = (m - start) * width <= MOST_CELLS;
  // longest[i, j]: of the common subsequences of what is left from i and from j on; too long to align: all of it differs
  const longest = new Uint32Array(isShort ? (m - start + 1) * width : 0), at = (i, j) => (i - start) * width + j - start;
  for (let i = m - 1; isShort && i >= start; i--) {
    for (let j = n - 1; j >= start; j--) {
      longest[at(i, j)] = same(i, j) ? longest[at(i + 1, j + 1)] + 1 : Math.max(longest[at(i + 1, j)], longest[at(i, j + 1)]);
    }
  }
  for (let i = 0, j = 0; i < a.length || j < b.length;) {
    const isInside = i >= start && (i < m || j < n);
    if (!isInside || (isShort && i < m && j < n && same(i, j))) add(true, a[i++], b[j++]);
    else if (i < m && (j >= n || !isShort || longest[at(i + 1, j)] >= longest[at(i, j + 1)])) add(false, a[i++], "");
    else add(false, "", b[j++]);
  }
  return found;
}
// ---- end of differences

// one side of the comparison of answers: a run and one of its looks
function side(name, runs, { run, last }) {
  const holder = element("fieldset", {}, element("legend", { textContent: name }));
  const which = element("select", { ariaLabel: `${name}: run` }, ...runs.map(({ i }, j) => element("option", { value: j, textContent: named[i] })));
  const slider = element("input", { type: "range", min: 0, ariaLabel: `${name}: step` }), told = element("output");
  which.value = run;
  keep(`${name} run`, which);
  const looks = () => runs[which.value].run.samples;
  const bound = (to) => { slider.max = looks().length - 1; slider.value = to; slider.disabled = looks().length < 2; };
  bound(last ? looks().length - 1 : 0);
  keep(`${name} step`, slider);
  if (runs.length > 1) holder.append(which);
  holder.append(slider, told);
  return { holder, which, slider, bound, look: () => {
    const look = looks()[slider.value];
    told.textContent = `step ${look.step}`;
    return look;
  } };
}

function samples() {
  const runs = DATA.runs.map((run, i) => ({ run, i })).filter(({ run }) => run.samples.length);
  if (!runs.length) return;
  const two = runs.length > 1;
  // of one run its first answers beside its last, of several the last ones of two
  const left = side("left", runs, { run: 0, last: two }), right = side("right", runs, { run: two ? 1 : 0, last: true });
  const marks = keep("differences", element("input", { type: "checkbox", checked: true }));
  const place = element("div", { className: "answers" });
  // kind: 1 for the left text of the parts, 2 for the right one
  const answer = (look, j, reward, parts, kind) => {
    const text = element("pre", { dir: "auto" });
    for (const part of parts) {
      if (part[0]) text.append(part[kind]);
      else if (part[kind]) text.append(element(kind === 1 ? "del" : "ins", { textContent: part[kind] }));
    }
    if (!look.completions[j]) text.append(element("i", { textContent: "an empty answer" }));
    return element("div", { className: "answer" }, element("div", { className: "score", textContent: `step ${look.step}, reward ${reward}` }), text);
  };
  function draw() {
    const a = left.look(), b = right.look();
    place.replaceChildren();
    b.prompts.forEach((prompt, j) => {
      const i = a.prompts.indexOf(prompt), card = element("div", { className: "card" }, element("pre", { dir: "auto", className: "prompt", textContent: plain(prompt) }));
      const reward = b.scores[j], more = i >= 0 && reward !== null && a.scores[i] !== null ? reward - a.scores[i] : 0;
      const gain = more ? ` (${more > 0 ? "+" : "−"}${number(Math.abs(more))})` : "";
      const texts = [i < 0 ? "" : plain(a.completions[i]), plain(b.completions[j])];
      const parts = marks.checked && i >= 0 ? differences(...texts) : [[true, ...texts]];
      const none = element("div", { className: "answer score", textContent: "This prompt was not answered on the left." });
      card.append(element("div", { className: "pair" },
        i < 0 ? none : answer(a, i, number(a.scores[i]), parts, 1),
        answer(b, j, number(reward) + gain, parts, 2)));
      place.append(card);
    });
  }
  for (const one of [left, right]) {
    one.which.addEventListener("change", () => { one.bound(1e9); draw(); });
    one.slider.addEventListener("input", draw);
  }
  marks.addEventListener("change", draw);
  draw();
  const thinned = runs.filter(({ run }) => run.looks > run.samples.length)
    .map(({ run, i }) => `${two ? `${named[i]}: ` : ""}${run.samples.length} of ${run.looks} looks at the answers are on this page. `);
  const key = element("p", { className: "unit" }, ...thinned, element("del", { textContent: "Struck out" }), ": on the left alone. ", element("ins", { textContent: "Underlined" }), ": on the right alone.");
  const controls = element("div", { className: "controls" }, left.holder, right.holder, element("label", {}, marks, " mark differences"));
  section("Answers side by side", controls, key, place);
}

function anyMetric() {
  const names = [...new Set(DATA.runs.flatMap((run) => Object.keys(run.curves)))].sort();
  const choice = element("select", { ariaLabel: "metric" }, ...names.map((name) => element("option", { textContent: name })));
  const place = element("div", { className: "grid" });
  function draw() {
    if (redraws.any) redraws.splice(redraws.indexOf(redraws.any), 1);
    place.replaceChildren(chart(choice.value, "", "step", seriesOf([[choice.value, ""]])));
    redraws.any = redraws.at(-1);
  }
  choice.addEventListener("change", draw);
  keep("metric", choice);
  draw();
  section("Any metric", element("div", { className: "controls" }, choice), place);
}

function facts() {
  const compare = (title, part, open) => {
    const names = [...new Set(DATA.runs.flatMap((run) => Object.keys(run[part])))];
    const text = (value) => value === undefined ? "–" : plain(typeof value === "string" ? value : JSON.stringify(value));
    const table = element("table");
    table.append(element("tr", {}, element("th"), ...named.map((name) => element("th", { textContent: name }))));
    for (const name of names) {
      const values = DATA.runs.map((run) => text(run[part][name]));
      const row = element("tr", { className: new Set(values).size > 1 ? "differs" : "" }, element("th", { textContent: name }),
        ...values.map((value) => element("td", { textContent: value })));
      table.append(row);
    }
    return keep(title, element("details", { open }, element("summary", { textContent: title }), element("div", { className: "scroll" }, table)));
  };
  section("What ran", compare("Versions and machine", "facts", true), compare("Options", "config", !many));
  if (many) page.append(element("p", { className: "unit", textContent: "Rows in which runs differ are marked." }));
}

// ---- the page as a whole --------------------------------------------------------------------------------------------

function share() {
  const bar = document.getElementById("bar");
  const file = new Blob([atRest(SOURCE)], { type: "text/html" });
  const button = element("button", { type: "button", textContent: `Share (${number(Math.ceil(file.size / 1000))} kB)`, title: "Saves this page as one file: numbers, answers and options, without paths or addresses of this machine" });
  button.addEventListener("click", () => {
    const name = document.title.replace(/[^\p{L}\p{N}._-]+/gu, "-").replace(/^[-.]+|[-.]+$/g, "") || "run";
    const link = element("a", { href: URL.createObjectURL(file), download: `${name}.html` });
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 60e3);
  });
  bar.append(button);
}

// a page that does not read itself again
function atRest(source) {
  return source.replace(/^(<!doctype html>\s*<html lang="en") data-refresh="\d+"/, "$1")
    .replace(/<noscript><meta http-equiv="refresh" content="\d+"><\/noscript>/, "");
}

function live() {
  const seconds = Number(document.documentElement.dataset.refresh);
  if (!seconds) return;
  const told = element("span", { role: "status" }), pause = element("button", { type: "button" });
  let paused = Boolean(before.paused), due = Date.now() + 1000 * seconds;
  kept.paused = () => paused;
  document.getElementById("bar").prepend(element("span", { className: "dot" }), told, pause);
  const isSilent = () => Date.now() / 1000 - DATA.written > DATA.patience;
  function tell() {
    pause.textContent = paused ? "Go on" : "Pause";
    told.textContent = isSilent() ? `No news since ${new Date(1000 * DATA.written).toLocaleString()}: this page no longer refreshes.`
      : paused ? "Running; refreshing is paused." : `Running; refreshes every ${seconds} s.`;
  }
  pause.addEventListener("click", () => { paused = !paused; due = Date.now(); tell(); });
  tell();
  setInterval(() => {
    const isBusy = document.hidden || paused || !getSelection().isCollapsed || document.querySelector("svg:focus, select:focus, input[type=range]:active");
    if (isSilent()) tell();
    else if (Date.now() >= due && !isBusy) reload();
  }, 500);
}

function sortable() {
  const table = document.getElementById("comparison");
  if (!table) return;
  const heads = [...table.tHead.rows[0].cells], body = table.tBodies[0];
  const value = (row, j) => {
    const cell = row.cells[j], found = cell.dataset.value;
    return found === undefined ? cell.textContent === "–" ? undefined : cell.textContent : Number(found);
  };
  heads.forEach((head, j) => {
    const button = element("button", { type: "button", className: "sort" }, ...head.childNodes);
    head.append(button);
    button.addEventListener("click", () => {
      const down = head.ariaSort === "ascending";
      heads.forEach((other) => other.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", down ? "descending" : "ascending");
      const rows = [...body.rows].sort((a, b) => {
        const x = value(a, j), y = value(b, j);
        if (x === undefined || y === undefined) return (x === undefined) - (y === undefined);  // missing ones last
        const order = typeof x === typeof y ? (x > y) - (x < y) : typeof x === "number" ? -1 : 1;
        return down ? -order : order;
      });
      body.append(...rows);
    });
  });
}

runSwitches();
sortable();
warnings();
curves();
samples();
rewardAgainst();
resources();
anyMetric();
facts();
share();
live();
if (before.top) scrollTo(0, before.top);
