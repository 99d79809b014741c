"""Every row of the tables of bad inputs is answered in one line, and what an output folder held is there afterwards."""

from __future__ import annotations

import contextlib
import io
import os
import random
import socket
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from rlhf_engine.commands import main as command_line
from rlhf_engine.commands.main import _COMMANDS
from rlhf_engine.hydra import HydraModel, RoleSpec, SlotConfig
from rlhf_engine.policy.pool import BASE, Policies
from rlhf_engine.rollout import RolloutEngine
from rlhf_engine.training.sft import SftTrainer
from rlhf_engine.user_code import TookTooLong, time_limit
from tests.conftest import build, random_batch, tiny_llama
from tests.reliability import bad_inputs as table
from tests.reliability.bad_inputs import Bad, rows_of
from tests.training.test_data import sft_config, write_model, write_pairs, write_prompts


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Files and folders that rows name; the output folder holds a run, and a file of somebody's."""
    folder = tmp_path_factory.mktemp("bad")
    (folder / "good.yaml").write_text("grid: {seed: [1]}\n")
    made = {"model": write_model(folder / "model"), "pairs": write_pairs(folder), "prompts": write_prompts(folder)}
    SftTrainer(sft_config(made["model"], folder / "out", max_steps=1)).run()
    (folder / "out" / "thesis.txt").write_text("years of work")
    more = {name: folder / name for name in ("out", "run", "none")}
    return {**made, **more, "grid": folder / "good.yaml", "folder": folder, "held": held(folder / "out")}


def words_of(command: str, without: Iterable[str], places: dict[str, Any]) -> list[str]:
    """The complete command line without some options."""
    words, first = list(table.COMPLETE[command]), _COMMANDS[command][0].POSITIONAL
    flagged = [f"--{name}={word}" for name, word in zip(first, words, strict=False)]
    words = flagged + words[len(flagged) :]
    for name in without:
        aliases = (name, "model" if name == "model_name_or_path" else name)
        at = [i for i, word in enumerate(words) if word.partition("=")[0] in [f"--{each}" for each in aliases]]
        for i in at:
            del words[i : i + (1 if "=" in words[i] else 2)]
        if name == "mode":
            words = [word for word in words if word != "--lora"]
    return [word.format(**places) for word in words]


def held(folder: Path) -> dict[str, tuple[int, int]]:
    """Files of a folder, each with its size and time."""
    return {str(each): (each.stat().st_size, each.stat().st_mtime_ns) for each in folder.rglob("*")}


def asked(argv: list[str]) -> tuple[Any, str, str]:
    """Exit code, standard output and standard error of a command in this process."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code: Any = command_line.main(argv)
        except BaseException as error:  # what the table is there to show
            code = repr(error)[:200]
    return code, out.getvalue(), err.getvalue()


def wrong(argv: list[str], named: tuple[str, ...], places: dict[str, Any]) -> str | None:
    """What is wrong with the answer to a bad input; None where it is as it should be."""
    code, out, err = asked(argv)
    lines = err.splitlines()
    kept = held(places["out"]) == places["held"]
    texts = [text.format(**places) if text.startswith("{") else text for text in named]
    if code == 2 and not out and len(lines) == 1 and kept and all(text in lines[0] for text in texts):
        return None
    return f"{[word[:40] for word in (argv[0], *argv[-2:])]}: {code}, kept {kept}, wanted {texts}, got {err[-400:]}"


def served(config: object) -> int:
    raise AssertionError("it was served")


def answers(rows: Iterable[Bad], places: dict[str, Any]) -> tuple[int, list[str]]:
    """Number of rows, and what is wrong with the answers."""
    found, n = [], 0
    file = places["folder"] / "config.yaml"
    for row in rows:
        n += 1
        if row.surface == "text":
            file.write_bytes(row.given)
            keys = {line.partition(b":")[0].decode(errors="replace") for line in row.given.splitlines()}
            argv = ["train", *words_of("train", keys, places), "--config", str(file)]
        elif row.surface == "yaml":
            command, name, value = row.given
            file.write_text(yaml.safe_dump({name: value}, allow_unicode=True))
            argv = [command, *words_of(command, [name], places), "--config", str(file)]
        else:
            command, *rest = row.given
            named = [word[2:].partition("=")[0] for word in rest if word.startswith("--")]
            argv = [command, *words_of(command, named, places), *(word.format(**places) for word in rest)]
        found.append(wrong(argv, row.named, places))
    return n, [each for each in found if each]


@pytest.mark.parametrize("every", [4, pytest.param(1, marks=pytest.mark.long)])
def test_options_that_cannot_be(places, survived, monkeypatch, every):
    """Flags and config files; every so many of the rows that are made of the options' own types."""
    monkeypatch.setattr(command_line.pkgutil, "resolve_name", lambda _: served)  # a row that passes starts no server
    flags = [Bad("flags", tuple(given.decode().split()), named) for given, named in rows_of(table.FLAGS)]
    texts = [Bad("text", given, named) for given, named in rows_of(table.YAML)]
    rows = [*flags, *texts, *list(table.option_rows())[::every]]
    n, found = answers(rows, places)
    assert n == len(rows) >= 340
    print("\n".join(found))
    survived("bad_inputs", n, len(found))


def test_files_that_cannot_be_read(places, survived, tmp_path):
    """Data sources and grids, by the real commands."""
    found, n = [], 0
    for command, name, content, named in table.data_rows():
        file = tmp_path / name
        file.write_bytes(content)
        argv = [command, *words_of(command, ["dataset_name"], places), "--resume_from_checkpoint", "restart"]
        argv += ["--dataset_name", str(file)]
        n += 1
        found.append(wrong(argv, named, places))
        file.unlink()
    for given, named in rows_of(table.GRIDS):
        text = given.decode()
        flags = f"\nflags: {{model_name_or_path: {places['model']}, dataset_name: {places['prompts']}}}"
        (tmp_path / "grid.yaml").write_text(text + flags if text.startswith("grid") and "flags" not in text else text)
        n += 1
        found.append(wrong(["sweep", str(tmp_path / "grid.yaml"), "--output_dir", str(places["out"])], named, places))
    found = [each for each in found if each]
    assert n >= 120
    print("\n".join(found))
    survived("bad_inputs", n, len(found))


def test_places_that_are_none(places, survived, tmp_path):
    """Options that name a file or a folder are given another thing; nothing is waited for."""
    os.mkfifo(tmp_path / "a_fifo")
    (tmp_path / "a_folder").mkdir()
    (tmp_path / "a_link").symlink_to(tmp_path / "none")
    (tmp_path / "empty").touch()
    (tmp_path / "binary").write_bytes(random.Random(0).randbytes(4000))
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(tmp_path / "a_socket"))
    found, n = [], 0
    for command, option in map(str.split, table.NAMERS.split(",")):
        for place in [each for each in table.PLACES if each not in table.FINE.get(option, ())]:
            path = str(tmp_path / place)
            given = {"models": f"{path}", "reward_funcs": f"{path}.py:f"}.get(option, path)
            more = {"judge_template": ["--judge=http://a", "--judge_model=a"]}.get(option, [])
            more += ["--max_completion_length=8"] * (command in ("train", "generate", "evaluate"))
            kept = command in ("train", "sft") and option not in ("resume_from_checkpoint", "output_dir")
            more += ["--resume_from_checkpoint=restart"] * kept
            argv = [command, *words_of(command, [option, "prompt" if option == "prompt_file" else ""], places), *more]
            n += 1
            try:
                with time_limit(20):
                    found.append(
                        wrong(
                            [*argv, f"--{option}={given}"],
                            ({"dataset_name": place, "actor_adapter": "adapter"}.get(option, option),),
                            places,
                        )
                    )
            except TookTooLong:
                found.append(f"{command} {option} {place}: waits")
    listener.close()
    found = [each for each in found if each]
    print("\n".join(found))
    assert n >= 140
    survived("bad_inputs", n, len(found))


def test_calls_that_cannot_be_served(places, survived):
    """Python: each is a ValueError or TypeError that names the argument, and the model is as it was."""
    model = build()
    host = HydraModel.from_pretrained(tiny_llama(), roles={BASE: RoleSpec()})
    pool = Policies(host)
    pool.add("one", slots={"actor": SlotConfig(r=2)})
    world = table.World(model, random_batch(), pool, RolloutEngine(model), places)
    before = {name: x.clone() for name, x in model.state_dict().items()}
    found = []
    for i, (call, argument) in enumerate(table.PYTHON):
        try:
            call(world)
            found.append(f"{i} {argument}: served")
        except (ValueError, TypeError) as error:
            text = str(error)
            if argument not in text or "expected" not in text or "\n" in text:
                found.append(f"{i} {argument}: {type(error).__name__} {text[:300]}")
        except Exception as error:  # what the table is there to show
            found.append(f"{i} {argument}: {type(error).__name__} {str(error)[:300]}")
    changed = [name for name, x in model.state_dict().items() if not torch.equal(x, before[name])]
    print("\n".join([*found, *changed]))
    assert len(table.PYTHON) >= 70
    survived("bad_inputs", len(table.PYTHON), len(found) + len(changed))
