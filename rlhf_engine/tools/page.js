// ---- answers side by side, and without names ------------------------------------------------------------------------

const page = document.getElementById("page");
const MODELS = DATA.runs, PROMPTS = DATA.prompts, AT_ONCE = 20;
const STORED = `rlhf-engine ratings ${DATA.key}`;
const VERDICTS = new Map([[1, "preferred"], [0, "not preferred"], [0.5, "a tie"]]);

// numbers from a seed, the same at every visit: the order of the models at a prompt gives no name away
function shuffled(n, seed) {
  const order = [...Array(n).keys()];
  let state = seed >>> 0;
  for (let i = n - 1; i > 0; i--) {
    state = (Math.imul(state, 1664525) + 1013904223) >>> 0;
    const j = Math.floor(state / 2 ** 32 * (i + 1));
    [order[i], order[j]] = [order[j], order[i]];
  }
  return order;
}
const seedOf = (i) => parseInt(DATA.key.slice(0, 8), 16) ^ Math.imul(i + 1, 2654435761);

// rows of a data file, one per rated answer, as `rlhf-engine reward` reads them
function ratedRows(ratings) {
  return Object.entries(ratings).map(([key, label]) => {
    const [model, i, draw] = JSON.parse(key), { source } = PROMPTS[i], text = MODELS[model].answers[i][draw].text;
    const completion = typeof source === "string" ? text : [{ role: "assistant", content: text }];
    return { prompt: source, completion, label, model: MODELS[model].name };
  });
}

function tally(ratings) {
  return MODELS.map((model, m) => {
    const labels = Object.entries(ratings).filter(([key]) => JSON.parse(key)[0] === m).map(([, label]) => label);
    return { name: model.name, up: labels.filter(Boolean).length, of: labels.length };
  });
}
// ---- end of ratings

function stored() {
  try {
    return JSON.parse(localStorage.getItem(STORED)) || {};
  } catch {
    return {};  // a browser that keeps nothing for files: ratings last as long as the page
  }
}
let ratings = stored();

function store() {
  try {
    localStorage.setItem(STORED, JSON.stringify(ratings));
  } catch {
    document.getElementById("kept").textContent = "This browser keeps no ratings: save them before you leave. ";
  }
}

function answer(model, i, draw, label, isBlind) {
  const { text, reward, preference } = MODELS[model].answers[i][draw];
  const facts = [];
  if (!isBlind && reward !== null) facts.push(`reward ${number(reward)}`);
  if (!isBlind && preference !== null) facts.push(VERDICTS.get(preference) || `preferred by ${number(preference)}`);
  const shown = element("pre", { dir: "auto" }, text ? plain(text) : element("i", { textContent: "an empty answer" }));
  const head = element("div", { className: "score" }, element("b", { textContent: label }), facts.length ? `: ${facts.join(", ")}` : "");
  const made = element("div", { className: "answer" }, head, shown);
  if (isBlind) made.append(thumbs(JSON.stringify([model, i, draw]), label));
  return made;
}

function thumbs(key, label) {
  const made = element("div", { className: "rating" });
  const buttons = [[true, "👍 good"], [false, "👎 bad"]].map(([value, text]) => {
    const button = element("button", { type: "button", textContent: text, ariaLabel: `${label}: ${text}` });
    button.addEventListener("click", () => {
      if (ratings[key] === value) delete ratings[key]; else ratings[key] = value;
      store();
      mark();
      count();
    });
    return [value, button];
  });
  const mark = () => buttons.forEach(([value, button]) => button.setAttribute("aria-pressed", ratings[key] === value));
  mark();
  made.append(...buttons.map(([, button]) => button));
  return made;
}

const counted = element("span", { role: "status" });
function count() {
  const rated = Object.keys(ratings).length;
  const all = MODELS.reduce((sum, model) => sum + model.answers.reduce((n, draws) => n + draws.length, 0), 0);
  counted.textContent = `${rated} of ${all} answers rated`;
}

function save() {
  const text = ratedRows(ratings).map((row) => `${JSON.stringify(row)}\n`).join("");
  const link = element("a", { href: URL.createObjectURL(new Blob([text], { type: "application/jsonl" })), download: "ratings.jsonl" });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}

function gap(i) {
  const means = MODELS.map((model) => mean(model.answers[i].map((a) => a.reward === null ? NaN : a.reward)));
  return Math.max(...means) - Math.min(...means);
}

function evaluation() {
  const blind = keep("blind", element("input", { type: "checkbox" }));
  const order = keep("order", element("select", { ariaLabel: "order of the prompts" },
    element("option", { value: "data", textContent: "as in the data" }),
    element("option", { value: "gap", textContent: "largest difference of rewards first" })));
  const search = keep("search", element("input", { type: "search", placeholder: "words of prompt or answer", ariaLabel: "search" }));
  const place = element("div", { className: "answers" }), more = element("button", { type: "button", textContent: "more prompts" });
  const saving = element("button", { type: "button", textContent: "save ratings.jsonl" });
  const showing = element("button", { type: "button", textContent: "show what was rated" }), result = element("div");
  const rating = element("div", { className: "controls" }, counted, saving, showing, element("span", { id: "kept", className: "unit" }));
  let most = AT_ONCE;

  function draw() {
    const isBlind = blind.checked, words = search.value.toLowerCase();
    document.getElementById("figures").hidden = isBlind;
    document.querySelectorAll(".named").forEach((part) => { part.hidden = isBlind; });
    rating.hidden = !isBlind;
    result.hidden = !isBlind;
    const texts = (i) => [PROMPTS[i].text, ...MODELS.flatMap((model) => model.answers[i].map((a) => a.text))];
    let found = PROMPTS.map((_, i) => i).filter((i) => !words || texts(i).some((text) => text.toLowerCase().includes(words)));
    if (order.value === "gap" && !isBlind) found = found.map((i) => [gap(i) || 0, i]).sort((a, b) => b[0] - a[0]).map(([, i]) => i);
    place.replaceChildren(...found.slice(0, most).map((i) => {
      const models = isBlind ? shuffled(MODELS.length, seedOf(i)) : MODELS.map((_, m) => m);
      const columns = models.map((m, j) => element("div", {}, ...MODELS[m].answers[i].map((_, draw) =>
        answer(m, i, draw, isBlind ? `answer ${String.fromCharCode(65 + j)}${MODELS[m].answers[i].length > 1 ? draw + 1 : ""}` : named[m], isBlind))));
      return element("div", { className: "card" }, element("pre", { dir: "auto", className: "prompt", textContent: plain(PROMPTS[i].text) }), element("div", { className: "side" }, ...columns));
    }));
    if (!found.length) place.append(element("p", { textContent: "No prompt or answer has these words." }));
    more.hidden = found.length <= most;
  }

  for (const control of [blind, order]) control.addEventListener("change", () => { most = AT_ONCE; draw(); });
  search.addEventListener("input", () => { most = AT_ONCE; draw(); });
  more.addEventListener("click", () => { most += AT_ONCE; draw(); });
  saving.addEventListener("click", save);
  showing.addEventListener("click", () => {
    result.replaceChildren(element("table", {}, element("tr", {}, ...["model", "good", "rated"].map((t) => element("th", { textContent: t }))),
      ...tally(ratings).map(({ name, up, of }) => element("tr", {}, element("td", { textContent: plain(name) }),
        element("td", { className: "number", textContent: of ? `${up} (${Math.round(100 * up / of)} %)` : "–" }), element("td", { className: "number", textContent: of })))));
  });
  document.getElementById("bar").append(element("label", {}, blind, " rate without names"), order, search);
  const best = MODELS.flatMap(({ best }, run) => best ? [{ run, label: named[run], dash: 0, xs: best.kl, ys: best.reward, steps: best.kl }] : []);
  if (best.length) {
    const grid = element("div", { className: "grid named" }, chart("Reward of the best of n answers", "reward", "KL from one answer, nats", best, { raw: true }));
    page.append(element("h2", { className: "named", textContent: "Best of n" }), grid);
  }
  const thinned = DATA.every > 1 ? element("p", { className: "unit", textContent: `One prompt in ${DATA.every} is on this page; all are in answers.jsonl.` }) : "";
  page.append(element("h2", { textContent: "Answers" }), rating, result, thinned, place, more);
  count();
  draw();
}
evaluation();
