#!/usr/bin/env python
"""Predicted against measured seconds of a step on this CPU: three models that differ in kind, in fp32 and bf16.

    python bench/studies/plan_time.py --out bench/results/cpu/plan_time [--shape llama …] [--dtype float32 …]

A case measures this CPU's ceilings, runs a step that packs weights, and one step by the clock with the ceilings
measured again; the prediction stands on the second ceilings. Ceilings come from ops of fixed sizes alone, see
`rlhf_engine/planning/ceilings.py`. A step is that of `whole_step.py`: answers, scores of all roles, one epoch of
updates of Hydra-PPO. Writes cpu.json and cpu.md:

    measured, predicted   seconds by phase
    error                 of the predicted step, relative to the measured one
    core                  CPU seconds of this process per second and thread of the measured step: 1 on a quiet machine
    drift                 the second ceilings' rate of a linear at most rows over the first ceilings'
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from rlhf_kernels.runtime import native
from rlhf_kernels.runtime.cores import threads
from transformers import AutoConfig
from whole_step import Step

from rlhf_engine.devices import DTYPES
from rlhf_engine.hydra import SlotConfig
from rlhf_engine.hydra.model import default_token_budget
from rlhf_engine.planning.ceilings import measure_cpu
from rlhf_engine.planning.duration import DurationPlanner
from rlhf_engine.planning.machines import Machine
from rlhf_engine.planning.phases import Setting
from rlhf_engine.planning.time_report import by_phase
from rlhf_engine.runs.metrics import git_commit, write_json_atomic

_CONTEXT = {"max_position_embeddings": 512}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {
        "hidden_size": 512,
        "intermediate_size": 1408,
        "num_hidden_layers": 12,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "vocab_size": 16000,
        "tie_word_embeddings": False,
        **_CONTEXT,
    },
    "qwen3": {
        "hidden_size": 640,
        "intermediate_size": 1920,
        "num_hidden_layers": 10,
        "num_attention_heads": 10,
        "num_key_value_heads": 5,
        "head_dim": 64,
        "vocab_size": 24000,
        "tie_word_embeddings": True,
        **_CONTEXT,
    },
    "gpt_neox": {
        "hidden_size": 512,
        "intermediate_size": 2048,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "vocab_size": 16000,
        **_CONTEXT,
    },
    "tiny": {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "vocab_size": 64,
        **_CONTEXT,
    },
}
"""Shapes by name; the architecture is the name, and `tiny` a llama that tries the script out."""


_CLOCKS = {"wall": time.perf_counter, "process": time.process_time}


def run_case(shape: str, dtype: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure and predict one case; the row of the record."""
    config = AutoConfig.for_model("llama" if shape == "tiny" else shape, **CONFIGS[shape])
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        options = {"prompt": arguments.prompt, "answer": arguments.answer, "batch": arguments.batch}
        step = Step(
            argparse.Namespace(
                shape=folder, dtype=dtype, algorithm="ppo", micro_batch=arguments.micro_batch, device="cpu", **options
            ),
            torch.device("cpu"),
        )
        clock = _CLOCKS[arguments.clock]
        before = measure_cpu(DTYPES[dtype], torch.float32, 16, clock=clock)
        step.by_the_clock()
        machine = measure_cpu(DTYPES[dtype], torch.float32, 16, clock=clock)
        wall, own = time.perf_counter(), time.process_time()
        measured = {phase: _clocked(run, clock) for phase, run in step.phases.items()}
        core = (time.process_time() - own) / (time.perf_counter() - wall) / threads()
    del step
    setting = Setting(
        config=config,
        dtype=DTYPES[dtype],
        adapter_dtype=torch.float32,
        device_type="cpu",
        slot=SlotConfig(r=16),
        prompt_length=arguments.prompt,
        completion_length=arguments.answer,
        batch=arguments.batch,
        num_mini_batches=1,
        micro_batch=arguments.micro_batch,
        token_budget=default_token_budget(torch.device("cpu"), config.hidden_size),
        gradient_checkpointing=False,
    )
    duration = DurationPlanner("hydra_ppo", setting, machine).predict_seconds()
    return {
        "shape": shape,
        "dtype": dtype,
        "measured": measured,
        "predicted": by_phase(duration),
        "error": duration.seconds / sum(measured.values()) - 1,
        "core": core,
        "drift": _linear_rate(machine, DTYPES[dtype]) / _linear_rate(before, DTYPES[dtype]),
        "load": os.getloadavg()[0],
        "parts": duration.parts,
        "figures": [figure._asdict() for figure in machine.figures],
    }


def _clocked(run: Callable[[], object], clock: Callable[[], float]) -> float:
    began = clock()
    run()
    return clock() - began


def _linear_rate(machine: Machine, dtype: torch.dtype) -> float:
    kind = "linear" if ("linear", dtype) in machine.ceilings else "mm"
    return machine.ceilings[kind, dtype].flops[-1][1]


def markdown(rows: list[dict[str, Any]]) -> str:
    """The rows as a table."""
    phases = ("generation", "scoring", "update")
    heads = ["shape", "dtype", *phases, "step, predicted / measured s", "error", "core", "drift"]
    lines = [f"| {' | '.join(heads)} |", "|" + "---|" * len(heads)]
    for row in rows:
        cells = [row["shape"], row["dtype"]]
        cells += [f"{row['predicted'][phase]:.2f} / {row['measured'][phase]:.2f}" for phase in phases]
        cells += [f"{sum(row['predicted'].values()):.2f} / {sum(row['measured'].values()):.2f}"]
        cells += [f"{100 * row['error']:+.0f} %", f"{row['core']:.2f}", f"{row['drift']:.2f}"]
        lines.append(f"| {' | '.join(cells)} |")
    worst = max(abs(row["error"]) for row in rows)
    return "\n".join([*lines, "", f"{len(rows)} cases: largest |error| of a step {100 * worst:.0f} %."]) + "\n"


def main() -> None:
    """Measure, predict, print, write."""
    transformers.logging.set_verbosity_error()
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--shape", nargs="*", default=["llama", "qwen3", "gpt_neox"], choices=list(CONFIGS))
    parser.add_argument("--dtype", nargs="*", default=["float32", "bfloat16"], choices=["float32", "bfloat16"])
    parser.add_argument("--batch", type=int, default=8, help="prompts, one answer each")
    parser.add_argument("--prompt", type=int, default=32, help="tokens")
    parser.add_argument("--answer", type=int, default=24, help="tokens")
    parser.add_argument("--micro-batch", type=int, default=8, help="answers per forward and backward")
    parser.add_argument(
        "--clock",
        default="wall",
        choices=list(_CLOCKS),
        help="process: CPU seconds of this process in place of those on the wall, where others use the machine; one "
        "thread only",
    )
    parser.add_argument("--out", type=Path, help="folder for cpu.md and cpu.json")
    arguments = parser.parse_args()
    if arguments.clock == "process" and threads() > 1:
        parser.error(f"--clock process: expected one thread (OMP_NUM_THREADS=1), got {threads()}")
    rows = []
    for shape in arguments.shape:
        for dtype in arguments.dtype:
            rows.append(run_case(shape, dtype, arguments))
            print(markdown(rows[-1:]).splitlines()[2], flush=True)
    print(markdown(rows))
    if arguments.out is not None:
        arguments.out.mkdir(parents=True, exist_ok=True)
        record = {
            "command": f"python bench/studies/plan_time.py {' '.join(sys.argv[1:])}".strip(),
            "setting": {key: value for key, value in vars(arguments).items() if key != "out"},
            "configs": {shape: CONFIGS[shape] for shape in arguments.shape},
            "git_commit": git_commit(Path(__file__)),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "isa": native.isa(),
            "threads": threads(),
            "rows": rows,
        }
        write_json_atomic(arguments.out / "cpu.json", record)
        (arguments.out / "cpu.md").write_text(markdown(rows))


if __name__ == "__main__":
    main()
