#!/usr/bin/env python
"""One step of PPO or GRPO on a model with random weights: where the seconds go, and how fast answers are drawn.

    python bench/studies/whole_step.py [--shape llama-8b] [--algorithm grpo] [--batch 64 --prompt 512 --answer 512]
        [--out DIR]

A step is what the training loop computes: answers of full length, scores of all roles, one epoch of updates. It runs
once to compile and capture, once by the clock, and once, with short answers, under torch's profiler. Beside it
`transformers.generate` draws as many tokens for the same prompts. Writes SHAPE-ALGORITHM.json and .png. The file is
there after the second run and grows with what follows; what is not measured yet is null:

    seconds              by phase, of the step by the clock
    first_seconds        by phase, of the step that compiles and captures
    capture_seconds      of CUDA graphs in that step; null without a GPU
    launches_per_layer   kernels and graphs launched by phase, over the number of layers; null without a GPU
    kernels              the twenty with most seconds, by phase: on the GPU, or of torch's operators on a CPU
    profiled_tokens      of each answer in these two: the profiler takes minutes over long ones
    peak_bytes           of the step by the clock; null without a GPU
    tokens_per_second    of the rollout, and of transformers.generate
"""

from __future__ import annotations

import argparse
import gc
import platform
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from rlhf_bench.plain import plain_model
from torch.profiler import ProfilerActivity, profile
from transformers import PreTrainedModel

from rlhf_engine.algorithms.base import Algorithm, TokenValues
from rlhf_engine.algorithms.grpo import Grpo
from rlhf_engine.algorithms.ppo import Ppo
from rlhf_engine.config.algorithm import AlgorithmOptions
from rlhf_engine.devices import DTYPES
from rlhf_engine.errors import ConfigError
from rlhf_engine.hydra import HydraModel, PackedBatch, SlotConfig, hydra_roles
from rlhf_engine.planning.formula import find_config
from rlhf_engine.policy.optimizer import RoleOptimizer
from rlhf_engine.rollout import SamplingConfig, generate
from rlhf_engine.rollout.steps import graph as graph_step
from rlhf_engine.runs.metrics import git_commit, write_json_atomic
from rlhf_engine.training.update import Schedule, update

ROLES = {"ppo": ("actor", "reference", "critic", "reward"), "grpo": ("actor", "reference")}
LAUNCHES = ("cudaLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernel", "cuLaunchKernelEx", "cudaGraphLaunch")
KERNELS = 20
PROFILED_TOKENS = 32


def make_plain(arguments: argparse.Namespace, device: torch.device) -> PreTrainedModel:
    """Make a model with random weights where it will run: on a CPU alone 8 B numbers take minutes."""
    torch.manual_seed(0)
    with device:
        return plain_model(find_config(arguments.shape), DTYPES[arguments.dtype], lm_head=True).eval()


def make_prompts(arguments: argparse.Namespace) -> torch.Tensor:
    """Make random prompts [batch, prompt], the same for every call."""
    vocab = find_config(arguments.shape).get_text_config().vocab_size
    size = (arguments.batch, arguments.prompt)
    return torch.randint(3, vocab, size, generator=torch.Generator().manual_seed(0))


class Step:
    """The three phases of one step; each leaves what the next one reads."""

    def __init__(self, arguments: argparse.Namespace, device: torch.device) -> None:
        self._arguments, self._device = arguments, device
        roles = {name: role for name, role in hydra_roles().items() if name in ROLES[arguments.algorithm]}
        slots = {role.slot: SlotConfig(r=16) for role in roles.values() if role.slot is not None}
        plain = make_plain(arguments, device)
        self.model = HydraModel.from_pretrained(plain, roles=roles, slots=slots, device=device)
        trained = [name for name, role in roles.items() if role.trainable]
        self._optimizer = RoleOptimizer(self.model, dict.fromkeys(trained, 1e-5))
        self._prompts: list[list[int]] = make_prompts(arguments).tolist()
        self._batch: PackedBatch | None = None
        self._algorithm: Algorithm = Ppo(AlgorithmOptions())
        if arguments.algorithm == "grpo":
            options = AlgorithmOptions(algorithm="grpo", loss_type="dapo", beta=0.04)
            self._algorithm = Grpo(options, max_completion_length=arguments.answer)
        self._answers: TokenValues | None = None
        self.phases: dict[str, Callable[[], None]] = {
            "generation": self._generation,
            "scoring": self._scoring,
            "update": self._update,
        }

    def _generation(self, tokens: int | None = None) -> None:
        sampling = SamplingConfig(max_completion_length=tokens or self._arguments.answer, eos_token_ids=())
        self.model.eval()
        self._batch = generate(self.model, self._prompts, sampling).batch

    def _scoring(self) -> None:
        assert self._batch is not None
        found = self.model.score(self._batch, ROLES[self._arguments.algorithm])
        assert found.logprobs_M is not None
        assert found.ref_logprobs_M is not None
        sign_M = (torch.arange(len(found.logprobs_M), device=self._device) % 2 * 2 - 1).float()
        values_M = found.values_M
        self._answers = TokenValues(
            batch=self._batch,
            old_logprobs_M=found.logprobs_M,
            ref_logprobs_M=found.ref_logprobs_M,
            values_M=values_M,
            advantages_M=sign_M,
            returns_M=None if values_M is None else values_M + sign_M,
        )

    def _update(self) -> None:
        assert self._answers is not None
        self.model.train()
        schedule = Schedule(num_epochs=1, num_mini_batches=1, micro_batch_size=self._arguments.micro_batch)
        update(self.model, self._algorithm, self._answers, schedule, self._optimizer.step, seed=0)

    def by_the_clock(self) -> dict[str, float]:
        """Seconds of each phase."""
        return {phase: clocked(run, self._device) for phase, run in self.phases.items()}

    def profiled(self) -> tuple[dict[str, float] | None, list[dict[str, Any]]]:
        """Launches per layer by phase, and what took most seconds."""
        on_gpu = self._device.type == "cuda"
        layers = find_config(self._arguments.shape).get_text_config().num_hidden_layers
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
        launches, kernels = {}, []
        shorter = partial(self._generation, min(self._arguments.answer, PROFILED_TOKENS))
        for phase, run in (self.phases | {"generation": shorter}).items():
            began = time.perf_counter()
            with profile(activities=activities) as found:
                clocked(run, self._device)
            ran = time.perf_counter()
            events = found.key_averages()
            print(f"profile of {phase}: {ran - began:.1f} s, read in {time.perf_counter() - ran:.1f} s", flush=True)
            launches[phase] = sum(event.count for event in events if event.key in LAUNCHES) / layers
            for event in events:
                micros = event.self_device_time_total if on_gpu else event.self_cpu_time_total
                if on_gpu and event.device_type != torch.autograd.DeviceType.CUDA:
                    continue  # an operator: its kernels have rows of their own
                kernels.append({"name": event.key, "phase": phase, "calls": event.count, "seconds": micros / 1e6})
        kernels.sort(key=lambda row: -row["seconds"])
        return launches if on_gpu else None, kernels[:KERNELS]


def clocked(run: Callable[[], Any], device: torch.device) -> float:
    """Seconds of a call, with everything that it queued."""
    began = time.perf_counter()
    run()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - began


def timed_captures(device: torch.device) -> list[float]:
    """Seconds of every capture of a CUDA graph from now on."""
    seconds: list[float] = []
    capture = graph_step.CudaCapture.__call__

    def timed(self: graph_step.CudaCapture, step: Any) -> Any:
        found: list[Any] = []
        seconds.append(clocked(lambda: found.append(capture(self, step)), device))
        return found[0]

    graph_step.CudaCapture.__call__ = timed  # type: ignore[method-assign]
    return seconds


def generate_with_transformers(arguments: argparse.Namespace, device: torch.device) -> float:
    """Seconds in which `transformers.generate` draws the answers, after a call that draws a few tokens."""
    model = make_plain(arguments, device)
    prompts = make_prompts(arguments).to(device)

    def draw(tokens: int) -> None:
        options = {"do_sample": True, "top_k": 0, "max_new_tokens": tokens, "min_new_tokens": tokens, "pad_token_id": 0}
        model.generate(prompts, attention_mask=torch.ones_like(prompts), **options)  # type: ignore[operator]

    draw(min(8, arguments.answer))
    return clocked(lambda: draw(arguments.answer), device)


def plot(record: dict[str, Any], path: Path) -> None:
    """Seconds by phase and by kernel."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(13, 5), width_ratios=(1, 2))
    left.bar(list(record["seconds"]), list(record["seconds"].values()))
    left.set_ylabel("seconds")
    left.set_title(f"{record['shape']}, {record['algorithm']}: {sum(record['seconds'].values()):.2f} s a step")
    kernels = record["kernels"][::-1]
    right.barh(range(len(kernels)), [row["seconds"] for row in kernels])
    right.set_yticks(range(len(kernels)), [f"{row['phase']}: {row['name'][:60]}" for row in kernels], fontsize=7)
    right.set_xlabel("seconds under the profiler")
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Run the steps, `transformers.generate` and the profiler; return the record that the module's docstring describes.

    The record is written to its file after each of the three.
    """
    device = torch.device(arguments.device)
    on_gpu = device.type == "cuda"
    captures = timed_captures(device)
    step = Step(arguments, device)
    first = step.by_the_clock()
    in_captures = sum(captures)
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(device)
    seconds = step.by_the_clock()
    print(f"by the clock: {seconds}; the first time: {first}", flush=True)
    tokens = arguments.batch * arguments.answer
    speeds: dict[str, float | None] = {"rollout": tokens / seconds["generation"], "transformers.generate": None}
    record = {
        "shape": Path(arguments.shape).name,
        "algorithm": arguments.algorithm,
        "device": torch.cuda.get_device_name(device) if on_gpu else platform.processor() or platform.machine(),
        "seconds": seconds,
        "first_seconds": first,
        "capture_seconds": in_captures if on_gpu else None,
        "launches_per_layer": None,
        "kernels": None,
        "profiled_tokens": min(arguments.answer, PROFILED_TOKENS),
        "peak_bytes": torch.cuda.max_memory_allocated(device) if on_gpu else None,
        "tokens_per_second": speeds,
        "setting": {k: v for k, v in vars(arguments).items() if k != "out"},
        "git_commit": git_commit(Path(__file__)),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "command": f"python bench/studies/whole_step.py {' '.join(sys.argv[1:])}".strip(),
    }
    arguments.out.mkdir(parents=True, exist_ok=True)
    path = arguments.out / f"{record['shape']}-{record['algorithm']}.json"
    write_json_atomic(path, record)
    record["launches_per_layer"], record["kernels"] = step.profiled()
    write_json_atomic(path, record)
    del step
    gc.collect()
    speeds["transformers.generate"] = tokens / generate_with_transformers(arguments, device)
    write_json_atomic(path, record)
    return record


def main(words: Sequence[str] | None = None) -> None:
    """Measure, print, write. words: of the command line; None: this process's."""
    transformers.logging.set_verbosity_error()
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--shape", default="llama-3.2-1b", help="a preset of `rlhf-engine plan`, or a folder's config.json"
    )
    parser.add_argument("--algorithm", choices=list(ROLES), default="ppo")
    parser.add_argument("--batch", type=int, default=64, help="prompts, one answer each")
    parser.add_argument("--prompt", type=int, default=512, help="tokens")
    parser.add_argument("--answer", type=int, default=512, help="tokens")
    parser.add_argument("--micro-batch", type=int, default=8, help="answers per forward and backward")
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="bfloat16")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, default=Path("runs/whole_step"))
    arguments = parser.parse_args(words)
    try:
        find_config(arguments.shape)
    except ConfigError as error:
        parser.error(str(error))
    record = measure(arguments)
    name = f"{record['shape']}-{record['algorithm']}"
    plot(record, arguments.out / f"{name}.png")
    print(f"{name}: {sum(record['seconds'].values()):.2f} s a step")
    for phase, seconds in record["seconds"].items():
        print(f"  {phase:12} {seconds:8.3f} s, the first time {record['first_seconds'][phase]:.3f} s")
    for who, speed in record["tokens_per_second"].items():
        print(f"  {who:22} {speed:10.0f} tokens/s")
    for row in record["kernels"][:5]:
        print(f"  {row['seconds']:8.3f} s {row['phase']}: {row['name']}")


if __name__ == "__main__":
    main()
