"""LoRA with many adapter slots in one call: on rows get a low-rank delta, off rows keep the base's bits.

For a row n of a run that carries slot i, with scale s_i and dropout factors m_n (each 0 or 1/(1 − p_i)):

    h_n = A_i (m_n ∘ x_n);   delta_n = s_i B_i h_n
    lora_delta_:  y_n += delta_n
    lora_linear:  y_n = W x_n + b + delta_n,   off rows y_n = W x_n + b

    dh_n = s_i B_iᵀ dy_n;   dx_n = Wᵀ dy_n + m_n ∘ (A_iᵀ dh_n)   (each term where forward has it)
    dA_i = Σ_n dh_n (m_n ∘ x_n)ᵀ;   dB_i = s_i Σ_n dy_n h_nᵀ;   dW = Σ dy_n x_nᵀ;   db = Σ dy_n

Symbols: x [.., K] with N rows (all leading dims flattened), y [.., M], weight [M,K], bias [M], A_i
[r_i,K], B_i [M,r_i]. `Segments` says which rows carry which slot. `Dropout` keys the mask by (seed, row
id, layer, column), so it is recomputed in the backward pass and does not depend on what else is in the
batch.

`DecodeLinear` is the same for the few rows of a decoding step, forward only.

Off rows of `lora_linear` are bit-identical to `linear(x, weight, bias)` on the same x. A slot without
rows gets no gradient (None, not zeros). Nothing is computed for what needs no gradient: a frozen weight
has no dW.

dtypes: base (x, y, weight) and adapters may differ; the product accumulates in fp32 (fp64 if either side
is) and is rounded once when it is added to y; gradients come in their tensor's dtype. Deterministic:
fixed order of runs.

Source: Hu et al. 2021 (LoRA). Segments over one batch as in Punica (Chen et al. 2023) and S-LoRA (Sheng et
al. 2023), here with a backward pass.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from rlhf_kernels.linear import linear
from rlhf_kernels.lora import native, reference
from rlhf_kernels.lora.reference import compute_dtype
from rlhf_kernels.lora.segments import OFF, Dropout, LoraCall, Segments, make_call
from rlhf_kernels.runtime import autocast, eager, registry, triton_support

__all__ = ["OFF", "DecodeLinear", "Dropout", "LoraCall", "Segments", "lora_delta_", "lora_linear"]

registry.register("lora", "reference", reference)
registry.register("lora", "triton", registry.Lazy("rlhf_kernels.lora.triton", triton_support.unsupported))
registry.register("lora", "cpu", native)
# What `DecodeLinear` chooses from
registry.register("lora_decode", "reference", reference)
registry.register("lora_decode", "triton", registry.Lazy("rlhf_kernels.lora.triton", triton_support.unsupported))
registry.register("lora_decode", "cpu", native)


@eager.custom_op(
    "rlhf_kernels::lora_delta",
    "x: float[N, K], A: float[r_i, K], B: float[M, r_i], row_ids: int64[N]",
    also=lambda given: given.lora_call.check(given.x.shape[0]),
)
def _delta_op(x: Tensor, lora_call: LoraCall, backend: str) -> Tensor:
    return registry.implementation("lora", backend).forward(x, lora_call)


@_delta_op.register_fake
def _(x, lora_call, backend):  # type: ignore[no-untyped-def]
    dtype = compute_dtype(x, *lora_call.A, *lora_call.B)
    return x.new_empty((lora_call.n_on, lora_call.B[0].shape[0]), dtype=dtype)


def _check_delta_backward(given: Any) -> None:
    given.lora_call.check(given.x.shape[0])
    if given.ddelta.shape[0] != given.lora_call.n_on:
        raise ValueError(
            f"ddelta: expected {given.lora_call.n_on} rows, as many as are on, got {given.ddelta.shape[0]}"
        )
    _check_needs(given)


def _check_linear_backward(given: Any) -> None:
    given.lora_call.check(math.prod(given.x.shape[:-1]))
    _check_needs(given)


def _check_needs(given: Any) -> None:
    """Raise unless need_A and need_B have an entry per slot."""
    n_slots = len(given.lora_call.A)
    for name, need in (("need_A", given.need_A), ("need_B", given.need_B)):
        if len(need) != n_slots:
            raise ValueError(f"{name}: expected {n_slots} entries, one per slot, got {len(need)}")


@eager.custom_op(
    "rlhf_kernels::lora_delta_backward",
    "ddelta: float[on, M], x: float[N, K], A: float[r_i, K], B: float[M, r_i], row_ids: int64[N]",
    also=_check_delta_backward,
)
def _delta_backward_op(
    ddelta: Tensor,
    x: Tensor,
    lora_call: LoraCall,
    need_x: bool,
    need_A: list[bool],
    need_B: list[bool],
    backend: str,
) -> list[Tensor]:
    return registry.implementation("lora", backend).backward(ddelta, x, lora_call, need_x, need_A, need_B)


def _like(tensors: list[Tensor], needed: list[bool]) -> list[Tensor]:
    return [t.new_empty(t.shape) for t, need in zip(tensors, needed, strict=True) if need]


@_delta_backward_op.register_fake
def _(ddelta, x, lora_call, need_x, need_A, need_B, backend):  # type: ignore[no-untyped-def]
    return _like([x, *lora_call.A, *lora_call.B], [need_x, *need_A, *need_B])


def _save(ctx, inputs, *tensors: Tensor) -> None:  # type: ignore[no-untyped-def]
    """Keep tensors, and the call that `_saved` puts together again."""
    call = inputs.lora_call
    ctx.save_for_backward(*tensors, *call.A, *call.B, call.row_ids)
    ctx.lora_call = call._replace(A=[], B=[], row_ids=None)
    ctx.n_slots, ctx.backend = len(call.A), inputs.backend


def _saved(ctx) -> tuple[list[Tensor], LoraCall]:  # type: ignore[no-untyped-def]
    """Tensors that `_save` was given, and the call."""
    *tensors, row_ids = ctx.saved_tensors
    n = ctx.n_slots
    return tensors[: -2 * n], ctx.lora_call._replace(A=tensors[-2 * n : -n], B=tensors[-n:], row_ids=row_ids)


def _delta_backward(ctx, ddelta):  # type: ignore[no-untyped-def]
    (x,), lora_call = _saved(ctx)
    needed = _delta_op.needed(ctx, "x", "A", "B")
    grads = _delta_backward_op(ddelta, x, lora_call, *needed, ctx.backend)
    dx, dA, dB = _deal(grads, [needed[0]], *needed[1:])
    return _delta_op.gradients(x=dx[0], A=dA, B=dB)


def _deal(grads: list[Tensor], *needed: list[bool]) -> list[list[Tensor | None]]:
    """The compact list of computed gradients, dealt back to where each was needed."""
    rest = iter(grads)
    return [[next(rest) if need else None for need in group] for group in needed]


_delta_op.register_autograd(_delta_backward, setup_context=lambda ctx, inputs, _: _save(ctx, inputs, inputs.x))


@eager.custom_op(
    "rlhf_kernels::lora_linear",
    "x: D[..., K], weight: D[M, K], bias: D[M], A: float[r_i, K], B: float[M, r_i], row_ids: int64[*]",
    also=lambda given: given.lora_call.check(math.prod(given.x.shape[:-1])),
)
def _linear_op(x: Tensor, weight: Tensor, bias: Tensor | None, lora_call: LoraCall, backend: str) -> Tensor:
    return registry.implementation("lora", backend).linear_forward(x, weight, bias, lora_call)


@_linear_op.register_fake
def _(x, weight, *args):  # type: ignore[no-untyped-def]
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


@eager.custom_op(
    "rlhf_kernels::lora_linear_backward",
    "dy: D[..., M], x: D[..., K], weight: D[M, K], A: float[r_i, K], B: float[M, r_i], row_ids: int64[*]",
    also=_check_linear_backward,
)
def _linear_backward_op(
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    lora_call: LoraCall,
    need_x: bool,
    need_weight: bool,
    need_bias: bool,
    need_A: list[bool],
    need_B: list[bool],
    backend: str,
) -> list[Tensor]:
    needed = (need_x, need_weight, need_bias, need_A, need_B)
    return registry.implementation("lora", backend).linear_backward(dy, x, weight, lora_call, *needed)


@_linear_backward_op.register_fake
def _(dy, x, weight, lora_call, need_x, need_weight, need_bias, need_A, need_B, backend):  # type: ignore[no-untyped-def]
    bias = weight.new_empty(weight.shape[0])
    tensors = [x, weight, bias, *lora_call.A, *lora_call.B]
    return _like(tensors, [need_x, need_weight, need_bias, *need_A, *need_B])


def _linear_backward(ctx, dy):  # type: ignore[no-untyped-def]
    (x, weight), lora_call = _saved(ctx)
    needed = _linear_op.needed(ctx, "x", "weight", "bias", "A", "B")
    grads = _linear_backward_op(dy, x, weight, lora_call, *needed, ctx.backend)
    (dx, dweight, dbias), dA, dB = _deal(grads, needed[:3], *needed[3:])
    return _linear_op.gradients(x=dx, weight=dweight, bias=dbias, A=dA, B=dB)


_linear_op.register_autograd(
    _linear_backward, setup_context=lambda ctx, inputs, _: _save(ctx, inputs, inputs.x, inputs.weight)
)


def lora_delta_(
    y: Tensor,
    x: Tensor,
    A: Sequence[Tensor],
    B: Sequence[Tensor],
    scales: Sequence[float],
    segments: Segments,
    *,
    dropout: Dropout | None = None,
    backend: str = "auto",
) -> Tensor:
    """Add every on row's low-rank delta (Hu et al. 2021) to y in place; other rows are not touched.

    The equations stand in the module's docstring. Differentiable in y, x, A and B; a slot without rows has no gradient.

    Args:
        y: [.., M], floating, with the rows and device of x; contiguous unless it has 2 dimensions.
        x: [.., K], floating, N rows in two or more dimensions.
        A: per slot [r_i, K], floating, on x's device.
        B: per slot [M, r_i], floating, on x's device.
        scales: factor of the delta per slot.
        segments: runs of rows and their slots; rows in no run are off.
        dropout: dropout of x before A. None: no dropout.
        backend: `auto` or the name of a backend, see `rlhf_kernels.runtime.registry`.

    Returns:
        y itself.

    Raises:
        TypeError: x, y or an adapter of a slot that has rows is not floating.
        ValueError: a shape, device or number of entries does not fit, or y is not contiguous.
        ValueError: segments or dropout do not fit the rows and slots, or backend is unknown.
        BackendUnavailableError: the named backend cannot serve the call.
    """
    _check_input("x", x)
    _check_input("y", y)
    if y.shape[:-1] != x.shape[:-1]:
        raise ValueError(f"y: expected the rows of x {tuple(x.shape[:-1])}, got {tuple(y.shape[:-1])}")
    if y.device != x.device:
        raise ValueError(f"y: expected the device of x ({x.device}), got {y.device}")
    lora_call = make_call(x, y.shape[-1], list(A), list(B), list(scales), segments, dropout)
    if not lora_call.A:
        return y
    if y.dim() != 2 and not y.is_contiguous():
        raise ValueError(f"y: expected contiguous memory with {y.dim()} dims, got strides {y.stride()}")
    rows = y if y.dim() == 2 else y.flatten(0, -2)
    delta = _delta_op(x.flatten(0, -2), lora_call, _resolve(backend, x, lora_call, y.shape[-1]))
    at = 0
    for start, end in _merged(lora_call):  # one slice per stretch of on rows: autograd copies y's gradient per slice
        rows[start:end].add_(delta[at : at + end - start])
        at += end - start
    return y


def lora_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    A: Sequence[Tensor],
    B: Sequence[Tensor],
    scales: Sequence[float],
    segments: Segments,
    *,
    dropout: Dropout | None = None,
    backend: str = "auto",
) -> Tensor:
    """Linear layer plus every on row's low-rank delta (Hu et al. 2021); off rows have the bits of `linear`.

    The equations stand in the module's docstring. Differentiable in x, weight, bias, A and B; a slot without rows gets
    no gradient. Under autocast x, weight and bias are converted first, as for `F.linear`.

    Args:
        x: [.., K], floating, N rows in two or more dimensions.
        weight: [M, K], of x's dtype and device.
        bias: [M], of x's dtype and device. None: no bias.
        A: per slot [r_i, K], floating, on x's device.
        B: per slot [M, r_i], floating, on x's device.
        scales: factor of the delta per slot.
        segments: runs of rows and their slots; rows in no run are off.
        dropout: dropout of x before A, not before weight. None: no dropout.
        backend: `auto` or the name of a backend, see `rlhf_kernels.runtime.registry`.

    Returns:
        y [.., M] of x's dtype; under autocast of autocast's dtype.

    Raises:
        TypeError: x or an adapter of a slot that has rows is not floating.
        TypeError: weight or bias is not of x's dtype and device.
        ValueError: a shape or number of entries does not fit, or an adapter is on another device.
        ValueError: segments or dropout do not fit the rows and slots, or backend is unknown.
        BackendUnavailableError: the named backend cannot serve the call.
    """
    _check_linear(x, weight, bias)
    lora_call = make_call(x, weight.shape[0], list(A), list(B), list(scales), segments, dropout)
    x, weight, bias = autocast.as_for_linear(x, weight, bias)  # a backend is one for what comes of it
    chosen = _resolve(backend, x, lora_call, weight.shape[0])
    if not lora_call.A:
        return linear(x, weight, bias, backend=chosen if chosen == "reference" else "auto")
    for name, w in (("weight", weight), ("bias", bias)):
        if w is not None and (w.dtype != x.dtype or w.device != x.device):
            raise TypeError(f"{name}: expected {x.dtype} on {x.device} like x, got {w.dtype} on {w.device}")
    with autocast.off(x):
        return _linear_op(x, weight, bias, lora_call, chosen)


class DecodeLinear:
    """`lora_linear` for the steps of decoding: everything but x is given once.

    Where nothing wants a gradient and the rows are few, a kernel for just that serves. `cpu`: the weight is read once
    for product and delta. It adds in another order than torch, so y may differ from `lora_linear`'s by rounding. It
    serves calls with off rows where `linear` is C++, too: they keep its bits.

    All that is checked and bound at the first call; later ones with such an x go straight to the kernel. Every other
    call is one of `lora_linear`, with its checks and errors.

    Between calls tensors may change in place, and their storage may move; their shapes, strides and dtypes may not
    change, nor the instruction set. Not for several threads at once.

    Args:
        weight: [M, K], of the dtype and device of x.
        bias: [M], of the dtype and device of x. None: no bias.
        A: per slot [r_i, K], floating, on the device of x.
        B: per slot [M, r_i], floating, on the device of x.
        scales: factor of the delta per slot.
        segments: runs of rows and their slots; rows in no run are off.
        backend: `auto` or the name of a backend, see `rlhf_kernels.runtime.registry`.
    """

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None,
        A: Sequence[Tensor],
        B: Sequence[Tensor],
        scales: Sequence[float],
        segments: Segments,
        *,
        backend: str = "auto",
    ) -> None:
        self._given = (weight, bias, list(A), list(B), list(scales), segments)
        self._tensors = [t for t in (weight, bias, *A, *B) if t is not None]
        self._backend = backend
        self._decoder: native.Decoder | None = None
        self._without: tuple[object, ...] | None = None
        """Shape, dtype, device and default backend of the last call that no decoder serves."""
        self._asked = ("", "")

    def __call__(self, x: Tensor) -> Tensor:
        """Result of `lora_linear` for x.

        Args:
            x: [.., K], floating, with the rows that the segments were made for.

        Returns:
            y [.., M] of x's dtype.

        Raises:
            TypeError: as in `lora_linear`.
            ValueError: as in `lora_linear`.
            BackendUnavailableError: the named backend cannot serve the call.
        """
        plain = eager.eager(x) and not autocast.is_on(x)
        if not plain or _wants_gradient(x, *self._tensors):
            return lora_linear(x, *self._given, backend=self._backend)
        asked = registry.asked("lora_decode"), registry.asked("linear")
        if self._decoder is not None and self._asked == asked and self._decoder.takes(x):
            return self._decoder(x)
        like = (x.shape, x.dtype, x.device, asked)
        decoder = None if like == self._without else self._make_decoder(x)
        if decoder is None:
            self._without = like
            return lora_linear(x, *self._given, backend=self._backend)
        if decoder.lasting:
            self._decoder, self._asked = decoder, asked
        return decoder(x)

    def _make_decoder(self, x: Tensor) -> native.Decoder | None:
        weight, bias, A, B, scales, segments = self._given
        _check_linear(x, weight, bias)
        lora_call = make_call(x, weight.shape[0], A, B, scales, segments, None)
        if not lora_call.A or not eager.eager(*self._tensors):
            return None
        chosen = _resolve(self._backend, x, lora_call, weight.shape[0], "lora_decode")
        if chosen == "cpu" and native.Decoder.serves(x, weight, bias, lora_call):
            return native.Decoder(x, weight, bias, lora_call)
        return None


def _check_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    _check_input("x", x)
    if weight.dim() != 2 or weight.shape[1] != x.shape[-1]:
        raise ValueError(f"weight: expected shape [M, {x.shape[-1]}], got {tuple(weight.shape)}")
    if bias is not None and tuple(bias.shape) != (weight.shape[0],):
        raise ValueError(f"bias: expected shape [{weight.shape[0]}], got {tuple(bias.shape)}")


def _resolve(backend: str, x: Tensor, lora_call: LoraCall, features: int, op: str = "lora") -> str:
    """The backend for x and the adapters of a [features, K] linear; float64 on either side means float64 products."""
    wide = [t for t in (*lora_call.A, *lora_call.B) if t.dtype == torch.float64]
    return registry.resolve(op, backend, wide[0] if wide else x, (features, x.shape[-1]))


def _wants_gradient(*tensors: Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


def _merged(lora_call: LoraCall) -> list[tuple[int, int]]:
    """Runs with adjacent ones joined, whatever their slots."""
    runs = list(zip(lora_call.starts, lora_call.ends, strict=True))
    cuts = [0, *(j + 1 for j, (left, right) in enumerate(pairwise(runs)) if left[1] != right[0]), len(runs)]
    return [(runs[first][0], runs[after - 1][1]) for first, after in pairwise(cuts)]


def _check_input(name: str, x: Tensor) -> None:
    if not isinstance(x, Tensor) or not x.is_floating_point():
        raise TypeError(f"{name}: expected a floating tensor, got {getattr(x, 'dtype', type(x).__name__)}")
    if x.dim() < 2:
        raise ValueError(f"{name}: expected rows, shape [.., features], got {tuple(x.shape)}")
