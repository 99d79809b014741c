"""`gae` and `whiten` in Triton. Formulas: the package docstring.

`gae`, forward and backward: one launch, one program per `ROWS` sequences, blocks of T with a carry between them. The
recurrence A_t = δ_t + γ λ A_t+ is an associative scan of pairs (decay, value); masked positions are the identity (1,
0), and V_t+ is a scan of its own that picks the nearest unmasked value. float32 throughout.

`whiten`: every program sums a fixed range of x in float64, the variance around the range's own mean; the launch that
writes y merges these at most `PROGRAMS` partial results, each of its programs in the same order. The backward is alike.

No atomics, no host synchronisation: equal inputs give equal bits. Masked positions are never read.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from rlhf_kernels.runtime.triton_support import AotCase

BLOCK_T = 1024
BLOCK = 1024
PROGRAMS = 256  # ranges that a sum over all elements is cut into


@triton.jit
def _then(decay, value, next_decay, next_value):
    """a ↦ decay · a + value, then the next one."""
    return next_decay * decay, next_decay * value + next_value


@triton.jit
def _latest(found, value, next_found, next_value):
    """The value found last; where nothing was found, value does not count."""
    return found | next_found, tl.where(next_found != 0, next_value, value)


@triton.jit
def _gae_kernel(reward, value, mask, bootstrap, advantage, ret, reward_stride, value_stride, mask_stride, n_rows,
                n_columns, gamma, decay, HAS_BOOTSTRAP: tl.constexpr, ROWS: tl.constexpr,
                BLOCK_T: tl.constexpr):  # fmt: skip
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    in_rows = (row < n_rows)[:, None]
    lane = tl.arange(0, BLOCK_T)
    next_value = tl.zeros([ROWS], tl.float32)
    if HAS_BOOTSTRAP:
        next_value = tl.load(bootstrap + row, mask=row < n_rows, other=0.0)
    next_advantage = tl.zeros([ROWS], tl.float32)
    n_blocks = tl.cdiv(n_columns, BLOCK_T)
    for i in range(0, n_blocks):
        t = ((n_blocks - 1 - i) * BLOCK_T + lane)[None, :]
        inside = in_rows & (t < n_columns)
        keep = tl.load(mask + row[:, None] * mask_stride + t, mask=inside, other=0) != 0
        v = tl.load(value + row[:, None] * value_stride + t, mask=keep, other=0.0)
        # V_t+: the nearest unmasked value from t + 1 to just behind the block, else what stands further right.
        right = in_rows & (t + 1 < n_columns)
        found = tl.load(mask + row[:, None] * mask_stride + t + 1, mask=right, other=0).to(tl.int32)
        v_right = tl.load(value + row[:, None] * value_stride + t + 1, mask=right & (found != 0), other=0.0)
        found, v_right = tl.associative_scan((found, v_right), 1, _latest, reverse=True)
        v_next = tl.where(found != 0, v_right, next_value[:, None])

        r = tl.load(reward + row[:, None] * reward_stride + t, mask=keep, other=0.0)
        delta = tl.where(keep, (r + gamma * v_next) - v, 0.0)
        factor, a = tl.associative_scan((tl.where(keep, decay, 1.0), delta), 1, _then, reverse=True)
        a = factor * next_advantage[:, None] + a
        at = row[:, None] * n_columns + t
        tl.store(advantage + at, tl.where(keep, a, 0.0), mask=inside)
        tl.store(ret + at, tl.where(keep, a + v, 0.0), mask=inside)
        first = (lane == 0)[None, :]
        next_value = tl.sum(tl.where(first, tl.where(keep, v, v_next), 0.0), 1)
        next_advantage = tl.sum(tl.where(first, a, 0.0), 1)


@triton.jit
def _gae_backward_kernel(grad_advantage, grad_ret, mask, d_reward, d_value, d_bootstrap, advantage_stride, ret_stride,
                         mask_stride, n_rows, n_columns, gamma, decay, ROWS: tl.constexpr,
                         BLOCK_T: tl.constexpr):  # fmt: skip
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    in_rows = (row < n_rows)[:, None]
    lane = tl.arange(0, BLOCK_T)
    total = tl.zeros([ROWS], tl.float32)  # G of the last unmasked position so far
    for start in range(0, n_columns, BLOCK_T):
        t = (start + lane)[None, :]
        inside = in_rows & (t < n_columns)
        keep = tl.load(mask + row[:, None] * mask_stride + t, mask=inside, other=0) != 0
        from_ret = tl.load(grad_ret + row[:, None] * ret_stride + t, mask=keep, other=0.0)
        g = tl.load(grad_advantage + row[:, None] * advantage_stride + t, mask=keep, other=0.0) + from_ret
        # G_t−: the scan over what stands one to the left, so that it ends before t.
        left = inside & (lane > 0)[None, :]
        keep_left = tl.load(mask + row[:, None] * mask_stride + t - 1, mask=left, other=0) != 0
        g_left = tl.load(grad_ret + row[:, None] * ret_stride + t - 1, mask=keep_left, other=0.0)
        g_left += tl.load(grad_advantage + row[:, None] * advantage_stride + t - 1, mask=keep_left, other=0.0)
        factor, previous = tl.associative_scan((tl.where(keep_left, decay, 1.0), g_left), 1, _then)
        previous = factor * total[:, None] + previous
        here = g + decay * previous
        at = row[:, None] * n_columns + t
        tl.store(d_reward + at, tl.where(keep, here, 0.0), mask=inside)
        tl.store(d_value + at, tl.where(keep, (gamma * previous - here) + from_ret, 0.0), mask=inside)
        last = (lane == tl.minimum(BLOCK_T, n_columns - start) - 1)[None, :]
        total = tl.sum(tl.where(last, tl.where(keep, here, previous), 0.0), 1)
    tl.store(d_bootstrap + row, gamma * total, mask=row < n_rows)


@triton.jit
def _moments_kernel(x, mask, partial, n, span, CENTRED: tl.constexpr, PROGRAMS: tl.constexpr, BLOCK: tl.constexpr):
    """partial [3, PROGRAMS]: count, sum and sum of squares of every range; CENTRED: squares around its own mean."""
    program = tl.program_id(0)
    begin = program.to(tl.int64) * span
    end = tl.minimum(begin + span, n)
    count = tl.zeros([BLOCK], tl.int64)
    total = tl.zeros([BLOCK], tl.float64)
    squares = tl.zeros([BLOCK], tl.float64)
    for start in range(begin, end, BLOCK):
        at = start + tl.arange(0, BLOCK)
        keep = tl.load(mask + at, mask=at < end, other=0) != 0
        v = tl.load(x + at, mask=keep, other=0.0).to(tl.float64)
        count += keep.to(tl.int64)
        total += v
        if not CENTRED:
            squares += v * v
    n_kept = tl.sum(count, 0).to(tl.float64)
    sum_x = tl.sum(total, 0)
    if CENTRED:
        mean = sum_x / tl.maximum(n_kept, 1.0)
        for start in range(begin, end, BLOCK):
            at = start + tl.arange(0, BLOCK)
            keep = tl.load(mask + at, mask=at < end, other=0) != 0
            v = tl.load(x + at, mask=keep, other=0.0).to(tl.float64)
            deviation = tl.where(keep, v - mean, 0.0)
            squares += deviation * deviation
    tl.store(partial + program, n_kept)
    tl.store(partial + PROGRAMS + program, sum_x)
    tl.store(partial + 2 * PROGRAMS + program, tl.sum(squares, 0))


@triton.jit
def _add_moments_kernel(partial, moments, n_partial, PROGRAMS: tl.constexpr):
    which = tl.arange(0, 4)
    column = tl.arange(0, PROGRAMS)
    there = (which[:, None] < 3) & (column[None, :] < n_partial)
    tile = tl.load(partial + which[:, None] * PROGRAMS + column[None, :], mask=there, other=0.0)
    tl.store(moments + which, tl.sum(tile, 1), mask=which < 3)


@triton.jit
def _whiten_kernel(x, mask, moments, partial, y, stats, n, n_partial, EPS: tl.constexpr, SHIFT_MEAN: tl.constexpr,
                   GIVEN: tl.constexpr, PROGRAMS: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    if GIVEN:
        count = tl.load(moments)
        sum_x = tl.load(moments + 1)
        mean = sum_x / tl.maximum(count, 1.0)
        squares = tl.load(moments + 2) - sum_x * mean
        squares = tl.where(squares < 0.0, 0.0, squares)  # a maximum would drop NaN
    else:
        column = tl.arange(0, PROGRAMS)
        there = column < n_partial
        counts = tl.load(partial + column, mask=there, other=0.0)
        sums = tl.load(partial + PROGRAMS + column, mask=there, other=0.0)
        own = tl.load(partial + 2 * PROGRAMS + column, mask=there, other=0.0)
        count = tl.sum(counts, 0)
        mean = tl.sum(sums, 0) / tl.maximum(count, 1.0)
        apart = sums / tl.maximum(counts, 1.0) - mean
        squares = tl.sum(own + tl.where(counts > 0.0, counts * apart * apart, 0.0), 0)
    rstd = 1.0 / tl.sqrt(squares / tl.maximum(count - 1.0, 1.0) + EPS)
    program = tl.program_id(0)
    at = program.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    keep = tl.load(mask + at, mask=at < n, other=0) != 0
    v = (tl.load(x + at, mask=keep, other=0.0).to(tl.float64) - mean) * rstd
    if not SHIFT_MEAN:
        v += mean
    tl.store(y + at, tl.where(keep, v, 0.0).to(tl.float32), mask=at < n)
    if program == 0:
        tl.store(stats, count)
        tl.store(stats + 1, mean)
        tl.store(stats + 2, rstd)


@triton.jit
def _whiten_sums_kernel(grad, x, mask, stats, partial, n, span, PROGRAMS: tl.constexpr, BLOCK: tl.constexpr):
    """partial [2, PROGRAMS]: Σ g and Σ g (x − μ) of every range."""
    program = tl.program_id(0)
    mean = tl.load(stats + 1)
    begin = program.to(tl.int64) * span
    end = tl.minimum(begin + span, n)
    sum_g = tl.zeros([BLOCK], tl.float64)
    sum_gd = tl.zeros([BLOCK], tl.float64)
    for start in range(begin, end, BLOCK):
        at = start + tl.arange(0, BLOCK)
        keep = tl.load(mask + at, mask=at < end, other=0) != 0
        g = tl.load(grad + at, mask=keep, other=0.0).to(tl.float64)
        d = tl.load(x + at, mask=keep, other=0.0).to(tl.float64) - mean
        sum_g += g
        sum_gd += tl.where(keep, g * d, 0.0)
    tl.store(partial + program, tl.sum(sum_g, 0))
    tl.store(partial + PROGRAMS + program, tl.sum(sum_gd, 0))


@triton.jit
def _whiten_backward_kernel(grad, x, mask, stats, partial, d_x, n, n_partial, SHIFT_MEAN: tl.constexpr,
                            CONSTANT: tl.constexpr, PROGRAMS: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    keep = tl.load(mask + at, mask=at < n, other=0) != 0
    rstd = tl.load(stats + 2)
    g = rstd * tl.load(grad + at, mask=keep, other=0.0).to(tl.float64)
    if not CONSTANT:
        count = tl.load(stats)
        column = tl.arange(0, PROGRAMS)
        there = column < n_partial
        sum_g = tl.sum(tl.load(partial + column, mask=there, other=0.0), 0)
        sum_gd = tl.sum(tl.load(partial + PROGRAMS + column, mask=there, other=0.0), 0)
        factor = rstd
        if not SHIFT_MEAN:
            factor = rstd - 1.0
        shift = factor * sum_g / tl.maximum(count, 1.0)
        slope = rstd * rstd * rstd * sum_gd / tl.maximum(count - 1.0, 1.0)
        d = tl.load(x + at, mask=keep, other=0.0).to(tl.float64) - tl.load(stats + 1)
        g = (g - shift) - slope * d
    tl.store(d_x + at, tl.where(keep, g, 0.0).to(tl.float32), mask=at < n)


def _unit_inner_stride(x: torch.Tensor) -> torch.Tensor:
    return x if x.shape[1] <= 1 or x.stride(1) == 1 else x.contiguous()


def _bytes(mask: torch.Tensor) -> torch.Tensor:
    return mask.view(torch.uint8)


def _rows(x: torch.Tensor) -> tuple[int, int, int, int]:
    """Programs, sequences per program, positions per block, warps, for x [B, T]."""
    n_rows, n_columns = x.shape
    block_t = min(BLOCK_T, max(32, triton.next_power_of_2(n_columns)))
    rows = max(1, min(8, 512 // block_t, n_rows // 256))  # several only where sequences are many and short
    rows = 1 << (rows.bit_length() - 1)
    return triton.cdiv(n_rows, rows), rows, block_t, max(1, min(4, rows * block_t // 128))


def forward(
    reward: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor,
    bootstrap: torch.Tensor | None,
    gamma: float,
    lam: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """reward, value: [B, T]; mask: bool [B, T]; bootstrap: [B] or None → advantage, ret: [B, T]."""
    reward, value, mask = map(_unit_inner_stride, (reward, value, mask))
    bootstrap = None if bootstrap is None else bootstrap.contiguous()
    advantage, ret = reward.new_empty(reward.shape), reward.new_empty(reward.shape)
    if advantage.numel():
        programs, rows, block_t, num_warps = _rows(reward)
        _gae_kernel[(programs,)](
            reward, value, _bytes(mask), bootstrap, advantage, ret, reward.stride(0), value.stride(0), mask.stride(0),
            *reward.shape, gamma, gamma * lam, HAS_BOOTSTRAP=bootstrap is not None, ROWS=rows, BLOCK_T=block_t,
            num_warps=num_warps,
        )  # fmt: skip
    return advantage, ret


def backward(
    grad_advantage: torch.Tensor, grad_ret: torch.Tensor, mask: torch.Tensor, gamma: float, lam: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """grad_advantage, grad_ret: [B, T]; mask: bool [B, T] → d_reward, d_value: [B, T], d_bootstrap: [B]."""
    shape = grad_advantage.shape
    grad_advantage, grad_ret, mask = map(_unit_inner_stride, (grad_advantage, grad_ret, mask))
    d_reward, d_value = grad_advantage.new_empty(shape), grad_advantage.new_empty(shape)
    d_bootstrap = grad_advantage.new_empty(shape[0])
    if shape[0]:
        programs, rows, block_t, num_warps = _rows(grad_advantage)
        _gae_backward_kernel[(programs,)](
            grad_advantage, grad_ret, _bytes(mask), d_reward, d_value, d_bootstrap, grad_advantage.stride(0),
            grad_ret.stride(0), mask.stride(0), *shape, gamma, gamma * lam, ROWS=rows, BLOCK_T=block_t,
            num_warps=num_warps,
        )  # fmt: skip
    return d_reward, d_value, d_bootstrap


def _ranges(n: int) -> tuple[int, int]:
    """Number of ranges and elements in each, for sums over all elements."""
    span = triton.cdiv(triton.cdiv(max(n, 1), PROGRAMS), BLOCK) * BLOCK
    return triton.cdiv(max(n, 1), span), span


def _moments(x: torch.Tensor, mask: torch.Tensor, centred: bool) -> tuple[torch.Tensor, int]:
    n_partial, span = _ranges(x.numel())
    partial = x.new_empty(3, PROGRAMS, dtype=torch.float64)
    _moments_kernel[(n_partial,)](
        x, mask, partial, x.numel(), span, CENTRED=centred, PROGRAMS=PROGRAMS, BLOCK=BLOCK
    )  # fmt: skip
    return partial, n_partial


def masked_moments(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """float64 [3]: number, sum and sum of squares of the unmasked elements."""
    partial, n_partial = _moments(x.contiguous(), _bytes(mask.contiguous()), centred=False)
    moments = x.new_empty(3, dtype=torch.float64)
    _add_moments_kernel[(1,)](partial, moments, n_partial, PROGRAMS=PROGRAMS)
    return moments


def whiten_forward(
    x: torch.Tensor, mask: torch.Tensor, moments: torch.Tensor | None, shift_mean: bool, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """x, mask: one shape; moments: float64 [3] or None → y: like x, stats: float64 [3] = (n, mean, rstd)."""
    x, mask = x.contiguous(), _bytes(mask.contiguous())
    partial, n_partial = (None, 0) if moments is not None else _moments(x, mask, centred=True)
    moments = None if moments is None else moments.contiguous()
    y, stats = torch.empty_like(x), x.new_empty(3, dtype=torch.float64)
    _whiten_kernel[(max(1, triton.cdiv(x.numel(), BLOCK)),)](
        x, mask, moments, partial, y, stats, x.numel(), n_partial, EPS=eps, SHIFT_MEAN=shift_mean,
        GIVEN=moments is not None, PROGRAMS=PROGRAMS, BLOCK=BLOCK,
    )  # fmt: skip
    return y, stats


def whiten_backward(
    grad: torch.Tensor,
    x: torch.Tensor,
    mask: torch.Tensor,
    stats: torch.Tensor,
    shift_mean: bool,
    constant_moments: bool,
) -> torch.Tensor:
    """grad, x, mask: one shape; stats: what the forward returned → d_x, like x."""
    grad, x, mask = grad.contiguous(), x.contiguous(), _bytes(mask.contiguous())
    d_x, n = torch.empty_like(x), x.numel()
    if n == 0:
        return d_x
    partial, n_partial = None, 0
    if not constant_moments:
        n_partial, span = _ranges(n)
        partial = x.new_empty(2, PROGRAMS, dtype=torch.float64)
        _whiten_sums_kernel[(n_partial,)](grad, x, mask, stats, partial, n, span, PROGRAMS=PROGRAMS, BLOCK=BLOCK)
    _whiten_backward_kernel[(triton.cdiv(n, BLOCK),)](
        grad, x, mask, stats, partial, d_x, n, n_partial, SHIFT_MEAN=shift_mean, CONSTANT=constant_moments,
        PROGRAMS=PROGRAMS, BLOCK=BLOCK,
    )  # fmt: skip
    return d_x


def aot_cases() -> list[AotCase]:
    """T = 512 and longer for `gae`; `whiten` with its own and with given moments."""
    strides = {"n_rows": "i32", "n_columns": "i32", "gamma": "fp32", "decay": "fp32", "mask_stride": "i32"}
    gae = {
        **dict.fromkeys(("reward", "value", "bootstrap", "advantage", "ret"), "*fp32"),
        **dict.fromkeys(("reward_stride", "value_stride"), "i32"),
        **strides,
        "mask": "*u8",
    }
    gae_backward = {
        **dict.fromkeys(("grad_advantage", "grad_ret", "d_reward", "d_value", "d_bootstrap"), "*fp32"),
        **dict.fromkeys(("advantage_stride", "ret_stride"), "i32"),
        **strides,
        "mask": "*u8",
    }
    whiten = {
        **dict.fromkeys(("x", "y", "grad", "d_x"), "*fp32"),
        **dict.fromkeys(("moments", "partial", "stats"), "*fp64"),
        **dict.fromkeys(("n", "n_partial", "span"), "i32"),
        "mask": "*u8",
    }
    blocks = {"PROGRAMS": PROGRAMS, "BLOCK": BLOCK}

    def scan(name: str, kernel: triton.JITFunction, rows: int, block_t: int, num_warps: int, **constexprs) -> AotCase:
        signature = gae if kernel is _gae_kernel else gae_backward
        arrays = tuple(n for n, kind in signature.items() if n != "bootstrap" and (kind[0] == "*" or "stride" in n))
        return AotCase(
            name=name,
            kernel=kernel,
            signature=signature,
            constexprs={"ROWS": rows, "BLOCK_T": block_t, **constexprs},
            num_warps=num_warps,
            divisible_by_16=(*arrays, "n_columns"),
        )

    def flat(name: str, kernel: triton.JITFunction, **constexprs) -> AotCase:
        names = kernel.arg_names
        signature = {n: kind for n, kind in whiten.items() if n in names}
        arrays = tuple(n for n, kind in signature.items() if kind[0] == "*")
        return AotCase(
            name=name, kernel=kernel, signature=signature, constexprs=constexprs, divisible_by_16=arrays
        )  # fmt: skip

    return [
        scan("T 512", _gae_kernel, 1, 512, 4, HAS_BOOTSTRAP=True),
        scan("T 4096", _gae_kernel, 1, BLOCK_T, 4, HAS_BOOTSTRAP=False),
        scan("T 64, 8 rows", _gae_kernel, 8, 64, 4, HAS_BOOTSTRAP=True),
        scan("T 512", _gae_backward_kernel, 1, 512, 4),
        scan("T 4096", _gae_backward_kernel, 1, BLOCK_T, 4),
        flat("own moments", _moments_kernel, CENTRED=True, **blocks),
        flat("for ranks", _moments_kernel, CENTRED=False, **blocks),
        flat("for ranks", _add_moments_kernel, PROGRAMS=PROGRAMS),
        flat("own moments", _whiten_kernel, EPS=1e-8, SHIFT_MEAN=True, GIVEN=False, **blocks),
        flat("given moments", _whiten_kernel, EPS=1e-8, SHIFT_MEAN=False, GIVEN=True, **blocks),
        flat("own moments", _whiten_sums_kernel, **blocks),
        flat("own moments", _whiten_backward_kernel, SHIFT_MEAN=True, CONSTANT=False, **blocks),
        flat("given moments", _whiten_backward_kernel, SHIFT_MEAN=True, CONSTANT=True, **blocks),
    ]
