"""`gather_logprob` on Triton: one pass over the logits forward, one backward, which may overwrite them.

Forward: each program folds a share of a row's columns into a state, a second kernel joins the shares; formulas and
states are those of `linear_logprob` (`rlhf_kernels.vocab.triton_logits`). Many rows take one share each, few rows many;
in exact mode the number of rows decides nothing.
Backward: elementwise; every element is read and written by the same thread, so `d_logits` may be the logits.
Logits may have any strides; rows are found by their offset. Arithmetic fp32; deterministic, capturable, and no
memory beyond the states (40 bytes per row and share).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from rlhf_kernels.runtime import registry
from rlhf_kernels.runtime.triton_support import INTERPRETED, AotCase
from rlhf_kernels.vocab.logits import OUTPUTS, accumulation_dtype, split_target, temperature_column
from rlhf_kernels.vocab.triton_kernels import FIELDS, SAME_ROUNDING, load_divisor, load_row, store_state
from rlhf_kernels.vocab.triton_logits import joined, tile_grad, tile_state
from rlhf_kernels.vocab.triton_sweep import RowGrads, finish

EXACT_SHARES = 8  # of a row in exact mode, whatever the number of rows
PROGRAMS = 528  # shares are made until there are so many programs: four per multiprocessor of an H200
FOLD_BLOCK, FOLD_WARPS = 128 if INTERPRETED else 4096, 8
GRAD_BLOCK, GRAD_WARPS = 128 if INTERPRETED else 2048, 4
ROWS = 32 if INTERPRETED else 1  # per program; the interpreter pays per program


@triton.jit
def gather_kernel(
    logits_ptr,
    offset_ptr,  # [N] int64, where a row starts
    index_ptr,  # [N] int64, −1 in rows that do not count
    temperature_ptr,
    state_ptr,  # out [splits, FIELDS, N]
    n_rows,
    n_vocab,
    column_stride,
    columns_per_split,
    temperature,
    ALIGNED: tl.constexpr,  # offsets are multiples of 16
    ENTROPY: tl.constexpr,
    SUM_SQ: tl.constexpr,
    MEAN: tl.constexpr,
    TOP: tl.constexpr,
    R: tl.constexpr,
    BLOCK: tl.constexpr,
):
    rows = tl.program_id(0) * R + tl.arange(0, R)
    inside = rows < n_rows
    index = tl.load(index_ptr + rows, mask=inside, other=-1)
    live = inside & (index >= 0)
    divisor = load_divisor(temperature_ptr, temperature, rows, live)
    offset = tl.load(offset_ptr + rows, mask=inside, other=0)
    if ALIGNED:
        offset = tl.multiple_of(offset, 16)
    m = tl.full((R,), float("-inf"), tl.float32)
    s = tl.zeros((R,), tl.float32)
    w = tl.zeros((R,), tl.float32)
    q = tl.zeros((R,), tl.float32)
    total = tl.zeros((R,), tl.float32)
    at_target = tl.zeros((R,), tl.float32)
    first = tl.zeros((R,), tl.float32)
    begin = tl.program_id(1) * columns_per_split
    for start in range(begin, tl.minimum(begin + columns_per_split, n_vocab), BLOCK):
        column = start + tl.arange(0, BLOCK)
        in_range = column < n_vocab
        place = logits_ptr + offset[:, None] + column.to(tl.int64)[None, :] * column_stride
        z = tl.load(place, mask=live[:, None] & in_range[None, :], other=0.0).to(tl.float32) / divisor[:, None]
        z = tl.where(in_range[None, :], z, float("-inf"))
        _, m2, s2, w2, q2, total2, at_target2, first2 = tile_state(
            z, column, in_range, index, ENTROPY, SUM_SQ, MEAN, TOP
        )
        _, _, m, s, w, q, total, at_target, first = joined(
            m, s, w, q, total, at_target, first, m2, s2, w2, q2, total2, at_target2, first2
        )
    base = state_ptr + tl.program_id(1).to(tl.int64) * 12 * n_rows
    store_state(base, n_rows, rows, inside, m, s, w, q, total, at_target, first)


@triton.jit
def gather_grad_kernel(
    logits_ptr,
    offset_ptr,
    out_ptr,
    out_offset_ptr,
    index_ptr,
    temperature_ptr,
    lse_ptr,
    entropy_ptr,
    sum_sq_ptr,
    d_logprob_ptr,  # [N] or None, as the following
    d_lse_ptr,
    d_entropy_ptr,
    d_mean_ptr,
    d_sum_sq_ptr,
    n_rows,
    n_vocab,
    column_stride,
    out_column_stride,
    temperature,
    ALIGNED: tl.constexpr,
    R: tl.constexpr,
    BLOCK: tl.constexpr,
):
    rows = tl.program_id(0) * R + tl.arange(0, R)
    inside = rows < n_rows
    index = tl.load(index_ptr + rows, mask=inside, other=-1)
    live = inside & (index >= 0)
    divisor = load_divisor(temperature_ptr, temperature, rows, live)
    offset = tl.load(offset_ptr + rows, mask=inside, other=0)
    out_offset = tl.load(out_offset_ptr + rows, mask=inside, other=0)
    if ALIGNED:
        offset = tl.multiple_of(offset, 16)
        out_offset = tl.multiple_of(out_offset, 16)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    in_range = column < n_vocab
    place = logits_ptr + offset[:, None] + column.to(tl.int64)[None, :] * column_stride
    z = tl.load(place, mask=live[:, None] & in_range[None, :], other=0.0).to(tl.float32) / divisor[:, None]
    zero = tl.zeros((R,), tl.float32)
    g = tile_grad(
        z,
        z,
        column[None, :] == index[:, None],
        tl.load(lse_ptr + rows, mask=live, other=float("inf")),
        zero,
        load_row(entropy_ptr, rows, live),
        load_row(sum_sq_ptr, rows, live),
        zero,
        load_row(d_logprob_ptr, rows, live),
        load_row(d_lse_ptr, rows, live),
        load_row(d_entropy_ptr, rows, live),
        load_row(d_mean_ptr, rows, live) / n_vocab,
        load_row(d_sum_sq_ptr, rows, live),
        zero,
        d_entropy_ptr is not None,
        d_sum_sq_ptr is not None,
        False,
    )
    g = g / divisor[:, None]
    place = out_ptr + out_offset[:, None] + column.to(tl.int64)[None, :] * out_column_stride
    tl.store(place, g.to(out_ptr.dtype.element_ty), mask=inside[:, None] & in_range[None, :])


def _offsets(x: Tensor) -> Tensor:
    """Return where each row of x [..., V] starts, int64 [N]; leading dimensions need not collapse into one."""
    offset = torch.zeros((), dtype=torch.int64, device=x.device)
    for size, stride in zip(x.shape[:-1], x.stride()[:-1], strict=True):
        offset = offset[..., None] + torch.arange(size, device=x.device) * stride
    return offset.reshape(-1)


def _aligned(x: Tensor) -> bool:
    return x.stride(-1) == 1 and all(stride % 16 == 0 for stride in x.stride()[:-1])


def _rows(
    logits: Tensor, target: Tensor, row_temperature: Tensor | None, ignore_index: int
) -> tuple[Tensor, Tensor | None]:
    """index [N] with −1 for rows that do not count, and the temperature [N]."""
    if accumulation_dtype(logits) == torch.float64:
        raise TypeError("logits: the Triton backend computes in float32, expected no float64; use 'reference'")
    keep, index = split_target(target, logits.shape[-1], ignore_index)
    column = temperature_column(row_temperature, keep, torch.float32)
    return torch.where(keep, index, -1), None if column is None else column.view(-1)


def forward(
    logits: Tensor,
    target: Tensor,
    row_temperature: Tensor | None,
    temperature: float,
    ignore_index: int,
    outputs: str,
) -> tuple[Tensor, ...]:
    """Statistics [N] in the order of `OUTPUTS`, empty where not wanted; lse is always made, for backward."""
    n_rows, n_vocab = target.shape[0], logits.shape[-1]
    index, per_row = _rows(logits, target, row_temperature, ignore_index)
    made = {"logprob", "lse", *outputs.split(",")}

    def empty(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.float32, device=logits.device)

    values = {name: empty(n_rows) for name in OUTPUTS if name in made}
    if n_rows:
        n_blocks = triton.cdiv(n_vocab, FOLD_BLOCK)
        shares = EXACT_SHARES if registry.is_exact() else triton.cdiv(PROGRAMS, n_rows)
        per_split = triton.cdiv(n_blocks, min(n_blocks, shares))
        splits = triton.cdiv(n_blocks, per_split)
        state = empty(splits, FIELDS, n_rows)
        gather_kernel[(triton.cdiv(n_rows, ROWS), splits)](
            logits,
            _offsets(logits),
            index,
            per_row,
            state,
            n_rows,
            n_vocab,
            logits.stride(-1),
            per_split * FOLD_BLOCK,
            temperature,
            ALIGNED=_aligned(logits),
            ENTROPY="entropy" in made,
            SUM_SQ="log_sum_sq_prob" in made,
            MEAN="mean_logit" in made,
            TOP="is_top1" in made,
            R=ROWS,
            BLOCK=FOLD_BLOCK,
            num_warps=FOLD_WARPS,
            **SAME_ROUNDING,
        )
        finish(state, index, None, values, n_vocab)
    return tuple(values[name] if name in values else empty(0) for name in OUTPUTS)


def backward(
    logits: Tensor,
    target: Tensor,
    row_temperature: Tensor | None,
    temperature: float,
    ignore_index: int,
    saved: tuple[Tensor, Tensor, Tensor],
    grads: tuple[Tensor | None, ...],
    d_logits: Tensor,
) -> None:
    """Write dL/d(logits) into `d_logits`, which may be `logits` itself.

    saved: lse, entropy, log_sum_sq_prob. grads: those of logprob, entropy, lse, mean_logit, log_sum_sq_prob
    (or None).
    """
    n_rows, n_vocab = target.shape[0], logits.shape[-1]
    if n_rows == 0:
        return
    index, per_row = _rows(logits, target, row_temperature, ignore_index)
    d_logprob, d_entropy, d_lse, d_mean, d_sum_sq = grads
    g = RowGrads.of(logprob=d_logprob, entropy=d_entropy, lse=d_lse, mean_logit=d_mean, log_sum_sq_prob=d_sum_sq)
    lse, entropy, sum_sq = saved
    gather_grad_kernel[(triton.cdiv(n_rows, ROWS), triton.cdiv(n_vocab, GRAD_BLOCK))](
        logits,
        _offsets(logits),
        d_logits,
        _offsets(d_logits),
        index,
        per_row,
        lse,
        entropy if d_entropy is not None else None,
        sum_sq if d_sum_sq is not None else None,
        g.logprob,
        g.lse,
        g.entropy,
        g.mean_logit,
        g.log_sum_sq_prob,
        n_rows,
        n_vocab,
        logits.stride(-1),
        d_logits.stride(-1),
        temperature,
        ALIGNED=_aligned(logits) and _aligned(d_logits),
        R=ROWS,
        BLOCK=GRAD_BLOCK,
        num_warps=GRAD_WARPS,
    )


def aot_cases() -> list[AotCase]:
    """bf16 logits with packed rows first, then every statistic."""
    pointers = {"logits_ptr": "*bf16", "offset_ptr": "*i64", "index_ptr": "*i64"}
    numbers = {"n_rows": "i32", "n_vocab": "i32", "temperature": "fp32"}
    fold = {"R": 1, "BLOCK": 4096, "ALIGNED": True, "temperature_ptr": None, "column_stride": 1}
    few = dict.fromkeys(("ENTROPY", "SUM_SQ", "MEAN", "TOP"), False)
    every = dict.fromkeys(few, True)
    signature = {**pointers, **numbers, "state_ptr": "*fp32", "columns_per_split": "i32"}
    wide = ("logits_ptr", "n_vocab", "columns_per_split")
    forwards = [
        AotCase(
            name=name,
            kernel=gather_kernel,
            signature=signature,
            constexprs={**fold, **flags},
            num_warps=8,
            divisible_by_16=wide,
            **SAME_ROUNDING,
        )
        for name, flags in (("logprob, bf16", few), ("every output, bf16", every))
    ]
    statistics = {"entropy_ptr": "*fp32", "sum_sq_ptr": "*fp32"}
    others = {"d_lse_ptr": "*fp32", "d_entropy_ptr": "*fp32", "d_mean_ptr": "*fp32", "d_sum_sq_ptr": "*fp32"}
    grad = {**pointers, **numbers, "out_ptr": "*bf16", "out_offset_ptr": "*i64", "lse_ptr": "*fp32"}
    grad |= {"d_logprob_ptr": "*fp32"}
    constexprs = {"R": 1, "BLOCK": 2048, "ALIGNED": True, "temperature_ptr": None}
    constexprs |= {"column_stride": 1, "out_column_stride": 1}
    backwards = [
        AotCase(
            name="logprob, bf16",
            kernel=gather_grad_kernel,
            signature=grad,
            constexprs={**constexprs, **dict.fromkeys({**statistics, **others})},
            divisible_by_16=("logits_ptr", "out_ptr", "n_vocab"),
        ),
        AotCase(
            name="every output, bf16",
            kernel=gather_grad_kernel,
            signature={**grad, **statistics, **others},
            constexprs=constexprs,
            divisible_by_16=("logits_ptr", "out_ptr", "n_vocab"),
        ),
    ]
    return forwards + backwards
