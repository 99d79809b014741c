"""How large the house may be: a ceiling for each measure. `python -m tests.test_measures` prints them all.

A change lowers a ceiling, or raises it in a commit of its own that says what users get for it.
"""

from __future__ import annotations

import ast
import collections
import dataclasses
import io
import sys
import tokenize
import types
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

import rlhf_engine
from tests.conftest import PER_PUSH, STORIES
from tests.step_map import COLUMNS, PHASES, PICTURE, picture
from tests.test_imports import imported_rooms, modules, room_of

ROOT = Path(__file__).resolve().parents[1]
ENGINE = str(Path(rlhf_engine.__file__).parent)
CORE = ("hydra", "rollout", "scoring", "algorithms", "training", "generators")
CEILINGS = {
    "CHANGELOG.md: lines": 60,
    "bench: lines": 12278,
    "csrc: lines": 11956,
    "docs: words of notes": 72700,
    "docs: words of pages": 32400,
    "engine: arrows between rooms": 114,
    "engine: files": 144,
    "engine: lines of code": 22443,
    "engine: lines of the core": 19041,
    "engine: lines": 34762,
    "engine: longest file": 800,
    "engine: longest function": 80,
    "examples: lines": 1365,
    "kernels: lines": 18561,
    "options of all commands": 140,
    "options of train": 85,
    "step: engine files entered": 31,
    "step: frames to loss": 12,
    "step: frames to sampling": 8,
    "step: frames to scoring": 10,
    "step: functions": 432,
    "step: types of records": 28,
    "tests: items in the interpreter": 350,
    "tests: items per push": 2800,
    "tests: lines": 56430,
}


def python_files(*folders: str) -> list[Path]:
    """Python files below these folders of the checkout."""
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def lines(paths: Iterable[Path]) -> int:
    return sum(path.read_text(encoding="utf-8").count("\n") for path in paths)


def code_lines(source: str) -> int:
    """Lines that hold code: neither a docstring, a comment, a blank nor an import."""
    left_out: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        is_text = (
            isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        )
        if is_text or isinstance(node, ast.Import | ast.ImportFrom):
            left_out |= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    held: set[int] = set()
    no_code = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in no_code:
            held |= set(range(token.start[0], token.end[0] + 1))
    return len(held - left_out)


def longest_function(paths: Iterable[Path]) -> int:
    nodes = (node for path in paths for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
    functions = (node for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
    return max((node.end_lineno or 0) - node.lineno + 1 for node in functions)


def words(paths: Iterable[Path]) -> int:
    return sum(len(path.read_text(encoding="utf-8").split()) for path in paths)


def sizes() -> dict[str, int]:
    """What the files of the checkout say."""
    engine = python_files("rlhf_engine")
    notes = set((ROOT / "docs" / "decisions").rglob("*.md"))
    arrows = {
        (room_of(name), room)
        for name, path in modules("rlhf_engine").items()
        for room in imported_rooms(path.read_text(encoding="utf-8"), "rlhf_engine")
    }
    csrc = [path for path in (ROOT / "csrc").rglob("*") if path.suffix in (".cpp", ".h", ".cu", ".cuh")]
    return {
        "engine: lines": lines(engine),
        "engine: files": len(engine),
        "engine: lines of code": sum(code_lines(path.read_text(encoding="utf-8")) for path in engine),
        "engine: lines of the core": lines(python_files(*(f"rlhf_engine/{room}" for room in CORE))),
        "engine: longest file": max(lines([path]) for path in engine),
        "engine: longest function": longest_function(engine),
        "engine: arrows between rooms": sum(one != other for one, other in arrows),
        "kernels: lines": lines(python_files("kernels")),
        "csrc: lines": lines(csrc),
        "bench: lines": lines(python_files("bench")),
        "examples: lines": lines(python_files("examples")),
        "tests: lines": lines(python_files("tests")),
        "docs: words of pages": words(set((ROOT / "docs").rglob("*.md")) - notes),
        "docs: words of notes": words(notes),
        "CHANGELOG.md: lines": lines([ROOT / "CHANGELOG.md"]),
    }


def option_counts() -> dict[str, int]:
    """Options of `train`, and different names of options of all commands."""
    from tests.test_docs import CONFIGS

    names = {
        command: {field.name for field in dataclasses.fields(options) if field.init}
        for command, options in CONFIGS.items()
    }
    return {"options of train": len(names["train"]), "options of all commands": len(set().union(*names.values()))}


KERNELS = {"loss": "linear_ppo_loss", "sampling": "sample", "scoring": "linear_logprob"}
"""Ops whose backends' `forward` ends the way of a step."""


class Watch:
    """A profiler's function: what Python of the engine a block enters, and how far below its start kernels are."""

    def __init__(self) -> None:
        self.functions: set[types.CodeType] = set()
        self.records: set[type] = set()
        self.depths: dict[str, int] = {}
        self.start: types.FrameType | None = None
        self._phases: list[str] = ["between"]  # of a step, the present one last
        self._entered: dict[str, set[str]] = {}  # file → phases, in the order of the way

    def __enter__(self) -> Watch:
        self.start = sys._getframe(1)
        sys.setprofile(self._called)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    def _called(self, frame: types.FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "return" and code.co_qualname in PHASES:
            self._phases.pop()
        if event != "call":
            return
        if code.co_filename.startswith(ENGINE):
            if code.co_qualname in PHASES:
                self._phases.append(PHASES[code.co_qualname])
            self.functions.add(code)
            self._entered.setdefault(code.co_filename, set()).add(self._phases[-1])
        elif code.co_name == "__init__" and code.co_filename == "<string>":  # what `dataclasses` writes
            self._made(type(frame.f_locals["self"]))
        elif code.co_filename.startswith("<string>") or code.co_filename.startswith("namedtuple"):
            self._made(frame.f_locals.get("_cls"))
        elif code.co_name == "forward" and (op := Path(code.co_filename).parent.name) in KERNELS.values():
            depth = sum(1 for _ in self._above(frame))
            self.depths[op] = min(depth, self.depths.get(op, depth))

    def files(self) -> dict[str, list[str]]:
        """The files of the engine that were entered, by their paths in it, and the phases of each."""
        paths = {str(Path(name).relative_to(ENGINE)): phases for name, phases in self._entered.items()}
        return {path: [name for name in COLUMNS if name in phases] for path, phases in paths.items()}

    def _made(self, record: object) -> None:
        if isinstance(record, type) and record.__module__.startswith("rlhf_engine."):
            self.records.add(record)

    def _above(self, frame: types.FrameType) -> Iterator[types.FrameType]:
        """The frames between a call and the step."""
        above = frame.f_back
        while above is not None and above.f_back is not self.start:
            yield above
            above = above.f_back


def watch_step(folder: Path) -> Watch:
    """Watch the third PPO step of a run on the pretrained model with a function's reward."""
    from rlhf_engine.training.rl import RlTrainer
    from tests.training.test_data import train_config, write_reward

    reward = write_reward(folder, "return [float(len(c)) for c in completions]")
    trainer = RlTrainer(train_config(STORIES, folder / "run", reward_funcs=[reward], max_steps=3, exact=None))
    with trainer.steps():
        trainer.begin()
        for _ in range(2):
            trainer.step()
        with trainer.kernels.used(), Watch() as watch:
            for _ in trainer.step_in_turns():  # as the loop of a run does
                pass
    return watch


def step_counts(watch: Watch) -> dict[str, int]:
    """Counts of a step that was watched."""
    return {
        "step: engine files entered": len({code.co_filename for code in watch.functions}),
        "step: functions": len(watch.functions),
        "step: types of records": len(watch.records),
        **{f"step: frames to {name}": watch.depths[kernel] for name, kernel in KERNELS.items()},
    }


def compare(measures: dict[str, int]) -> None:
    over = {name: f"{value} > {CEILINGS[name]}" for name, value in measures.items() if value > CEILINGS[name]}
    assert not over


def test_files_are_below_their_ceilings():
    compare(sizes())


def test_options_are_below_their_ceilings():
    compare(option_counts())


def test_a_step_is_below_its_ceilings(stories, tmp_path):
    watch = watch_step(tmp_path)
    compare(step_counts(watch))
    same = PICTURE.read_text(encoding="utf-8") == picture(watch.files())
    assert same, "python -m tests.step_map draws the step's files anew"


def test_items_are_below_their_ceiling(request):
    if request.config.args_source is not pytest.Config.ArgsSource.TESTPATHS:
        pytest.skip("counts the items of a whole run, and this is a part")
    compare({"tests: items per push": request.config.stash[PER_PUSH]})


def test_code_is_what_is_neither_text_nor_import():
    text = '"""Text.\n\nMore."""\n\nimport os\nfrom a import (\n    b,\n)\n\n'
    code = 'def f(x):  # why\n    """One."""\n    # two\n    y = """\n\n    """\n    return (\n        x\n    )\n'
    assert code_lines(text + code) == 1 + 3 + 3


if __name__ == "__main__":
    import tempfile

    counted: collections.ChainMap[str, int] = collections.ChainMap(sizes(), option_counts())
    with tempfile.TemporaryDirectory() as made:
        counted.maps.append(step_counts(watch_step(Path(made))))
    for name, value in sorted(counted.items()):
        print(f'    "{name}": {value},')
