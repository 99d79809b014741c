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
  DATA.runs.forEach(({ nonfinite, damaged }, i) => {
    const said = [];
    if (nonfinite.count) said.push(`not finite in ${nonfinite.count} steps, first at step ${nonfinite.first}: ${nonfinite.names.join(", ")}`);
    if (damaged) said.push(`damaged in metrics.jsonl and not shown: ${damaged}`);
    said.forEach((text) => page.append(element("div", { className: "warning", textContent: `${named[i]}: ${text}` })));
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
  section("What ran", compare("Versions and machine", "facts", true), compare("Options", "config", false));
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
