"""Predicted against measured memory: every phase of every method with the real code, a process per method.

CPU: peak resident memory of the phase in the second step less the resident memory before the model was built (see
`bench/rlhf_bench/memory.py` for what that counts); packed copies of weights are kept from the second micro-batch on.
CUDA: `torch.cuda.max_memory_allocated`. The models have random weights. Exact mode is on where a run begins in it.

    python bench/studies/plan_check.py [--shape llama …] [--method hydra_ppo …] [--out bench/results/plan]
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import importlib
import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_args

import torch
import transformers
from rlhf_bench.memory import _status, set_up_malloc
from rlhf_bench.plain import plain_model
from rlhf_kernels.runtime import native, registry
from transformers import AutoConfig

from rlhf_engine.algorithms.base import TokenValues
from rlhf_engine.algorithms.ppo import Ppo
from rlhf_engine.config.algorithm import AlgorithmOptions
from rlhf_engine.config.run import Optim
from rlhf_engine.devices import reset_peak_memory
from rlhf_engine.hydra import METHODS, HydraModel, LmLoss, PackedBatch, SlotConfig
from rlhf_engine.hydra.backbone import Backbone
from rlhf_engine.hydra.optimizer import RoleOptimizer, gradient_dtype
from rlhf_engine.hydra.roles import base_is_trained, needs_lm_head
from rlhf_engine.rollout import SamplingConfig, exactness, generate
from rlhf_engine.runs.metrics import git_commit
from rlhf_engine.tools.memory import FULL_SFT, PHASES, Formula, Setting, roles_of
from rlhf_engine.training.update import Schedule, alone, update

_COMMON = {"num_attention_heads": 8, "max_position_embeddings": 1024}
_WIDE = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 8, **_COMMON}
CONFIGS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "llama": (
        "llama",
        {**_WIDE, "num_key_value_heads": 4, "vocab_size": 16000, "tie_word_embeddings": False},
        {"dtype": torch.float32, "prompt_length": 120, "completion_length": 8, "batch": 12, "micro_batch": 6},
    ),
    "gpt2": (
        "gpt2",
        {"n_embd": 384, "n_layer": 10, "n_head": 6, "vocab_size": 8000, "n_positions": 1024},
        {"dtype": torch.float32, "prompt_length": 190, "completion_length": 10, "batch": 16, "micro_batch": 8},
    ),
    "qwen3": (
        "qwen3",
        {**_WIDE, "num_key_value_heads": 4, "head_dim": 64, "vocab_size": 24000, "tie_word_embeddings": True},
        {"dtype": torch.bfloat16, "prompt_length": 240, "completion_length": 16, "batch": 16, "micro_batch": 8},
    ),
}
"""name → (architecture, its shape, what the setting has)."""


def setting_of(shape: str, device_type: str, **changes: Any) -> Setting:
    """The setting of a named shape."""
    model_type, arguments, options = CONFIGS[shape]
    setting = Setting(
        config=AutoConfig.for_model(model_type, **arguments),
        adapter_dtype=torch.float32,
        device_type=device_type,
        slot=SlotConfig(r=16),
        num_mini_batches=1,
        token_budget=16384,
        gradient_checkpointing=False,
        **options,
    )
    return dataclasses.replace(setting, **changes)


def build_model(method: str, setting: Setting) -> HydraModel:
    """The method's model as `training.build` makes it, with random weights."""
    roles = roles_of(method)
    model = HydraModel(
        {
            name: Backbone(
                plain_model(setting.config, setting.dtype, needs_lm_head(roles, name)),
                frozen=not base_is_trained(roles, name),
            )
            for name in dict.fromkeys(role.backbone for role in roles.values())
        },
        roles=roles,
        slots={role.slot: setting.slot for role in roles.values() if role.slot is not None},
        token_budget=setting.token_budget,
        adapter_dtype=setting.adapter_dtype,
    )
    for p in model.parameters():
        if p.requires_grad:
            p.grad_dtype = gradient_dtype(setting.optim, p.dtype)
    model.shares_prompts = setting.num_generations > 1
    if setting.gradient_checkpointing:
        for name in {role.backbone for role in roles.values() if role.trainable}:
            model.backbone(name).enable_gradient_checkpointing()
    return model.eval()


def run_phase(phase: str, model: HydraModel, optimizer: RoleOptimizer, s: Setting) -> None:
    """One phase, as the training loop runs it. Answers have their full length, since no token ends one."""
    different = [i // s.num_generations for i in range(s.batch)]  # equal ones are kept once
    prompts = [[3 + i % 7] * (s.prompt_length - 1) + [i] for i in different]
    if phase == "generation":
        sampling = SamplingConfig(max_completion_length=s.completion_length, eos_token_ids=())
        generate(model, prompts, sampling)
        return
    batch = PackedBatch.from_lists(prompts, [[5] * s.completion_length] * s.batch, device=model.device)
    if phase == "inference":
        model.score(batch)
        return
    model.train()
    if phase == "update" and "sft" in model.roles:
        for part in range(0, s.batch, s.micro_batch):
            rows = batch.select(range(part, min(s.batch, part + s.micro_batch)))
            (loss,) = model(rows, (LmLoss(role="sft", denom=float(batch.n_completion_tokens)),))
            loss.backward()
            del loss
        optimizer.step()
        return
    per_token = torch.full((batch.n_completion_tokens,), 0.1, device=model.device)
    answers = TokenValues(
        batch=batch,
        old_logprobs_M=-per_token,
        values_M=per_token,
        advantages_M=per_token,
        returns_M=per_token,
    )
    schedule = Schedule(num_epochs=1, num_mini_batches=s.num_mini_batches, micro_batch_size=s.micro_batch)
    alone(update(model, Ppo(AlgorithmOptions()), answers, schedule, optimizer.step, seed=0))


def measure(method: str, shape: str, device: str, options: dict[str, Any]) -> dict[str, int]:
    """Peak bytes by phase above what was there before the model. Runs in a process that has not computed before."""
    set_up_malloc()
    torch.manual_seed(0)
    setting = setting_of(shape, torch.device(device).type, **options)
    small = dataclasses.replace(setting, batch=2, micro_batch=1, prompt_length=4, completion_length=2)
    # what a process gets once: code, thread stacks, buffers of libraries
    layers = "n_layer" if "n_layer" in CONFIGS[shape][1] else "num_hidden_layers"
    config = type(setting.config)(**{**CONFIGS[shape][1], "vocab_size": 64, layers: 1})
    phases = ("update",) if method == FULL_SFT else PHASES
    with registry.use_exact(exactness.by_default(torch.device(device).type)):
        tiny = build_model(method, dataclasses.replace(small, config=config)).to(device)
        for phase in phases:
            run_phase(phase, tiny, optimizer_of(tiny, setting.optim), small)
        del tiny
        _trim()
        before = _status("VmRSS") if device == "cpu" else torch.cuda.memory_allocated()
        model = build_model(method, setting).to(device)
        optimizer = optimizer_of(model, setting.optim)
        for phase in phases:
            run_phase(phase, model, optimizer, setting)
        return {
            phase: _peak(lambda p=phase: run_phase(p, model, optimizer, setting), device) - before for phase in phases
        }


def optimizer_of(model: HydraModel, optim: Optim) -> RoleOptimizer:
    return RoleOptimizer(
        model, dict.fromkeys((n for n, role in model.roles.items() if role.trainable), 0.0), optim=optim
    )


def _peak(run: Callable[[], None], device: str) -> int:
    """Most bytes of the process during a call."""
    _trim()
    reset_peak_memory(device)
    run()
    return _status("VmHWM") if device == "cpu" else torch.cuda.max_memory_allocated()


def _trim() -> None:
    import ctypes

    gc.collect()
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)


def predict(method: str, shape: str, device: str, options: dict[str, Any]) -> dict[str, int]:
    """Predicted peaks by phase, and what is resident through all of them."""
    with registry.use_exact(exactness.by_default(torch.device(device).type)):
        formula = Formula(roles_of(method), setting_of(shape, torch.device(device).type, **options))
        return {"resident": formula.held("generation"), **{phase: formula.peak(phase) for phase in formula.phases}}


def in_child(function: Callable[..., Any], *arguments: Any) -> Any:
    """A function's result in a fork of this process, which has imported everything and computed nothing."""
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read_end)
        code = 1
        try:
            os.write(write_end, json.dumps(function(*arguments)).encode())
            code = 0
        finally:
            os._exit(code)
    os.close(write_end)
    with os.fdopen(read_end) as pipe:
        text = pipe.read()
    os.waitpid(child, 0)
    if not text:
        raise RuntimeError(f"{function.__name__} {arguments}: the process ended without a result")
    return json.loads(text)


def check(
    shapes: list[str],
    methods: list[str],
    device: str,
    options: dict[str, Any],
    known: dict[tuple[str, str], dict[str, int]],
) -> Iterator[dict[str, Any]]:
    """One row per shape, method and phase. known: what need not be measured again."""
    for shape in shapes:
        for method in methods:
            predicted = predict(method, shape, device, options)
            measured = known.get((shape, method)) or in_child(measure, method, shape, device, options)
            for phase, peak in measured.items():
                yield {
                    "shape": shape,
                    "method": method,
                    "phase": phase,
                    "resident_bytes": predicted["resident"],
                    "predicted_bytes": predicted[phase],
                    "measured_bytes": peak,
                    "error": predicted[phase] / peak - 1,
                }


def markdown(rows: list[dict[str, Any]]) -> str:
    """The rows as a table."""
    lines = [
        "| shape | method | phase | state MB | predicted MB | measured MB | error |",
        "|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {r['shape']} | {r['method']} | {r['phase']} | {r['resident_bytes'] / 1e6:.0f} | "
        f"{r['predicted_bytes'] / 1e6:.0f} | {r['measured_bytes'] / 1e6:.0f} | {100 * r['error']:+.1f} % |"
        for r in rows
    ]
    errors = sorted(abs(r["error"]) for r in rows)
    lines += [
        "",
        f"{len(rows)} rows: median |error| {100 * errors[len(errors) // 2]:.1f} %, largest {100 * errors[-1]:.1f} %.",
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure, predict, print, write."""
    transformers.logging.set_verbosity_error()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", nargs="*", default=list(CONFIGS), choices=list(CONFIGS))
    parser.add_argument("--method", nargs="*", default=[*METHODS, FULL_SFT], choices=[*METHODS, FULL_SFT])
    parser.add_argument("--optim", default="adamw", choices=get_args(Optim))
    parser.add_argument("--num_generations", type=int, default=1, help="answers per prompt")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--out", type=Path, help="folder for DEVICE.md and DEVICE.json")
    parser.add_argument("--again", type=Path, help="an earlier rows file: predict anew, keep what was measured")
    arguments = parser.parse_args()
    known: dict[tuple[str, str], dict[str, int]] = {}
    if arguments.again is not None:
        for row in json.loads(arguments.again.read_text())["rows"]:
            known.setdefault((row["shape"], row["method"]), {})[row["phase"]] = row["measured_bytes"]
    importlib.import_module("torch._dynamo")
    for model_type, _, _ in CONFIGS.values():  # what a child would import for itself
        importlib.import_module(f"transformers.models.{model_type}.modeling_{model_type}")
    rows = []
    options = {"optim": arguments.optim, "num_generations": arguments.num_generations}
    for row in check(arguments.shape, arguments.method, arguments.device, options, known):
        rows.append(row)
        print(markdown([row]).splitlines()[2], flush=True)
    print(markdown(rows))
    if arguments.out is not None:
        arguments.out.mkdir(parents=True, exist_ok=True)
        record = {
            "device": arguments.device,
            "isa": native.isa(),
            **options,
            "command": sys.argv,
            "git_commit": git_commit(Path(__file__)),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "threads": torch.get_num_threads(),
            "rows": rows,
        }
        (arguments.out / f"{arguments.device}.json").write_text(json.dumps(record, indent=1) + "\n")
        (arguments.out / f"{arguments.device}.md").write_text(markdown(rows))


if __name__ == "__main__":
    main()
