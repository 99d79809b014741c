"""`rlhf-engine report`: what is on the page is what the runs wrote, and no text of a run becomes markup."""

import contextlib
import json
import platform
import random
import re
import shutil
import subprocess
from html.parser import HTMLParser
from importlib import resources

import pytest

from rlhf_engine.commands.main import main
from rlhf_engine.errors import ConfigError
from rlhf_engine.runs.metrics import MetricsWriter, SampleLog, Samples
from rlhf_engine.runs.page import MOST_LOOKS, MOST_POINTS, MOST_TEXT, shareable, write_page
from rlhf_engine.runs.text import show_controls
from rlhf_engine.training.rl import RlTrainer
from tests.training.test_damaged_folders import damage
from tests.training.test_data import train_config, write_model, write_prompts


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    root = tmp_path_factory.mktemp("runs")
    model = write_model(root / "model")
    options = {"max_steps": 3, "eval_steps": 1, "eval_dataset_name": str(write_prompts(root))}
    RlTrainer(train_config(model, root / "first", **options)).run()
    return root / "first"


def data_of(path) -> dict:
    text = path.read_text(encoding="utf-8")
    (found,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    return json.loads(found)


def test_a_run_is_on_its_page(run, tmp_path, capsys):
    out = tmp_path / "pages" / "one.html"
    assert main(["report", str(run), "--out", str(out)]) == 0
    assert capsys.readouterr().out == f"page {out}\n"
    (found,) = data_of(out)["runs"]
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert found["name"] == "first"
    assert (found["steps"], found["every"], found["nonfinite"]) == (3, 1, {})
    assert (found["state"], found["total"]) == ("done", 3)
    for name, steps in {"reward": [1, 2, 3], "eval/kl": [0, 1, 2, 3]}.items():
        assert found["curves"][name] == [steps, pytest.approx([row[name] for row in rows if name in row], rel=1e-5)]
    assert {"seconds/step", "seconds/update", "peak_memory_bytes"} <= set(found["curves"])
    assert [look["step"] for look in found["samples"]] == [0, 1, 2, 3]
    assert len({tuple(look["prompts"]) for look in found["samples"]}) == 1
    assert found["config"]["max_steps"] == 3
    assert {"commit", "device", "torch", "command", "started", "kernels"} <= set(found["facts"]) | {"commit"}
    assert set(re.findall(r"https?://[^\"\s]*", out.read_text())) == {"http://www.w3.org/2000/svg"}


def copy_run(run, folder, *, steps=2, sample="fine", prompt="p", option="d", **metrics):
    """A run's folder with other numbers and texts."""
    folder.mkdir(parents=True)
    record = json.loads((run / "run.json").read_text())
    record["config"]["dataset_name"] = option
    (folder / "run.json").write_text(json.dumps(record))
    with MetricsWriter(folder / "metrics.jsonl") as writer:
        for step in range(1, steps + 1):
            writer.write(step, {"reward": float(step), "kl": 1.0, **metrics})
    look = {"step": 0, "prompts": [prompt], "completions": [sample], "scores": [None]}
    (folder / "samples.jsonl").write_text(json.dumps(look) + "\n")
    return folder


def test_several_runs_are_told_apart(run, tmp_path):
    left, right = copy_run(run, tmp_path / "a" / "run"), copy_run(run, tmp_path / "b" / "run")
    out = write_page([left, right, run], tmp_path / "three.html", title="A & B")
    assert [found["name"] for found in data_of(out)["runs"]] == ["a/run", "b/run", f"{run.parent.name}/first"]
    assert "<title>A &amp; B</title>" in out.read_text()
    with pytest.raises(ConfigError, match="run: expected different folders"):
        write_page([left, tmp_path / "b" / ".." / "a" / "run"], tmp_path / "x.html")


def test_the_run_within_a_demo_s_folder_is_found(run, tmp_path):
    copy_run(run, tmp_path / "demo" / "rl")
    assert data_of(write_page([tmp_path / "demo"], tmp_path / "d.html"))["runs"][0]["name"] == "rl"


HOSTILE = {
    "script": "</script><script>alert(1)</script> & <b>\u2028", "comment": "<!--<script>",
    "noscript": "</noscript><img src=x onerror=alert(1)>", "attribute": '" onmouseover="alert(1)',
    "braces": "{data} {0} %s ${DATA}", "right to left": "safe \u202etxt.exe\u2069 \u200f",
    "zero width": "a\u200bb\x00c\x1b[31m", "long word": "x" * 20_000,
    "markup": "&lt;i&gt; <i>x</i> </pre></div></body>",
}  # fmt: skip


class Markup(HTMLParser):
    """Elements and attributes of a page, and its text outside of scripts and styles."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[str] = []
        self.attributes: set[str] = set()
        self.text = ""

    def handle_starttag(self, tag, attrs):
        self.elements.append(tag)
        self.attributes |= {name for name, _ in attrs}

    def handle_data(self, data):
        if self.elements and self.elements[-1] not in ("script", "style"):
            self.text += data


def markup_of(path) -> Markup:
    found = Markup()
    found.feed(path.read_text(encoding="utf-8"))
    return found


def test_texts_of_a_run_stay_texts(run, tmp_path):
    harmless = markup_of(write_page([copy_run(run, tmp_path / "fine")], tmp_path / "fine.html", title="A"))
    for kind, nasty in HOSTILE.items():
        folder = copy_run(run, tmp_path / kind / "<i>x", sample=nasty, prompt=nasty, option=nasty)
        out = write_page([folder], tmp_path / "n.html", title=nasty)
        found = data_of(out)["runs"][0]
        assert found["samples"][0]["completions"] == found["samples"][0]["prompts"] == [nasty]
        assert found["config"]["dataset_name"] == shareable(nasty)
        assert found["name"] == "<i>x"
        there = markup_of(out)
        assert there.elements == harmless.elements
        assert there.attributes == harmless.attributes
        assert show_controls(nasty) in there.text
        assert not set(there.text.replace(nasty, "", 2)) & set("\u202e\u200b\x1b")
        assert "innerHTML" not in out.read_text()


def test_names_of_compared_runs_stay_texts(run, tmp_path):
    folders = [copy_run(run, tmp_path / name) for name in ("<i>x", "a\u202eb", "plain")]
    there = markup_of(write_page(folders, tmp_path / "n.html", title="t"))
    assert "i" not in there.elements
    assert "<i>x" in there.text
    assert "a⟨U+202E⟩b" in there.text


def test_long_runs_are_thinned_and_what_is_not_finite_is_told(run, tmp_path):
    folder = copy_run(run, tmp_path / "long", steps=2 * MOST_POINTS + 1, bad=float("nan"))
    found = data_of(write_page([folder], tmp_path / "l.html"))["runs"][0]
    assert found["every"] == 3
    steps, values, least, most = found["curves"]["reward"]
    assert len(steps) <= MOST_POINTS
    assert (least[0], most[0]) == (1.0, 3.0)  # no spike is lost
    assert (steps[0], values[0]) == (3, 2.0)  # the mean of 1, 2, 3
    assert found["nonfinite"] == {"count": 2 * MOST_POINTS + 1, "first": 1, "names": ["bad"]}
    assert "bad" not in found["curves"]


def test_a_page_of_a_long_run_stays_small(run, tmp_path):
    folder = copy_run(run, tmp_path / "long", steps=3000, **{f"metric/{i}": 0.1234567890123 for i in range(30)})
    log = SampleLog(folder / "samples.jsonl")
    for step in range(1, 200):
        log.write(Samples(step=step, prompts=["p"], completions=["word " * 2000], scores=[0.5]))
    out = write_page([folder], tmp_path / "l.html")
    found = data_of(out)["runs"][0]
    steps = [look["step"] for look in found["samples"]]
    assert (steps[0], steps[-1], found["looks"]) == (0, 199, 200)
    assert len(steps) == MOST_LOOKS
    assert steps == sorted(set(steps))
    assert out.stat().st_size < 1_500_000


def test_long_answers_leave_room_for_the_first_and_the_last(run, tmp_path):
    folder = copy_run(run, tmp_path / "long")
    log = SampleLog(folder / "samples.jsonl")
    for step in range(1, 6):
        log.write(Samples(step=step, prompts=["p"], completions=["x" * MOST_TEXT], scores=[0.5]))
    looks = data_of(write_page([folder], tmp_path / "l.html"))["runs"][0]["samples"]
    assert [look["step"] for look in looks] == [0, 5]


def test_places_of_a_machine_are_left_out():
    for value, left in (
        ("/home/alice/models/llama", "…/llama"),
        ("~/x/y", "…/y"),
        ("~alice/x/y", "…/y"),
        ("/home/al b/reward.py:reward", "…/reward.py:reward"),
        ("--a=/home/alice/x/y.py:f,/etc/z.py:g", "--a=…/y.py:f,…/z.py:g"),
        ("file:///home/alice/b", "…/b"),
        ("C:\\Users\\alice\\x", "…/x"),
        ("http://gpu7.example.org:8000/v1", "http://…/v1"),
        (["/home/alice/a", 1, None], ["…/a", 1, None]),
        ({"x": {"y": "/home/alice/a"}}, {"x": {"y": "…/a"}}),
        ({"ray_address": "gpu7:6379"}, {"ray_address": "…"}),
        # names and relative places say nothing of a machine
        ("runs/sft", "runs/sft"),
        ("../shared/m", "../shared/m"),
        ("org/model@main", "org/model@main"),
        ("reward.py:reward", "reward.py:reward"),
        ("1/2", "1/2"),
    ):
        assert shareable(value) == left, value


def test_no_place_of_the_machine_is_on_a_page(run, tmp_path):
    record = json.loads((run / "run.json").read_text())
    folder = copy_run(run, tmp_path / "home" / "alice" / "run")
    record["config"] |= {"model_name_or_path": "/home/alice/m", "ray_address": "gpu7:6379"}
    record["command"] = [
        "/home/alice/.venv/bin/rlhf-engine", "train", "--ray_address", "gpu7:6379", "--x=/home/alice/x",
    ]  # fmt: skip
    (folder / "run.json").write_text(json.dumps(record))
    text = write_page([folder], tmp_path / "s.html").read_text()
    assert "rlhf-engine train --ray_address … --x=…/x" in text
    for word in ("alice", "gpu7", str(tmp_path), str(run), platform.node()):
        assert word not in text


def test_a_value_that_is_lost_moves_no_other(run, tmp_path):
    folder = copy_run(run, tmp_path / "gap", steps=2 * MOST_POINTS + 1)
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    lines[10] = json.dumps({**json.loads(lines[10]), "reward": None})
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    curves = data_of(write_page([folder], tmp_path / "g.html"))["runs"][0]["curves"]
    assert curves["reward"][0] == curves["kl"][0]
    assert curves["reward"][1][3] == (10 + 12) / 2


def test_any_text_may_be_an_answer_and_a_run_may_still_write(run, tmp_path):
    folder, answer = copy_run(run, tmp_path / "strange"), "a\u2028b\u2029c\x85d\u2028}"
    (folder / "samples.jsonl").unlink()
    log = SampleLog(folder / "samples.jsonl")
    log.write(Samples(step=0, prompts=["p"], completions=[answer], scores=[None]))
    with log.path.open("ab") as file:
        file.write(b'{"step": 1, "prom')
    found = data_of(write_page([folder], tmp_path / "s.html"))["runs"][0]
    assert [look["completions"] for look in found["samples"]] == [[answer]]


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node")
def test_axes_end_beyond_their_values_and_have_ticks_within():
    script = resources.files("rlhf_engine.runs").joinpath("page_chart.js").read_text(encoding="utf-8")
    functions = script[script.index("function smooth") : script.index("// ---- a chart")]
    constants, spans = [100, 0, 1e-5, 0.1, 102.0, 1e300, -7], [(0, 1), (-3.2, 7.1), (1e15, 1e15 + 4), (0.96, 40.5)]
    asked = f"{constants}.map((x) => range(smooth(Array(30).fill(x)))).concat({[list(span) for span in spans]})"
    asked = f"console.log(JSON.stringify({asked}.map(([a, b]) => [a, b, ticks(a, b, 5)])))"
    program = f"const DECAY = 0.8;\n{functions}\n{asked}"
    done = subprocess.run(["node", "-e", program], capture_output=True, text=True, timeout=20, check=True)
    axes = json.loads(done.stdout)
    assert all(low < value < high for value, (low, high, _) in zip(constants, axes, strict=False))
    for low, high, ticks in axes:
        assert 2 <= len(ticks) <= 20
        assert all(low - 1e-9 <= tick <= high + 1e-9 for tick in ticks)


def test_requests_that_cannot_be_served(capsys):
    for argv, message in [
        ([], "missing required option: --run"),
        (["nowhere"], "run: expected a folder with metrics.jsonl and run.json, got 'nowhere'"),
        (["nowhere", "--oot", "x"], "unknown option --oot; did you mean --out"),
    ]:
        assert main(["report", *argv]) == 2
        assert message in capsys.readouterr().err


DAMAGES = {
    "no JSON": ("run.json", lambda text: text[:-10]),
    "no text": ("run.json", lambda text: "\ud800"),
    "a list": ("run.json", lambda text: "[1]"),
    "a command of another run's": ("run.json", lambda text: '{"command": 3}'),
    "versions of another kind": ("run.json", lambda text: '{"versions": ["1.0"]}'),
    "a commit of another kind": ("run.json", lambda text: '{"git_commit": {"commit": 12}}'),
    "a hash of another kind": ("run.json", lambda text: '{"base_hash": 1}'),
    "NaN": ("run.json", lambda text: '{"config": {"beta": NaN}}'),
    "half a character": ("run.json", lambda text: '{"config": {"title": "\\ud800"}}'),
    "depth": ("run.json", lambda text: "[" * 100_000),
    "metrics without steps": ("metrics.jsonl", lambda text: '{"loss": 1.0}\n'),
    "metrics that are text": ("metrics.jsonl", lambda text: "loss 1.0\n"),
    "infinite metrics": ("metrics.jsonl", lambda text: '{"step": 1, "reward": 1e999}\n'),
    "huge metrics": ("metrics.jsonl", lambda text: '{"step": 1, "reward": 1' + "0" * 400 + "}\n"),
    "samples without scores": ("samples.jsonl", lambda text: '{"step": 1, "prompts": [], "completions": []}\n'),
    "samples of numbers": ("samples.jsonl", lambda text: '{"step": 1, "prompts": [1], "completions": ["a"]}\n'),
}


def test_damaged_and_foreign_runs_are_refused_in_one_line(run, tmp_path, capsys):
    for kind, (name, change) in DAMAGES.items():
        folder = copy_run(run, tmp_path / kind)
        path = folder / name
        path.write_bytes(change(path.read_text()).encode(errors="surrogatepass"))
        assert main(["report", str(folder), "--out", str(tmp_path / "page.html")]) == 2
        said = capsys.readouterr().err
        assert said.count("\n") == 1
        assert str(folder) in said
        assert not (tmp_path / "page.html").exists()


def test_a_damaged_line_of_metrics_is_on_the_page(run, tmp_path):
    folder = copy_run(run, tmp_path / "run", steps=3)
    assert data_of(write_page([folder], tmp_path / "whole.html"))["runs"][0]["damaged"] == ""
    path = folder / "metrics.jsonl"
    path.write_bytes(b"x" + path.read_bytes())
    with pytest.warns(UserWarning, match=r"left out line 1, before every other"):
        MetricsWriter(path).close()  # a run that goes on
    with pytest.warns(UserWarning, match="left out line 1"):
        (found,) = data_of(write_page([folder], tmp_path / "page.html"))["runs"]
    assert found["damaged"] == "line 1, before every other"
    assert found["curves"]["reward"] == [[2, 3], [2.0, 3.0]]


@pytest.mark.filterwarnings("ignore:.*left out line")
@pytest.mark.parametrize("n", [300, pytest.param(20_000, marks=pytest.mark.long)])
def test_no_damage_to_a_run_is_a_traceback(run, tmp_path, n):
    folder = copy_run(run, tmp_path / "run")
    files, chosen = sorted(folder.iterdir()), random.Random(n)
    for i in range(n):
        path = files[i % len(files)]
        content = path.read_bytes()
        damage(path, chosen)
        with contextlib.suppress(ConfigError):
            write_page([folder], tmp_path / "page.html")
        path.write_bytes(content)


def test_a_page_that_cannot_be_written(run, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"out: expected a file that can be written, got .*page\.html"):
        write_page([run], tmp_path / "file" / "page.html")
    with pytest.raises(ConfigError, match=r"out: expected a file, such as .*report\.html', got the folder"):
        write_page([run], tmp_path)


def test_a_run_without_a_step(run, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "run.json").write_text("{}")
    (tmp_path / "empty" / "metrics.jsonl").write_text("")
    with pytest.raises(ConfigError, match="run: expected metrics of at least one step, got none"):
        write_page([tmp_path / "empty"], tmp_path / "e.html")
