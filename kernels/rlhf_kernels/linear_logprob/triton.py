"""`linear_logprob` on Triton and cuBLAS; how it sweeps the vocabulary is told in `triton_sweep`.

GEMMs of N·H·V: forward 1; with the gradient ahead 2 in all (3 where the fused kernel made the statistics: few rows,
whose time is that of reading W); backward otherwise 1 to make the products again plus one per trained factor. What
needs no gradient is neither computed nor allocated.
Dtypes: bf16 and fp16 operands give fp32 products; dL/dy is rounded to the operands' dtype for its own products, whose
sums are fp32. LoRA's part of the logits is computed in fp32. Mixed dtypes of hidden and weight are promoted tile by
tile. Determinism: bitwise, and capturable in a CUDA graph after a first call that compiles.
Several LoRAs take a sweep each, or by `vocab.runs.use_variant` one for all, which no GPU has run; where W is trained,
the gradients take one each in any case.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from rlhf_kernels.runtime.triton_support import AotCase
from rlhf_kernels.vocab import triton_aot
from rlhf_kernels.vocab.logits import OUTPUTS, HeadGrads, HeadOptions, LogprobSaved
from rlhf_kernels.vocab.runs import HeadRuns, joined
from rlhf_kernels.vocab.triton_sweep import RowGrads, Stats, Sweep, Sweeping, finished, side_by_side, together

__all__ = ["aot_cases", "backward", "backwards", "forward", "forwards", "together"]


def forward(hidden: Tensor, weight: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    """Statistics [N] in the order of `OUTPUTS`, empty where not wanted, then E [N, H], empty unless `ahead`.

    logprob and lse are always made, for backward. rest: see `_forward`.
    """
    return finished(_forward({}, hidden, weight, *rest))


def forwards(calls: Sequence[tuple[Any, ...]]) -> list[tuple[Tensor, ...]]:
    """Return the results of `forward` for the arguments of each call, by sweeps side by side."""
    buffers: dict[str, Tensor] = {}
    return finished(side_by_side([_forward(buffers, *call) for call in calls]))


def _forward(
    buffers: dict[str, Tensor],
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    options: HeadOptions,
    ignore_index: int,
    outputs: str,
    ahead: bool,
    runs: HeadRuns | None = None,
) -> Sweeping[tuple[Tensor, ...]]:
    sweep = Sweep(hidden, weight, target, options, ignore_index, runs=runs, buffers=buffers)
    if sweep.n_rows == 0:
        return (*(sweep.empty(0) for _ in OUTPUTS), sweep.empty(*((0, sweep.hidden_size) if ahead else (0,))))
    stats = yield from sweep.sweeping_statistics(outputs, "logprob" if ahead and runs is None else "")
    if ahead and runs is not None:
        heads = runs.heads(options, sweep.n_rows, hidden.device)
        own = [
            Sweep(hidden[rows], weight, target[rows], head, ignore_index, buffers=buffers) for rows, head, *_ in heads
        ]
        made = yield from side_by_side([one.expected("logprob") for one in own])
        stats.expected = joined(heads, [expected for expected, _ in made if expected is not None], sweep.n_rows)
    everything = (*(stats.values.get(name) for name in OUTPUTS), stats.expected)
    return tuple(sweep.empty(0) if x is None else x for x in everything)


def backward(hidden: Tensor, weight: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    """dL/d(hidden, weight, bias, lora_A, lora_B), empty where `needs` does not name it; rest: see `_backward`."""
    return finished(_backward({}, hidden, weight, *rest))


def backwards(calls: Sequence[tuple[Any, ...]]) -> list[tuple[Tensor, ...]]:
    """Return the results of `backward` for the arguments of each call, by sweeps side by side."""
    buffers: dict[str, Tensor] = {}
    return finished(side_by_side([_backward(buffers, *call) for call in calls]))


def _backward(
    buffers: dict[str, Tensor],
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    options: HeadOptions,
    ignore_index: int,
    saved: LogprobSaved,
    grads: tuple[Tensor | None, ...],
    needs: str,
) -> Sweeping[tuple[Tensor, ...]]:
    """grads: those of logprob, entropy, lse, mean_logit, log_sum_sq_prob (or None)."""
    sweep = Sweep(hidden, weight, target, options, ignore_index, buffers=buffers)
    d_logprob, d_entropy, d_lse, d_mean_logit, d_log_sum_sq_prob = grads
    row_grads = RowGrads.of(
        logprob=d_logprob,
        entropy=d_entropy,
        lse=d_lse,
        mean_logit=d_mean_logit,
        log_sum_sq_prob=d_log_sum_sq_prob,
    )
    inputs = (hidden, weight, options.bias, options.lora_A, options.lora_B)
    like = {
        name: x for name, x in zip(HeadGrads.names, inputs, strict=True) if x is not None and name in needs.split(",")
    }
    made: dict[str, Tensor]
    if sweep.n_rows == 0:
        made = {name: x.new_zeros(x.shape) for name, x in like.items()}
    elif needs == "hidden" and saved.expected.dim() == 2 and d_entropy is d_mean_logit is d_log_sum_sq_prob is None:
        stats = Stats(lse=saved.lse, values={"logprob": saved.logprob}, expected=saved.expected)
        made = {"hidden": sweep.from_expected(stats, row_grads, hidden.dtype)}
    else:
        values = {"entropy": saved.entropy, "log_sum_sq_prob": saved.log_sum_sq_prob}
        dtypes = {name: x.dtype for name, x in like.items()}
        made = yield from sweep.sweeping_gradients(Stats(lse=saved.lse, values=values), row_grads, needs, dtypes)
    return tuple(made[name] if name in made else sweep.empty(0) for name in HeadGrads.names)


def aot_cases() -> list[AotCase]:
    """Large N in bf16 with the gradient ahead, the bare forward, the fused kernel and the gradient sweep."""
    return triton_aot.linear_logprob_cases()
