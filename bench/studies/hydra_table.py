#!/usr/bin/env python
"""The Hydra paper's table: five methods, memory at equal batch and latency per sample at equal memory.

    python bench/studies/hydra_table.py  # a small Llama on a CPU, bench/results/cpu/hydra_table/
    python bench/studies/hydra_table.py --shape llama-7b --dtype bfloat16 --lora-r 128 --prompt 400 --answer 400
        --cap 80GB  # on a GPU, bench/results/<gpu>/hydra_table/

Every method runs the engine's own step on random weights, once per process:

    generation   sampling an answer of --answer tokens for each of `batch` prompts of --prompt tokens
    inference    one scoring pass of all roles over them
    update       --epochs PPO epochs over them, one minibatch each, micro-batches of `micro` sequences, AdamW

Equal batch: batch = micro = --batch for every method; state and the peak of each phase, measured above a process that
has run a small model. Equal memory: batch and micro are the largest that `rlhf-engine plan` says fit --cap (at most
--limit); seconds per sample by phase, and the measured peak beside the cap. On a GPU the allocator refuses memory
beyond the cap; on a CPU the peak is only compared with it.

The paper (arXiv 2309.00754, table 1, Llama-7B): LoRA-PPO 18.75 s per sample in 68.0 GB, J-Hydra 5.01 in 67.9, Hydra
6.47 in 71.1: 65 % less at equal memory, because what sharing saves goes into a larger batch.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rlhf_bench.memory import peak_of_process, peak_on_cuda, set_up_malloc
from rlhf_bench.plain import plain_model
from transformers import LlamaConfig, PreTrainedConfig, PreTrainedModel

from rlhf_engine.algorithms.base import Experience
from rlhf_engine.algorithms.ppo import Ppo, token_kl
from rlhf_engine.config.algorithm import AlgorithmOptions
from rlhf_engine.config.parser import parse_size
from rlhf_engine.devices import DTYPES
from rlhf_engine.hydra import METHODS, HydraModel, SlotConfig, hydra_roles
from rlhf_engine.hydra.model import default_token_budget
from rlhf_engine.hydra.optimizer import RoleOptimizer
from rlhf_engine.hydra.roles import needs_lm_head
from rlhf_engine.rollout import Rollout, SamplingConfig, generate
from rlhf_engine.runs.metrics import git_commit, write_json_atomic
from rlhf_engine.tools.memory import Formula, Setting, find_config
from rlhf_engine.training.update import Schedule, alone, update

RESULTS = "hydra_table.json"
PHASES = ("generation", "inference", "update")
PAPER = {"lora_ppo": (68.0, 18.75), "j_hydra_ppo": (67.9, 5.01), "hydra_ppo": (71.1, 6.47)}
_ROLES = ("actor", "reference", "critic", "reward")


def shape(arguments: argparse.Namespace) -> PreTrainedConfig:
    """The config of --shape, or the small Llama that a CPU can run in every method."""
    if arguments.shape != "small":
        return find_config(arguments.shape)
    return LlamaConfig(
        hidden_size=512,
        intermediate_size=1344,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=8,
        vocab_size=8192,
        max_position_embeddings=1024,
    )


def plain(arguments: argparse.Namespace, lm_head: bool, device: torch.device) -> PreTrainedModel:
    """One backbone with random weights, without an LM head where no role needs it."""
    torch.manual_seed(0)
    with device:
        return plain_model(shape(arguments), DTYPES[arguments.dtype], lm_head)


class Method:
    """A method's model, optimizer and one step's parts."""

    def __init__(self, arguments: argparse.Namespace, batch: int, micro: int) -> None:
        self.arguments, self.batch, self.micro = arguments, batch, micro
        self.device = torch.device(arguments.device)
        roles = METHODS[arguments.method]()
        names = dict.fromkeys(role.backbone for role in roles.values())
        made = {name: plain(arguments, needs_lm_head(roles, name), self.device) for name in names}
        slots = {r.slot: SlotConfig(r=arguments.lora_r) for r in roles.values() if r.slot is not None}
        self.model = HydraModel.from_pretrained(
            made.pop("base"),
            roles=roles,
            slots=slots,
            backbones=made,
            device=self.device,
            token_budget=arguments.token_budget,
        ).eval()
        if arguments.gradient_checkpointing:
            for name in names:
                self.model.backbone(name).enable_gradient_checkpointing()
        self.optimizer = RoleOptimizer(self.model, {"actor": 1e-5, "critic": 1e-5})
        self.algorithm = Ppo(AlgorithmOptions(beta=0.02))
        generator = torch.Generator().manual_seed(1)
        vocabulary = self.model.backbone().lm_head.weight.shape[0]
        self.prompts = torch.randint(3, vocabulary, (batch, arguments.prompt), generator=generator).tolist()

    def generation(self) -> Rollout:
        """Answers of exactly --answer tokens: nothing ends them."""
        sampling = SamplingConfig(max_completion_length=self.arguments.answer, eos_token_ids=())
        return generate(self.model, self.prompts, sampling)

    def inference(self, rollout: Rollout) -> Experience:
        """One scoring pass of all roles, and what the update learns from."""
        batch = rollout.batch
        scores = self.model.score(batch, _ROLES)
        assert scores.logprobs_M is not None
        assert scores.ref_logprobs_M is not None
        assert scores.values_M is not None
        assert scores.rewards_N is not None
        experience = Experience(
            batch=batch,
            groups_N=torch.arange(batch.n_sequences, device=self.device),
            scores_N=scores.rewards_N,
            old_logprobs_M=scores.logprobs_M,
            kl_M=token_kl(scores.logprobs_M, scores.ref_logprobs_M, "k1"),
            values_M=scores.values_M,
        )
        learned, _ = self.algorithm.learn_from(experience)
        assert learned is not None
        return learned

    def update(self, experience: Experience) -> None:
        """All epochs; every minibatch is the whole batch."""
        schedule = Schedule(num_epochs=self.arguments.epochs, num_mini_batches=1, micro_batch_size=self.micro)
        found = alone(update(self.model.train(), self.algorithm, experience, schedule, self.optimizer.step, seed=0))
        self.model.eval()
        if found["micro_batch_size"] < self.micro:
            raise MemoryError(f"micro: expected {self.micro} sequences to fit, {found['micro_batch_size']} did")


# ---- in a process of its own -----------------------------------------------------------------------------------------


def held_bytes(device: torch.device) -> int:
    """Bytes that this process holds now: the allocator's blocks on a GPU, resident memory on a CPU."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    statm = Path("/proc/self/statm").read_text().split()
    return int(statm[1]) * 4096


def measure_memory(arguments: argparse.Namespace) -> dict[str, Any]:
    """State and the peak of each phase, bytes above the process before the model was made."""
    device = torch.device(arguments.device)
    if device.type == "cpu":
        set_up_malloc()
    peak: Callable[[Callable[[], object]], int] = peak_on_cuda if device.type == "cuda" else peak_of_process
    # what a process gets once: code, thread stacks, what libraries keep
    few = argparse.Namespace(**{**vars(arguments), "shape": "small", "prompt": 4, "answer": 2})
    warm = Method(few, 2, 1)
    warm.update(warm.inference(warm.generation()))
    del warm
    gc.collect()
    peak(lambda: None)  # gives a CPU's free memory back
    before = held_bytes(device)
    method = Method(arguments, arguments.rows, arguments.micro)
    rollout = method.generation()
    experience = method.inference(rollout)
    method.update(experience)  # optimizer state, and workspaces that stay
    peak(lambda: None)
    state = held_bytes(device) - before
    return {
        "state_bytes": state,
        "peak_bytes": {
            "generation": state + peak(method.generation),
            "inference": state + peak(lambda: method.inference(rollout)),
            "update": state + peak(lambda: method.update(experience)),
        },
        "parameters": method.model.held_parameters(),
    }


def measure_time(arguments: argparse.Namespace) -> dict[str, Any]:
    """Seconds per sample of each phase, medians over rounds after one that warms up; the whole process's peak."""
    device = torch.device(arguments.device)
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, parse_size("cap", arguments.cap) / total), device)
    method = Method(arguments, arguments.rows, arguments.micro)
    seconds: dict[str, list[float]] = {phase: [] for phase in PHASES}

    def timed(phase: str, call: Callable[[], Any]) -> Any:
        began = time.perf_counter()
        result = call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds[phase].append((time.perf_counter() - began) / arguments.rows)
        return result

    for _ in range(arguments.rounds + 1):
        rollout = timed("generation", method.generation)
        experience = timed("inference", lambda rollout=rollout: method.inference(rollout))
        timed("update", lambda experience=experience: method.update(experience))
    medians = {phase: statistics.median(values[1:]) for phase, values in seconds.items()}
    return {"seconds_per_sample": medians, "all_seconds": seconds}


def in_worker(kind: str, argv: list[str], **flags: object) -> dict[str, Any]:
    """Run this file in a process of its own; its result."""
    extra = [text for name, value in flags.items() for text in (f"--{name}", str(value))]
    command = [sys.executable, __file__, *argv, "--worker", kind, *extra]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


# ---- the table -------------------------------------------------------------------------------------------------------


def plan(arguments: argparse.Namespace, method: str) -> dict[str, Any]:
    """Planned rows and sequences of a micro-batch that fit the cap (0: none), and peaks at --batch."""
    config = shape(arguments)
    device = torch.device(arguments.device)
    setting = Setting(
        config=config,
        dtype=DTYPES[arguments.dtype],
        adapter_dtype=torch.float32,
        device_type=device.type,
        slot=SlotConfig(r=arguments.lora_r),
        prompt_length=arguments.prompt,
        completion_length=arguments.answer,
        batch=arguments.batch,
        num_mini_batches=1,
        micro_batch=arguments.batch,
        token_budget=arguments.token_budget or default_token_budget(device, config.hidden_size),
        gradient_checkpointing=arguments.gradient_checkpointing,
    )
    formula = Formula(hydra_roles(method), setting)
    drawn, fits = formula.largest(parse_size("cap", arguments.cap))
    micro = min(fits, drawn, arguments.limit)
    rows = min(drawn, arguments.limit) // micro * micro if micro else 0
    peaks = {phase: formula.peak(phase) for phase in formula.phases}
    return {"rows": rows, "micro": micro, "predicted": {"state": formula.state, "peak": peaks}}


def fits_device(arguments: argparse.Namespace, planned: dict[str, Any]) -> bool:
    """Whether the comparison at equal batch fits what the device has, cap or not."""
    device = torch.device(arguments.device)
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
    else:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return max(planned["predicted"]["peak"].values()) < 0.9 * total


def table(records: dict[str, dict[str, Any]], arguments: argparse.Namespace) -> str:
    """Markdown: both halves of the comparison beside the paper's figures."""
    lora = records.get("lora_ppo")
    lines = [
        f"| method | state MB | of LoRA-PPO's | peak at batch {arguments.batch}: generation, inference, update MB | "
        f"batch in {arguments.cap}, at most {arguments.limit} | measured peak MB | s/sample | generation | inference | "
        "update | against LoRA-PPO |",
        "|---" * 11 + "|",
    ]
    for method, r in records.items():
        same, capped = r["equal_batch"], r["equal_memory"]
        state = peaks = share = seconds = split = change = measured = "–"
        if same is not None:
            state = f"{same['state_bytes'] / 1e6:,.0f}"
            peaks = ", ".join(f"{same['peak_bytes'][p] / 1e6:,.0f}" for p in PHASES)
            if lora is not None and lora["equal_batch"] is not None:
                share = f"{100 * same['state_bytes'] / lora['equal_batch']['state_bytes']:.0f} %"
        split = " | ".join("–" for _ in PHASES)
        if capped is not None:
            total = sum(capped["seconds_per_sample"].values())
            seconds = f"{total:.3f}"
            split = " | ".join(f"{capped['seconds_per_sample'][p]:.3f}" for p in PHASES)
            measured = f"{max(r['at_cap']['peak_bytes'].values()) / 1e6:,.0f}"
            if lora is not None and lora["equal_memory"] is not None:
                change = f"{100 * (total / sum(lora['equal_memory']['seconds_per_sample'].values()) - 1):+.0f} %"
        batch = f"{r['rows']} ({r['micro']})" if r["rows"] else "does not fit"
        lines.append(
            f"| {method} | {state} | {share} | {peaks} | {batch} | {measured} | {seconds} | {split} | {change} |"
        )
    return "\n".join(lines)


def plot(records: dict[str, dict[str, Any]], path: Path) -> None:
    """Memory at equal batch and seconds per sample at equal memory, stacked."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    names = [n for n in records if records[n]["equal_batch"] is not None]
    state = [records[n]["equal_batch"]["state_bytes"] / 1e6 for n in names]
    peak = [max(records[n]["equal_batch"]["peak_bytes"].values()) / 1e6 for n in names]
    left.bar(names, state, label="weights and training state")
    left.bar(names, [p - s for p, s in zip(peak, state, strict=True)], bottom=state, label="highest phase's rest")
    left.set_title("memory at equal batch, MB")
    names = [n for n in records if records[n]["equal_memory"] is not None]
    bottom = [0.0] * len(names)
    for phase in PHASES:
        values = [records[n]["equal_memory"]["seconds_per_sample"][phase] for n in names]
        right.bar(names, values, bottom=bottom, label=phase)
        bottom = [b + v for b, v in zip(bottom, values, strict=True)]
    right.set_title("seconds per sample at equal memory")
    for axes in (left, right):
        axes.tick_params(axis="x", rotation=20)
        axes.legend(fontsize=8)
    figure.savefig(path, dpi=130)


def parse(argv: list[str]) -> argparse.Namespace:
    """The flags of both the table and its workers."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", default="small", help="small, a preset of `rlhf-engine plan`, or a config's folder")
    parser.add_argument("--methods", nargs="+", choices=sorted(METHODS), default=list(METHODS))
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="float32")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--lora-r", type=int, default=16)
    parser.add_argument("--prompt", type=int, default=64, help="tokens per prompt")
    parser.add_argument("--answer", type=int, default=64, help="tokens per answer")
    parser.add_argument("--batch", type=int, default=8, help="sequences, where methods are compared at equal batch")
    parser.add_argument("--cap", default="1.6GB", help="memory, where methods are compared at equal memory")
    parser.add_argument("--limit", type=int, default=64, help="most sequences of a batch at equal memory")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--token-budget", type=int, default=None, help="tokens of all lanes in one backbone forward")
    parser.add_argument("--gradient-checkpointing", action="store_true")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=None)
    for name, kind in (("worker", str), ("method", str), ("rows", int), ("micro", int)):
        parser.add_argument(f"--{name}", type=kind, help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def earlier(path: Path, setting: dict[str, str]) -> dict[str, dict[str, Any]]:
    """Methods measured before in the same setting: a run of some methods adds to the table."""
    if not path.is_file():
        return {}
    found = json.loads(path.read_text())
    return dict(found["methods"]) if found["setting"] == setting else {}


def main() -> None:
    arguments = parse(sys.argv[1:])
    torch.set_num_threads(arguments.threads)
    if arguments.worker:
        print(json.dumps({"memory": measure_memory, "time": measure_time}[arguments.worker](arguments)))
        return
    argv = sys.argv[1:]
    device = torch.device(arguments.device)
    where = torch.cuda.get_device_name(device).replace(" ", "-") if device.type == "cuda" else "cpu"
    out = arguments.out or Path("bench/results") / where / "hydra_table"
    out.mkdir(parents=True, exist_ok=True)
    internal = ("out", "worker", "method", "rows", "micro", "methods")
    setting = {k: str(v) for k, v in vars(arguments).items() if k not in internal}
    records = earlier(out / RESULTS, setting)
    for method in arguments.methods:
        planned = plan(arguments, method)
        print(f"{method}: {planned['rows']} rows in micro-batches of {planned['micro']}", file=sys.stderr)
        one = {"method": method, "rows": arguments.batch, "micro": arguments.batch}
        sizes = {"method": method, "rows": planned["rows"], "micro": planned["micro"]}
        records[method] = {
            **planned,
            "equal_batch": in_worker("memory", argv, **one) if fits_device(arguments, planned) else None,
            "at_cap": in_worker("memory", argv, **sizes) if planned["rows"] else None,
            "equal_memory": in_worker("time", argv, **sizes) if planned["rows"] else None,
        }
        record = {
            "methods": {name: records[name] for name in METHODS if name in records},
            "setting": setting,
            "paper": PAPER,
            "git_commit": git_commit(Path(__file__)),
            "torch": torch.__version__,
            "command": f"python bench/studies/hydra_table.py {' '.join(argv)}".strip(),
        }
        write_json_atomic(out / RESULTS, record)
    records = record["methods"]
    text = table(records, arguments)
    (out / "hydra_table.md").write_text(f"# {record['command']}\n\n{text}\n")
    plot(records, out / "hydra_table.png")
    print(text)
    print("paper, Llama-7B (GB, s/sample):", PAPER)


if __name__ == "__main__":
    main()
