"""Causal attention of packed sequences, each to itself and to a prompt that it may share, with gradients.

For the query at position t of a family, head h and its key head c = h // (Hq / Hkv), over positions s in [lo, t]:

    z_s = scale · q_h · k_{c,s};   with softcap: z_s = softcap · tanh(z_s / softcap)
    m = max(z, sink_h)    e_s = e^(z_s − m)    l = Σ_s e_s + e^(sink_h − m)    o_h = (Σ_s e_s v_{c,s}) / l
    lo = 0, or max(0, t + 1 − window)

Without sinks, the terms with sink_h are left out. With p_s = e_s / l and do the gradient of o:

    δ = do · o    dv_s = Σ p_s do    dz_s = p_s (do · v_s − δ)    dsink_h = −Σ_t e^(sink_h − m) / l · δ
    dq = scale Σ_s dz_s (1 − (z_s / softcap)²) k_s    dk_s = scale Σ dz_s (1 − (z_s / softcap)²) q

A family is a sequence without a parent, then the sequences that name it as theirs, in order. A child sees all keys of
its parent, then its own up to the query's; its first position is the parent's length. Several answers thus share one
prompt. Families do not see each other.

`cpu` gives a row the bits that `decode_attention` gives for its query over the same keys in a paged cache, with one
instruction set. Both sum in one order (csrc/cpu/attention_lanes.inc.h): features in sixteen lanes, exponentials in a
lane for each place in a tile of sixteen positions, values position by position, one division at the end. Tiles begin
at multiples of sixteen positions of the family. So the bits depend on nothing else: neither the other rows, nor
whether a prompt is shared or copied, nor threads. `triton` does the same with blocks of its own, and has the bits of
`decode_attention` in exact mode. Gradients have an order that depends on the family alone; those of a parent's keys
take its own queries first, then those of its children in order.

Symbols: q [T,Hq,D]; k, v [T,Hkv,D], any strides; lengths and parents, one integer per sequence; sinks [Hq].
dtypes: float32 and bfloat16 (cpu), those and float16 (triton), any floating point (reference); sinks of that or
float32. Scores, softmax and sums are in float32 (float64 for float64), and results are rounded once; `triton` rounds p
and dz to the inputs' dtype before their products. The backward pass keeps q, k, v, o, m and l. First derivatives only.
Backends: triton, which `auto` takes in exact mode; cpu, reference.

Memory beyond results: in `triton` backward δ, a float32 for each row and head. In `cpu` per thread: forward 2^18
floats of scores, or those of one position and key head if they are more; backward the float32 gradients of one
family's queries of one key head.

Source: Vaswani et al., "Attention is all you need", 2017; Dao et al., "FlashAttention", 2022 (δ and what is kept);
the order is that of `decode_attention`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from rlhf_kernels.attention import native, reference
from rlhf_kernels.runtime import registry, triton_support
from rlhf_kernels.runtime.eager import custom_op
from rlhf_kernels.runtime.signature import check_window

__all__ = ["attention"]

registry.register("attention", "reference", reference)
registry.register("attention", "cpu", native)
registry.register(
    "attention",
    "triton",
    registry.Lazy("rlhf_kernels.attention.triton", triton_support.unsupported),
    when_measured=True,
)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Sequence[int],
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    parents: Sequence[int] | None = None,
    backend: str = "auto",
) -> Tensor:
    """Causal attention of packed sequences (Vaswani et al. 2017), with the equations of the module's docstring.

    Differentiable in q, k, v and sinks. All tensors are on one device.

    Args:
        q: [T, Hq, D], floating; queries of all sequences, one after the other. Hq is a multiple of Hkv.
        k: [T, Hkv, D], of q's dtype; keys.
        v: of k's shape and q's dtype; values.
        lengths: integers ≥ 0 that add up to T; rows of each sequence.
        scale: factor of the scores, usually D^−½.
        window: integer ≥ 1, number of last positions that a query sees, its own among them. None: all.
        softcap: number > 0, the bound of |scores|. None: no bound.
        sinks: [Hq], of q's dtype or float32; a logit of each head in the softmax's denominator. None: no such logit.
        parents: for each sequence the number of an earlier one without a parent, whose keys it sees too, or −1.
            None: no sequence has one.
        backend: `auto` or the name of a backend, see `rlhf_kernels.runtime.registry`.

    Returns:
        Attention output [T, Hq, D] in q's dtype.

    Raises:
        TypeError: a dtype is not the one above, or a length, parent or window is no integer.
        ValueError: a shape or device does not fit, a length, parent, window or softcap is out of its range, or
            backend is unknown.
        BackendUnavailableError: the named backend cannot serve the call.
    """
    if q.dim() != 3:
        raise ValueError(f"q: expected shape [T, Hq, D], got {tuple(q.shape)}")
    if not q.is_floating_point():
        raise TypeError(f"q: expected a floating dtype, got {q.dtype}")
    t, n_heads, d = q.shape
    for name, x in (("k", k), ("v", v)):
        if x.dim() != 3 or x.shape[0] != t or x.shape[2] != d:
            raise ValueError(f"{name}: expected shape [{t}, Hkv, {d}], got {tuple(x.shape)}")
        if x.dtype != q.dtype:
            raise TypeError(f"{name}: expected the dtype of q ({q.dtype}), got {x.dtype}")
    if v.shape != k.shape:
        raise ValueError(f"v: expected the shape of k {tuple(k.shape)}, got {tuple(v.shape)}")
    if k.shape[1] == 0 or n_heads % k.shape[1]:
        raise ValueError(f"q: expected a multiple of the {k.shape[1]} heads of k, got {n_heads}")
    if sinks is not None and sinks.shape != (n_heads,):
        raise ValueError(f"sinks: expected shape [{n_heads}], one number for each head of q, got {tuple(sinks.shape)}")
    for name, other in (("k", k), ("v", v), ("sinks", sinks)):
        if other is not None and other.device != q.device:
            raise ValueError(f"{name}: expected the device of q ({q.device}), got {other.device}")
    sizes = _integers("lengths", lengths)
    above = [-1] * len(sizes) if parents is None else _integers("parents", parents)
    _check(q, sinks, sizes, above, window, softcap)
    options = (float(scale), window, None if softcap is None else float(softcap))
    chosen = registry.resolve("attention", backend, q, (d,))
    if chosen == "reference":
        return reference.attention(q, k, v, sizes, above, *options, sinks)
    out: Tensor = _attention(q, k, v, sinks, sizes, above, *options, chosen)[0]
    return out


def _integers(name: str, values: Sequence[int]) -> list[int]:
    if isinstance(values, Tensor) or not all(isinstance(x, int) and not isinstance(x, bool) for x in values):
        raise TypeError(f"{name}: expected a list of integers, got {values!r}")
    return list(values)


def _check(
    q: Tensor,
    sinks: Tensor | None,
    lengths: Sequence[int],
    parents: Sequence[int],
    window: int | None,
    softcap: float | None,
) -> None:
    """Raise unless lengths and parents describe q's rows, and the options are in their ranges."""
    if sinks is not None and sinks.dtype not in (q.dtype, torch.float32):
        raise TypeError(f"sinks: expected the dtype of q ({q.dtype}) or float32, got {sinks.dtype}")
    if sum(lengths) != q.shape[0] or any(n < 0 for n in lengths):
        raise ValueError(f"lengths: expected integers >= 0 that add up to the {q.shape[0]} rows of q, got {lengths}")
    if len(parents) != len(lengths):
        raise ValueError(f"parents: expected one integer for each of {len(lengths)} sequences, got {len(parents)}")
    for i, parent in enumerate(parents):
        if not -1 <= parent < i or (parent >= 0 and parents[parent] != -1):
            raise ValueError(
                f"parents: expected -1 or an earlier sequence without a parent, got {parent} for sequence {i}"
            )
    check_window("window", window)
    if softcap is not None and not softcap > 0:
        raise ValueError(f"softcap: expected None or a number > 0, got {softcap!r}")


# ---- the ops of kernels ----------------------------------------------------------------------------------------------


@custom_op(
    "rlhf_kernels::attention",
    "q: D[T, heads, d], k: D[T, kv_heads, d], v: D[T, kv_heads, d], sinks: float[heads]",
    also=lambda given: _check(given.q, given.sinks, given.lengths, given.parents, given.window, given.softcap),
)
def _attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    lengths: Sequence[int],
    parents: Sequence[int],
    scale: float,
    window: int | None,
    softcap: float | None,
    backend: str,
) -> tuple[Tensor, Tensor]:
    return registry.kernels("attention", backend).attention(q, k, v, sinks, lengths, parents, scale, window, softcap)  # type: ignore[no-any-return]


@_attention.register_fake
def _(q: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), q.new_empty((*q.shape[:2], 2), dtype=torch.float32)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, sinks, *ctx.rest = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(q, k, v, sinks, *output)


def _backward(ctx: Any, d_out: Tensor, _: Tensor) -> tuple[Any, ...]:
    q, k, v, sinks, out, totals = ctx.saved_tensors
    grads = _attention_backward(d_out, q, k, v, sinks, out, totals, *ctx.rest)
    d_sinks = grads[3] if sinks is not None and ctx.needs_input_grad[3] else None
    return (*grads[:3], d_sinks, *[None] * len(ctx.rest))


_attention.register_autograd(_backward, setup_context=_setup)


@custom_op(
    "rlhf_kernels::attention_backward",
    "d_out: D[T, heads, d], q: D[T, heads, d], k: D[T, kv_heads, d], v: D[T, kv_heads, d], sinks: float[heads], "
    "out: D[T, heads, d], totals: float32[T, heads, 2]",
    also=lambda given: _check(given.q, given.sinks, given.lengths, given.parents, given.window, given.softcap),
)
def _attention_backward(
    d_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    out: Tensor,
    totals: Tensor,
    lengths: Sequence[int],
    parents: Sequence[int],
    scale: float,
    window: int | None,
    softcap: float | None,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return registry.kernels("attention", backend).attention_backward(  # type: ignore[no-any-return]
        d_out, q, k, v, sinks, out, totals, lengths, parents, scale, window, softcap
    )


@_attention_backward.register_fake
def _(d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, *args: Any) -> tuple[Tensor, ...]:
    d_sinks = q.new_empty(0, dtype=torch.float32) if sinks is None else sinks.new_empty(sinks.shape)
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), d_sinks
