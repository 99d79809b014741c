"""What is written, by name: each job goes on from whatever a stop has left, in one process that has imported all.

`python -m tests.reliability.jobs points|kills FOLDER OPTIONS` writes one JSON object. Every attempt is a process that
is forked, and stopped at one of its file operations (LD_PRELOAD of `faults.cpp`) or killed at some moment. What is left
is compared with an undisturbed run by `!=`.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import hashlib
import json
import os
import random
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch

from rlhf_engine.commands.main import main
from rlhf_engine.hydra import SlotConfig
from rlhf_engine.io import check_manifest, check_model
from rlhf_engine.policy.thread import PolicyThread
from rlhf_engine.runs.checkpoint import list_checkpoints
from rlhf_engine.runs.metrics import read_metrics, write_atomic
from tests.distributed import ranks
from tests.runs.test_page import data_of
from tests.serve.test_kills import learn, make_pool
from tests.training.crash_driver import lose_what_was_not_flushed
from tests.training.test_data import MEASURED, PROMPTS, sft_config, train_config, write_rows
from tests.training.test_reward import reward_config, toy_rows
from tests.training.test_rl import without_timings
from tests.training.test_sweep import write_grid

ENDED, FAILED = 0, 1
MODEL_FILES = ("config.json", "adapter_config.json", "trainer_state.json")
"""A folder with one of these loads, and has to be whole."""
TIMES = ("seconds", "started", "tokens_per_second", "samples_per_second", "peak_memory", "resumed_at_step")


class Job(NamedTuple):
    """Something that is written below `run`."""

    write: Callable[[], None]  # to the end, from whatever is there
    begin: Callable[[], None] = lambda: None  # what is there before
    power: bool = False  # whether the power may fail, too: no file of it grows


def command(*words: object) -> None:
    """A command that has to succeed."""
    code = main([str(word) for word in words])
    assert code == 0, code


def run_of(name: str, config: Any, **power: bool) -> Job:
    """A run that goes on with its newest checkpoint."""
    path = Path(config.output_dir).parent / "run.yaml"
    path.write_text(config.to_yaml())
    return Job(lambda: command(name, "--config", path, "--resume_from_checkpoint", "auto"), **power)


def rl(place: Path, **options: Any) -> Job:
    given = {"max_steps": 2, "save_steps": 1, "save_total_limit": None, **options}
    return run_of("train", train_config(place / "model", place / "run", **given))


def looked_at(place: Path, **options: Any) -> Job:
    """With evaluations, samples, and the best checkpoint, which stays."""
    return rl(place, eval_dataset_name=0.3, eval_steps=1, **options)


def sft(place: Path, mode: str) -> Job:
    given = {"mode": mode, "save_steps": 1, "save_total_limit": None}
    return run_of("sft", sft_config(place / "model", place / "run", **given))


def reward(place: Path, mode: str, **options: Any) -> Job:
    given = {"mode": mode, "max_steps": 2, "save_steps": 1, "save_total_limit": None, **options}
    return run_of("reward", reward_config(place / "model", place / "run", toy_rows(16), **given))


def export(place: Path, to: str, *, source: str = "source") -> Job:
    folder, out = place.parent / source, place / "run" / "export"
    if not folder.exists():
        made = reward if source == "source_reward" else rl
        more = ("lora",) if made is reward else ()
        (place / "made").mkdir()
        shutil.copytree(place / "model", place / "made" / "model")
        made(place / "made", *more, save_steps=0).write()
        shutil.move(place / "made" / "run", folder)

    def write() -> None:
        if not out.exists():  # or it is done
            command("export", folder, "--to", to, "--output_dir", out, "--model_name_or_path", place / "model")

    return Job(write, power=True)


def answers(place: Path, *more: object) -> Job:
    out = place / "run" / "answers.jsonl"
    shown = ("--prompt", *PROMPTS[:4], "--json", "--max_completion_length", 5, "--out", out, "--resume", *more)
    return Job(lambda: command("generate", "--model_name_or_path", place / "model", "--device", "cpu", *shown))


def evaluate(place: Path) -> Job:
    rows = write_rows(place / "data.jsonl", [{"prompt": p, "completion": f"{p} sings"} for p in PROMPTS[:3]])
    words = ("--models", "references", "--dataset_name", rows, "--max_completion_length", 5, "--device", "cpu")
    where = ("--output_dir", place / "run" / "evaluation", "--resume")
    return Job(lambda: command("evaluate", "--model_name_or_path", place / "model", *words, *where))


def sweep(place: Path) -> Job:
    config = train_config(place / "model", place / "run", max_steps=2, save_steps=1, save_total_limit=None).to_dict()
    keys = ("model_name_or_path", "dataset_name", "max_completion_length", "generation_batch_size", "learning_rate",
            "max_steps", "save_steps", "device", "lora_r", "save_total_limit")  # fmt: skip
    flags = {key: config[key] for key in keys}
    halving = {"at": [1], "by": "reward", "keep": 0.5}
    grid = write_grid(place, flags, grid={"learning_rate": [1e-2, 3e-3]}, halving=halving, **{"with": {}})
    return Job(lambda: command("sweep", grid, "--output_dir", place / "run"))


def served(place: Path, steps: int = 2) -> Job:
    """Policies that are trained, saved, put on disk alone and come back."""

    def write(steps: int = steps) -> None:
        policies = make_pool(place / "run")
        with PolicyThread(policies) as thread:
            for i, name in enumerate(("one", "two")):
                if name not in policies:
                    policies.add(name, slots={"actor": SlotConfig(r=2 + i)}, seed=i)
                while policies.get(name).state.step < steps:
                    learn(thread, name, i)
                    policies.save(name)
                policies.save(name)  # or an older one stays, where a stop came before it was dropped
            thread.call(lambda: policies.evict("one")).result(60)
            policies.get("one")

    return Job(write, lambda: write(1), power=True)


def behind_trl(place: Path) -> Job:
    from rlhf_engine.integrations.trl import HydraPPOConfig, HydraPPOTrainer
    from tests.integrations.trl_runs import QUICK, make_trainer

    saved = {"save_strategy": "steps", "save_steps": 1, "steps_per_generation": 4, "max_steps": 3}

    def write() -> None:
        args = HydraPPOConfig(**{**QUICK, **saved, "output_dir": str(place / "run")})
        for checkpoint in [*map(str, reversed(list_checkpoints(place / "run"))), None]:
            trainer = make_trainer(HydraPPOTrainer, args, place / "model", n_prompts=16)
            try:
                trainer.train(resume_from_checkpoint=checkpoint)
                break
            except Exception:  # whatever transformers says of a folder that it has not written to the end
                if checkpoint is None:
                    raise

    return Job(write)


def two_ranks(place: Path) -> Job:
    config = train_config(place / "model", place / "run", max_steps=3, save_steps=1, resume_from_checkpoint="auto")
    plan = {"processes": 2, "timeout": 60, "jobs": [{"name": "job", "do": "run", "config": config.to_dict()}]}
    (place / "plan.json").write_text(json.dumps(plan))

    def write() -> None:
        (place / "store").unlink(missing_ok=True)
        children = [ranks.fork(rank, 2, place) for rank in range(2)]
        assert [os.waitpid(child, 0)[1] for child in children] == [0, 0]

    return Job(write)


def talks(place: Path) -> Job:
    from tests.conversations.test_runs_of_talks import GRPO, options_of

    given = {"max_steps": 3, "save_steps": 1, **options_of(place, **GRPO)}
    return run_of("train", train_config(place / "caller", place / "run", **given))


GROUPS = {"algorithm": "grpo", "num_generations": 4}
JOBS: dict[str, Callable[[Path], Job]] = {
    "ppo": looked_at, "grpo": lambda place: rl(place, **GROUPS),
    "full_ppo": lambda place: rl(place, method="full_ppo"),
    "replay": lambda place: rl(place, async_mode="replay", max_steps=3),
    "overlap": lambda place: rl(place, async_mode="overlap", max_steps=3),
    "sft_lora": lambda place: sft(place, "lora"), "sft_full": lambda place: sft(place, "full"),
    "reward_lora": lambda place: reward(place, "lora"), "reward_full": lambda place: reward(place, "full"),
    "reward_merged": lambda place: reward(place, "lora", export="merged"),
    "export_merged": lambda place: export(place, "merged"), "export_adapter": lambda place: export(place, "peft"),
    "export_classifier": lambda place: export(place, "sequence_classification", source="source_reward"),
    "answers": answers, "best_of": lambda place: answers(place, "--best_of", 2), "evaluate": evaluate,
    "sweep": sweep, "served": served, "trl": behind_trl, "two_ranks": two_ranks, "talks": talks,
}  # fmt: skip


def plain(value: Any) -> Any:
    """Without what tells time or place."""
    if isinstance(value, dict):
        return {name: plain(x) for name, x in value.items() if not any(time in name for time in TIMES)}
    return [plain(x) for x in value] if isinstance(value, list) else value


def is_kept(line: dict[str, Any]) -> dict[str, Any]:
    """Without what tells time, which generators beside the learner report as well."""
    kept = without_timings(line).items()
    return {name: x for name, x in kept if name not in MEASURED and not name.startswith("async/")}


def read(root: Path) -> dict[str, Any]:
    """What a reader finds below a folder, by name; what may not be loaded though it has its name raises."""
    found: dict[str, Any] = {}
    for path in sorted(root.rglob("*")):
        name = path.relative_to(root).as_posix()
        if any(part.startswith(".") for part in Path(name).parts) or path.is_dir():
            continue
        folder = path.parent
        if root.parent.name == "trl":  # transformers writes no list, and in place
            if path.suffix == ".safetensors":
                found[f"in place {name}"] = hashlib.sha256(path.read_bytes()).hexdigest()
        elif path.name in MODEL_FILES:
            assert (folder / "manifest.json").is_file(), f"{name} has no list"
            (check_manifest if path.name == "trainer_state.json" else check_model)(folder)
            files = json.loads((folder / "manifest.json").read_text())["files"]
            files.pop("kernels.json", None)  # of the ops that a process has run by then
            found |= {f"{folder.relative_to(root)}: {name}": entry["sha256"] for name, entry in files.items()}
        elif path.suffix == ".jsonl":
            lines = read_metrics(path) if path.name in ("metrics.jsonl", "samples.jsonl") else rows_of(path)
            found[name] = list(map(is_kept, lines))
        elif path.name in ("run.json", "sweep.json", "results.json"):
            record = json.loads(path.read_text())
            found[f"{name} config"] = record.get("config", record.get("runs"))
            if "result" in record:
                found[f"{name} result"] = plain(record["result"])
        elif path.suffix == ".html":
            assert path.read_text().rstrip().endswith("</html>"), f"{name} is cut"
            data_of(path) if path.name == "page.html" else None
        elif path.suffix == ".png" and root.parent.name != "two_ranks":  # whose curves are not drawn
            assert path.read_bytes().endswith((PICTURE, b"IEND\xaeB`\x82")), f"{name} is cut"
        elif path.name == "samples.md":
            found[name] = path.read_text().splitlines()
    return found


def rows_of(path: Path) -> list[dict[str, Any]]:
    """Whole lines of a journal, which a reader takes."""
    text = path.read_text()
    rows = [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]
    for row in rows:  # out of exact mode other company rounds otherwise; the digest is of what is rounded
        row |= {name: round(x, 3) for name, x in row.items() if isinstance(x, float)} | {"digest": ""}
    return sorted(rows, key=lambda row: json.dumps(row.get("index", row)))


PICTURE = b"\x89PNG curves"


def draw(metrics: str | Path, picture: str | Path) -> None:
    """Curves take most of a short run; they are written as `plot_curves` writes them."""
    assert read_metrics(metrics)
    write_atomic(Path(picture), PICTURE)


def wrong_with(found: dict[str, Any], old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """Names of what is neither the old nor the new, nor the first lines of what grows."""

    def is_fine(name: str) -> bool:
        value, to_be = found[name], new.get(name)
        grows = isinstance(value, list) and isinstance(to_be, list) and name.endswith(".jsonl")
        lines_of_it = grows and value == to_be[: len(value)]
        is_journal = grows and all(row in to_be for row in value) and "metrics" not in name
        return (
            value in (old.get(name), to_be)
            or lines_of_it
            or is_journal
            or name.startswith("in place")
            or name.endswith("samples.md")
        )

    return [name for name in found if not is_fine(name)]


class Place:
    """A job's folder, and what an undisturbed process leaves in it."""

    def __init__(self, root: Path, name: str) -> None:
        self.name, self.place = name, root / name
        self.run, self.spare, self.log, self.said = (self.place / x for x in ("run", "spare", "log", "said"))
        self.place.mkdir()
        for model in ("model", "caller"):
            if (root / model).exists():
                shutil.copytree(root / model, self.place / model)
        self.run.mkdir()
        with self.quietly():
            self.job = JOBS[name](self.place)
            self.job.begin()
        self.old = read(self.run)
        shutil.copytree(self.run, self.spare)
        began = time.monotonic()
        assert self.attempt() == ENDED, self.said.read_text()[-3000:]
        self.seconds = time.monotonic() - began
        self.new = read(self.run)
        assert self.new, name

    @contextlib.contextmanager
    def quietly(self) -> Iterator[None]:
        with self.said.open("w") as said, contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            yield

    def anew(self) -> None:
        """The folder as it was before."""
        shutil.rmtree(self.run)
        shutil.copytree(self.spare, self.run)

    def attempt(self, arm: Callable[[], None] | None = None, kill_after: float | None = None) -> int:
        """What waitpid says of a process that does the job, and whose own ones have ended, too."""
        alive, held = os.pipe()
        child = os.fork()
        if child == 0:
            os.setsid()
            os.close(alive)
            status = FAILED
            try:
                said = os.open(self.said, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
                os.dup2(said, 1)
                os.dup2(said, 2)
                if arm is not None:
                    arm()
                self.job.write()
                status = ENDED
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(status)
        os.close(held)
        if kill_after is not None:
            time.sleep(kill_after)  # a random moment is no event
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child, signal.SIGKILL)
        status = os.waitpid(child, 0)[1]
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)  # what it has started
        os.read(alive, 1)  # until the last of them has gone
        os.close(alive)
        return status

    def goes_on(self) -> str:
        """What is wrong after the next attempt, which is not disturbed; empty: nothing."""
        if self.attempt() != ENDED:
            return f"it did not go on: {self.said.read_text()[-1500:]}"
        # pictures can be made again; transformers writes in place, where safetensors leaves what it had begun
        fine = (".lock", ".page.html", ".curves.png", *((".tmp",) if self.name == "trl" else ()))
        strays = [p.name for p in self.run.rglob(".*") if not p.name.startswith(fine)]
        found = read(self.run)
        changed = {n: (found.get(n), self.new.get(n)) for n in found.keys() | self.new.keys()}
        changed = {n: f"{a}"[:600] + " != " + f"{b}"[:600] for n, (a, b) in changed.items() if a != b}
        return f"strays {strays}, other than undisturbed: {changed}" if strays or changed else ""


def points(place: Place, every: int, first: int) -> dict[str, Any]:
    """Stop before each so-many-th operation, half-way in each that writes, and let the power fail."""
    faults = ctypes.CDLL(None)
    count, wrong = 0, []

    def armed(at: int, mode: int, place: Place) -> int:
        place.anew()
        log = os.open(place.log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        status = place.attempt(lambda: faults.faults_arm(str(place.run).encode(), ctypes.c_long(at), mode, log))
        os.close(log)
        return status

    assert armed(-1, 0, place) == ENDED
    lines = [line.split("\t") for line in place.log.read_text().splitlines()]
    for at in range(first, len(lines), every):
        kinds = ["killed", *(["half"] if lines[at][0] == "write" else [])]
        for kind in kinds + (["power", "power, old names"] if place.job.power else []):
            if not os.WIFSIGNALED(armed(at, int(kind == "half"), place)):
                continue  # a page is written by the clock: there may be an operation less
            count += 1
            if kind.startswith("power"):
                lose_what_was_not_flushed(place.log, old_names=kind != "power")
            try:
                bad = wrong_with(read(place.run), place.old, place.new)
                said = f"neither old nor new: {bad}" if bad else place.goes_on()
            except Exception as error:
                said = f"{type(error).__name__}: {error}"
            if said:
                wrong.append([place.name, kind, at, *lines[at], said])
    return {"count": count, "operations": len(lines), "wrong": wrong, "seconds": place.seconds}


def kills(place: Place, n: int, seed: int) -> dict[str, Any]:
    """Kill at random moments, up to three times before a run comes to its end."""
    chosen, count, wrong = random.Random(f"{seed} {place.name}"), 0, []
    while count < n:
        place.anew()
        moments = []
        for _ in range(chosen.randint(1, 3)):
            moments.append(chosen.uniform(0.02, 1.0) * place.seconds)
            count += os.WIFSIGNALED(place.attempt(kill_after=moments[-1]))
        if said := place.goes_on():
            wrong.append([place.name, seed, moments, said])
    return {"count": count, "wrong": wrong, "seconds": place.seconds}


if __name__ == "__main__":
    torch.set_num_threads(1)  # a forked process has no other threads
    what, root, options = sys.argv[1], Path(sys.argv[2]), json.loads(sys.argv[3])
    gc.collect()
    gc.freeze()
    found = {}
    with mock.patch("rlhf_engine.training.run.plot_curves", draw):
        for name in options.pop("jobs"):
            place = Place(root, name)
            found[name] = points(place, **options) if what == "points" else kills(place, **options)
            shutil.rmtree(place.place)
    print(json.dumps(found))
