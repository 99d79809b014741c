"""Script of the page: its functions under node, and whole pages in a browser."""

import json
import re
import shutil
import subprocess
from importlib import resources

import pytest

from rlhf_engine.runs.page import SCRIPTS, write_page

NODE, BROWSER = shutil.which("node"), shutil.which("chromium") or shutil.which("google-chrome")
needs_node = pytest.mark.skipif(NODE is None, reason="needs node")
needs_browser = pytest.mark.skipif(BROWSER is None, reason="needs chromium or google-chrome")
FOLDER = resources.files("rlhf_engine.runs")
SCRIPT = "\n".join(FOLDER.joinpath(name).read_text(encoding="utf-8") for name in SCRIPTS)


def evaluate(functions: str, expression: str):
    """Value of an expression under node, with a part of the page's script before it."""
    program = f"{functions}\nconsole.log(JSON.stringify({expression}))"
    done = subprocess.run([NODE, "-e", program], capture_output=True, text=True, timeout=60, check=True)
    return json.loads(done.stdout)


DIFFERENCES = SCRIPT[SCRIPT.index("// words and single signs") : SCRIPT.index("// ---- end of differences")]
PAIRS = [
    ("the room is cold .", "the room is warm now ."), ("", "new words"), ("old words", ""), ("", ""),
    ("same text", "same text"), ("a b c d", "d c b a"), (" leading", "leading"), ("一二三", "一四三"),
    ("naïve cafe\u0301", "naive café"), ("emoji 👩‍🚀 x", "emoji 👩 x"), ("tabs\tand\nlines", "tabs and lines"),
    ("x " * 500, "y " * 500), ("<b>a</b>", "<i>a</i>"),
]  # fmt: skip


@needs_node
def test_both_texts_are_in_their_differences():
    expression = f"{json.dumps(PAIRS)}.map(([a, b]) => differences(a, b))"
    for (left, right), parts in zip(PAIRS, evaluate(DIFFERENCES, expression), strict=True):
        assert "".join(part[1] for part in parts) == left
        assert "".join(part[2] for part in parts) == right
        for both, a, b in parts:
            assert not both or a.split() == b.split()


@needs_node
def test_as_much_as_can_be_is_in_both_texts():
    parts = evaluate(DIFFERENCES, 'differences("the room is cold .", "the room is warm now .")')
    assert parts == [[True, "the room is ", "the room is "], [False, "cold ", "warm now "], [True, ".", "."]]
    assert evaluate(DIFFERENCES, 'differences("a b c d e", "b x d e f").filter((p) => p[0]).map((p) => p[1])') == [
        "b ",
        "d e",
    ]
    assert evaluate(DIFFERENCES, 'differences("一二三", "一四三")')[1] == [False, "二", "四"]
    assert evaluate(DIFFERENCES, 'differences("a  b", "a b").every((p) => p[0])')


@needs_node
def test_texts_that_are_too_long_to_align_keep_their_ends():
    asked = """((a, b) => { const parts = differences(a, b); return [parts.length, parts[0], parts.at(-1),
        parts.map((p) => p[1]).join("") === a, parts.map((p) => p[2]).join("") === b]; })(
        "start " + "x1 y ".repeat(3000) + "end", "start " + "x2 z ".repeat(3000) + "end")"""
    assert evaluate(DIFFERENCES, asked) == [3, [True, "start ", "start "], [True, "end", "end"], True, True]


@needs_node
def test_a_shared_page_does_not_read_itself_again():
    functions = SCRIPT[SCRIPT.index("function atRest") : SCRIPT.index("function live()")]
    source = (
        '<!doctype html>\n<html lang="en" data-refresh="5"><head>'
        '<noscript><meta http-equiv="refresh" content="5"></noscript></head> data-refresh="7"'
    )
    left = evaluate(functions, f"atRest({json.dumps(source)})")
    assert left == '<!doctype html>\n<html lang="en"><head></head> data-refresh="7"'
    assert evaluate(functions, f"atRest({json.dumps(left)})") == left


def folder_of(place, *, reward=1.0, samples=(), steps=3, **config):
    """A run's folder, written by hand."""
    place.mkdir(parents=True)
    (place / "run.json").write_text(json.dumps({"config": config, "total_steps": steps}))
    rows = [{"step": i, "reward": reward * i, "kl": 0.1 * i, "seconds/step": 1.0} for i in range(1, steps + 1)]
    (place / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    looks = [
        {"step": i, "prompts": ["p"], "completions": [text], "scores": [float(i)]} for i, text in enumerate(samples)
    ]
    (place / "samples.jsonl").write_text("".join(json.dumps(look) + "\n" for look in looks))
    return place


def browse(page, tmp_path, *options) -> str:
    """Markup of a page once its script has run, without the script and its data; an error in it fails the test."""
    command = [BROWSER, "--headless=new", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=1000"]
    command += ["--enable-logging=stderr", f"--user-data-dir={tmp_path / 'profile'}", "--no-first-run"]
    command += [*options, "--dump-dom", page.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert "Uncaught" not in done.stderr, done.stderr
    return re.sub(r"<(script|style)\b.*?</\1>", "", done.stdout, flags=re.DOTALL)


@needs_browser
def test_answers_stand_side_by_side_with_their_differences_marked(tmp_path):
    folder = folder_of(tmp_path / "run", samples=["it is cold", "it was", "it is warm now"])
    seen = browse(write_page([folder], tmp_path / "a.html"), tmp_path)
    assert re.search(r"it is <del>cold</del>", seen)
    assert re.search(r"it is <ins>warm now</ins>", seen)
    assert "step 2, reward 2 (+2)" in seen
    assert "it was" not in re.sub(r"<noscript>.*?</noscript>", "", seen, flags=re.DOTALL)
    assert 'tabindex="0"' in seen
    assert "Share (" in seen


@needs_browser
def test_hostile_answers_are_text_in_a_browser(tmp_path):
    nasty = "</script><script>document.title='taken'</script><img src=x onerror=\"document.title='taken'\"> \u202eabc"
    folder = folder_of(tmp_path / "<b>run", samples=[nasty, f"now {nasty}"], dataset_name=nasty)
    seen = browse(write_page([folder], tmp_path / "a.html", title="mine"), tmp_path)
    assert "<title>mine</title>" in seen
    assert "<img" not in re.sub(r"<noscript>.*?</noscript>", "", seen, flags=re.DOTALL)
    assert "&lt;img" in seen
    assert "⟨U+202E⟩abc" in seen
    assert "\u202e" not in seen


@needs_browser
def test_a_script_that_is_not_the_page_s_own_does_not_run(tmp_path):
    page = write_page([folder_of(tmp_path / "run")], tmp_path / "a.html", title="mine")
    taken = "<script>document.title='taken'</script><img src=x onerror=\"document.title='taken'\">"
    page.write_text(page.read_text().replace("<main>", f"<main>{taken}"))
    seen = browse(page, tmp_path)
    assert "<title>mine</title>" in seen
    assert "Share (" in seen  # the page's own runs


@needs_browser
def test_two_runs_are_compared_by_their_last_answers(tmp_path):
    left = folder_of(tmp_path / "left", samples=["a", "red house"], beta=0.1)
    right = folder_of(tmp_path / "right", reward=2.0, samples=["b", "blue house"], beta=0.2)
    seen = browse(write_page([left, right], tmp_path / "a.html"), tmp_path)
    assert "<del>red </del>house" in seen
    assert "<ins>blue </ins>house" in seen
    assert seen.count('class="sort"') >= 4  # each head of the comparison is a button
    assert "beta" in seen


@needs_browser
def test_a_page_of_a_running_run_says_so_and_may_be_paused(tmp_path):
    folder = folder_of(tmp_path / "run")
    page = write_page([folder], tmp_path / "a.html", state="running", refresh=30)
    seen = browse(page, tmp_path)
    assert "Running; refreshes every 30 s." in seen
    assert ">Pause</button>" in seen
    silent = page.read_text().replace('"patience": 600.0', '"patience": -1')
    page.write_text(silent)
    assert re.search(r"No news since [^<]*: this page no longer refreshes\.", browse(page, tmp_path))


@needs_browser
def test_a_page_without_a_script_shows_numbers_and_answers(tmp_path):
    folder = folder_of(tmp_path / "run", samples=["first", "last"])
    page = write_page([folder], tmp_path / "a.html")
    text = re.sub(r"<script>.*?</script>", "", page.read_text(), flags=re.DOTALL)
    (tmp_path / "b.html").write_text(text.replace("<noscript>", "<div>").replace("</noscript>", "</div>"))
    seen = browse(tmp_path / "b.html", tmp_path)
    for part in ("Reward, training", "1.000 → 3.000", "first", "last", "step 1, reward 1.000"):
        assert part in seen
