"""The vocabulary sweeps of csrc/cpu/head.h for tensors: what `linear_logprob`, its pair and `linear_ppo_loss` call.

Products take bf16 operands if hidden and weight are both bf16 (tile registers or vdpbf16ps where the CPU has them),
otherwise fp32 ones; logits stay in fp32 accumulators. Only rows that count enter: a `HeadCall` names them, and its
results and gradients are compact, one entry per such row in ascending order.

A LoRA on the head widens both operands by a few columns: hidden by s h Aᵀ and W by B. As bf16 operands these are split
into a rounded part and a rounded remainder, so that the addition is not rounded to bf16.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from rlhf_kernels.linear import native as linear
from rlhf_kernels.linear import packed
from rlhf_kernels.runtime import native
from rlhf_kernels.vocab.logits import HeadGrads, HeadOptions

STATISTICS = ("logprob", "lse", "entropy", "is_top1", "mean_logit", "log_sum_sq_prob")
ROW_GRADIENTS = (
    "lse",
    "logprob",
    "on_lse",
    "entropy",
    "entropy_value",
    "mean_logit",
    "log_sum_sq_prob",
    "log_sum_sq_prob_value",
    "kl",
    "kl_value",
    "pair_lse",
)


def unsupported(device_type: str, dtype: torch.dtype) -> str | None:
    """Reason why the native sweeps cannot serve such tensors, or None."""
    if dtype in (torch.bfloat16, torch.float16):  # fp16 is upcast once per call
        dtype = torch.float32
    if dtype == torch.float64:
        return "it computes in torch.float32, not in torch.float64"
    return native.unsupported(device_type, dtype)


def has_whole_tiles(shape: Sequence[int]) -> bool:
    """Whether a head [V, H] without LoRA may keep a packed copy, see `linear.packed`."""
    return all(n % 32 == 0 for n in shape)


def _rows_of(x: Tensor) -> Tensor:
    """x as fp32 or bf16 with inner stride 1."""
    if x.dtype not in (torch.float32, torch.bfloat16):
        x = x.float()
    return x if x.shape[1] <= 1 or x.stride(1) == 1 else x.contiguous()


def _matrix(name: str, x: Tensor | None, shape: Sequence[int] | None = None) -> tuple[int, int, int]:
    if x is None or (x.numel() == 0 and shape is None):
        return (0, 0, 0)
    return (*native.rows(name, x, x.dtype, shape), int(x.dtype == torch.bfloat16))


def floats(*shape: int) -> Tensor:
    """Memory for fp32 numbers, whatever torch's default dtype."""
    return torch.empty(shape, dtype=torch.float32)


def _optional(name: str, x: Tensor | None, n: int | None = None) -> int:
    return 0 if x is None else native.dense(name, x, torch.float32, None if n is None else (n,))


def _check_head(hidden: Tensor, weight: Tensor, target: Tensor, o: HeadOptions) -> None:
    """Raise unless all have the rows of hidden [N, H] or the words of weight [V, H]."""
    if hidden.dim() != 2 or weight.dim() != 2:
        raise ValueError(
            f"hidden, weight: expected two dimensions each, got {tuple(hidden.shape)} and {tuple(weight.shape)}"
        )
    (N, H), V = hidden.shape, weight.shape[0]
    r = 0 if o.lora_A is None else o.lora_A.shape[0]
    for name, x, shape in (
        ("weight", weight, (V, H)),
        ("target", target, (N,)),
        ("bias", o.bias, (V,)),
        ("lora.A", o.lora_A, (r, H)),
        ("lora.B", o.lora_B, (V, r)),
        ("temperature", o.row_temperature, (N,)),
    ):
        if x is not None and x.shape != shape:
            raise ValueError(f"{name}: expected shape {shape}, got {tuple(x.shape)}")


class Gradients(NamedTuple):
    """Gradients in the order of `HeadGrads.names`; None where not asked for. hidden is compact [n, H].

    fp32, but for a weight's gradient that was asked for in bf16: its sums are rounded once, when they are complete.
    """

    hidden: Tensor | None
    weight: Tensor | None
    bias: Tensor | None
    lora_A: Tensor | None
    lora_B: Tensor | None


class HeadCall:
    """One batch of active rows under one head; keeps alive what the native code reads."""

    def __init__(self, hidden: Tensor, weight: Tensor, target: Tensor, options: HeadOptions, rows: Tensor) -> None:
        """rows: int64 [n], the active rows, ascending; target: index of every row, in range where active."""
        n, o = rows.shape[0], options
        _check_head(hidden, weight, target, o)
        self.rows, self.options = rows, options
        self.hidden, self.weight = _rows_of(hidden), _rows_of(weight)
        self.bf16 = self.hidden.dtype == self.weight.dtype == torch.bfloat16
        self.target = target[rows]
        if o.row_temperature is None:
            self.temperature = torch.full((n,), o.temperature, dtype=torch.float32)
        else:
            self.temperature = o.row_temperature[rows].float()
        self.bias = None if o.bias is None else o.bias.float().contiguous()
        self.extra_hidden: Tensor | None = None
        self.extra_weight: Tensor | None = None
        self.rank = 0
        if o.lora_A is not None and o.lora_B is not None and o.lora_A.shape[0] > 0:
            self._widen(o.lora_A, o.lora_B, o.lora_scale)
        self.extra = 0 if self.extra_weight is None else self.extra_weight.shape[1]
        self.head_args = (
            *_matrix("weight", self.weight),
            *_matrix("lora.B", self.extra_weight),
            _optional("bias", self.bias),
            self.weight.shape[1],
            self.extra,
            self.weight.shape[0],
            o.softcap,
            o.logit_scale,
        )
        self._packed: Tensor | None = None  # held while its address is read: `packed` may drop it at any time
        self._may_keep = self.hidden.dtype == weight.dtype and self.weight is weight and self.extra == 0
        self.batch_args = (
            *_matrix("hidden", self.hidden),
            *_matrix("lora.A", self.extra_hidden),
            native.dense("rows", rows, torch.int64),
            n,
            native.dense("temperature", self.temperature, torch.float32),
            native.dense("target", self.target, torch.int64),
        )

    def _head(self, across: bool) -> tuple[float | int, ...]:
        """The head for C++. across: its weight is multiplied with across, too; then a frozen one has a kept copy."""
        if across and self._may_keep and has_whole_tiles(self.weight.shape):
            address, stride, type_ = self.head_args[:3]
            self._packed = packed.of(self.weight, int(type_), int(address), int(stride))
        return (*self.head_args, 0 if self._packed is None else self._packed.data_ptr())

    def _widen(self, A: Tensor, B: Tensor, scale: float) -> None:
        down = linear.forward(self.hidden[self.rows].float(), A.float(), None).mul_(scale)  # torch's bits vary with n
        self.rank = A.shape[0]
        if not self.bf16:
            self.extra_hidden = down
            self.extra_weight = (B if B.dtype == self.weight.dtype else B.float()).contiguous()
            return
        high = down.bfloat16()
        low = (down - high).bfloat16()
        B_high = B.bfloat16()
        if B.dtype == torch.bfloat16:
            self.extra_hidden, self.extra_weight = torch.cat([high, low], 1), torch.cat([B, B], 1)
        else:
            B_low = (B.float() - B_high).bfloat16()
            self.extra_hidden = torch.cat([high, low, high], 1)
            self.extra_weight = torch.cat([B_high, B_high, B_low], 1)

    def forward(
        self, wanted: set[str], *, pair_hidden: Tensor | None = None, expected: bool = False, expected_kl: bool = False
    ) -> dict[str, Tensor]:
        """The wanted `STATISTICS` [n], with `pair_hidden` also pair_logprob, pair_lse and kl [n]; `expected` [n, H]."""
        n, threads = self.rows.shape[0], native.threads()
        made = {name: floats(n) for name in STATISTICS if name in wanted}
        statistics = tuple(_optional(name, made.get(name)) for name in STATISTICS)
        pair = None
        if pair_hidden is not None:
            other = _rows_of(pair_hidden).to(self.hidden.dtype)
            made |= {name: floats(n) for name in ("pair_logprob", "pair_lse", "kl")}
            addresses = (_optional(name, made[name]) for name in ("pair_logprob", "pair_lse", "kl"))
            pair = (*_matrix("hidden_r", other, self.hidden.shape), *addresses)
        width = self.weight.shape[1] + self.extra
        wide = {name: floats(n, width) for name, want in (("expected", expected), ("expected_kl", expected_kl)) if want}
        native.extension().head_forward(
            self._head(expected),
            self.batch_args,
            statistics,
            pair,
            _optional("expected", wide.get("expected")),
            _optional("expected_kl", wide.get("expected_kl")),
            threads,
        )
        return made | {name: self._narrow(x) for name, x in wide.items()}

    def backward(
        self,
        rows: dict[str, Tensor],
        needs: set[str],
        *,
        pair_hidden: Tensor | None = None,
        round_weight: bool = False,
    ) -> Gradients:
        """Gradients from those of the statistics, named as in `ROW_GRADIENTS`, each fp32 [n] and dense.

        round_weight: the caller takes the weight's gradient as it is, so bf16 sums may be rounded where they are made.
        """
        H, r, n_vocab = self.weight.shape[1], self.rank, self.weight.shape[0]
        n, width = self.rows.shape[0], H + self.extra
        need_hidden = "hidden" in needs or ("lora_A" in needs and r > 0)
        need_lora_B = "lora_B" in needs and r > 0
        wide = floats(n, width) if need_hidden else None
        rounded = round_weight and self.bf16 and self.extra == 0
        weight_dtype = torch.bfloat16 if rounded else torch.float32
        weight = torch.empty(n_vocab, width, dtype=weight_dtype) if "weight" in needs or need_lora_B else None
        bias = floats(n_vocab) if "bias" in needs else None
        other = None if pair_hidden is None else _rows_of(pair_hidden).to(self.hidden.dtype)
        pair = (0, 0) if other is None else _matrix("hidden_r", other, self.hidden.shape)[:2]
        native.extension().head_backward(
            self._head(need_hidden),
            self.batch_args,
            (*(_optional(name, rows.get(name), n) for name in ROW_GRADIENTS), *pair),
            _optional("d_hidden", wide),
            0 if weight is None else native.dense("d_weight", weight, weight_dtype),
            0 if "weight" in needs else H,
            rounded,
            _optional("d_bias", bias),
            native.threads(),
        )
        d_A = d_B = None
        if "lora_A" in needs and self.options.lora_A is not None:
            if wide is None:
                d_A = torch.zeros_like(self.options.lora_A, dtype=torch.float32)
            else:
                d_A = self._down(wide).mul_(self.options.lora_scale).T @ self.hidden[self.rows].float()
        if "lora_B" in needs and self.options.lora_B is not None:
            if weight is None or not need_lora_B:
                d_B = torch.zeros_like(self.options.lora_B, dtype=torch.float32)
            else:
                d_B = weight[:, H : H + r] + weight[:, H + r : H + 2 * r] if self.bf16 else weight[:, H : H + r]
        return Gradients(
            hidden=None if wide is None or "hidden" not in needs else self._narrow(wide),
            weight=None if weight is None or "weight" not in needs else weight[:, :H],
            bias=bias,
            lora_A=d_A,
            lora_B=d_B,
        )

    def _down(self, wide: Tensor) -> Tensor:
        """The columns that stand for products with B, [n, r], as a new tensor."""
        H, r = self.weight.shape[1], self.rank
        down = wide[:, H : H + r].clone()
        if self.bf16 and self.extra == 3 * r:
            down += wide[:, H + 2 * r :]
        return down

    def _narrow(self, wide: Tensor) -> Tensor:
        """Σ g W' taken back through the addition: [n, H + extra] → [n, H]."""
        if self.extra == 0:
            return wide
        assert self.options.lora_A is not None
        down = self._down(wide).mul_(self.options.lora_scale)
        return torch.addmm(wide[:, : self.weight.shape[1]], down, self.options.lora_A.float())


def active_rows(keep: Tensor) -> Tensor:
    """int64 [n] indices of the rows that count."""
    return keep.nonzero()[:, 0]


def scatter(rows: Tensor, values: Tensor, n_rows: int) -> Tensor:
    """Compact rows put back among `n_rows`; zeros elsewhere."""
    if rows.shape[0] == n_rows:
        return values
    return values.new_zeros(n_rows, *values.shape[1:]).index_copy_(0, rows, values)


def results(gradients: Gradients, rows: Tensor, inputs: tuple[Tensor | None, ...]) -> tuple[Tensor, ...]:
    """Gradients in the order of `HeadGrads.names`, each in its input's dtype; empty where none was asked for."""
    made = []
    for name, x, g in zip(HeadGrads.names, inputs, gradients, strict=True):
        if x is None or g is None:
            made.append(floats(0))
        elif name == "hidden":
            made.append(scatter(rows, g.to(x.dtype), x.shape[0]))
        else:
            made.append(g.to(x.dtype).contiguous())
    return tuple(made)


__all__ = ["STATISTICS", "HeadCall", "active_rows", "floats", "results", "scatter", "unsupported"]
