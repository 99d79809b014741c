"""`rlhf-engine evaluate`: its figures beside transformers' and our own, resumption, bad input, and the page."""

import html
import json
import math
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from rlhf_engine.commands.main import main
from rlhf_engine.config import EvaluateConfig
from rlhf_engine.data.tokenize import encode_prompt, load_tokenizer
from rlhf_engine.errors import ConfigError, EngineError
from rlhf_engine.hydra import HydraModel, RoleSpec, SlotConfig
from rlhf_engine.hydra.peft_io import save_slot
from rlhf_engine.tools.candidates import find_candidates
from rlhf_engine.tools.evaluate import Evaluation
from tests.conftest import randomise
from tests.data.texts import EACH_FAMILY, loss_of_text
from tests.tools.test_judges import likes_longer, says, serving
from tests.training.test_data import PROMPTS, write_model, write_rows
from tests.training.test_sft import BORDERS, base_of_family

BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
needs_browser = pytest.mark.skipif(BROWSER is None, reason="needs chromium or google-chrome")
needs_node = pytest.mark.skipif(shutil.which("node") is None, reason="needs node")
LENGTH = """
def score(completion_ids, **columns):
    return [float(len(ids)) for ids in completion_ids]
"""


def write_adapter(base: Path, folder: Path, seed: int, scale: float = 0.3) -> Path:
    """A PEFT folder of a random adapter on the base."""
    model = HydraModel.from_pretrained(
        str(base), roles={"actor": RoleSpec(slot="actor", trainable=True)}, slots={"actor": SlotConfig(r=4, alpha=8.0)}
    )
    randomise(model, "actor", seed=seed, scale=scale)
    save_slot(model.backbone(), "actor", folder, base_name=str(base))
    return folder


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """Folder with a base, two adapters, another model, prompts with answers of their own, and a reward."""
    folder = tmp_path_factory.mktemp("evaluate")
    write_model(folder / "base")
    write_adapter(folder / "base", folder / "one", seed=3)
    write_adapter(folder / "base", folder / "two", seed=4)
    write_model(folder / "other", seed=9)
    rows = [{"prompt": p, "completion": f"{p} sings the sun"} for p in PROMPTS]
    write_rows(folder / "data.jsonl", rows)
    write_rows(folder / "prompts.jsonl", [{"prompt": p} for p in PROMPTS])
    (folder / "reward.py").write_text(LENGTH)
    return folder


def options(place: Path, output: Path, **given) -> dict:
    values = {
        "model_name_or_path": str(place / "base"), "models": [f"one={place / 'one'}", f"two={place / 'two'}"],
        "dataset_name": str(place / "data.jsonl"), "output_dir": str(output), "max_completion_length": 6,
        "num_generations": 4, "reward_funcs": [f"{place / 'reward.py'}:score"],
    }  # fmt: skip
    return {**values, **given}


def command(place: Path, output: Path, **given) -> list[str]:
    argv = ["evaluate"]
    for name, value in options(place, output, **given).items():
        argv += [f"--{name}", *(map(str, value) if isinstance(value, list) else [str(value)])]
    return argv


def run(place: Path, output: Path, **given) -> dict:
    assert main(command(place, output, **given)) == 0
    return json.loads((output / "results.json").read_text())


@pytest.fixture(scope="module")
def evaluated(place, tmp_path_factory):
    output = tmp_path_factory.mktemp("output") / "e"
    return output, run(place, output)


def answers(output: Path) -> dict:
    rows = [json.loads(line) for line in (output / "answers.jsonl").read_text().splitlines()]
    return {(row["model"], row["prompt"], row["draw"]): row for row in rows}


def test_all_models_are_in_one_table_with_intervals(evaluated, place, capsys):
    output, results = evaluated
    assert list(results["models"]) == ["base", "one", "two"]
    assert results["prompts"] == len(PROMPTS)
    assert len(answers(output)) == 3 * 4 * len(PROMPTS)
    for name, figures in results["models"].items():
        value, low, high = figures["reward"]
        assert low <= value <= high
        assert ("win_rate" in figures) == (name != "base")
        assert [best["n"] for best in figures["best_of_n"]] == [1, 2, 4]
        assert figures["best_of_n"][0]["reward"][0] == pytest.approx(value)
        assert figures["best_of_n"][2]["reward"][0] > value
    assert main(command(place, output, resume="true")) == 0
    shown = capsys.readouterr().out
    for word in ("win rate", "KL from the base", "perplexity", "two", "[low, high]", str(output / "report.html")):
        assert word in shown


@pytest.mark.parametrize("name", EACH_FAMILY)
def test_perplexity_is_that_of_the_text(name, tmp_path):
    """Of references in strings, whatever the tokenizer does at a border, beside a plain loop over whole texts."""
    tokenizer, plain = base_of_family(tmp_path / "base", name)
    data = write_rows(tmp_path / "rows.jsonl", BORDERS)
    config = EvaluateConfig(
        model_name_or_path=str(tmp_path / "base"), models=[], dataset_name=str(data), output_dir=str(tmp_path / "out"),
        max_completion_length=1,
    )  # fmt: skip
    (of,) = Evaluation(config).run().values()
    for i, row in enumerate(BORDERS):
        loss, n = loss_of_text(plain, tokenizer, row)
        assert of.reference_tokens[i] == n
        assert of.surprise[i] == pytest.approx(loss, rel=1e-5)


def test_answers_are_those_of_generate(evaluated, place, tmp_path):
    output, _ = evaluated
    found = answers(output)
    for name in ("one", "two", "base"):
        out = tmp_path / f"{name}.jsonl"
        argv = ["generate", "--model_name_or_path", str(place / "base"), "--prompt", *PROMPTS, "--out", str(out),
                "--num_generations", "4", "--max_completion_length", "6"]  # fmt: skip
        assert main(argv + (["--adapter", str(place / name)] if name != "base" else [])) == 0
        for line in out.read_text().splitlines():
            row = json.loads(line)
            assert found[name, row["index"] // 4, row["index"] % 4]["text"] == row["completion"]


def test_figures_are_those_of_transformers_and_peft(evaluated, place):
    from peft import PeftModel

    output, results = evaluated
    evaluation = Evaluation(EvaluateConfig(**options(place, output, resume=True)))
    base = AutoModelForCausalLM.from_pretrained(place / "base").double().eval()
    found = answers(output)

    def logprobs(model, prompt, completion):
        with torch.no_grad():
            logits = model(torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1]
        return logits.log_softmax(-1)

    for name in ("base", "one"):
        model = base
        if name == "one":
            other = AutoModelForCausalLM.from_pretrained(place / "base").double().eval()
            model = PeftModel.from_pretrained(other, place / name).double().eval()
        kl, tokens, nats, reference_tokens = [], 0, 0.0, 0
        for i, prompt in enumerate(evaluation.prompts.ids):
            for draw in range(4):
                ids = found[name, i, draw]["ids"]
                p, q = logprobs(model, prompt, ids), logprobs(base, prompt, ids)
                kl.append(float((p.exp() * (p - q)).sum()))
                tokens += len(ids)
            own = evaluation._encode(i, evaluation.references[i], True)
            nats -= float(logprobs(model, prompt, own)[range(len(own)), own].sum())
            reference_tokens += len(own)
        figures = results["models"][name]
        assert figures["kl"][0] == pytest.approx(sum(kl) / len(kl), rel=1e-4, abs=1e-6)
        assert figures["kl_per_token"][0] == pytest.approx(sum(kl) / tokens, rel=1e-4, abs=1e-6)
        assert figures["perplexity"][0] == pytest.approx(math.exp(nats / reference_tokens), rel=1e-5)
    assert results["models"]["base"]["kl"] == [0.0, 0.0, 0.0]


def test_win_rates_by_hand(evaluated):
    output, results = evaluated
    found = answers(output)
    by_prompt = []
    for i in range(len(PROMPTS)):
        wins = []
        for draw in range(4):
            mine, theirs = (len(found[name, i, draw]["ids"]) for name in ("one", "base"))
            wins.append(0.5 if mine == theirs else float(mine > theirs))
        by_prompt.append(sum(wins) / 4)
    figures = results["models"]["one"]
    assert figures["win_rate"][0] == pytest.approx(sum(by_prompt) / len(by_prompt))
    # rewards are lengths; their differences by prompt, resampled by numpy
    length = {key: len(row["ids"]) for key, row in found.items()}
    gaps = [np.mean([length["one", i, k] - length["base", i, k] for k in range(4)]) for i in range(len(PROMPTS))]
    means = np.random.default_rng(0).choice(gaps, (20_000, len(gaps))).mean(1)
    assert figures["reward_difference"][0] == pytest.approx(np.mean(gaps))
    assert figures["reward_difference"][1:] == pytest.approx(np.quantile(means, [0.025, 0.975]), abs=0.05)
    assert "reward_difference" not in results["models"]["base"]
    assert figures["won"] + figures["tied"] + figures["lost"] == pytest.approx(1.0)


def test_an_evaluation_that_was_stopped_goes_on(evaluated, place, tmp_path):
    whole, results = evaluated
    output = tmp_path / "cut"
    output.mkdir()
    lines = (whole / "answers.jsonl").read_text().splitlines(keepends=True)
    (output / "answers.jsonl").write_text("".join(lines[:13]) + lines[13][:20])  # the last line was cut short
    with pytest.raises(ConfigError, match=r"expected a folder without answers\.jsonl.*--resume goes on"):
        Evaluation(EvaluateConfig(**options(place, output)))
    again = run(place, output, resume="true")
    assert answers(output) == answers(whole)
    assert again["models"] == results["models"]


def test_a_changed_line_is_refused(evaluated, place, tmp_path):
    output = shutil.copytree(evaluated[0], tmp_path / "copy")
    path, given = output / "answers.jsonl", options(place, output, resume=True)
    lines = path.read_text().splitlines(keepends=True)
    for change in (("sun", "sea"), ('"ids": [', '"ids": [1, '), ('"draw": 0', '"draw": 1'), ('"digest"', '"other"')):
        i = next(i for i, line in enumerate(lines) if change[0] in line)
        path.write_text("".join([*lines[:i], lines[i].replace(*change, 1), *lines[i + 1 :]]))
        with pytest.raises(ConfigError, match=rf"answers.jsonl:{i + 1}: expected a line as it was written, got"):
            Evaluation(EvaluateConfig(**given))
    path.write_text("".join(lines))
    with pytest.raises(ConfigError, match=r"answers.jsonl:1: .*got one of another model or with other options"):
        Evaluation(EvaluateConfig(**{**given, "temperature": 0.5}))


def test_answers_of_an_adapter_that_has_changed_in_its_folder_are_refused(place, tmp_path):
    adapter = write_adapter(place / "base", tmp_path / "adapter", seed=3)
    given = options(place, tmp_path / "e", models=[f"one={adapter}"], resume=True)
    Evaluation(EvaluateConfig(**given)).run()
    Evaluation(EvaluateConfig(**given))
    shutil.rmtree(adapter)
    write_adapter(place / "base", adapter, seed=8)
    with pytest.raises(ConfigError, match=r"got one of another model or with other options \('one'\)"):
        Evaluation(EvaluateConfig(**given))


def test_a_learned_reward_is_that_of_generate(place, tmp_path):
    # the base's own head; best_of prints it for the best answer
    results = run(place, tmp_path / "e", reward_funcs=["reward_model"], models=[f"one={place / 'one'}"])
    out = tmp_path / "best.jsonl"
    argv = ["generate", "--model_name_or_path", str(place / "base"), "--adapter", str(place / "one"), "--prompt",
            *PROMPTS, "--best_of", "4", "--out", str(out), "--max_completion_length", "6"]  # fmt: skip
    assert main(argv) == 0
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    mean, best = (sum(row[key] for row in rows) / len(rows) for key in ("mean_score", "score"))
    figures = results["models"]["one"]
    assert figures["reward"][0] == pytest.approx(mean, abs=1e-5)
    assert figures["best_of_n"][2]["reward"][0] == pytest.approx(best, abs=1e-5)


def test_references_other_models_and_files_of_answers(place, tmp_path):
    rows = [{"prompt": p, "completion": "sea sea"} for p in PROMPTS]
    file = write_rows(tmp_path / "written.jsonl", rows)
    results = run(
        place, tmp_path / "e", models=[f"other={place / 'other'}", str(file), "base"], against="references",
        num_generations=2,
    )  # fmt: skip
    models = results["models"]
    assert list(models) == ["references", "other", "written", "base"]
    assert models["references"]["missing"]["rouge"] == "these are the references"
    assert models["written"]["win_rate"] is not None
    # another model with the base's tokens has a KL from the base
    assert models["other"]["kl"][0] > 0.01
    assert models["base"]["rouge1"][0] < 1


def test_answers_in_a_file_are_scored_as_they_were_drawn(place, tmp_path):
    """All of a prompt's answers, the cut ones without an end; rewards beside transformers' hidden states."""
    out = tmp_path / "drawn.jsonl"
    argv = ["generate", "--model_name_or_path", str(place / "base"), "--adapter", str(place / "one"), "--prompt",
            *PROMPTS, "--num_generations", "4", "--out", str(out), "--max_completion_length", "6"]  # fmt: skip
    assert main(argv) == 0
    results = run(
        place, tmp_path / "e", models=[f"one={place / 'one'}", str(out)], reward_funcs=["reward_model"], against="one"
    )
    drawn, read = results["models"]["one"], results["models"]["drawn"]
    for key in ("answers", "reward", "finished", "tokens", "best_of_n"):
        assert read[key] == drawn[key]
    assert 0 < read["finished"][0] < 1  # some ended, some were cut
    assert read["reward_difference"] == [0.0, 0.0, 0.0]
    assert read["tied"] == 1.0
    model = AutoModelForCausalLM.from_pretrained(place / "base").eval()
    head = load_file(place / "base" / "heads.safetensors")
    tokenizer = load_tokenizer(str(place / "base"))
    rewards = []
    for line in out.read_text().splitlines():
        row = json.loads(line)
        ids = [*encode_prompt(tokenizer, row["prompt"]), *row["completion_ids"]]
        with torch.no_grad():
            last = model(torch.tensor([ids]), output_hidden_states=True).hidden_states[-1][0, -1]
        rewards.append(float(last @ head["reward.weight"][0] + head["reward.bias"][0]))
    assert len(rewards) == 4 * len(PROMPTS)
    assert read["reward"][0] == pytest.approx(sum(rewards) / len(rewards), abs=1e-4)


def test_a_file_of_texts(place, tmp_path):
    """A text alone ended by itself, finish_reason says otherwise; ids of other tokenizers read as another text."""
    tokenizer = load_tokenizer(str(place / "base"))
    sea, end = encode_prompt(tokenizer, "sea")[-1], tokenizer.eos_token_id
    columns = [{}, {"finish_reason": "length"}, {"finish_reason": "length", "completion_ids": [sea + 1]},
               {"completion_ids": [10**9]}, {"completion_ids": "none"},
               {"completion": "", "finish_reason": "eos", "completion_ids": [end]}]  # fmt: skip
    rows = [{"prompt": p, "completion": "sea", **given} for p in PROMPTS for given in columns]
    file = write_rows(tmp_path / "texts.jsonl", rows)
    (tmp_path / "judge.py").write_text("def first(prompts, completions):\n    return [0] * len(prompts)\n")
    given = options(place, tmp_path / "e", models=[str(file)], resume=True, judge=f"{tmp_path / 'judge.py'}:first")
    found = Evaluation(EvaluateConfig(**given)).run()["texts"]
    assert [answer.ids for answer in found.answers[0]] == [(sea, end), (sea,), (sea,), (sea, end), (sea, end), (end,)]
    assert [answer.finished for answer in found.answers[0]] == [True, False, False, True, True, True]
    assert found.preferences == [[0.5] * 6] * len(PROMPTS)  # each of the six, though the base has four
    Evaluation(EvaluateConfig(**given))
    write_rows(file, [{**row, "completion": "sea sea"} for row in rows])
    with pytest.raises(ConfigError, match=r"verdicts.jsonl:1: .*got one of another model or with other options"):
        Evaluation(EvaluateConfig(**given))


def test_a_server_judges_both_orders_and_keeps_its_verdicts(place, tmp_path):
    with serving(likes_longer) as (url, seen):
        results = run(place, tmp_path / "e", judge=url, judge_model="m", num_generations=2)
        assert len(seen) == 2 * 2 * 2 * len(PROMPTS)  # models, draws, orders
        again = run(place, tmp_path / "e", judge=url, judge_model="m", num_generations=2, resume="true")
        assert again["models"] == results["models"]
        assert len(seen) == 2 * 2 * 2 * len(PROMPTS)  # nothing was asked again
    rows = answers(tmp_path / "e")
    wins = []
    for i in range(len(PROMPTS)):
        for draw in range(2):
            mine, theirs = (len(rows[name, i, draw]["text"]) for name in ("one", "base"))
            wins.append(0.5 if mine == theirs else float(mine > theirs))
    assert results["models"]["one"]["win_rate"][0] == pytest.approx(sum(wins) / len(wins))


def test_a_judge_who_takes_the_first_prefers_nobody(place, tmp_path):
    with serving(lambda body: says("A")) as (url, _):
        results = run(place, tmp_path / "e", judge=url, judge_model="m", num_generations=1)
    for name in ("one", "two"):
        assert results["models"][name]["win_rate"] == [0.5, 0.5, 0.5]
        assert results["models"][name]["tied"] == 1.0


def test_nonsense_stops_the_evaluation_unless_some_is_allowed(place, tmp_path):
    given = options(place, tmp_path / "e", judge_model="m", num_generations=1)
    left = iter(["I do not know", "both"])
    with serving(lambda body: says(next(left, "A"))) as (url, _):
        with pytest.raises(EngineError, match=r"expected A, B or TIE in the last line.*such as '(I do not know|both)'"):
            Evaluation(EvaluateConfig(**given, judge=url)).run()
        found = Evaluation(EvaluateConfig(**given, judge=url, resume=True, max_bad_verdicts=0.4)).run()
    unjudged = [p for of in found.values() if of.preferences for row in of.preferences for p in row if p is None]
    assert 1 <= len(unjudged) <= 2


def test_what_cannot_be_served_is_one_line(place, tmp_path, capsys):
    """As the other commands say it: adapters of every other kind, classifiers as policies, two outputs as a reward."""
    kinds = {"use_dora": {"use_dora": True}, "lora_embedding_A": {"target_modules": ["embed_tokens"]}}
    for said, unusual in kinds.items():
        base = AutoModelForCausalLM.from_pretrained(place / "base")
        lora = LoraConfig(**{"r": 4, "target_modules": ["q_proj"], **unusual})
        get_peft_model(base, lora).save_pretrained(tmp_path / said)
        assert main(command(place, tmp_path / "e", models=[str(tmp_path / said)])) == 2
        assert said in capsys.readouterr().err.splitlines()[-1]
    (tmp_path / "of a run").mkdir()
    (tmp_path / "of a run" / "rlhf_engine.json").write_text("{}")
    assert main(command(place, tmp_path / "e", models=[str(tmp_path / "of a run")])) == 2
    assert "models: expected a PEFT folder, a model, a run or a file" in capsys.readouterr().err.splitlines()[-1]
    two = tmp_path / "two"
    AutoModelForSequenceClassification.from_pretrained(place / "base", num_labels=2).save_pretrained(two)
    load_tokenizer(str(place / "base")).save_pretrained(two)
    assert main(command(place, tmp_path / "e", models=[str(two)])) == 2
    assert "models: expected a model with an LM head, got" in capsys.readouterr().err.splitlines()[-1]
    assert main(command(place, tmp_path / "f", reward_model_path=two, reward_funcs=["reward_model"])) == 2
    assert "expected a reward model with one output (num_labels=1), got" in capsys.readouterr().err.splitlines()[-1]


def test_bad_requests(place, tmp_path):
    for given, message in (
        ({"models": ["nowhere"]}, "models: expected the folder of a run, a checkpoint or a model, got .nowhere."),
        ({"models": ["x.jsonl"]}, "expected a file with prompt and completion, got 'x.jsonl', which is not there"),
        ({"against": "three"}, r"against: expected base, references or one of the models \['one', 'two'\], got"),
        ({"judge": "reward", "reward_funcs": []}, "judge: expected reward_funcs or a reward model"),
        ({"reward_weights": [1.0, 2.0]}, "reward_weights: expected 1 numbers"),
        ({"greedy": True}, "num_generations: expected 1 with greedy"),
        ({"judge_model": "m"}, "judge_model: expected it unset without the address of a server as judge"),
        ({"models": [str(place / "one")] * 2}, "expected different names, got 'one' and 'one'"),
    ):
        with pytest.raises(ConfigError, match=message):
            find_candidates(EvaluateConfig(**options(place, tmp_path / "e", **given)))


def test_references_that_are_missing_are_counted(place, tmp_path):
    file = write_rows(tmp_path / "some.jsonl", [{"prompt": PROMPTS[0], "completion": "sea"}])
    without = {"dataset_name": str(place / "prompts.jsonl"), "against": "references"}
    for given, message in (
        (without, r"references: expected an answer .* got none for \d+ of \d+, such as"),
        ({"models": [str(file)]}, f"models: expected an answer to every prompt .* got none for {len(PROMPTS) - 1}"),
    ):
        with pytest.raises(ConfigError, match=message):
            Evaluation(EvaluateConfig(**options(place, tmp_path / "e", **given)))


def page_data(output: Path) -> dict:
    text = (output / "report.html").read_text()
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)[1])


def test_the_page_holds_answers_and_no_paths(evaluated, place):
    output, _ = evaluated
    text = (output / "report.html").read_text()
    assert str(output) not in text
    assert str(place) not in text
    data = page_data(output)
    found = answers(output)
    for model in data["runs"]:
        for i, draws in enumerate(model["answers"]):
            assert [a["text"] for a in draws] == [found[model["name"], i, k]["text"] for k in range(4)]


@needs_node
def test_ratings_are_rows_that_reward_reads(evaluated, place, tmp_path):
    output, _ = evaluated
    script = Path("rlhf_engine/tools/page.js").read_text()
    functions = script[script.index("const VERDICTS") : script.index("// ---- end of ratings")]
    data = (output / "report.html").read_text()
    data = re.search(r'<script type="application/json" id="data">(.*?)</script>', data, re.DOTALL)[1]
    program = f"""
const DATA = {data};
const MODELS = DATA.runs, PROMPTS = DATA.prompts;
{functions}
const ratings = {{}};
const rate = (m, i, k) => {{ ratings[JSON.stringify([m, i, k])] = m === 1; }};
MODELS.forEach((model, m) => model.answers.forEach((draws, i) => draws.forEach((_, k) => rate(m, i, k))));
const orders = PROMPTS.map((_, i) => shuffled(MODELS.length, seedOf(i)));
console.log(JSON.stringify({{ rows: ratedRows(ratings), tally: tally(ratings), orders }}));
"""
    done = subprocess.run(["node", "-e", program], capture_output=True, text=True, timeout=20, check=True)
    found = json.loads(done.stdout)
    assert [row["up"] for row in found["tally"]] == [0, 4 * len(PROMPTS), 0]
    assert all(sorted(order) == [0, 1, 2] for order in found["orders"])
    rows = [row for row in found["rows"] if row["completion"].strip()]
    assert {row["label"] for row in rows} == {True, False}
    file = write_rows(tmp_path / "ratings.jsonl", rows)
    assert main(["reward", "--lora", "--model_name_or_path", str(place / "base"), "--dataset_name", str(file),
                 "--output_dir", str(tmp_path / "rm"), "--max_steps", "2", "--eval_dataset_name", "0.3",
                 "--lora_r", "2"]) == 0  # fmt: skip


@needs_browser
def test_nothing_gives_a_name_away_while_answers_are_rated(evaluated, tmp_path):
    script = """<script>{
const seen = () => document.querySelector("main").innerText;
const before = seen();
document.querySelector("#bar input[type=checkbox]").click();
const blind = seen();
document.querySelectorAll(".rating button")[0].click();
const rows = ratedRows(ratings);
document.title = JSON.stringify({ before, blind, rows });
}</script></body>"""
    page = tmp_path / "page.html"
    # the page itself runs no script but its own
    text = re.sub(r"<meta http-equiv=.Content-Security-Policy[^>]*>", "", (evaluated[0] / "report.html").read_text())
    page.write_text(text.replace("</body>", script))
    command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom", page.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    found = json.loads(html.unescape(re.search(r"<title>(.*?)</title>", done.stdout, re.DOTALL)[1]))
    # the answers themselves may say one or two
    names = re.compile(r"\bbase\b|: reward|preferred")
    assert names.search(found["before"])
    assert "win rate" in found["before"]
    assert "0 of 144 answers rated" not in found["before"]
    assert not names.search(found["blind"])
    assert "answer A1" in found["blind"]
    assert "0 of 144 answers rated" in found["blind"]
    assert "win rate" not in found["blind"]
    assert len(found["rows"]) == 1


@needs_browser
def test_a_phone_shows_two_models(evaluated, tmp_path):
    shutil.copy(evaluated[0] / "report.html", tmp_path / "report.html")
    script = """for (const frame of document.querySelectorAll("iframe")) frame.onload = () => {
const cells = [...frame.contentDocument.querySelectorAll("#comparison th.number, #comparison td:nth-child(3)")];
const ends = cells.filter((_, i) => i !== 2).map((cell) => cell.getBoundingClientRect().right);  // but the third model
document.title = Math.max(...ends);
};"""
    page = tmp_path / "phone.html"
    page.write_text(
        f'<title></title><iframe src="report.html" width="390" height="800"></iframe><script>{script}</script>'
    )
    command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--allow-file-access-from-files", "--dump-dom"]
    done = subprocess.run([*command, page.as_uri()], capture_output=True, text=True, timeout=60, check=True)
    right = float(re.search(r"<title>(.*?)</title>", done.stdout)[1])
    assert 200 < right <= 390
