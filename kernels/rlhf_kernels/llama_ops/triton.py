"""`rms_norm`, `rotary`, `swiglu` and `activation` in Triton, with the functions and arguments of `native`.

Numbers are rounded to the tensors' dtype where `native` rounds them, so `rotary` has the reference's bits. Everything
else is fp32. No product is fused with a sum: whether it is would be the compiler's choice, once for every alignment.

A norm's program owns a few rows, whose number depends on the width alone. A sum goes over one row: every column of a
tile has a sum, and these are added at the end. Rows begin at multiples of 16 bytes, or are copied, so that the tile is
laid out in one way and adds in one order. A head and an element depend on nothing else anyway.

GELU's share of a normal distribution is the polynomial of `native` (csrc/cpu/llama_ops_kernel.inc.h): the interpreter
has no erf.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from rlhf_kernels.llama_ops.native import turned_like
from rlhf_kernels.runtime.triton_support import AotCase

TILE = 4096
"""Elements of a program's tile of rows or heads, and the widest piece of a row."""
ELEMENTS = 1024
"""Elements of a program elsewhere."""
AS_WRITTEN: dict[str, Any] = {"enable_fp_fusion": False}
"""Launch options of every kernel."""
_SHARES = {"silu": (1.0, 0.0), "quick_gelu": (1.702, 0.0), "gelu_tanh": (1.5957691216, 0.0713548183), "gelu": None}
"""Kind of activation: (a, b), where its share is σ(x (a + b x²)); None: of a normal distribution."""


# ---- norms -----------------------------------------------------------------------------------------------------------


@triton.jit
def _factors(weight_ptr, column, PLUS_ONE: tl.constexpr, WIDTH: tl.constexpr):
    factor = tl.load(weight_ptr + column, mask=column < WIDTH, other=0.0).to(tl.float32)[None, :]
    return 1.0 + factor if PLUS_ONE else factor


@triton.jit(do_not_specialize=["n_rows"])
def norm_kernel(
    x_ptr,  # [n_rows, WIDTH]
    weight_ptr,  # [WIDTH]
    y_ptr,  # out, as x
    rstd_ptr,  # out [n_rows] fp32
    n_rows,
    eps,
    PLUS_ONE: tl.constexpr,
    WIDTH: tl.constexpr,
    R: tl.constexpr,
    BLOCK: tl.constexpr,
):
    rows = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    live, at = (rows < n_rows)[:, None], rows[:, None] * WIDTH
    squares = tl.zeros((R, BLOCK), tl.float32)
    for start in range(0, WIDTH, BLOCK):
        column = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + at + column[None, :], mask=live & (column < WIDTH)[None, :], other=0.0).to(tl.float32)
        squares += x * x
    mean = tl.div_rn(tl.sum(squares, 1), tl.full((R,), WIDTH, tl.float32))
    rstd = tl.div_rn(tl.full((R,), 1.0, tl.float32), tl.sqrt_rn(mean + eps))
    tl.store(rstd_ptr + rows, rstd, mask=rows < n_rows)
    for start in range(0, WIDTH, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = live & (column < WIDTH)[None, :]
        n = tl.load(x_ptr + at + column[None, :], mask=inside, other=0.0).to(tl.float32) * rstd[:, None]
        if not PLUS_ONE:
            n = n.to(y_ptr.dtype.element_ty).to(tl.float32)
        y = n * _factors(weight_ptr, column, PLUS_ONE, WIDTH)
        tl.store(y_ptr + at + column[None, :], y.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["n_rows"])
def norm_gradient_kernel(
    dy_ptr,  # [n_rows, WIDTH]
    x_ptr,
    weight_ptr,  # [WIDTH]
    rstd_ptr,  # [n_rows] fp32
    dx_ptr,  # out, as x
    n_rows,
    PLUS_ONE: tl.constexpr,
    WIDTH: tl.constexpr,
    R: tl.constexpr,
    BLOCK: tl.constexpr,
):
    rows = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    live, at = (rows < n_rows)[:, None], rows[:, None] * WIDTH
    rstd = tl.load(rstd_ptr + rows, mask=rows < n_rows, other=0.0)[:, None]
    products = tl.zeros((R, BLOCK), tl.float32)
    for start in range(0, WIDTH, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = live & (column < WIDTH)[None, :]
        n = tl.load(x_ptr + at + column[None, :], mask=inside, other=0.0).to(tl.float32) * rstd
        dy = tl.load(dy_ptr + at + column[None, :], mask=inside, other=0.0).to(tl.float32)
        products += dy * _factors(weight_ptr, column, PLUS_ONE, WIDTH) * n
    mean = tl.div_rn(tl.sum(products, 1), tl.full((R,), WIDTH, tl.float32))[:, None]
    for start in range(0, WIDTH, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = live & (column < WIDTH)[None, :]
        n = tl.load(x_ptr + at + column[None, :], mask=inside, other=0.0).to(tl.float32) * rstd
        dy = tl.load(dy_ptr + at + column[None, :], mask=inside, other=0.0).to(tl.float32)
        dx = rstd * (dy * _factors(weight_ptr, column, PLUS_ONE, WIDTH) - n * mean)
        tl.store(dx_ptr + at + column[None, :], dx.to(dx_ptr.dtype.element_ty), mask=inside)


def _tile(width: int) -> dict[str, int]:
    """Rows of a program and columns of a piece, by the width alone."""
    block = min(TILE, triton.next_power_of_2(width))
    return {"R": TILE // block, "BLOCK": block}


def _aligned(x: Tensor) -> Tensor:
    """x, dense and from a multiple of 16 bytes on."""
    x = x.contiguous()
    return x.clone() if x.data_ptr() % 16 else x


def rms_norm(x: Tensor, weight: Tensor, eps: float, plus_one: bool) -> tuple[Tensor, Tensor]:
    """x: [..., H], weight: [H] → y like x, rstd: float32 [..., 1]."""
    x, weight = _aligned(x), _aligned(weight)
    y = torch.empty_like(x)
    rstd = torch.empty((*x.shape[:-1], 1), dtype=torch.float32, device=x.device)
    tile = _tile(x.shape[-1])
    if rstd.numel():
        norm_kernel[(triton.cdiv(rstd.numel(), tile["R"]),)](
            x, weight, y, rstd, rstd.numel(), eps, PLUS_ONE=plus_one, WIDTH=x.shape[-1], **tile, **AS_WRITTEN
        )
    return y, rstd


def rms_norm_gradient(dy: Tensor, x: Tensor, weight: Tensor, rstd: Tensor, plus_one: bool) -> Tensor:
    """dy, x: [..., H], weight: [H], rstd: float32 [..., 1] → dx like x."""
    dy, x, weight, rstd = map(_aligned, (dy, x, weight, rstd))
    dx = torch.empty_like(x)
    tile = _tile(x.shape[-1])
    if rstd.numel():
        norm_gradient_kernel[(triton.cdiv(rstd.numel(), tile["R"]),)](
            dy, x, weight, rstd, dx, rstd.numel(), PLUS_ONE=plus_one, WIDTH=x.shape[-1], **tile, **AS_WRITTEN
        )
    return dx


# ---- rotary embedding ------------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["n_rows", "tokens"])
def rotate_kernel(
    x_ptr,  # [B, heads, T, 2 HALF]
    cos_ptr,  # [1 or B, T, 2 HALF], dense
    sin_ptr,
    y_ptr,  # out [B, T, heads, 2 HALF], dense
    n_rows,  # B T heads
    heads,
    tokens,
    x_batch,
    x_head,
    x_token,
    angle_batch,
    BACK: tl.constexpr,
    HALF: tl.constexpr,
    R: tl.constexpr,
    BLOCK: tl.constexpr,
):
    rows = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    head, token, batch = rows % heads, rows // heads % tokens, rows // heads // tokens
    column = tl.arange(0, BLOCK)[None, :]
    inside = (rows < n_rows)[:, None] & (column < HALF)
    at = (batch * x_batch + head * x_head + token * x_token)[:, None] + column
    angle = (batch * angle_batch + token * (2 * HALF))[:, None] + column
    a = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(x_ptr + at + HALF, mask=inside, other=0.0).to(tl.float32)
    cos = tl.load(cos_ptr + angle, mask=inside, other=0.0).to(tl.float32)
    sin = tl.load(sin_ptr + angle, mask=inside, other=0.0).to(tl.float32)
    cos_b = tl.load(cos_ptr + angle + HALF, mask=inside, other=0.0).to(tl.float32)
    sin_b = tl.load(sin_ptr + angle + HALF, mask=inside, other=0.0).to(tl.float32)
    narrow: tl.constexpr = y_ptr.dtype.element_ty
    if BACK:
        first, second = a * cos + b * sin_b, b * cos_b - a * sin
    else:
        first = (a * cos).to(narrow).to(tl.float32) - (b * sin).to(narrow).to(tl.float32)
        second = (b * cos_b).to(narrow).to(tl.float32) + (a * sin_b).to(narrow).to(tl.float32)
    to = y_ptr + rows[:, None] * (2 * HALF) + column
    tl.store(to, first.to(narrow), mask=inside)
    tl.store(to + HALF, second.to(narrow), mask=inside)


def rotate(x: Tensor, cos: Tensor, sin: Tensor, *, back: bool = False) -> Tensor:
    """x: [B, heads, T, D], cos, sin: [1 or B, T, D] → like x, as `turned_like`; `back` is the gradient's way."""
    x = x if x.stride(3) == 1 else x.contiguous()
    cos, sin = cos.contiguous(), sin.contiguous()
    batch, heads, tokens, dim = x.shape
    y = turned_like(x)
    tile = _tile(dim // 2)
    if y.numel():
        rotate_kernel[(triton.cdiv(batch * heads * tokens, tile["R"]),)](
            x,
            cos,
            sin,
            y,
            batch * heads * tokens,
            heads,
            tokens,
            *x.stride()[:3],
            tokens * dim if cos.shape[0] == batch else 0,
            BACK=back,
            HALF=dim // 2,
            **tile,
            **AS_WRITTEN,
        )
    return y


# ---- elements --------------------------------------------------------------------------------------------------------


@triton.jit
def _loaded(ptr, at, inside):
    return tl.load(ptr + at, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def swiglu_kernel(gate_ptr, up_ptr, y_ptr, count, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    gate, up = _loaded(gate_ptr, at, at < count), _loaded(up_ptr, at, at < count)
    narrow: tl.constexpr = y_ptr.dtype.element_ty
    silu = (gate / (1.0 + tl.exp(-gate))).to(narrow).to(tl.float32)
    tl.store(y_ptr + at, (silu * up).to(narrow), mask=at < count)


@triton.jit
def swiglu_gradient_kernel(dy_ptr, gate_ptr, up_ptr, d_gate_ptr, d_up_ptr, count, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    dy, gate = _loaded(dy_ptr, at, at < count), _loaded(gate_ptr, at, at < count)
    up = _loaded(up_ptr, at, at < count)
    s = 1.0 / (1.0 + tl.exp(-gate))
    d_gate = dy * up * (s * (1.0 + gate * (1.0 - s)))
    tl.store(d_gate_ptr + at, d_gate.to(d_gate_ptr.dtype.element_ty), mask=at < count)
    tl.store(d_up_ptr + at, (dy * (gate * s)).to(d_up_ptr.dtype.element_ty), mask=at < count)


@triton.jit
def _within_bounds(x):
    """Beyond, a share is 0 or 1 and its slope 0, but infinity times 0 would be NaN."""
    all_nan: tl.constexpr = tl.PropagateNan.ALL
    return tl.maximum(tl.minimum(x, 128.0, propagate_nan=all_nan), -128.0, propagate_nan=all_nan)


@triton.jit
def _normal(v):
    """Share of a normal distribution that lies below v, and its density there.

    Above u = |v| lies e^(−u² / 2) t p(t) with t = 1 / (1 + u / 4).
    """
    u = tl.abs(v)
    e = tl.exp(-0.5 * (u * u))
    t = 1.0 / (1.0 + 0.25 * u)
    p = 0.016892388463020325 * t - 0.06453707814216614
    p = p * t + 0.05587926506996155
    p = p * t + 0.022611180320382118
    p = p * t + 0.017734481021761894
    p = p * t + 0.08385135233402252
    p = p * t + 0.07301276177167892
    p = p * t + 0.09528786689043045
    p = p * t + 0.0995214581489563
    p = p * t + 0.09974633157253265
    above = e * (t * p)
    return tl.where(v < 0.0, above, 1.0 - above), 0.3989422804 * e


@triton.jit
def activation_kernel(x_ptr, y_ptr, count, NORMAL: tl.constexpr, A: tl.constexpr, B: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = _loaded(x_ptr, at, at < count)
    v = _within_bounds(x)
    if NORMAL:
        share, _ = _normal(v)
        y = x * share
    else:
        y = x / (1.0 + tl.exp(-(v * (A + B * (v * v)))))
    tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=at < count)


@triton.jit
def activation_gradient_kernel(
    dy_ptr, x_ptr, dx_ptr, count, NORMAL: tl.constexpr, A: tl.constexpr, B: tl.constexpr, BLOCK: tl.constexpr
):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    dy, v = _loaded(dy_ptr, at, at < count), _within_bounds(_loaded(x_ptr, at, at < count))
    if NORMAL:
        share, density = _normal(v)
        slope = share + v * density
    else:
        # 1 − s is e^−z s, of which no digit cancels where s is near 1
        square = v * v
        e = tl.exp(tl.minimum(-(v * (A + B * square)), 88.0))
        s = 1.0 / (1.0 + e)
        slope = s * (1.0 + v * (A + 3.0 * B * square) * (e * s))
    tl.store(dx_ptr + at, (dy * slope).to(dx_ptr.dtype.element_ty), mask=at < count)


def _on_elements(kernel: Any, *tensors: Tensor, **constexprs: Any) -> None:
    """Launch on dense tensors of one size, inputs first."""
    count = tensors[0].numel()
    if count:
        kernel[(triton.cdiv(count, ELEMENTS),)](*tensors, count, **constexprs, BLOCK=ELEMENTS, **AS_WRITTEN)


def _share(kind: str) -> dict[str, Any]:
    share = _SHARES[kind]
    a, b = share or (0.0, 0.0)
    return {"NORMAL": share is None, "A": a, "B": b}


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """gate, up: one shape → like them."""
    gate = gate.contiguous()
    y = torch.empty_like(gate)
    _on_elements(swiglu_kernel, gate, up.contiguous(), y)
    return y


def swiglu_gradient(dy: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """dy, gate, up: one shape → d_gate, d_up of the same."""
    gate = gate.contiguous()
    d_gate, d_up = torch.empty_like(gate), torch.empty_like(gate)
    _on_elements(swiglu_gradient_kernel, dy.contiguous(), gate, up.contiguous(), d_gate, d_up)
    return d_gate, d_up


def activation(x: Tensor, kind: str) -> Tensor:
    """x: any shape → like it; kind: one of `rlhf_kernels.llama_ops.native.KINDS`."""
    x = x.contiguous()
    y = torch.empty_like(x)
    _on_elements(activation_kernel, x, y, **_share(kind))
    return y


def activation_gradient(dy: Tensor, x: Tensor, kind: str) -> Tensor:
    """dy, x: one shape → dx of the same; kind: one of `rlhf_kernels.llama_ops.native.KINDS`."""
    x = x.contiguous()
    dx = torch.empty_like(x)
    _on_elements(activation_gradient_kernel, dy.contiguous(), x, dx, **_share(kind))
    return dx


def aot_cases() -> list[AotCase]:
    """bf16 first, then fp32: norms of a model, of a head and of an odd width; heads, and elements of every kind."""

    def case(name: str, kernel: Any, dtype: str, **constexprs: Any) -> AotCase:
        types = {n: f"*{dtype}" if n.endswith("_ptr") else "i32" for n in kernel.arg_names}
        types = types | {"rstd_ptr": "*fp32", "eps": "fp32"}
        signature = {n: types[n] for n in kernel.arg_names if n not in constexprs}
        never = ("n_rows", "tokens", "eps")
        return AotCase(
            name=f"{name}, {dtype}",
            kernel=kernel,
            signature=signature,
            constexprs=constexprs,
            divisible_by_16=tuple(n for n in signature if n not in never),
            **AS_WRITTEN,
        )

    cases = []
    for dtype in ("bf16", "fp32", "fp16"):
        for kernel in (norm_kernel, norm_gradient_kernel):
            cases += [
                case(f"width {width}", kernel, dtype, PLUS_ONE=False, WIDTH=width, **_tile(width))
                for width in (4096, 128, 8192, 1001)
            ]
            cases.append(case("plus one", kernel, dtype, PLUS_ONE=True, WIDTH=2304, **_tile(2304)))
        for back in (False, True):
            name = "gradient of heads of 128" if back else "heads of 128"
            cases.append(case(name, rotate_kernel, dtype, BACK=back, HALF=64, **_tile(64)))
        for kernel in (swiglu_kernel, swiglu_gradient_kernel):
            cases.append(case("gate and up", kernel, dtype, BLOCK=ELEMENTS))
        for kind in _SHARES:
            for kernel in (activation_kernel, activation_gradient_kernel):
                cases.append(case(kind, kernel, dtype, **_share(kind), BLOCK=ELEMENTS))
    return cases
