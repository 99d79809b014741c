// ---- answers side by side ------------------------------------------------------------------------------------------

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
