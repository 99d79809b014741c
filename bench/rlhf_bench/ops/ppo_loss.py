"""`ppo_loss`, `value_loss` and `whiten` on [64, 512]: each alone and as one update uses them, forward and backward.

Everything is float32. Floor: a bare copy of the bytes that must move. One position in ten is masked; the policy loss
comes with a k3 penalty and an entropy bonus. In "all" the advantages are whitened first, the losses are added, and
the gradients go to log-probs, entropies and values.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from rlhf_kernels import ppo_loss, value_loss, whiten
from torch import Tensor

from rlhf_bench.case import Baseline, Case, Tensors, differentiate, leaves_of
from rlhf_bench.floor import copy_floors
from rlhf_bench.formulas import CLIP, clipped_value, log_ratios, ppo_full, whitened

KL_COEF, ENTROPY_COEF, VALUE_COEF = 0.05, 0.01, 0.1
NAMES = ("all", "ppo_loss", "value_loss", "whiten")
_GRID = [(8, 256), (64, 512), (512, 1024)]
_SIZES = {
    "cpu": {"tiny": [(4, 24)], "quick": [(64, 512)], "default": [(64, 512)], "full": _GRID},
    "cuda": {"tiny": [(4, 24)], "quick": [(64, 512)], "default": [(64, 512), (512, 1024)], "full": _GRID},
}
Losses = Callable[[Tensors], Tensors]  # inputs → outputs, of which "loss" or "white" is differentiated


def cases(size: str, device_type: str, dtype: torch.dtype) -> list[Case]:
    """Four cases per size; `dtype` does not matter, numbers per token are float32."""
    return [_case(name, B, T) for B, T in _SIZES[device_type][size] for name in NAMES]


_KERNELS = {
    "all": ("ppo_loss", "whiten"),  # value_loss is registered with ppo_loss
    "ppo_loss": ("ppo_loss",),
    "value_loss": ("ppo_loss",),
    "whiten": ("whiten",),
}
_GRADIENTS = {
    "all": ("new_logprob", "entropy", "value"),
    "ppo_loss": ("new_logprob", "entropy"),
    "value_loss": ("value",),
    "whiten": ("advantage",),
}
# float32 tensors read or written at least, forward and backward together, per element
_MOVED = {"all": 9 + 3, "ppo_loss": 5 + 2, "value_loss": 3 + 1, "whiten": 2 + 2}


def _case(name: str, B: int, T: int) -> Case:
    gradients, upstream = _GRADIENTS[name], "white" if name == "whiten" else "loss"

    def make(device: torch.device) -> Tensors:
        generator = torch.Generator(device).manual_seed(0)

        def draw() -> Tensor:
            return torch.randn(B, T, generator=generator, device=device)

        new_logprob, old_value = -draw().abs(), draw()
        inputs = {
            "new_logprob": new_logprob,
            "old_logprob": new_logprob - log_ratios((B, T), generator, device),
            "ref_logprob": new_logprob + 0.1 * draw(),
            "entropy": draw().abs(),
            "advantage": draw(),
            "value": old_value + log_ratios((B, T), generator, device),
            "old_value": old_value,
            "ret": old_value + draw(),
            "mask": torch.rand(B, T, generator=generator, device=device) < 0.9,
        }
        return inputs | {"grad_white": draw(), "grad_loss": torch.ones((), device=device)}

    denom = 0.9 * B * T  # a number of the whole optimizer step, known beforehand

    def finish(losses: Losses, inputs: Tensors) -> Tensors:
        leaves = leaves_of(inputs, gradients)
        return differentiate(losses(inputs | leaves), {upstream: inputs[f"grad_{upstream}"]}, leaves)

    def run(inputs: Tensors, backend: str) -> Tensors:
        return finish(lambda given: _ours(name, given, denom, backend), inputs)

    def plain(given: Tensors) -> Tensors:
        return _formula(name, given, denom)

    def prepare_eager(inputs: Tensors) -> Callable[[], Tensors]:
        return lambda: finish(plain, inputs)

    def prepare_compiled(inputs: Tensors) -> Callable[[], Tensors]:
        losses = torch.compile(plain, dynamic=False)
        return lambda: finish(losses, inputs)

    moved = B * T * (4.0 * _MOVED[name] + 1)
    return Case(
        op="ppo_loss",
        name=f"{name}/{B}x{T}",
        dtype=torch.float32,
        kernels=_KERNELS[name],
        make=make,
        run=run,
        eager=lambda inputs: finish(plain, inputs),
        floor=lambda inputs: copy_floors(moved, inputs["mask"].device, torch.float32),
        baselines=(
            Baseline(name="eager formulas", prepare=prepare_eager),
            Baseline(name="torch.compile(formulas)", prepare=prepare_compiled, compiles=True),
        ),
        flops=B * T * {"all": 70.0, "ppo_loss": 40.0, "value_loss": 20.0, "whiten": 10.0}[name],
        moved_bytes=moved,
    )


def _ours(name: str, given: Tensors, denom: float, backend: str) -> Tensors:
    mask = given["mask"]
    if name == "whiten":
        return {"white": whiten(given["advantage"], mask, backend=backend)}
    outputs: Tensors = {}
    loss = torch.zeros((), device=mask.device)
    if name in ("all", "ppo_loss"):
        advantage = whiten(given["advantage"], mask, backend=backend) if name == "all" else given["advantage"]
        policy = ppo_loss(
            given["new_logprob"],
            given["old_logprob"],
            advantage,
            mask,
            denom=denom,
            clip_low=CLIP,
            clip_high=CLIP,
            ref_logprob=given["ref_logprob"],
            kl="k3",
            kl_coef=KL_COEF,
            entropy=given["entropy"],
            entropy_coef=ENTROPY_COEF,
            backend=backend,
        )
        outputs["policy_statistics"] = policy.statistics
        loss = policy.loss
    if name in ("all", "value_loss"):
        value = value_loss(
            given["value"], given["old_value"], given["ret"], mask, denom=denom, clip=CLIP, backend=backend
        )
        outputs["value_statistics"] = value.statistics
        loss = torch.add(loss, value.loss, alpha=VALUE_COEF) if name == "all" else value.loss
    return outputs | {"loss": loss}


def _formula(name: str, given: Tensors, denom: float) -> Tensors:
    mask = given["mask"]
    if name == "whiten":
        return {"white": whitened(given["advantage"], mask)}
    outputs: Tensors = {}
    loss = torch.zeros((), device=mask.device)
    if name in ("all", "ppo_loss"):
        advantage = whitened(given["advantage"], mask) if name == "all" else given["advantage"]
        loss, outputs["policy_statistics"] = ppo_full(
            given["new_logprob"],
            given["old_logprob"],
            advantage,
            mask,
            given["ref_logprob"],
            given["entropy"],
            denom,
            KL_COEF,
            ENTROPY_COEF,
        )
    if name in ("all", "value_loss"):
        part, outputs["value_statistics"] = clipped_value(given["value"], given["old_value"], given["ret"], mask, denom)
        loss = torch.add(loss, part, alpha=VALUE_COEF) if name == "all" else part
    return outputs | {"loss": loss}
