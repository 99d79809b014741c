"use strict";
const DATA = JSON.parse(document.getElementById("data").textContent);
const COLOURS = ["#2f6fde", "#d9590f", "#1c9a5b", "#a23bc4", "#b8860b", "#c2185b", "#00838f", "#6d5145"];
const DASHES = ["", "7 4", "2 3"];
const SMOOTHED_FROM = 20, DECAY = 0.8;
const shown = new Set(DATA.runs.map((_, i) => i));
const redraws = [];

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

const colour = (run) => COLOURS[run % COLOURS.length];
const mean = (values) => values.reduce((a, b) => a + b, 0) / values.length;

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

// series: {run, label, dash, xs, ys}; raw: not smoothed; path: points follow each other in any direction
function chart(title, unit, xLabel, series, { path = false, raw = path } = {}) {
  const card = element("div", { className: "card" });
  card.append(element("h3", { textContent: title }), element("div", { className: "unit", textContent: unit }));
  const W = 440, H = 240, L = 52, R = 10, T = 8, B = 34;
  const holder = element("div"), legend = element("div", { className: "legend" });
  const tip = element("div", { className: "tip", hidden: true });
  card.append(holder, legend, tip);

  function draw() {
    holder.replaceChildren();
    legend.replaceChildren();
    tip.hidden = true;
    const visible = series.filter((s) => shown.has(s.run));
    const picture = svg("svg", { viewBox: `0 0 ${W} ${H}`, role: "img", "aria-label": title });
    holder.append(picture);
    if (!visible.length) return;
    const drawn = visible.map((s) => ({ ...s, line: raw || s.ys.length < SMOOTHED_FROM ? s.ys : smooth(s.ys) }));
    const [x0, x1] = range(drawn.flatMap((s) => s.xs)), [y0, y1] = range(drawn.flatMap((s) => [...s.ys, ...s.line]));
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
    picture.addEventListener("pointermove", (event) => {
      const box = picture.getBoundingClientRect();
      const at = { x: (event.clientX - box.left) * W / box.width, y: (event.clientY - box.top) * H / box.height };
      const found = visible.map((s) => {
        let best = 0, nearest = Infinity;
        s.xs.forEach((v, i) => {
          const far = Math.abs(x(v) - at.x) + (path ? Math.abs(y(s.ys[i]) - at.y) : 0);
          if (far < nearest) { nearest = far; best = i; }
        });
        return { s, best, nearest };
      }).sort((a, b) => a.nearest - b.nearest);
      const head = found[0], where = head.s.xs[head.best];
      cursor.setAttribute("x1", x(where));
      cursor.setAttribute("x2", x(where));
      cursor.setAttribute("stroke-opacity", 0.4);
      tip.replaceChildren(element("b", { textContent: `${xLabel} ${number(where)}` }));
      for (const { s, best } of path ? found.slice(0, 1) : found) {
        const swatch = element("span", { className: "swatch" });
        swatch.style.background = colour(s.run);
        const step = path ? `step ${s.steps[best]}: ` : "";
        tip.append(element("div", {}, swatch, `${s.label}: ${step}${number(s.ys[best])}`));
      }
      tip.hidden = false;
      const card_ = card.getBoundingClientRect();
      const left = event.clientX - card_.left, width = tip.offsetWidth;
      tip.style.left = `${left + width + 24 > card_.width ? Math.max(4, left - width - 12) : left + 12}px`;
      tip.style.top = `${event.clientY - card_.top + 12}px`;
    });
    picture.addEventListener("pointerleave", () => { tip.hidden = true; cursor.setAttribute("stroke-opacity", 0); });
  }
  redraws.push(draw);
  draw();
  return card;
}

const many = DATA.runs.length > 1;
const label = (run, line) => many ? (line ? `${DATA.runs[run].name}, ${line}` : DATA.runs[run].name) : line || DATA.runs[run].name;

function seriesOf(lines) {
  return DATA.runs.flatMap((run, i) => lines.flatMap(([name, text], dash) => {
    const found = run.curves[name];
    return found ? [{ run: i, label: label(i, lines.length > 1 ? text : ""), dash, xs: found[0], ys: found[1] }] : [];
  }));
}

// ---- sections -------------------------------------------------------------------------------------------------------

const page = document.getElementById("page");
page.replaceChildren();

function section(title, ...content) {
  page.append(element("h2", { textContent: title }), ...content);
}

function runSwitches() {
  const place = document.getElementById("runs");
  DATA.runs.forEach((run, i) => {
    const swatch = element("span", { className: "swatch" });
    swatch.style.background = colour(i);
    if (!many) {
      place.append(element("span", { textContent: `${run.steps} steps` }));
      return;
    }
    const box = element("input", { type: "checkbox", checked: true });
    box.addEventListener("change", () => {
      box.checked ? shown.add(i) : shown.delete(i);
      redraws.forEach((draw) => draw());
    });
    place.append(element("label", {}, box, swatch, `${run.name}, ${run.steps} steps`));
  });
}

function warnings() {
  DATA.runs.forEach((run) => {
    const steps = Object.keys(run.nonfinite);
    if (!steps.length) return;
    const names = [...new Set(steps.flatMap((step) => Object.keys(run.nonfinite[step])))];
    page.append(element("div", {
      className: "warning",
      textContent: `${run.name}: not finite in ${steps.length} steps, first at step ${steps[0]}: ${names.join(", ")}`,
    }));
  });
}

function curves() {
  const grid = element("div", { className: "grid" });
  for (const panel of DATA.panels) {
    const series = seriesOf(panel.lines);
    if (series.length) grid.append(chart(panel.title, panel.unit, "step", series));
  }
  section("Curves", grid);
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
      ...DATA.runs.map((run) => element("th", { textContent: run.name })), ));
    const row = (name, text) => element("tr", {}, element("th", {}, swatchOf(phases.indexOf(name)), text),
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

const phaseColour = (j) => COLOURS[(j + 2) % COLOURS.length];

function swatchOf(phase) {
  const swatch = element("span", { className: "swatch" });
  if (phase >= 0) swatch.style.background = phaseColour(phase);
  return swatch;
}

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
        bar.append(svg("title", {}, `${run.name}, ${phases[j].slice(8)}: ${number(part)} s`));
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

function samples() {
  const runs = DATA.runs.map((run, i) => ({ run, i })).filter(({ run }) => run.samples.length);
  if (!runs.length) return;
  const place = element("div"), controls = element("div", { className: "controls" });
  const which = element("select", { ariaLabel: "run" }, ...runs.map(({ run }, j) => element("option", { value: j, textContent: run.name })));
  const slider = element("input", { type: "range", min: 0, value: 0, ariaLabel: "step" }), told = element("span");
  if (runs.length > 1) controls.append(which);
  controls.append(slider, told);
  function draw() {
    const { run } = runs[which.value || 0];
    slider.max = run.samples.length - 1;
    slider.disabled = run.samples.length < 2;
    const now = run.samples[slider.value];
    told.textContent = `after step ${now.step}` + (slider.value > 0 ? ", beside the first" : "");
    place.replaceChildren();
    now.prompts.forEach((prompt, i) => {
      const card = element("div", { className: "card" });
      card.append(element("pre", { textContent: prompt }));
      const first = run.samples.find((look) => look.prompts.includes(prompt));  // prompts may have changed since
      for (const [look, j] of first === now ? [[now, i]] : [[first, first.prompts.indexOf(prompt)], [now, i]]) {
        card.append(element("div", { className: "answer" },
          element("div", { className: "score", textContent: `step ${look.step}, reward ${number(look.scores[j])}` }),
          element("pre", { textContent: look.completions[j] || "(an empty answer)" })));
      }
      place.append(card);
    });
    place.className = "grid";
  }
  which.addEventListener("change", () => { slider.max = runs[which.value].run.samples.length - 1; slider.value = slider.max; draw(); });
  slider.addEventListener("input", draw);
  slider.max = runs[0].run.samples.length - 1;
  slider.value = slider.max;
  draw();
  section("Answers over time", controls, place);
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
  draw();
  section("Any metric", element("div", { className: "controls" }, choice), place);
}

function facts() {
  const compare = (title, part, open) => {
    const names = [...new Set(DATA.runs.flatMap((run) => Object.keys(run[part])))];
    const text = (value) => value === undefined ? "–" : typeof value === "string" ? value : JSON.stringify(value);
    const table = element("table");
    table.append(element("tr", {}, element("th"), ...DATA.runs.map((run) => element("th", { textContent: run.name }))));
    for (const name of names) {
      const values = DATA.runs.map((run) => text(run[part][name]));
      const row = element("tr", { className: new Set(values).size > 1 ? "differs" : "" }, element("th", { textContent: name }),
        ...values.map((value) => element("td", { textContent: value })));
      table.append(row);
    }
    return element("details", { open }, element("summary", { textContent: title }), element("div", { className: "scroll" }, table));
  };
  section("What ran", compare("Versions and machine", "facts", true), compare("Options", "config", !many));
  if (many) page.append(element("p", { className: "unit", textContent: "Rows in which runs differ are marked." }));
}

runSwitches();
warnings();
curves();
rewardAgainst();
resources();
samples();
anyMetric();
facts();
