"""`gae` on answers of random length, forward and with the backward to the values.

Everything is float32. Floor: a bare copy of the bytes that must move. The baseline is the loop over time that trainers
have, one vector operation per step, differentiated by autograd.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from rlhf_kernels import gae
from torch import Tensor

from rlhf_bench.case import Baseline, Case, Tensors, differentiate, leaves_of
from rlhf_bench.floor import copy_floors

GAMMA, LAM = 0.99, 0.95
_SIZES = {
    "tiny": [(3, 16)],
    "quick": [(64, 512)],
    "default": [(1, 512), (64, 512), (512, 1024)],
    "full": [(1, 512), (64, 512), (512, 1024), (512, 4096)],
}


def cases(size: str, device_type: str, dtype: torch.dtype) -> list[Case]:
    """Forward and backward at every B × T; `dtype` does not matter, rewards and values are float32."""
    return [_case(B, T, backward) for B, T in _SIZES[size] for backward in (False, True)]


def _case(B: int, T: int, backward: bool) -> Case:
    def make(device: torch.device) -> Tensors:
        generator = torch.Generator(device).manual_seed(0)
        reward, value, grad = torch.randn(3, B, T, generator=generator, device=device)
        length = torch.randint(T // 4, T + 1, (B, 1), generator=generator, device=device)
        mask = torch.arange(T, device=device) < length
        return {"reward": reward, "value": value, "mask": mask, "grad_advantage": grad}

    def finish(scan: Callable[..., tuple[Tensor, Tensor]], inputs: Tensors) -> Tensors:
        leaves = leaves_of(inputs, ("value",) if backward else ())
        given = inputs | leaves
        advantage, ret = scan(given["reward"], given["value"], given["mask"])
        return differentiate({"advantage": advantage, "ret": ret}, {"advantage": inputs["grad_advantage"]}, leaves)

    def run(inputs: Tensors, backend: str) -> Tensors:
        return finish(lambda *given: gae(*given, gamma=GAMMA, lam=LAM, backend=backend), inputs)

    def prepare(inputs: Tensors) -> Callable[[], Tensors]:
        return lambda: finish(_loop, inputs)

    # reward, value in, advantage, return out, and the mask; the backward reads and writes a gradient
    moved = B * T * (4.0 * 4 + 1 + ((4 * 2 + 1) if backward else 0))
    return Case(
        op="gae",
        name=f"{'backward' if backward else 'forward'}/{B}x{T}",
        dtype=torch.float32,
        kernels=("gae",),
        make=make,
        run=run,
        eager=lambda inputs: finish(_loop, inputs),
        floor=lambda inputs: copy_floors(moved, inputs["mask"].device, torch.float32),
        baselines=(Baseline(name="eager loop", prepare=prepare),),
        flops=B * T * (10.0 if backward else 6.0),
        moved_bytes=moved,
    )


def _loop(reward: Tensor, value: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Right-padded answers: masked positions stand after the last real one, and carry nothing over to it."""
    keep = mask.to(value.dtype)
    reward, kept = reward * keep, value * keep
    steps: list[Tensor] = []
    following = torch.zeros_like(value[:, 0])
    for t in range(value.shape[1] - 1, -1, -1):
        next_value = kept[:, t + 1] if t + 1 < value.shape[1] else 0.0
        following = (reward[:, t] + GAMMA * next_value - kept[:, t]) + GAMMA * LAM * following
        steps.append(following)
    advantage = torch.stack(steps[::-1], dim=1) * keep
    return advantage, (advantage + kept) * keep
