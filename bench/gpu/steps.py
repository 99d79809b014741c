#!/usr/bin/env python
"""Calls that `measure.py` runs in processes of their own, with the packages of the tree that PYTHONPATH names.

    python bench/gpu/steps.py FILE ABOUT CALL...

Each CALL is a function of this file with its words, and with `WAYS` that are on meanwhile: "decode 1b 64 + rounded".
What it finds is appended to FILE as JSON lines, with the keys of ABOUT before it. Models have random weights. With the
device `rehearsal` they are tiny.
"""

from __future__ import annotations

import contextlib
import gc
import importlib.metadata
import json
import re
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from rlhf_kernels import HeadLora, HeadLoras, linear_logprob, sample
from rlhf_kernels.decode_attention import triton as attention
from rlhf_kernels.runtime import cuda_native, native, registry
from rlhf_kernels.vocab import runs
from torch.profiler import ProfilerActivity, profile
from transformers import AutoConfig, AutoModelForCausalLM

from rlhf_engine.algorithms.base import Algorithm, TokenValues
from rlhf_engine.algorithms.grpo import Grpo
from rlhf_engine.algorithms.ppo import Ppo
from rlhf_engine.config.algorithm import AlgorithmOptions
from rlhf_engine.hydra import HydraModel, PackedBatch, PolicyLoss, SlotConfig, ValueLoss, hydra_roles
from rlhf_engine.hydra.optimizer import RoleOptimizer
from rlhf_engine.rollout import EngineOptions, SamplingConfig, generate
from rlhf_engine.training.update import Schedule, alone, update

PACKAGES = ("torch", "triton", "transformers", "peft", "trl", "liger-kernel", "flash-attn")
SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
SHAPES = {  # Llama 3.2 1B, Llama 3.1 8B, and a rehearsal's: the sizes, and words in the vocabulary
    "1b": ((2048, 8192, 16, 32, 8), 128256),
    "8b": ((4096, 14336, 32, 32, 8), 128256),
    "tiny": ((24, 40, 2, 4, 2), 61),
}
ROLES = {"ppo": ("actor", "reference", "critic", "reward"), "grpo": ("actor", "reference")}
KERNELS = {  # part of a decoding step → its kernels' names
    "lora": r"shrink|expand|lora",
    "attention": r"attend|join|flash|fmha",
    "norms, rotary, swiglu": r"norm|rotate|swiglu|activation|heads_kernel|gate_kernel",
    "head and drawing": r"sample|finish|argmax",
    "products": r"gemm|gemv|cutlass|nvjet|xmma|splitK|cublas|product",
}
drawn_by: dict[str, Any] = {}  # of every rollout
WAYS: dict[str, Callable[[], Any]] = {  # taken by name alone; a tree before may lack some
    "exact": lambda: registry.use_exact(True),
    "native": lambda: mock.patch.dict(drawn_by, options=EngineOptions(decode_step="native")),
    "rounded": lambda: attention.use_variant(rounded=True),
    "whole": lambda: attention.use_variant(whole=True),
    "one_sweep": lambda: runs.use_variant(one_sweep=True),
    **{op: lambda op=op: registry.use_op_backend(op, "triton") for op in ("attention", "lora_group")},
}


def clocked(device: torch.device, run: Callable[[], Any]) -> float:
    """Seconds of a call, with everything that it queued."""
    began = time.perf_counter()
    run()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return round(time.perf_counter() - began, 5)


class Policy:
    """A model with random weights, and how long what it does takes."""

    def __init__(self, shape: str, roles: Sequence[str], rehearsed: bool) -> None:
        torch.manual_seed(0)
        self.device = torch.device("cpu" if rehearsed else "cuda")
        self.rows, self.prompt, self.answer, self.micro = (8, 8, 4, 2) if rehearsed else (64, 512, 512, 8)
        sizes, self.vocab = SHAPES["tiny" if rehearsed else shape]
        more = {"vocab_size": self.vocab, "tie_word_embeddings": shape == "1b", "max_position_embeddings": 8192}
        config = AutoConfig.for_model("llama", **dict(zip(SIZES, sizes, strict=True)), **more)
        self.layers = config.num_hidden_layers
        with self.device:
            dtype = torch.float32 if rehearsed else torch.bfloat16
            self.plain = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
        if roles:
            kept = {name: role for name, role in hydra_roles().items() if name in roles}
            slots = {role.slot: SlotConfig(r=16) for role in kept.values() if role.slot is not None}
            self.trained = [name for name, role in kept.items() if role.trainable]
            self.model = HydraModel.from_pretrained(self.plain, roles=kept, slots=slots, device=self.device)

    def prompts(self, rows: int, length: int, answers: int = 1) -> list[list[int]]:
        """Random prompts, each as often as it has answers."""
        drawn = torch.randint(3, self.vocab, (rows, length), generator=torch.Generator().manual_seed(0)).tolist()
        return [prompt for prompt in drawn for _ in range(answers)]

    def clocked(self, run: Callable[[], Any]) -> float:
        """Seconds of a call, with everything that it queued."""
        return clocked(self.device, run)

    def kernels(self, run: Callable[[], Any]) -> dict[str, tuple[int, float]]:
        """Kernels of a call by name: how often, and µs. Nothing on a CPU."""
        if self.device.type == "cpu":
            return {}
        with profile(activities=[ProfilerActivity.CUDA]) as found:
            self.clocked(run)
        total: dict[str, tuple[int, float]] = {}
        for event in found.events():
            if event.device_type == torch.autograd.DeviceType.CUDA:
                calls, us = total.get(event.name, (0, 0.0))
                total[event.name] = calls + 1, us + event.device_time_total
        return total

    def peaks(self) -> dict[str, float]:
        """GiB that were taken at most since the last call."""
        if self.device.type == "cpu":
            return {}
        found = {"peak_gib": torch.cuda.max_memory_allocated(), "reserved_gib": torch.cuda.max_memory_reserved()}
        torch.cuda.reset_peak_memory_stats()
        return {name: round(n / 2**30, 2) for name, n in found.items()}


def environment(say: Callable[..., None], rehearsed: bool) -> None:
    """Versions, and which backend serves which op."""
    versions = {found.name: found.version for found in importlib.metadata.distributions() if found.name in PACKAGES}
    backends = {op: row["auto"] for op, row in registry.report("cpu" if rehearsed else "cuda", torch.bfloat16).items()}
    say(versions=versions, backends=backends, cuda_kernels=cuda_native.missing(), native=native.missing())


def whole_step(say: Callable[..., None], rehearsed: bool, shape: str, name: str) -> None:
    """Seconds by phase of the step that compiles and captures and of those after it; answers of full length.

    name: ppo; grpo: eight answers to a prompt, which go through the model as by default, as copies and shared. `apart`:
    the log-probs of drawing and of scoring differ by that much at most.
    """
    policy = Policy(shape, ROLES[name], rehearsed)
    model, each = policy.model, 1 if name == "ppo" else 2 if rehearsed else 8
    algorithm: Algorithm = Ppo(AlgorithmOptions())
    if name == "grpo":
        options = AlgorithmOptions(algorithm="grpo", loss_type="dapo", beta=0.04)
        algorithm = Grpo(options, max_completion_length=policy.answer)
    optimizer = RoleOptimizer(model, dict.fromkeys(policy.trained, 1e-5))
    prompts = policy.prompts(policy.rows // each, policy.prompt, each)
    held: dict[str, Any] = {}

    def generation() -> None:
        model.eval()
        sampling = SamplingConfig(max_completion_length=policy.answer, eos_token_ids=())
        held["rollout"] = generate(model, prompts, sampling, **drawn_by)

    def scoring() -> None:
        found = model.score(held["rollout"].batch, ROLES[name])
        assert found.logprobs_M is not None
        held["apart"] = (found.logprobs_M - held["rollout"].logprobs_M).abs().max()
        sign_M = (torch.arange(len(found.logprobs_M), device=policy.device) % 2 * 2 - 1).float()
        held["answers"] = TokenValues(
            batch=held["rollout"].batch,
            old_logprobs_M=found.logprobs_M,
            ref_logprobs_M=found.ref_logprobs_M,
            values_M=found.values_M,
            advantages_M=sign_M,
            returns_M=None if found.values_M is None else found.values_M + sign_M,
        )

    def learning() -> None:
        model.train()
        schedule = Schedule(num_epochs=1, num_mini_batches=1, micro_batch_size=policy.micro)
        alone(update(model, algorithm, held["answers"], schedule, optimizer.step, seed=0))

    phases = {"generation": generation, "scoring": scoring, "update": learning}
    ways = {"default": None, "copied": False, "shared": True} if name == "grpo" else {"default": None}
    for way, shares in ways.items():
        model.shares_prompts = shares
        for run in range(4 if registry.is_exact() else 3):  # of exact mode 131,072 tokens
            try:
                seconds = {phase: policy.clocked(call) for phase, call in phases.items()}
            except RuntimeError as error:  # of this way: the next may run
                say(prompts=way, failed=str(error)[:300])
                break
            speed = round(policy.rows * policy.answer / seconds["generation"])
            more = {"step": round(sum(seconds.values()), 4), "apart": float(held["apart"]), **policy.peaks()}
            say(prompts=way, run=run, seconds=seconds, tokens_per_second=speed, **more)


def decode(say: Callable[..., None], rehearsed: bool, shape: str, rows: str, prompt: str = "720") -> None:
    """One decoding step, 48 tokens behind the prompt: ms by the clock, and µs of its kernels by part.

    Both are differences of two rollouts, so what a rollout does once falls out. The adapter is off in the reference.
    """
    policy = Policy(shape, ("actor", "reference"), rehearsed)
    short, long, context = (2, 4, 8) if rehearsed else (16, 80, int(prompt))
    prompts = policy.prompts(2 if rehearsed else int(rows), context)
    policy.model.eval()
    for role in ("actor", "reference"):

        def draw(tokens: int, role: str = role) -> None:
            sampling = SamplingConfig(max_completion_length=tokens, eos_token_ids=())
            generate(policy.model, prompts, sampling, role=role, **drawn_by)

        draw(long)
        few_s, many_s = (min(policy.clocked(partial(draw, n)) for _ in range(2)) for n in (short, long))
        few, many = (policy.kernels(partial(draw, n)) for n in (short, short + 8))
        us_of: dict[str, float] = dict.fromkeys((*KERNELS, "other"), 0.0)
        rows_of = []
        for kernel, (calls, us) in many.items():
            calls_before, us_before = few.get(kernel, (0, 0.0))
            of = next((part for part, names in KERNELS.items() if re.search(names, kernel)), "other")
            us_of[of] += (us - us_before) / 8
            rows_of.append((round((us - us_before) / 8, 1), (calls - calls_before) / 8, kernel[:80]))
        found = {part: round(us, 1) for part, us in us_of.items()}
        nodes, kernels = sum(calls for _, calls, _ in rows_of), sorted(rows_of, reverse=True)[:15]
        say(role=role, step_ms=1e3 * (many_s - few_s) / (long - short), us=found, nodes=nodes, kernels=kernels)


def micro_batch(say: Callable[..., None], rehearsed: bool, shape: str) -> None:
    """One micro-batch: ms until Python has queued it, ms until it is done, kernels per layer; one term, and two."""
    policy = Policy(shape, ROLES["ppo"], rehearsed)
    policy.model.train()
    for micro in (policy.micro, 4 * policy.micro):
        texts = (policy.prompts(micro, length) for length in (policy.prompt, policy.answer))
        batch = PackedBatch.from_lists(*texts, device=policy.device)
        one_M = torch.ones(batch.n_completion_tokens, device=policy.device)
        common: dict[str, Any] = {"mask_M": one_M.bool(), "denom": float(len(one_M))}
        actor = PolicyLoss(old_logprob_M=-9 * one_M, advantage_M=one_M, **common)
        for terms in ((actor,), (actor, ValueLoss(old_value_M=one_M, return_M=one_M, **common))):
            queued: list[float] = []

            def once(terms: Any = terms, batch: Any = batch, queued: list[float] = queued) -> None:
                began = time.perf_counter()
                losses = [found.loss for found in policy.model(batch, terms)]
                sum(losses[1:], losses[0]).backward()
                policy.model.zero_grad(set_to_none=True)
                queued.append(time.perf_counter() - began)

            once()
            done_ms = 1e3 * min(policy.clocked(once) for _ in range(1 if rehearsed else 3))
            per_layer = round(sum(calls for calls, _ in policy.kernels(once).values()) / policy.layers, 1)
            found = {"queued_ms": round(1e3 * min(queued[1:]), 2), "done_ms": done_ms, "kernels_per_layer": per_layer}
            say(answers=micro, terms=len(terms), **found, **policy.peaks())


def heads(say: Callable[..., None], rehearsed: bool, shape: str) -> None:
    """Draws, log-probs and gradients for rows of several LoRAs on the head: ms, and ms with one LoRA for all rows."""
    sizes, vocab = SHAPES["tiny" if rehearsed else shape]
    device = torch.device("cpu" if rehearsed else "cuda")
    dtype, backend = (torch.float32, "auto") if rehearsed else (torch.bfloat16, "triton")
    torch.manual_seed(0)
    weight = torch.randn(vocab, sizes[0], dtype=dtype, device=device)
    for slots, each in ((8, 16), (32, 4), (4, 512)):
        n = slots * each
        hidden, at = torch.randn(n, sizes[0], dtype=dtype, device=device), torch.arange(n, device=device)
        leaf = partial(torch.randn, device=device, requires_grad=True)
        loras = [HeadLora(leaf(16, sizes[0]), leaf(vocab, 16), 1.0) for _ in range(slots)]
        starts = range(0, n, each)
        several = HeadLoras.of_runs(starts, [start + each for start in starts], loras)

        def draw(lora: Any, hidden: Any = hidden, at: Any = at) -> None:
            with torch.no_grad():
                sample(hidden, weight, seed=at, position=at, lora=lora, backend=backend)

        def learn(lora: Any, hidden: Any = hidden, at: Any = at) -> None:
            linear_logprob(hidden, weight, at % vocab, lora=lora, backend=backend).logprob.sum().backward()

        for call in (draw, learn):
            found = {}
            for name, lora in (("several", several), ("one", loras[0])):
                run = partial(call, lora)
                run()
                found[name] = round(1e3 * min(clocked(device, run) for _ in range(1 if rehearsed else 5)), 3)
            say(slots=slots, rows=each, what=call.__name__, ms=found)


def peft_step(say: Callable[..., None], rehearsed: bool, shape: str) -> None:
    """The same GRPO step by PEFT and transformers: `generate`, log-probs from logits, the clipped loss."""
    from peft import LoraConfig, get_peft_model

    policy = Policy(shape, (), rehearsed)
    lora = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    model: Any = get_peft_model(policy.plain, lora)
    ids = torch.tensor(policy.prompts(policy.rows, policy.prompt + policy.answer), device=policy.device)
    parts, advantage = ids.split(policy.micro), torch.ones(policy.micro, 1, device=policy.device)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-5)
    held: list[Any] = []

    @torch.no_grad()
    def draw(tokens: int) -> None:
        length = {"max_new_tokens": tokens, "min_new_tokens": tokens, "do_sample": True, "top_k": 0, "pad_token_id": 0}
        given = ids[:, : policy.prompt]
        model.generate(input_ids=given, attention_mask=torch.ones_like(given), **length)

    def logprobs(part: Any) -> Any:
        kept = {"attention_mask": torch.ones_like(part), "logits_to_keep": policy.answer + 1, "use_cache": False}
        logits = model(input_ids=part, **kept).logits[:, :-1]
        return torch.log_softmax(logits.float(), -1).gather(-1, part[:, policy.prompt :, None])[..., 0]

    @torch.no_grad()
    def score() -> None:
        held[:] = [[logprobs(part) for part in parts]]
        with model.disable_adapter():
            held.append([logprobs(part) for part in parts])

    def learning() -> None:
        model.train()
        for part, old, ref in zip(parts, *held, strict=True):
            new = logprobs(part)
            ratio, apart = (new - old).exp(), ref - new
            clipped = -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
            (clipped + 0.04 * (apart.exp() - apart - 1)).mean().div(len(parts)).backward()
        optimizer.step()
        optimizer.zero_grad()
        model.eval()

    short, long = (2, 4) if rehearsed else (16, 112)
    draw(short)
    few_s, many_s = (policy.clocked(partial(draw, n)) for n in (short, long))
    each_s = (many_s - few_s) / (long - short)
    for run in range(2):
        seconds = {"generation": few_s + each_s * (policy.answer - short), "scoring": policy.clocked(score)}
        scored = policy.peaks()
        seconds["update"] = policy.clocked(learning)
        say(run=run, seconds=seconds, step_ms=1e3 * each_s, scoring=scored, **policy.peaks())


FUNCTIONS: dict[str, Callable[..., None]] = {
    found.__name__: found for found in (environment, whole_step, decode, micro_batch, heads, peft_step)
}


def main(file: Path, about: dict[str, Any], calls: Sequence[str]) -> int:
    """Call one function after the other; 1 if something in one of them failed."""
    rc = 0
    for call in calls:
        print(call, flush=True)
        (function, *words), *ways = (part.split() for part in call.split(" + "))

        def say(call: str = call, **row: Any) -> None:
            nonlocal rc
            rc = max(rc, int("failed" in row))
            with file.open("a", encoding="utf-8") as out:
                out.write(json.dumps({**about, "call": call, **row}) + "\n")

        with contextlib.ExitStack() as stack:
            try:
                for (way,) in ways:
                    stack.enter_context(WAYS[way]())
            except (AttributeError, KeyError) as missing:
                say(missing=str(missing))
                continue
            FUNCTIONS[function](say, about["device"] == "rehearsal", *words)
        gc.collect()  # the next one's model needs the room
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    return rc


if __name__ == "__main__":
    raise SystemExit(main(Path(sys.argv[1]), json.loads(sys.argv[2]), sys.argv[3:]))
