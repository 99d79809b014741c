"""`ppo_loss` and `value_loss` in Triton. Equations: the package docstring and `value`.

Forward: one launch over blocks of tokens writes the gradient and a column of partial sums per block; a second launch
of one program folds the columns in block order. Up to `ONE_PROGRAM` tokens the first launch does both. Backward: one
elementwise launch. No atomics: equal inputs give equal bits. Loads are masked, so what stands at masked positions is
never read.

Dtypes: any float in (mask: any real dtype), fp32 inside and out. Shapes as in `reference`; partial sums [8, blocks].
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from rlhf_kernels.ppo_loss.options import PpoOptions, PpoTokens
from rlhf_kernels.runtime.triton_math import expm1, expm1_minus
from rlhf_kernels.runtime.triton_support import AotCase

ONE_PROGRAM = 2048
BLOCK = 1024  # tokens per program where there are several
FOLD = 512  # partial columns that the folding program adds at a time
_KL = {"k1": 1, "k2": 2, "k3": 3}


@triton.jit
def _write_ppo(sums, ratio_max, loss, statistics, denom, kl_coef, entropy_coef, USE_KL: tl.constexpr,
               USE_ENTROPY: tl.constexpr):  # fmt: skip
    """Loss and statistics from the sums [8] = (policy, kl, entropy, low, high, approx_kl, ratio, unused)."""
    index = tl.arange(0, 8)
    ratio = tl.sum(tl.where(index == 6, sums, 0.0), 0)
    sums = sums / denom
    policy = tl.sum(tl.where(index == 0, sums, 0.0), 0)
    kl = tl.sum(tl.where(index == 1, sums, 0.0), 0)
    entropy = tl.sum(tl.where(index == 2, sums, 0.0), 0)
    total = policy
    if USE_KL:
        total += kl_coef * kl
    if USE_ENTROPY:
        total -= entropy_coef * entropy
    tl.store(loss, total)
    low = tl.sum(tl.where(index == 3, sums, 0.0), 0)
    high = tl.sum(tl.where(index == 4, sums, 0.0), 0)
    # sums 0, 1, 2 stay where they are, 3 to 6 follow the clip fraction, which is the sum of two of them
    tl.store(statistics + index + (index >= 3).to(tl.int32), sums, mask=index < 7)
    tl.store(statistics + 3, low + high)
    # A maximum drops NaN; the sum has kept it.
    tl.store(statistics + 8, tl.where(ratio == ratio, ratio_max, ratio))


@triton.jit
def _ppo_kernel(new_logprob, old_logprob, advantage, mask, denom, ref_logprob, entropy, dloss, partial, loss,
                statistics, n, n_blocks, ratio_low, ratio_high, dual_clip, kl_coef, entropy_coef, KL: tl.constexpr,
                HAS_ENTROPY: tl.constexpr, DUAL: tl.constexpr, USE_KL: tl.constexpr, USE_ENTROPY: tl.constexpr,
                ONE: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    weight = tl.load(mask + at, mask=at < n, other=0).to(tl.float32)
    live = weight != 0.0
    new = tl.load(new_logprob + at, mask=live, other=0.0).to(tl.float32)
    old = tl.load(old_logprob + at, mask=live, other=0.0).to(tl.float32)
    adv = tl.load(advantage + at, mask=live, other=0.0).to(tl.float32)
    divisor = tl.load(denom).to(tl.float32)

    log_ratio = new - old
    ratio = tl.exp(log_ratio)
    unclipped = -adv * ratio
    # Comparisons instead of min and max, which drop NaN.
    within = tl.where(ratio < ratio_low, ratio_low, tl.where(ratio > ratio_high, ratio_high, ratio))
    bounded = -adv * within
    policy = tl.where(bounded > unclipped, bounded, unclipped)
    low = (adv < 0.0) & (ratio < ratio_low)
    high = (adv > 0.0) & (ratio > ratio_high)
    if DUAL:
        beyond = (adv < 0.0) & (ratio > dual_clip)
        policy = tl.where(beyond, -adv * dual_clip, policy)
        high = high | beyond
    slope = tl.where(low | high, 0.0, unclipped)
    kl = tl.zeros([BLOCK], tl.float32)
    if KL > 0:
        d = tl.load(ref_logprob + at, mask=live, other=0.0).to(tl.float32) - new
        if KL == 1:
            kl, dkl = -d, tl.full([BLOCK], 1.0, tl.float32)
        elif KL == 2:
            kl, dkl = 0.5 * d * d, -d
        else:
            kl, dkl = expm1_minus(d), -expm1(d)
        if USE_KL:
            slope += kl_coef * dkl
    bonus = tl.zeros([BLOCK], tl.float32)
    if HAS_ENTROPY:
        bonus = tl.load(entropy + at, mask=live, other=0.0).to(tl.float32)
    tl.store(dloss + at, tl.where(live, weight * slope / divisor, 0.0), mask=at < n)

    index = tl.arange(0, 8)
    sums = tl.where(index == 0, tl.sum(tl.where(live, weight * policy, 0.0), 0), 0.0)
    sums = tl.where(index == 1, tl.sum(tl.where(live, weight * kl, 0.0), 0), sums)
    sums = tl.where(index == 2, tl.sum(tl.where(live, weight * bonus, 0.0), 0), sums)
    sums = tl.where(index == 3, tl.sum(tl.where(low & live, weight, 0.0), 0), sums)
    sums = tl.where(index == 4, tl.sum(tl.where(high & live, weight, 0.0), 0), sums)
    sums = tl.where(index == 5, tl.sum(tl.where(live, weight * expm1_minus(log_ratio), 0.0), 0), sums)
    sums = tl.where(index == 6, tl.sum(tl.where(live, weight * ratio, 0.0), 0), sums)
    ratio_max = tl.max(tl.where(live, ratio, 0.0), 0)
    if ONE:
        _write_ppo(sums, ratio_max, loss, statistics, divisor, kl_coef, entropy_coef, USE_KL, USE_ENTROPY)
    else:
        column = tl.program_id(0)
        tl.store(partial + index * n_blocks + column, tl.where(index == 7, ratio_max, sums))


@triton.jit
def _ppo_fold_kernel(partial, denom, loss, statistics, n_blocks, kl_coef, entropy_coef, USE_KL: tl.constexpr,
                     USE_ENTROPY: tl.constexpr, FOLD: tl.constexpr):  # fmt: skip
    index = tl.arange(0, 8)
    lanes = tl.zeros([8, FOLD], tl.float32)
    largest = tl.zeros([8, FOLD], tl.float32)
    for start in range(0, n_blocks, FOLD):
        column = start + tl.arange(0, FOLD)
        at = index[:, None] * n_blocks + column[None, :]
        tile = tl.load(partial + at, mask=column[None, :] < n_blocks, other=0.0)
        lanes += tile
        largest = tl.maximum(largest, tile)
    ratio_max = tl.max(tl.where(index == 7, tl.max(largest, 1), 0.0), 0)
    divisor = tl.load(denom).to(tl.float32)
    _write_ppo(tl.sum(lanes, 1), ratio_max, loss, statistics, divisor, kl_coef, entropy_coef, USE_KL, USE_ENTROPY)


@triton.jit
def _ppo_backward_kernel(grad_loss, dloss, mask, denom, grad_new, grad_entropy, n, entropy_coef, NEW: tl.constexpr,
                         ENTROPY: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    grad = tl.load(grad_loss).to(tl.float32)
    if NEW:
        tl.store(grad_new + at, grad * tl.load(dloss + at, mask=at < n, other=0.0), mask=at < n)
    if ENTROPY:
        weight = tl.load(mask + at, mask=at < n, other=0).to(tl.float32)
        slope = -entropy_coef * grad * weight / tl.load(denom).to(tl.float32)
        tl.store(grad_entropy + at, slope, mask=at < n)


@triton.jit
def _write_value(sums, loss, statistics, denom):
    """Loss and statistics from the sums [8] = (loss, clipped, count, error, error², ret, ret², unused)."""
    index = tl.arange(0, 8)
    shared = tl.where(index < 2, sums / denom, sums)
    tl.store(loss + index, 0.5 * shared, mask=index == 0)
    tl.store(statistics + index - 1, shared, mask=(index >= 1) & (index < 7))


@triton.jit
def _value_kernel(value, old_value, ret, mask, denom, dloss, partial, loss, statistics, n, n_blocks, clip,
                  CLIP: tl.constexpr, ONE: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    weight = tl.load(mask + at, mask=at < n, other=0).to(tl.float32)
    live = weight != 0.0
    v = tl.load(value + at, mask=live, other=0.0).to(tl.float32)
    target = tl.load(ret + at, mask=live, other=0.0).to(tl.float32)
    divisor = tl.load(denom).to(tl.float32)
    error = v - target
    worst, slope = error * error, error
    clipped = live & (weight == 0.0)  # nowhere
    if CLIP:
        old = tl.load(old_value + at, mask=live, other=0.0).to(tl.float32)
        change = v - old
        near = old + tl.where(change < -clip, -clip, tl.where(change > clip, clip, change)) - target
        clipped = live & (tl.abs(change) > clip) & (near * near > worst)
        worst = tl.where(clipped, near * near, worst)
        slope = tl.where(clipped, 0.0, error)
    tl.store(dloss + at, tl.where(live, weight * slope / divisor, 0.0), mask=at < n)

    index = tl.arange(0, 8)
    sums = tl.where(index == 0, tl.sum(tl.where(live, weight * worst, 0.0), 0), 0.0)
    sums = tl.where(index == 1, tl.sum(tl.where(clipped, weight, 0.0), 0), sums)
    sums = tl.where(index == 2, tl.sum(weight, 0), sums)
    sums = tl.where(index == 3, tl.sum(tl.where(live, -weight * error, 0.0), 0), sums)
    sums = tl.where(index == 4, tl.sum(tl.where(live, weight * (error * error), 0.0), 0), sums)
    sums = tl.where(index == 5, tl.sum(tl.where(live, weight * target, 0.0), 0), sums)
    sums = tl.where(index == 6, tl.sum(tl.where(live, weight * (target * target), 0.0), 0), sums)
    if ONE:
        _write_value(sums, loss, statistics, divisor)
    else:
        tl.store(partial + index * n_blocks + tl.program_id(0), sums)


@triton.jit
def _value_fold_kernel(partial, denom, loss, statistics, n_blocks, FOLD: tl.constexpr):
    index = tl.arange(0, 8)
    lanes = tl.zeros([8, FOLD], tl.float32)
    for start in range(0, n_blocks, FOLD):
        column = start + tl.arange(0, FOLD)
        at = index[:, None] * n_blocks + column[None, :]
        lanes += tl.load(partial + at, mask=column[None, :] < n_blocks, other=0.0)
    _write_value(tl.sum(lanes, 1), loss, statistics, tl.load(denom).to(tl.float32))


@triton.jit
def _scale_kernel(grad_loss, dloss, grad, n, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    factor = tl.load(grad_loss).to(tl.float32)
    tl.store(grad + at, factor * tl.load(dloss + at, mask=at < n, other=0.0), mask=at < n)


def _plain(x: Tensor) -> Tensor:
    """Contiguous, and bool as the bytes it is made of."""
    x = x.contiguous()
    return x.view(torch.uint8) if x.dtype == torch.bool else x


def _blocks(x: Tensor) -> tuple[int, int, int]:
    """Number of programs, tokens per program, warps, for x [N]."""
    n = x.shape[0]
    if n <= ONE_PROGRAM:
        block = max(128, triton.next_power_of_2(n))
        return 1, block, max(1, min(8, block // 128))
    return triton.cdiv(n, BLOCK), BLOCK, 4


def forward(
    new_logprob: Tensor, tokens: PpoTokens, entropy: Tensor | None, options: PpoOptions
) -> tuple[Tensor, Tensor, Tensor]:
    """loss [], statistics [9] in the order of `PpoLossOutputs` after `loss`, and ∂loss/∂new_logprob [N]; all fp32."""
    new_logprob, old_logprob, advantage, mask = map(_plain, (new_logprob, *tokens[:3]))
    ref_logprob = None if tokens.ref_logprob is None else _plain(tokens.ref_logprob)
    entropy = None if entropy is None else _plain(entropy)
    n = new_logprob.shape[0]
    n_blocks, block, num_warps = _blocks(new_logprob)
    like: dict[str, Any] = {"dtype": torch.float32, "device": new_logprob.device}
    loss, statistics, dloss = torch.empty((), **like), torch.empty(9, **like), torch.empty(n, **like)
    partial = None if n_blocks == 1 else torch.empty(8, n_blocks, **like)
    kl_coef, entropy_coef, dual_clip = options.kl_coef, options.entropy_coef, options.dual_clip
    use_kl, use_entropy = ref_logprob is not None and kl_coef != 0, entropy is not None and entropy_coef != 0
    _ppo_kernel[(n_blocks,)](
        new_logprob, old_logprob, advantage, mask, tokens.denom, ref_logprob, entropy, dloss, partial, loss, statistics,
        n, n_blocks, 1 - options.clip_low, 1 + options.clip_high, dual_clip or 0.0, kl_coef, entropy_coef,
        KL=0 if ref_logprob is None else _KL[options.kl], HAS_ENTROPY=entropy is not None, DUAL=dual_clip is not None,
        USE_KL=use_kl, USE_ENTROPY=use_entropy, ONE=n_blocks == 1, BLOCK=block, num_warps=num_warps,
    )  # fmt: skip
    if partial is not None:
        _ppo_fold_kernel[(1,)](
            partial, tokens.denom, loss, statistics, n_blocks, kl_coef, entropy_coef,
            USE_KL=use_kl, USE_ENTROPY=use_entropy, FOLD=FOLD, num_warps=4,
        )  # fmt: skip
    return loss, statistics, dloss


def backward(
    grad_loss: Tensor,
    dloss: Tensor,
    mask: Tensor,
    denom: Tensor,
    entropy_coef: float,
    need_new_logprob: bool,
    need_entropy: bool,
) -> tuple[Tensor, Tensor]:
    """Gradients to new_logprob and entropy, [N] each, fp32; size 0 for the one that nobody needs."""
    n = dloss.shape[0]
    grad_new = dloss.new_empty(n if need_new_logprob else 0)
    grad_entropy = dloss.new_empty(n if need_entropy else 0)
    if n and (need_new_logprob or need_entropy):
        _ppo_backward_kernel[(triton.cdiv(n, BLOCK),)](
            grad_loss, dloss.contiguous(), _plain(mask), denom, grad_new, grad_entropy, n, entropy_coef,
            NEW=need_new_logprob, ENTROPY=need_entropy, BLOCK=BLOCK,
        )  # fmt: skip
    return grad_new, grad_entropy


def value_forward(
    value: Tensor, old_value: Tensor | None, ret: Tensor, mask: Tensor, denom: Tensor, clip: float | None
) -> tuple[Tensor, Tensor, Tensor]:
    """loss [], statistics [6] in the order of `ValueLossOutputs` after `loss`, and ∂loss/∂value [N]; all fp32."""
    value, ret, mask = map(_plain, (value, ret, mask))
    clips = clip is not None and old_value is not None
    old_value = _plain(old_value) if clips and old_value is not None else None
    n = value.shape[0]
    n_blocks, block, num_warps = _blocks(value)
    like: dict[str, Any] = {"dtype": torch.float32, "device": value.device}
    loss, statistics, dloss = torch.empty((), **like), torch.empty(6, **like), torch.empty(n, **like)
    partial = None if n_blocks == 1 else torch.empty(8, n_blocks, **like)
    _value_kernel[(n_blocks,)](
        value, old_value, ret, mask, denom, dloss, partial, loss, statistics,
        n, n_blocks, 0.0 if clip is None else clip,
        CLIP=clips, ONE=n_blocks == 1, BLOCK=block, num_warps=num_warps,
    )  # fmt: skip
    if partial is not None:
        _value_fold_kernel[(1,)](partial, denom, loss, statistics, n_blocks, FOLD=FOLD, num_warps=4)
    return loss, statistics, dloss


def value_backward(grad_loss: Tensor, dloss: Tensor) -> Tensor:
    """Gradient to value, [N]."""
    dloss, n = dloss.contiguous(), dloss.numel()
    grad = torch.empty_like(dloss)
    if n:
        _scale_kernel[(triton.cdiv(n, BLOCK),)](grad_loss, dloss, grad, n, BLOCK=BLOCK)
    return grad


def aot_cases() -> list[AotCase]:
    """fp32 and bf16 log-probs, with and without KL and entropy, in one program and in many."""
    arrays = ("new_logprob", "old_logprob", "advantage", "mask", "ref_logprob", "entropy", "dloss")
    scalars = {"n": "i32", "n_blocks": "i32", "ratio_low": "fp32", "ratio_high": "fp32", "dual_clip": "fp32"}
    coefficients = {"kl_coef": "fp32", "entropy_coef": "fp32"}
    fp32 = dict.fromkeys(("denom", "dloss", "partial", "loss", "statistics"), "*fp32")

    def ppo(name: str, dtype: str, full: bool, one: bool) -> AotCase:
        tokens = dict.fromkeys(("new_logprob", "old_logprob", "advantage", "ref_logprob", "entropy"), f"*{dtype}")
        constexprs: dict[str, Any] = {
            "KL": 3 if full else 0,
            "HAS_ENTROPY": full,
            "DUAL": full,
            "USE_KL": full,
            "USE_ENTROPY": full,
            "ONE": one,
            "BLOCK": ONE_PROGRAM if one else BLOCK,
        }
        signature = {**tokens, **fp32, "mask": "*u8", **scalars, **coefficients}
        return AotCase(
            name=name,
            kernel=_ppo_kernel,
            signature=signature,
            constexprs=constexprs,
            num_warps=8 if one else 4,
            divisible_by_16=arrays,
        )

    def value(name: str, one: bool) -> AotCase:
        signature = {
            **dict.fromkeys(("value", "old_value", "ret", "denom", "dloss", "partial", "loss", "statistics"), "*fp32"),
            "mask": "*u8",
            "n": "i32",
            "n_blocks": "i32",
            "clip": "fp32",
        }
        constexprs = {"CLIP": True, "ONE": one, "BLOCK": ONE_PROGRAM if one else BLOCK}
        return AotCase(
            name=name,
            kernel=_value_kernel,
            signature=signature,
            constexprs=constexprs,
            num_warps=8 if one else 4,
            divisible_by_16=("value", "old_value", "ret", "mask", "dloss"),
        )

    fold = {**dict.fromkeys(("partial", "denom", "loss", "statistics"), "*fp32"), "n_blocks": "i32"}
    return [
        ppo("fp32 k3 entropy dual", "fp32", True, False),
        ppo("fp32 plain", "fp32", False, False),
        ppo("bf16 k3 entropy dual", "bf16", True, False),
        ppo("fp32 k3 one program", "fp32", True, True),
        AotCase(
            name="fp32 k3 entropy",
            kernel=_ppo_fold_kernel,
            signature={**fold, **coefficients},
            constexprs={"USE_KL": True, "USE_ENTROPY": True, "FOLD": FOLD},
        ),
        AotCase(
            name="both",
            kernel=_ppo_backward_kernel,
            signature={
                **dict.fromkeys(("grad_loss", "dloss", "denom", "grad_new", "grad_entropy"), "*fp32"),
                "mask": "*u8",
                "n": "i32",
                "entropy_coef": "fp32",
            },
            constexprs={"NEW": True, "ENTROPY": True, "BLOCK": BLOCK},
            divisible_by_16=("dloss", "mask", "grad_new", "grad_entropy"),
        ),
        value("fp32 clip", False),
        value("fp32 clip one program", True),
        AotCase(name="fp32", kernel=_value_fold_kernel, signature=fold, constexprs={"FOLD": FOLD}),
        AotCase(
            name="fp32",
            kernel=_scale_kernel,
            signature={**dict.fromkeys(("grad_loss", "dloss", "grad"), "*fp32"), "n": "i32"},
            constexprs={"BLOCK": BLOCK},
            divisible_by_16=("dloss", "grad"),
        ),
    ]
