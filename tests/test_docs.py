"""The documentation says what is: code runs, commands parse, links lead somewhere, formulas count right."""

import ast
import dataclasses
import functools
import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from transformers import LlamaConfig, LlamaForCausalLM

from rlhf_engine.commands.demo_task import build_tokenizer
from rlhf_engine.commands.main import _COMMANDS, main
from rlhf_engine.config import (
    parse_config,
)
from rlhf_engine.config.parser import Options
from rlhf_engine.runs import folder
from rlhf_engine.runs.metrics import read_metrics
from rlhf_engine.scoring.rewards import check_reward, load_reward
from rlhf_engine.scoring.verifiable import BUILT_IN

CONFIGS: dict[str, type[Options]] = {name: cls for name, (cls, _) in _COMMANDS.items()}
ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
NOTES = sorted((ROOT / "docs" / "decisions").glob("*.md"))
PAGES = sorted(path for path in (ROOT / "docs").rglob("*.md") if path.parent.name != "decisions")
DOCS = [README, *PAGES, *NOTES]
GUIDES, CONCEPTS, TUTORIALS, WHY = (ROOT / "docs" / name for name in ("guides", "concepts", "tutorials", "why"))
# pages whose commands lead from one to the next, in the order in which they are read
COMMANDS = [README, *(GUIDES / f"{name}.md" for name in ("train", "reward-models", "asynchronous", "algorithms"))]
COMMANDS += [CONCEPTS / "memory.md", *(GUIDES / f"{name}.md" for name in ("kernels", "add-a-model"))]
# pages of the site that are held to short lines and sentences; the others are older
TOP = ("index", "install", "quickstart", "faq", "benchmarks", "status", "recipes")
PLAIN = [README, *(ROOT / "docs" / f"{name}.md" for name in TOP)]
PLAIN += sorted([*GUIDES.glob("*.md"), *CONCEPTS.glob("*.md"), *TUTORIALS.glob("*.md"), *WHY.glob("*.md")])
TO_BE_FILLED = {"demo-table", "/demo-table", "stories-table", "/stories-table", "demo-tuning", "/demo-tuning"}
TO_BE_FILLED |= {"bench-table", "/bench-table"}
# bench/tables/doc_tables.py fills these; tests/bench/test_bench.py compares
for page in GUIDES.glob("*.md"):
    TO_BE_FILLED |= set(re.findall(r"<!-- (/?table(?:: \S+)?) -->", page.read_text(encoding="utf-8")))
ABSOLUTE = re.compile(r"(?<![\w.:/)\]>~-])(?:~?/|[A-Z]:\\)[\w.-]{2,}")


def blocks(doc: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", doc.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


def commands() -> Iterator[list[str]]:
    """Every line of the bash blocks of the pages, as words."""
    for block in (block for page in COMMANDS for block in blocks(page, "bash")):
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            if words and words[0] != "cd":
                yield words


def prose(doc: Path) -> str:
    """The text without its blocks."""
    return re.sub(r"^```.*?^```$", "", doc.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    """What the documents call path/to/model."""
    folder = tmp_path_factory.mktemp("model")
    tokenizer = build_tokenizer(["Once upon a time there was a girl and a dog ."])
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=192,  # the notes' snippet asks for answers of 96 tokens
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id, tie_word_embeddings=False,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


SNIPPETS = [
    (f"{doc.parent.name}-{doc.stem}", i, code)
    for doc in DOCS
    # blocks of a tutorial run one after another, below
    if doc.parent != TUTORIALS
    for i, code in enumerate(blocks(doc, "python"))
]


@pytest.mark.parametrize("code", [code for *_, code in SNIPPETS], ids=[f"{stem}-{i}" for stem, i, _ in SNIPPETS])
def test_python_blocks_run(code, model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["block", str(model), "2"])
    code = code.replace("path/to/model", str(model)).replace('"rlhf_engine/', f'"{ROOT}/rlhf_engine/')
    exec(compile(code, "block", "exec"), {"__name__": "block"})


def test_there_are_blocks_to_run():
    assert len(SNIPPETS) >= 4
    assert len(list(commands())) >= 6
    tutorials = {TUTORIALS / f"{name}.md" for name in TUTORIALS_THAT_RUN}
    assert {page for page in DOCS if blocks(page, "bash")} == {*COMMANDS, *tutorials}


def test_the_reward_file_is_a_reward_function(tmp_path):
    (source,) = (block for block in blocks(README, "python") if block.startswith("# reward.py\n"))
    (tmp_path / "reward.py").write_text(source)
    function = load_reward(f"{tmp_path}/reward.py:reward")
    check_reward(function, ["Once upon a time"])
    rewards = function(prompts=["a"] * 3, completions=["one two", "one one", ""], completion_ids=[[1]] * 3)
    assert rewards == [1.0, 0.5, 0.0]


def test_the_tutorial_in_python_runs(model, tmp_path, monkeypatch):
    """Its blocks one after another, in one namespace."""
    monkeypatch.chdir(tmp_path)
    code = "\n".join(blocks(TUTORIALS / "four-roles.md", "python")).replace("path/to/model", str(model))
    exec(compile(code, "tutorial", "exec"), {"__name__": "tutorial"})
    assert (tmp_path / "ppo" / "adapter_config.json").is_file()


TUTORIALS_THAT_RUN = {  # page → its start, and what its last command leaves
    "first-ppo": ("tutorial", "runs/longer/curves.png"),
    "from-trl": ("trl", "answers.jsonl"),
    "own-reward": ("reward-function", "runs/shorter/curves.png"),
    "thumbs": ("reward-model", "report.html"),
}


def lines_of(page: Path) -> list[str]:
    """Commands of the bash blocks of a page."""
    return [line for block in blocks(page, "bash") for line in block.splitlines()]


@pytest.mark.long
@pytest.mark.parametrize("name", TUTORIALS_THAT_RUN)
def test_a_tutorial_runs(name, tmp_path):
    """Its commands in their order, as a reader has them; and its reward climbs."""
    start, left = TUTORIALS_THAT_RUN[name]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    folder = tmp_path
    for line in lines_of(TUTORIALS / f"{name}.md"):
        program, *words = shlex.split(line)
        if program == "cd":
            folder /= words[0]
            continue
        assert program in ("rlhf-engine", "python")
        command = [sys.executable, *(["-m", "rlhf_engine"] if program == "rlhf-engine" else []), *words]
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
    assert (folder / left).is_file()
    assert len((folder / "answers.jsonl").read_text().splitlines()) == 64
    if start == "trl":
        history = json.loads((folder / "runs" / "ppo" / "trainer_state.json").read_text())["log_history"]
        rewards = [row["reward"] for row in history if "reward" in row]
    else:
        rewards = [row["reward"] for row in read_metrics(folder / "runs" / "ppo" / "metrics.jsonl") if "reward" in row]
    assert rewards[-1] > rewards[0] + 1.0, rewards


@pytest.mark.parametrize("name", TUTORIALS_THAT_RUN)
def test_a_folder_to_begin_with_has_the_commands_of_its_page(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    start, _ = TUTORIALS_THAT_RUN[name]
    assert main(["init", start, "here"]) == 0
    first, *commands = lines_of(TUTORIALS / f"{name}.md")
    assert shlex.split(first)[:3] == ["rlhf-engine", "init", start]
    assert set(lines_of(tmp_path / "here" / "README.md")) <= set(commands)
    for line in lines_of(tmp_path / "here" / "README.md"):
        words = shlex.split(line)
        if words[0] == "python" or words[1] == "report":
            continue
        named = [*words[2:-1], str(tmp_path / "here" / words[-1])] if "--config" in words else words[2:]
        parse_config(CONFIGS[words[1]], named)


@pytest.fixture(scope="module")
def started(tmp_path_factory) -> Path:
    """The folder of the README's first command."""
    folder = tmp_path_factory.mktemp("started") / "hotel"
    assert main(["init", "tutorial", str(folder)]) == 0
    return folder


def parsed(words: Sequence[str]) -> Options:
    """Options of a command of the pages."""
    return parse_config(CONFIGS[words[1]], words[2:], prog=" ".join(words[:2]))


def test_commands_parse(started, monkeypatch):
    for words in list(commands()):
        monkeypatch.chdir(started)
        assert words[0] == "rlhf-engine"
        config = parsed(words)
        given = {word.removeprefix("--") for word in words[2:] if word.startswith("--")}
        assert given - {"config"} <= option_names(type(config))
        for source in getattr(config, "reward_funcs", []):
            assert source in ("reward_model", "reward.py:reward") or source.partition(",")[0] in BUILT_IN


def option_names(config: type) -> set[str]:
    """Names of a config's flags."""
    fields = dataclasses.fields(config)
    more = {name for field in fields for name in (field.metadata["alias"], *field.metadata["switches"])}
    return {field.name for field in fields} | more - {None}


def test_commands_lead_from_one_to_the_next(started, monkeypatch):
    """What a command takes from runs/ is where an earlier one put it."""
    monkeypatch.chdir(started)
    made: set[str] = set()
    for words in commands():
        config = parsed(words)
        for name in ("model_name_or_path", "adapter", "reference_adapter", "reward_model_path"):
            path = getattr(config, name, None)
            if path is not None and path.startswith("runs/"):
                assert path in made, words
        output = getattr(config, "output_dir", None)
        if output is not None:
            assert output not in made or getattr(config, "resume_from_checkpoint", None) == "auto"
            made |= {output, f"{output}/{folder.FINAL_FOLDER}"}


def test_mentioned_flags_commands_and_targets_exist():
    for doc in DOCS:
        text = prose(doc)
        flags = {"config", "print_config", "help_all", "help", "full", "lora"}
        flags |= {"base", "data", "tiny", "set"}  # of examples/recipes/run.py
        for options in CONFIGS.values():
            flags |= option_names(options)
        if doc.parent.name != "decisions":  # notes keep what there was
            assert set(re.findall(r"(?<![\w-])--([a-z0-9_]+)", text)) <= flags, doc
        assert set(re.findall(r"`rlhf-engine ([a-z]+)", text)) <= set(_COMMANDS), doc
        targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
        everything = doc.read_text(encoding="utf-8")
        assert set(re.findall(r"(?:`|^)make ([a-z-]+)", everything, re.MULTILINE)) <= targets, doc


def test_files_of_a_run_are_called_what_they_are_called():
    text = (GUIDES / "train.md").read_text(encoding="utf-8")
    files = (folder.RECORD_FILE, folder.METRICS_FILE, folder.CURVES_FILE, folder.SAMPLES_FILE, folder.SAMPLES_LOG)
    for name in (*files, f"{folder.FINAL_FOLDER}/"):
        assert f"`{name}`" in text


def test_the_numbers_of_the_7b_example():
    d, ff, layers, vocabulary, r = 4096, 11008, 32, 32000, 16
    slot = layers * r * (4 * (d + d) + 3 * (d + ff))
    backbone = layers * (4 * d * d + 3 * d * ff + 2 * d) + 2 * vocabulary * d + d
    text = " ".join((CONCEPTS / "memory.md").read_text(encoding="utf-8").split())
    assert f"{backbone / 1e9:.2f} billion parameters with r = {r}" in text
    assert f"(S = {slot / 1e6:.1f} million)" in text
    assert f"{(backbone + 2 * slot + 2 * (d + 1)) / 1e9:.2f} billion against {4 * backbone / 1e9:.2f} billion" in text


QUOTING = (GUIDES / "add-a-model.md", ROOT / "docs" / "faq.md")
"""Pages that quote the program's messages: in headings and in first cells of tables, with … for what changes."""


@functools.cache
def texts_of_the_sources() -> tuple[str, ...]:
    """Every string of the packages as a message has it, what an f-string fills in as …"""
    found: set[str] = set()
    for path in [*(ROOT / "rlhf_engine").rglob("*.py"), *(ROOT / "kernels").rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                parts = [part.value if isinstance(part, ast.Constant) else "…" for part in node.values]
                found.add(" ".join("".join(map(str, parts)).split()))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.add(" ".join(node.value.split()))
    return tuple(found)


def is_said(message: str) -> bool:
    """Whether one string of the sources has all parts of a message that do not change, in their order."""
    pattern = re.compile(".*".join(re.escape(part.strip()) for part in message.split("…")))
    return any(pattern.search(text) for text in texts_of_the_sources())


def quoted(page: Path) -> list[str]:
    """Messages that a page quotes; what has no spaces is a name."""
    found = re.findall(r"^(?:### |\| )`([^`]+)`", page.read_text(encoding="utf-8"), re.MULTILINE)
    return [message for message in found if " " in message]


@pytest.mark.parametrize("page", QUOTING, ids=lambda page: page.stem)
def test_quoted_messages_are_those_of_the_program(page):
    messages = quoted(page)
    assert len(messages) >= 25
    assert [message for message in messages if not is_said(message)] == []


def test_links_lead_somewhere():
    for doc in DOCS:
        for target in re.findall(r"\]\(([^)\s]+)\)", doc.read_text(encoding="utf-8")):
            if not target.startswith("https://"):
                assert (doc.parent / target.partition("#")[0]).exists(), (doc, target)


def test_nothing_is_left_over():
    for doc in DOCS:
        text = doc.read_text(encoding="utf-8")
        assert set(re.findall(r"<!-- *(.*?) *-->", text)) <= TO_BE_FILLED, doc
        assert text.count("<!--") == text.count("-->") == len(re.findall(r"<!-- */?[a-z-]+(?:: \S+)? *-->", text))
        assert not re.findall(r"\b(?:TODO|FIXME|XXX|TBD|WIP)\b", text), doc
        # a path that starts at the root or at somebody's home exists on one machine only
        assert not ABSOLUTE.findall(re.sub(r"<!--.*?-->", "", text)), doc


def test_notes_are_dated_short_and_say_whether_they_hold():
    for note in NOTES:
        date = re.fullmatch(r"(\d{4}-\d\d-\d\d)-[a-z0-9-]+", note.stem)
        assert date is not None, f"expected a name like 2026-11-20-what-was-chosen.md, got {note.name}"
        text = note.read_text(encoding="utf-8")
        assert text.startswith("# "), note
        status = text.splitlines()[2]
        holds = r"Status: (holds|(superseded by|holds in part; see) \[[^\]]+\]\(\S+\))\."
        assert re.fullmatch(holds, status), (note, status)
        text = text.replace(f"{status}\n\n", "", 1)
        assert text.splitlines()[2].startswith(date[1]), note
        assert "**Choice.**" in text, note
        if date[1] < "2026-11-25":  # older ones were capped by lines
            assert len(text.splitlines()) <= 70, note
        else:  # 600 words, and what stands in links
            assert len(re.findall(r"[^\W_]+(?:[-'./_][^\W_]+)*", text)) <= 640, note


def plain_sentences(text: str) -> list[str]:
    """Sentences of the prose: no code, tables or headings; a link is its text, a bullet a paragraph."""
    text = re.sub(r"^```.*?^```$|<!--.*?-->", "", text, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"^(?:\||#|:::|    options).*$", "\n", text, flags=re.MULTILINE)
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text)
    paragraphs = re.split(r"\n\s*\n|\n(?=\s*(?:\*|\d+\.) )", text)
    return [s for p in paragraphs for s in re.split(r"(?<=[.?!])\s+", " ".join(p.split())) if s]


def test_pages_are_plain():
    """At most 30 words a sentence, 110 characters a line of prose, and a README of 170 lines."""
    for page in PLAIN:
        text = page.read_text(encoding="utf-8")
        assert [s for s in plain_sentences(text) if len(s.split()) > 30] == []
        lines = prose(page).splitlines()
        assert [line for line in lines if len(line) > 110 and not line.startswith(("|", "!["))] == []
        assert page != README or len(text.splitlines()) <= 170


def test_the_server_of_the_vllm_page_serves_its_run_from_an_environment_of_its_own():
    """Without --dtype vLLM serves a float32 base in bf16, which the run refuses; its pins are not the trainer's."""
    page = (GUIDES / "asynchronous.md").read_text(encoding="utf-8")
    (command,) = re.findall(r"^\S* ?(\S*/vllm serve (?:.*\\\n)*.*)", page, re.MULTILINE)
    assert command.startswith("vllm-env/bin/vllm serve")
    for row in re.findall(r"^\| `((?:dtype|enable-lora|max-lora-rank|logprobs-mode)[^`]*)`", page, re.MULTILINE):
        assert f"--{row}" in command
    assert "--dtype float32" in command
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    assert not [name for names in extras.values() for name in names if name.startswith("vllm")]
