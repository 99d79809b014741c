"""Helpers of studies whose arms take turns, each in a process of its own: flags, requests, and the record."""

from __future__ import annotations

import argparse
import dataclasses
import json
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from rlhf_bench.workload import PROMPTS_FILE, Setting
from rlhf_kernels.runtime import native, registry

from rlhf_engine.config import TrainConfig
from rlhf_engine.devices import ALONE, World
from rlhf_engine.runs.metrics import cpu_name, git_commit, run_record, write_json_atomic
from rlhf_engine.training.rl import RlTrainer

QUICK = {"hidden": 64, "layers": 2, "vocab": 256, "batch": 8, "prompt_tokens": 8, "answer_tokens": 8, "micro_batch": 4}


def make_parser(doc: str | None) -> argparse.ArgumentParser:
    """Flags that all of them have, those of `Setting` among them. doc: of the script, its first line describes it."""
    parser = argparse.ArgumentParser(description=(doc or "").splitlines()[0])
    parser.add_argument("--request", type=json.loads, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    for field in dataclasses.fields(Setting):
        parser.add_argument(f"--{field.name.replace('_', '-')}", type=int, help=field.metadata["help"])
    return parser


def append(file: Path | None, **found: Any) -> None:
    """Append what a study found to a file, if it was named, with the command and the machine."""
    about = {
        "isa": native.isa(),
        "cpu": cpu_name(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "git_commit": git_commit(Path(__file__)),
        "command": shlex.join(["python", f"bench/studies/{Path(sys.argv[0]).name}", *sys.argv[1:]]),
    }
    if file:
        with file.open("a", encoding="utf-8") as out:
            out.write(json.dumps(found | about) + "\n")


def arguments_in_processes(
    parser: argparse.ArgumentParser, work: Callable[[dict[str, Any]], dict[str, Any] | None], study: str
) -> argparse.Namespace | None:
    """Arguments of a study whose arms are several processes; None in one of these, after its work.

    Args:
        parser: of the flags, `--processes` among them.
        work: what a process does; what it returns, the main one alone, is printed.
        study: the name of the files in `--out`.
    """
    arguments = parser.parse_args()
    if arguments.request:
        found = work(arguments.request)
        if found is not None:
            print(json.dumps(found))
        return None
    if arguments.out is None:
        parser.error(f"--out: expected a folder for {study}.json and {study}.md")
    if arguments.processes < 2:
        parser.error(f"--processes: expected at least 2, got {arguments.processes}")
    return arguments


def setting_of(arguments: argparse.Namespace, **defaults: int) -> Setting:
    """Flags win over --quick, and that over the script's defaults."""
    given = {field.name: getattr(arguments, field.name) for field in dataclasses.fields(Setting)}
    given = {name: value for name, value in given.items() if value is not None}
    return Setting(**{**defaults, **(QUICK if arguments.quick else {}), **given})


def trainer_of(
    request: Mapping[str, Any], setting: Setting, folder: Path, output: Path, *, world: World = ALONE, **options: Any
) -> RlTrainer:
    """The trainer that `rlhf-engine train` makes. folder: as `prepare` has written it."""
    return RlTrainer(
        TrainConfig(
            model_name_or_path=str(folder),
            dataset_name=str(folder / PROMPTS_FILE),
            output_dir=str(output),
            algorithm=request.get("algorithm", "ppo"),
            dtype=request["dtype"],
            device=request["device"],
            lora_r=setting.lora_r,
            lora_alpha=float(setting.lora_alpha),
            generation_batch_size=setting.batch,
            per_device_train_batch_size=setting.micro_batch,
            max_completion_length=setting.answer_tokens,
            max_steps=setting.steps,
            learning_rate=1e-5,
            seed=setting.seed,
            **options,
        ),
        world,
    )


def measure(script: str, setting: Setting, folder: Path, *, processes: int = 1, **request: Any) -> dict[str, Any]:
    """Answer of `script --request`, in a process of its own; of several processes, one answers."""
    with tempfile.TemporaryDirectory() as scratch:
        paths = {"folder": str(folder), "scratch": str(Path(scratch) / "run")}
        text = json.dumps({"setting": dataclasses.asdict(setting), **paths, **request})
        several = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)]
        command = [sys.executable, *(several if processes > 1 else []), script, "--request", text]
        done = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def in_turn(
    arms: Sequence[str], rounds: int, measure_arm: Callable[[str], dict[str, Any]]
) -> dict[str, list[dict[str, Any]]]:
    """Measurements of every arm, round by round."""
    found: dict[str, list[dict[str, Any]]] = {arm: [] for arm in arms}
    for i in range(rounds):
        for arm in arms:
            began = time.perf_counter()
            found[arm].append(measure_arm(arm))
            print(f"round {i + 1}/{rounds} {arm} {time.perf_counter() - began:.0f} s", file=sys.stderr)
    return found


def write_results(
    name: str, arguments: argparse.Namespace, setting: Setting, found: Mapping[str, Any], text: str
) -> None:
    """NAME.json and NAME.md in --out. found: what the record holds besides the run's own; text: of the latter."""
    arguments.out.mkdir(parents=True, exist_ok=True)
    record = run_record(
        config=setting,
        command=["python", f"bench/studies/{name}.py", *sys.argv[1:]],
        backends=registry.report(torch.device(arguments.device).type, getattr(torch, arguments.dtype)),
        device=arguments.device,
    )
    write_json_atomic(arguments.out / f"{name}.json", {**record, **found})
    (arguments.out / f"{name}.md").write_text(text)
