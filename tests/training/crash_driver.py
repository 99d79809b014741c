"""Writes a checkpoint over and over, with another of its file operations failing each time; run by test_crashes.

    LD_PRELOAD=faults.so python -m tests.training.crash_driver FOLDER EVERY SCENARIO...

Standard output has one JSON object for each scenario: how many operations a checkpoint takes, and for every fate what
became of it. A process is forked for each, so that being killed ends no more than that.
"""

import ctypes
import json
import os
import shutil
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from rlhf_engine.errors import EngineError
from rlhf_engine.hydra import HydraModel, SlotConfig, hydra_roles
from rlhf_engine.hydra.optimizer import RoleOptimizer
from rlhf_engine.runs.checkpoint import TrainerState, list_checkpoints, load_checkpoint, resolve_resume, save_checkpoint
from tests.conftest import randomise, tiny_llama

FATES = ("killed before", "killed half-way", "no space", "input/output error", "power lost", "power lost, old names")
"""The last two: killed before, and then nothing is left of what had not been flushed."""
RAISED, SAVED = 3, 0
"""Exit codes of the forked process."""


def state(step: int) -> TrainerState:
    return TrainerState(step=step, seed=0, samples=step, policy_version=step)


def tensors(model: HydraModel, optimizer: RoleOptimizer) -> dict[str, torch.Tensor]:
    return {k: v.clone() for k, v in {**model.state_dict(), **optimizer.state_tensors()}.items()}


def lose_what_was_not_flushed(log: Path, *, old_names: bool) -> None:
    """What a power cut may leave: files without the content, and names, that no flush has followed."""
    dirty: set[str] = set()
    unnamed: list[str] = []
    renamed: list[tuple[str, str]] = []
    for line in log.read_text().splitlines():
        what, path, other = line.split("\t")
        if what in ("open", "mkdir"):
            unnamed.append(path)
        if what in ("open", "write"):
            dirty.add(path)
        elif what == "fsync":
            dirty.discard(path)
            unnamed = [p for p in unnamed if os.path.dirname(p) != path]
            renamed = [pair for pair in renamed if os.path.dirname(pair[1]) != path]
        elif what == "unlink":
            dirty.discard(path)
            unnamed = [p for p in unnamed if p != path]
        elif what == "rename":
            moved = lambda p: other + p[len(path) :] if p == path or p.startswith(path + "/") else p  # noqa: B023, E731
            dirty, unnamed = {moved(p) for p in dirty}, [moved(p) for p in unnamed]
            renamed.append((path, other))
    for path in dirty:
        if os.path.isfile(path):
            os.truncate(path, os.path.getsize(path) // 2)
    for path in reversed(unnamed):
        if os.path.isfile(path):
            os.unlink(path)
    for before, after in reversed(renamed) if old_names else ():
        if os.path.exists(after) and not os.path.exists(before):
            os.rename(after, before)


class Writer:
    """A model that is at one step, whose next checkpoint is written."""

    def __init__(self, folder: Path, scenario: str) -> None:
        self.faults = ctypes.CDLL(None)
        self.faults.faults_count.restype = ctypes.c_long
        self.root, self.spare, self.log = folder / "run", folder / "spare", folder / "log"
        base = folder / "base"
        tiny_llama().save_pretrained(base)
        slots = dict.fromkeys(("actor", "critic"), SlotConfig(r=2, alpha=4.0))
        self.model = HydraModel.from_pretrained(base, roles=hydra_roles(), slots=slots)
        self.optimizer = RoleOptimizer(self.model, {"actor": 1e-2, "critic": 1e-2})
        # `next`: another step, and the old checkpoint goes; `same`: the checkpoint of the same step again
        self.step, self.keep = (2, 1) if scenario == "next" else (1, None)
        self.contents = {}
        for i, step in enumerate((1, self.step)):
            randomise(self.model, "actor", "critic", seed=i + 1)
            for p in self.model.parameters():
                p.grad = torch.ones_like(p) if p.requires_grad else None
            self.optimizer.step()
            self.contents[i] = tensors(self.model, self.optimizer)
            if i == 0:
                save_checkpoint(self.root, self.model, self.optimizer, state(step), keep=self.keep)
        shutil.copytree(self.root, self.spare)

    def attempt(self, at: int, mode: int) -> int:
        """What waitpid says of a process that writes the checkpoint, one operation of which meets its fate."""
        shutil.rmtree(self.root)
        shutil.copytree(self.spare, self.root)
        log = os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        child = os.fork()
        if child == 0:
            self.faults.faults_arm(str(self.root).encode(), ctypes.c_long(at), mode, log)
            try:
                save_checkpoint(self.root, self.model, self.optimizer, state(self.step), keep=self.keep)
            except EngineError:
                os._exit(RAISED)
            except BaseException as error:
                os.write(2, f"{type(error).__name__}: {error}\n".encode())
                os._exit(RAISED + 1)
            os._exit(SAVED)
        os.close(log)
        return os.waitpid(child, 0)[1]

    def what_is_left(self) -> str:
        """`old` or `new`, after what a run does that goes on; or what is wrong with it."""
        folder = resolve_resume("auto", self.root)
        if folder is None:
            return "nothing is left"
        for found in list_checkpoints(self.root):  # every one there is
            load_checkpoint(found, self.model, self.optimizer)
        counters = load_checkpoint(folder, self.model, self.optimizer)
        loaded = tensors(self.model, self.optimizer)
        for i, name in enumerate(("old", "new")):
            if all(torch.equal(loaded[k], v) for k, v in self.contents[i].items()):
                if counters.step != (1, self.step)[i]:
                    return f"step {counters.step} with the tensors of another"
                return name
        return "tensors of no step"

    def write_again(self) -> str:
        """The next attempt of the same checkpoint, over whatever is left."""
        self.load(1)
        save_checkpoint(self.root, self.model, self.optimizer, state(self.step), keep=self.keep)
        stray = [p.name for p in self.root.glob(".*")]
        return self.what_is_left() if not stray else f"strays {stray}"

    def load(self, which: int) -> None:
        """Model and optimizer as they were at the first or second step."""
        held = self.contents[which]
        self.model.load_state_dict({k: held[k] for k in self.model.state_dict()})
        self.optimizer.load_state_tensors({k: held[k] for k in self.optimizer.state_tensors()})


def outcomes(folder: Path, scenario: str, every: int) -> dict[str, Any]:
    """What became of every checkpoint. every: only each so-many-th operation fails, another first one for each fate."""
    folder.mkdir()
    writer = Writer(folder, scenario)
    assert writer.attempt(-1, 0) == SAVED
    lines = [line.split("\t") for line in writer.log.read_text().splitlines()]
    found: dict[str, dict[str, int]] = {}
    wrong = []
    for number, fate in enumerate(FATES):
        tally: Counter[str] = Counter()
        for at in range(number % every, len(lines) + (number >= 4), every):  # one more: after all of them
            writer.load(1)
            status = writer.attempt(at, number if number < 4 else 0)
            ended = "killed" if os.WIFSIGNALED(status) else {SAVED: "saved", RAISED: "raised"}.get(status >> 8, "?")
            if number >= 4:
                lose_what_was_not_flushed(writer.log, old_names=number == 5)
            try:
                left = writer.what_is_left()
                again = writer.write_again()
            except Exception as error:
                left, again = f"{type(error).__name__}: {error}", ""
            tally[f"{ended}, {left}"] += 1
            expected = "saved" if at == len(lines) else "raised" if number in (2, 3) else "killed"
            if at < len(lines) and lines[at][0] == "refused" and number in (2, 3):
                expected = ended  # whether its error matters depends on the error: a folder may be there already
            fine = left == "new" or (left == "old" and ended != "saved")
            if not fine or again != "new" or ended != expected:
                wrong.append([fate, at, *(lines[at] if at < len(lines) else ()), ended, left, again])
        found[fate] = dict(tally)
    return {"operations": Counter(line[0] for line in lines), "fates": found, "wrong": wrong}


if __name__ == "__main__":
    torch.set_num_threads(1)  # a forked process has no other threads
    place, each, *scenarios = sys.argv[1:]
    print(json.dumps({scenario: outcomes(Path(place) / scenario, scenario, int(each)) for scenario in scenarios}))
