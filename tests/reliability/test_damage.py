"""A damaged file is refused in one line, or read as what was written: bytes of each file, and files as a whole.

What loads a folder checks its list before anything else, as `test_damaged_folders` shows by loading. Here the check is
called alone, which is cheap enough for many bytes.
"""

import json
import os
import random
import shutil
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rlhf_engine.commands.main import main
from rlhf_engine.config import TrainConfig
from rlhf_engine.config.parser import parse_config
from rlhf_engine.data.read import Tally, load_rows
from rlhf_engine.errors import EngineError
from rlhf_engine.io import LineFile, check_model
from rlhf_engine.runs.checkpoint import check
from rlhf_engine.runs.metrics import SampleLog, read_metrics
from tests.training.test_damaged_folders import READERS, Written, damage, model_files, written
from tests.training.test_data import PROMPTS, train_config, write_rows

__all__ = ["written"]
SEED = int(os.environ.get("RELIABILITY_SEED", "0"))
PLACES = {(place, part) for place, part, _ in READERS.values()}
SHARDS = 6
"""Of folders."""


def changes(content: bytes, every: int, first: int) -> Iterator[tuple[str, bytes]]:
    """What becomes of a file: bytes and bits that differ, cuts, zeros, something more or less."""
    for at in range(first, len(content), every):
        for value in {content[at] ^ 1, content[at] ^ 0x80, 0, 0xFF, ord(" ")} - {content[at]}:
            yield f"byte {at} is {value}", content[:at] + bytes([value]) + content[at + 1 :]
        yield f"cut at {at}", content[:at]
        yield f"without {at}", content[:at] + content[at + 1 :]
        yield f"twice {at}", content[:at] + content[at : at + 1] + content[at:]
        if content[at : at + 64].strip(b"\0"):
            zeros = bytes(len(content[at : at + 64]))
            yield f"zeros at {at}", content[:at] + zeros + content[at + 64 :]


def exchanged(path: Path, others: list[Path], outside: Path) -> Iterator[str]:
    """What becomes of a file as a whole, which is put back by who asks: it is another's, a link, a folder, or gone."""
    content = path.read_bytes()
    for other in others:
        if other.read_bytes() != content:
            path.write_bytes(other.read_bytes())
            yield f"as {other.name}"
    path.unlink()
    yield "gone"
    path.symlink_to(outside)
    yield "a link to another file"
    path.unlink()
    path.symlink_to(path.with_name("nowhere"))
    yield "a link to nothing"
    path.unlink()
    path.mkdir()
    yield "a folder"
    path.rmdir()


def said_of(read: Callable[[], Any]) -> tuple[Any, str]:
    """What a reader returns, and what it refuses in the one line that it may have."""
    found, said = None, list[str]()
    try:
        found = read()
    except EngineError as error:
        said = str(error).split("\n")
    assert len(said) < 2
    return found, "".join(said)


def damaged_folder(folder: Path, part: str, places: int, outside: Path) -> tuple[int, list[Any]]:
    """How many damages of the files of a folder there were, and those that were not refused."""
    count, silent, chosen = 0, [], random.Random(f"{SEED} {folder.name}")
    listed = json.loads((folder / "manifest.json").read_text())["files"]
    files = [path for path in model_files(folder, part) if path.relative_to(folder).as_posix() in listed]
    is_checkpoint = (folder / "trainer_state.json").exists()

    def ask(path: Path, what: str) -> None:
        nonlocal count
        count += 1
        refused = said_of(lambda: check(folder) if is_checkpoint else check_model(folder / part))[1]
        # without a list the files are as they were
        if not refused and path.name != "manifest.json":
            silent.append((path, what))

    for path in [*files, folder / "manifest.json"]:
        content = path.read_bytes()
        step = max(1, len(content) // places)
        for what, changed in changes(content, step, chosen.randrange(step)):
            path.write_bytes(changed)
            ask(path, what)
        path.write_bytes(content)
        for what in exchanged(path, files, outside):
            ask(path, what)
        path.write_bytes(content)
    return count, silent


@pytest.mark.parametrize(
    ("places", "shard"), [(1, 0), *(pytest.param(150, i, marks=pytest.mark.long) for i in range(SHARDS))]
)
def test_any_byte_of_each_file_of_a_folder_counts(written: Written, tmp_path, survived, places, shard):
    (tmp_path / "outside").write_text("{}")
    count, silent = 0, []
    for to in ("merged", "peft"):
        out, more = written.root / f"export_{to}", ("--model_name_or_path", str(written.base))
        if not out.exists():
            assert main(["export", str(written.root / "rl"), "--to", to, "--output_dir", str(out), *more]) == 0
    for place, part in sorted(PLACES | {("export_merged", "."), ("export_peft", ".")})[shard::SHARDS]:
        folder = tmp_path / f"{place} {part}".replace("/", " ")
        shutil.copytree(written.root / place, folder)
        cases, wrong = damaged_folder(folder, part, places, tmp_path / "outside")
        count, silent = count + cases, silent + wrong
    print({"seed": SEED, "cases": count, "read all the same": silent[:20]})
    assert count > 50 * places
    survived("damage", count, len(silent))


@pytest.mark.parametrize("every", [17, pytest.param(1, marks=pytest.mark.long)])
def test_each_byte_of_a_journal_counts(tmp_path, survived, every):
    """Of answers and verdicts: a last line that was cut short is written again, and others are refused."""
    journal = LineFile(tmp_path / "answers.jsonl")
    for i, prompt in enumerate(PROMPTS):
        journal.add({"index": i, "prompt": prompt, "completion": "ö\u2028 sea", "mean_logprob": -1.25, "ids": [3, i]})
    content = journal.path.read_bytes()
    rows, count, wrong = list(journal.read("out")), 0, []
    for what, changed in changes(content, every, 0):
        journal.path.write_bytes(changed)
        count += 1
        found, refused = said_of(lambda: list(journal.read("out")))
        cut = changed == content[: len(changed)] or changed.rfind(b"\n") < len(content) - 1
        if not refused and found != rows and not (cut and found == rows[: len(found)]):
            wrong.append(what)
    print({"cases": count, "read as something else": wrong[:20]})
    assert count > 100
    survived("damage", count, len(wrong))


@pytest.mark.filterwarnings("ignore:.*left out")
@pytest.mark.parametrize("n", [40, pytest.param(3_000, marks=pytest.mark.long)])
def test_what_has_no_digest_is_read_or_refused_in_one_line(tmp_path, n):
    """Files that people write and edit: whatever is in them is no traceback, and other lines stay as they were."""
    import pandas

    rows = [{"prompt": prompt, "place": i} for i, prompt in enumerate(PROMPTS)]
    data, table = write_rows(tmp_path / "data.jsonl", rows), tmp_path / "data.parquet"
    pandas.DataFrame(rows).to_parquet(table)
    lines = [{"step": i, "reward": i / 3, "kl": 0.25} for i in range(5)]
    metrics = write_rows(tmp_path / "metrics.jsonl", lines)
    looks = [{"step": i, "prompts": ["a"], "completions": ["b"], "scores": [1.0]} for i in range(4)]
    samples, config = write_rows(tmp_path / "samples.jsonl", looks), tmp_path / "run.yaml"
    config.write_text(train_config(tmp_path / "model", tmp_path / "run", dataset_name=str(data)).to_yaml())

    def rows_of(path: Path) -> list[Any]:
        found = load_rows(
            path, Tally(source=str(path), argument="dataset_name", max_bad_rows=1.0), kinds=("prompt_only",)
        )
        return [row.prompt for row in found]

    readers: dict[Path, Callable[[Path], Any]] = {
        data: rows_of, table: rows_of, metrics: read_metrics, samples: lambda path: SampleLog(path).read(),
        config: lambda path: parse_config(TrainConfig, ["--config", str(path)], prog="train"),
    }  # fmt: skip
    print({"seed": SEED})
    for path, read in readers.items():
        content, chosen, whole = path.read_bytes(), random.Random(f"{SEED} {path.name}"), read(path)
        refused = 0
        for _ in range(n):
            kind = damage(path, chosen)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                try:
                    found, refusal = said_of(lambda: read(path))  # noqa: B023
                except FileNotFoundError:
                    assert kind == "lost"
                    refusal = "lost"
            refused += bool(refusal)
            if not refusal and path.suffix == ".jsonl" and kind in ("byte", "bit"):
                assert sum(row not in whole for row in found) <= 2, (path, kind)
            path.write_bytes(content)
        assert refused, path
        assert read(path) == whole
