"""Logits of a language-model head, one tile at a time: what every op that sweeps the vocabulary shares.

Transform of one row of hidden states h into logits z, in this order:
    y = h Wᵀ + s (h Aᵀ) Bᵀ + b          linear head, optional rank-r addition and bias
    c = softcap · tanh(logit_scale · y / softcap)      (c = logit_scale · y without softcap)
    z = c / T
Its derivative, with g = dL/dz:  dL/dy = (g / T) · (1 − (c / softcap)²) · logit_scale, and c = z T needs no
second tile.

Shapes: hidden [N, H], W [V, H], b [V], A [r, H], B [V, r], T scalar or [N]; tiles [n, V], n·V ≤ 2²², n ≥ 1.
Dtypes: any float in; products, tiles and sums in fp32 (fp64 if hidden or W is fp64); operands are upcast
before the product, so logits are never rounded to bf16. A W in another dtype is upcast once per call, which
costs a copy of it.
Determinism: chunk borders depend on N and V only and sums run in row order, so equal inputs give equal bits.
Rows that are not kept (ignored target) may hold anything, NaN included: they give 0 and no gradient.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rlhf_kernels.runtime.registry import is_gpu

TILE_ELEMENTS = 2**22
OUTPUTS = ("logprob", "entropy", "lse", "is_top1", "mean_logit", "log_sum_sq_prob")


class HeadLora(NamedTuple):
    """Rank-r addition to a head: logits gain scale · (h Aᵀ) Bᵀ."""

    A: Tensor
    """[r, H], floating, on the device of hidden"""
    B: Tensor
    """[V, r], floating, on the device of hidden"""
    scale: float
    """factor of the addition"""


class LogprobOutputs(NamedTuple):
    """Per-row results of `linear_logprob` ([N]) and `gather_logprob` (target's shape); p = softmax(z).

    A field that `outputs` does not name is None. Rows whose target is `ignore_index` hold 0.
    """

    logprob: Tensor | None
    """log-prob of the target, in nats"""
    entropy: Tensor | None = None
    """−Σ p log p, in nats"""
    lse: Tensor | None = None
    """log Σ exp z"""
    is_top1: Tensor | None = None
    """1.0 where the target is the first arg-max of z, else 0.0; carries no gradient"""
    mean_logit: Tensor | None = None
    """mean of z over the vocabulary"""
    log_sum_sq_prob: Tensor | None = None
    """log Σ p²"""


class LogprobSaved(NamedTuple):
    """Tensors that `linear_logprob` keeps for its backward; empty where they were not made."""

    logprob: Tensor  # [N]
    lse: Tensor  # [N]
    entropy: Tensor  # [N]
    log_sum_sq_prob: Tensor  # [N]
    expected: Tensor  # [N, H], E_n = Σ_{v≠t} p_nv u_nv W_v; made in the forward where that saves a GEMM


class PairSaved(NamedTuple):
    """Tensors that `linear_logprob_pair` keeps for its backward; the last two are empty where they were not made."""

    logprob_a: Tensor  # [N], as the next five
    logprob_r: Tensor
    lse_a: Tensor
    lse_r: Tensor
    kl: Tensor
    entropy: Tensor
    expected: Tensor  # [N, H], E_n = Σ_{v≠t} p_nv u_nv W_v
    expected_kl: Tensor  # [N, H], D_n = Σ_{v≠t} p_nv (log p_nv − log p_r,nv − kl_n) u_nv W_v


class LogprobGrads(NamedTuple):
    """Gradients of the loss to statistics of `linear_logprob` and `gather_logprob`; None where there is none."""

    d_logprob: Tensor | None
    d_entropy: Tensor | None
    d_lse: Tensor | None
    d_mean_logit: Tensor | None
    d_log_sum_sq_prob: Tensor | None


class HeadOptions(NamedTuple):
    """A head beside its weight as ops take it: bias, lora, temperature, softcap (0: none), logit_scale."""

    bias: Tensor | None
    lora_A: Tensor | None
    lora_B: Tensor | None
    row_temperature: Tensor | None
    lora_scale: float
    temperature: float
    softcap: float
    logit_scale: float


HEAD = "bias: float[V], lora_A: float[r, H], lora_B: float[V, r], row_temperature: float[N]"
"""Tensors of `HeadOptions` in the signature of an op."""
LOGPROB_GRADS = ", ".join(f"{name}: float[%s]" for name in LogprobGrads._fields)
"""Tensors of `LogprobGrads` in the signature of an op, with a place for their sizes."""


# --- checks of public arguments -----------------------------------------------------------------------------


def check_tensor(name: str, x: object, shape: tuple[int | None, ...], like: Tensor, kind: str = "float") -> None:
    """Raise unless `x` has `shape` (None: any size), kind (float, int64, bool, mask) and `like`'s device."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{name}: expected a torch.Tensor, got {type(x).__name__}")
    if x.dim() != len(shape) or not all(map(_fits, shape, x.shape)):
        expected = "[" + ", ".join("*" if s is None else str(s) for s in shape) + "]"
        raise ValueError(f"{name}: expected shape {expected}, got {list(x.shape)}")
    if not (x.is_floating_point() if kind == "float" else _of_kind(x, kind)):
        wanted = {"float": "a floating point dtype", "mask": "bool or a floating point dtype"}.get(kind, kind)
        raise TypeError(f"{name}: expected {wanted}, got {x.dtype}")
    if x.device != like.device:
        raise ValueError(f"{name}: expected a tensor on {like.device}, got one on {x.device}")


def _fits(expected: int | None, size: int) -> bool:
    return expected is None or expected == size


def _of_kind(x: Tensor, kind: str) -> bool:
    if kind == "int64":
        return x.dtype == torch.int64
    return x.dtype == torch.bool or (kind == "mask" and x.is_floating_point())


def check_temperature(temperature: float | Tensor, shape: tuple[int, ...], like: Tensor) -> tuple[float, Tensor | None]:
    """(scalar, per-row tensor or None) of one temperature; a tensor must have `shape` and `like`'s device."""
    if isinstance(temperature, Tensor):
        check_tensor("temperature", temperature, shape, like)
        if temperature.requires_grad:
            raise ValueError("temperature: not differentiable; expected a tensor without requires_grad")
        return 1.0, temperature
    if not (math.isfinite(temperature) and temperature > 0):
        raise ValueError(f"temperature: expected a finite number > 0, got {temperature}")
    return float(temperature), None


def check_matrices(hidden: Tensor, weight: Tensor) -> None:
    """Raise unless these are hidden [N, H] and weight [V, H] of a head."""
    check_tensor("hidden", hidden, (None, None), hidden)
    check_tensor("weight", weight, (None, hidden.shape[1]), hidden)
    if weight.shape[0] == 0:
        raise ValueError("weight: expected at least one row (V ≥ 1), got V = 0")


def check_head(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    lora: HeadLora | None,
    temperature: float | Tensor,
    softcap: float | None,
    logit_scale: float | None,
) -> HeadOptions:
    """Validate everything that defines the logits and flatten it for an op's schema."""
    check_matrices(hidden, weight)
    n_vocab = weight.shape[0]
    if bias is not None:
        check_tensor("bias", bias, (n_vocab,), hidden)
    if lora is not None:
        if not isinstance(lora, HeadLora):
            raise TypeError(f"lora: expected one HeadLora for all rows, or None, got {type(lora).__name__}")
        check_tensor("lora.A", lora.A, (None, hidden.shape[1]), hidden)
        check_tensor("lora.B", lora.B, (n_vocab, lora.A.shape[0]), hidden)
    for name, value in (("softcap", softcap), ("logit_scale", logit_scale)):
        if value is not None and not (math.isfinite(value) and value > 0):
            raise ValueError(f"{name}: expected None or a finite number > 0, got {value}")
    scalar, per_row = check_temperature(temperature, (hidden.shape[0],), hidden)
    return HeadOptions(
        bias=bias,
        lora_A=None if lora is None else lora.A,
        lora_B=None if lora is None else lora.B,
        row_temperature=per_row,
        lora_scale=0.0 if lora is None else float(lora.scale),
        temperature=scalar,
        softcap=float(softcap or 0.0),
        logit_scale=1.0 if logit_scale is None else float(logit_scale),
    )


def check_outputs(outputs: tuple[str, ...], allowed: tuple[str, ...] = OUTPUTS) -> str:
    """Validate the names of wanted outputs; returns them comma-separated in the order of `allowed`."""
    if isinstance(outputs, str):
        raise TypeError(f"outputs: expected a tuple of names such as ({outputs!r},), got a str")
    unknown = [name for name in outputs if name not in allowed]
    if unknown or not outputs:
        raise ValueError(f"outputs: expected one or more of {allowed}, got {tuple(outputs)}")
    return ",".join(name for name in allowed if name in outputs)


def check_detach(detach: tuple[str, ...], outputs: tuple[str, ...]) -> set[str]:
    """Validate the names of outputs that carry no gradient."""
    if isinstance(detach, str):
        raise TypeError(f"detach: expected a tuple of names such as ({detach!r},), got a str")
    unknown = [name for name in detach if name not in outputs]
    if unknown:
        raise ValueError(f"detach: expected names of outputs among {tuple(outputs)}, got {tuple(detach)}")
    return set(detach)


def grads_needed(*inputs: Tensor | None) -> str:
    """Names of those of hidden, weight, bias, lora_A, lora_B that need a gradient, comma-separated."""
    if not torch.is_grad_enabled():
        return ""
    pairs = zip(HeadGrads.names, inputs, strict=True)
    return ",".join(name for name, x in pairs if x is not None and x.requires_grad)


def check_saved(grads: LogprobGrads, saved: Any) -> None:
    """Raise where a saved statistic was not made although its gradient is given."""
    for name in ("entropy", "log_sum_sq_prob"):
        x, grad = getattr(saved, name), getattr(grads, f"d_{name}")
        if grad is not None and x.shape != grad.shape:
            raise ValueError(f"{name}: expected shape {list(grad.shape)} with d_{name}, got {list(x.shape)}")


# --- values, read where reading them costs no device synchronisation ----------------------------------------


def split_target(target: Tensor, n_vocab: int, ignore_index: int) -> tuple[Tensor, Tensor]:
    """(keep, index): rows that count, and their target (0 elsewhere). Range is checked on the CPU only."""
    keep = target != ignore_index
    index = torch.where(keep, target, 0)
    if not is_gpu(target.device) and bool(((index < 0) | (index >= n_vocab)).any()):
        wrong = target[keep & ((target < 0) | (target >= n_vocab))][0].item()
        raise ValueError(f"target: expected values in [0, {n_vocab}) or ignore_index={ignore_index}, got {wrong}")
    return keep, index


def temperature_column(row_temperature: Tensor | None, keep: Tensor, dtype: torch.dtype) -> Tensor | None:
    """Per-row temperature as [N, 1], 1 in rows that do not count. Positivity is checked on the CPU only."""
    if row_temperature is None:
        return None
    column = torch.where(keep, row_temperature.to(dtype), 1.0)
    if not is_gpu(column.device) and not bool((column > 0).all()):
        raise ValueError(f"temperature: expected values > 0, got {column[~(column > 0)][0].item()}")
    return column[:, None]


# --- the tile of logits and the way back from it ------------------------------------------------------------


def row_chunks(n_rows: int, n_vocab: int) -> Iterator[slice]:
    """Row ranges of the tiles, a function of N and V alone: GEMM shapes, hence bits, follow from it."""
    step = max(1, TILE_ELEMENTS // n_vocab)
    for start in range(0, n_rows, step):
        yield slice(start, min(start + step, n_rows))


def accumulation_dtype(*tensors: Tensor) -> torch.dtype:
    """fp64 if any of the tensors is fp64, otherwise fp32."""
    return torch.float64 if any(x.dtype == torch.float64 for x in tensors) else torch.float32


def widest(hidden: Tensor, weight: Tensor) -> Tensor:
    """The one whose dtype decides which backend can serve: fp64 on either side makes the sums fp64."""
    return weight if weight.dtype == torch.float64 else hidden


def target_slope(z: Tensor, divisor: float | Tensor, options: HeadOptions) -> Tensor | float:
    """u = dz/dy [N] at the transformed target logits z [N], `divisor` being their temperature."""
    u = options.logit_scale / divisor
    return u * (1 - (z * divisor / options.softcap) ** 2) if options.softcap else u


def ahead_hidden_grad(
    weight: Tensor,
    index: Tensor,
    keep: Tensor,
    options: HeadOptions,
    logprob: Tensor,
    lse: Tensor,
    terms: list[tuple[Tensor, Tensor]],
    on_target: Tensor,
) -> Tensor:
    """d_hidden [N, H] = Σ_i c_i E_i + a u_t W_t, from sums E_i [N, H] that the forward made ahead.

    terms: (c_i [N], E_i) pairs. on_target: a [N], the gradient to the target's logit. Both 0 in rows that do not count.
    """
    dtype = lse.dtype
    column = temperature_column(options.row_temperature, keep, dtype)
    divisor = options.temperature if column is None else column[:, 0]
    slope = on_target * target_slope(logprob + lse, divisor, options)
    d_hidden = weight[index].to(dtype).mul_(slope[:, None])
    for coefficient, made in terms:
        d_hidden.addcmul_(made, coefficient[:, None])
    if options.lora_A is not None and options.lora_B is not None:
        down = options.lora_B[index].to(dtype) * (options.lora_scale * slope)[:, None]
        d_hidden.addmm_(down, options.lora_A.to(dtype))
    return d_hidden


def logprob_hidden_grad(
    weight: Tensor,
    index: Tensor,
    keep: Tensor,
    options: HeadOptions,
    saved: LogprobSaved,
    d_logprob: Tensor | None,
    d_lse: Tensor | None,
) -> Tensor:
    """d_hidden [N, H] of `linear_logprob` from E; the target's logit gets g (1 − p_t) + g' p_t, p_t = exp(logprob).

    g, g': gradients of logprob and lse. 1 − p_t is −expm1(logprob), exact also where the target is nearly certain.
    """
    zero = torch.zeros_like(saved.lse)
    g, g_lse = (zero if x is None else torch.where(keep, x.to(zero.dtype), 0.0) for x in (d_logprob, d_lse))
    on_target = g_lse * saved.logprob.exp() - g * torch.expm1(saved.logprob)
    terms = [(g_lse - g, saved.expected)]
    return ahead_hidden_grad(weight, index, keep, options, saved.logprob, saved.lse, terms, on_target)


def pair_hidden_grad(
    weight: Tensor,
    index: Tensor,
    keep: Tensor,
    options: HeadOptions,
    saved: PairSaved,
    d_logprob: Tensor | None,
    d_kl: Tensor | None,
) -> Tensor:
    """d_hidden_a [N, H] of `linear_logprob_pair` from E and D; the target's logit gets g (1 − p_t) + g″ p_t (d_t − kl).

    g, g″: gradients of logprob_a and kl; d_t = logprob_a − logprob_r.
    """
    zero = torch.zeros_like(saved.lse_a)
    g, g_kl = (zero if x is None else torch.where(keep, x.to(zero.dtype), 0.0) for x in (d_logprob, d_kl))
    on_target = -g * torch.expm1(saved.logprob_a)
    terms = [(-g, saved.expected)]
    if d_kl is not None:
        gap = (saved.logprob_a - saved.logprob_r) - saved.kl
        on_target = on_target + g_kl * torch.where(saved.logprob_a > -torch.inf, saved.logprob_a.exp() * gap, 0.0)
        terms.append((g_kl, saved.expected_kl))
    return ahead_hidden_grad(weight, index, keep, options, saved.logprob_a, saved.lse_a, terms, on_target)


@dataclass(frozen=True, kw_only=True)
class Head:
    """A head in the accumulation dtype: makes tiles of transformed logits and takes gradients back."""

    weight: Tensor  # [V, H]
    bias: Tensor | None  # [V]
    lora: HeadLora | None
    temperature: float
    column: Tensor | None  # [N, 1], replaces `temperature`
    softcap: float
    logit_scale: float
    keep: Tensor  # [N] bool

    @classmethod
    def of(cls, hidden: Tensor, weight: Tensor, keep: Tensor, options: HeadOptions) -> Head:
        """Options from an op's flat arguments."""
        o, dtype = options, accumulation_dtype(hidden, weight)
        lora = None
        if o.lora_A is not None and o.lora_B is not None:
            lora = HeadLora(o.lora_A.to(dtype), o.lora_B.to(dtype), o.lora_scale)
        return cls(
            weight=weight.to(dtype),
            bias=None if o.bias is None else o.bias.to(dtype),
            lora=lora,
            temperature=o.temperature,
            column=temperature_column(o.row_temperature, keep, dtype),
            softcap=o.softcap,
            logit_scale=o.logit_scale,
            keep=keep,
        )

    def rows(self, hidden: Tensor, rows: slice) -> Tensor:
        """hidden[rows] in the accumulation dtype, with zeros in the rows that do not count."""
        return hidden[rows].to(self.weight.dtype).masked_fill(~self.keep[rows, None], 0.0)

    def divisor(self, rows: slice) -> float | Tensor:
        """The temperature of `rows`: a number, or [n, 1]."""
        return self.temperature if self.column is None else self.column[rows]

    def capped(self, h: Tensor) -> Tensor:
        """c: logits [n, V] before the temperature."""
        c = h @ self.weight.T
        if self.lora is not None:
            c.addmm_(h @ self.lora.A.T, self.lora.B.T, alpha=self.lora.scale)
        if self.bias is not None:
            c += self.bias
        if self.logit_scale != 1.0:
            c *= self.logit_scale
        if self.softcap:
            c.div_(self.softcap).tanh_().mul_(self.softcap)
        return c

    def tile(self, h: Tensor, rows: slice) -> Tensor:
        """z: transformed logits [n, V]."""
        return self.capped(h).div_(self.divisor(rows))

    def pull_back_(self, g: Tensor, z: Tensor, divisor: float | Tensor) -> Tensor:
        """dL/dz → dL/dy in place; `z` is only read."""
        g.div_(divisor)
        if self.softcap:
            g.mul_((z * divisor).div_(self.softcap).square_().neg_().add_(1.0))
        return g.mul_(self.logit_scale) if self.logit_scale != 1.0 else g


class HeadGrads:
    """Sums of dL/d(hidden, weight, bias, lora_A, lora_B); what `needs` does not name is never made."""

    names = ("hidden", "weight", "bias", "lora_A", "lora_B")

    def __init__(self, head: Head, hidden: Tensor, needs: str) -> None:
        self.head = head
        self.needs = tuple(needs.split(",")) if needs else ()
        like = {"hidden": hidden, "weight": head.weight, "bias": head.bias}
        if head.lora is not None:
            like |= {"lora_A": head.lora.A, "lora_B": head.lora.B}
        self.sums = {
            name: torch.zeros(x.shape, dtype=head.weight.dtype, device=x.device)
            for name, x in like.items()
            if name in self.needs and x is not None
        }

    def add(self, rows: slice | Tensor, h: Tensor, g: Tensor) -> None:
        """One tile: rows of `hidden` (a range or distinct indices), h [n, H], g = dL/dy [n, V]."""
        head, sums = self.head, self.sums
        down = None
        if head.lora is not None and ("hidden" in sums or "lora_A" in sums):
            down = (g @ head.lora.B).mul_(head.lora.scale)  # [n, r]
        if "hidden" in sums:
            dh = g @ head.weight
            sums["hidden"][rows] = dh if down is None or head.lora is None else dh.addmm_(down, head.lora.A)
        if "weight" in sums:
            sums["weight"].addmm_(g.T, h)
        if "bias" in sums:
            sums["bias"] += g.sum(0)
        if "lora_A" in sums and down is not None:
            sums["lora_A"].addmm_(down.T, h)
        if "lora_B" in sums and head.lora is not None:
            sums["lora_B"].addmm_(g.T, h @ head.lora.A.T, alpha=head.lora.scale)

    def results(self, *inputs: Tensor | None) -> tuple[Tensor, ...]:
        """Gradients in the order of `names`, each in its input's dtype; empty where none was asked for."""
        empty = self.head.weight.new_empty
        return tuple(
            self.sums[name].to(x.dtype) if x is not None and name in self.sums else empty(0)
            for name, x in zip(self.names, inputs, strict=True)
        )
