"""The vocabulary sweeps of csrc/cpu/head.h for tensors: what `linear_logprob`, its pair and `linear_ppo_loss` call.

Products take bf16 operands if hidden and weight are both bf16 (tile registers or vdpbf16ps where the CPU has them),
otherwise fp32 ones; logits stay in fp32 accumulators. Only rows that count enter: a `HeadCall` names them, and its
results and gradients are compact, one entry per such row, in ascending order or, with runs, slot by slot.

A LoRA on the head widens both operands by a few columns: hidden by s h Aᵀ and W by B. As bf16 operands these are split
into a rounded part and a rounded remainder, so that the addition is not rounded to bf16. Rows of another run meet
other columns; W itself is read once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from rlhf_kernels.linear import native as linear, packed
from rlhf_kernels.lora.segments import OFF
from rlhf_kernels.runtime import native
from rlhf_kernels.vocab.logits import HeadLora, HeadOptions
from rlhf_kernels.vocab.runs import HeadRuns, slot_names

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


class Part(NamedTuple):
    """Compact rows [start, end) that share a LoRA, or have none, and the columns by which it widens both operands."""

    start: int
    end: int
    lora: HeadLora | None
    names: tuple[str, str]  # of the gradients of its A and B
    hidden: Tensor | None  # [rows, extra]
    weight: Tensor | None  # B [V, r], which C++ takes apart

    @property
    def rank(self) -> int:
        """Rank of the LoRA, 0 without one."""
        return 0 if self.lora is None else self.lora.A.shape[0]

    @property
    def extra(self) -> int:
        """Columns beside those of W."""
        return 0 if self.hidden is None else self.hidden.shape[1]

    def down(self, sums: Tensor) -> Tensor:
        """The columns of `sums` [n, extra] that stand for products with B, [n, r], as a new tensor."""
        r = self.rank
        down = sums[:, :r].clone()
        if self.extra == 3 * r:
            down += sums[:, 2 * r :]
        return down

    def add_down_(self, rows: Tensor, sums: Tensor) -> None:
        """Products with B go back through A: rows [n, H] gain s (Σ g B) A."""
        if self.lora is not None and self.extra:
            rows.addmm_(self.down(sums).mul_(self.lora.scale), self.lora.A.float())


class HeadCall:
    """One batch of active rows under one head; keeps alive what the native code reads."""

    def __init__(
        self,
        hidden: Tensor,
        weight: Tensor,
        target: Tensor,
        options: HeadOptions,
        rows: Tensor,
        runs: HeadRuns | None = None,
    ) -> None:
        """rows: int64 [n], the active rows, ascending; target: index of every row, in range where active.

        Afterwards `rows` are in the order of the results; `moved` if not ascending any more.
        """
        n, o = rows.shape[0], options
        _check_head(hidden, weight, target, o)
        self.options, self._n_rows = o, hidden.shape[0]
        self.hidden, self.weight = _rows_of(hidden), _rows_of(weight)
        self.bf16 = self.hidden.dtype == self.weight.dtype == torch.bfloat16
        self.moved = False
        self.rows, self._parts = self._by_slot(rows, HeadRuns.none() if runs is None else runs)
        self.target = target[self.rows]
        if o.row_temperature is None:
            self.temperature = torch.full((n,), o.temperature, dtype=torch.float32)
        else:
            self.temperature = o.row_temperature[self.rows].float()
        self.bias = None if o.bias is None else o.bias.float().contiguous()
        self.head_args = (
            *_matrix("weight", self.weight),
            _optional("bias", self.bias),
            self.weight.shape[1],
            self.weight.shape[0],
            o.softcap,
            o.logit_scale,
        )
        self._packed: Tensor | None = None  # held while its address is read: `packed` may drop it at any time
        self._may_keep = self.hidden.dtype == weight.dtype and self.weight is weight
        self._may_keep = self._may_keep and not any(part.extra for part in self._parts)
        self.batch_args = (
            *_matrix("hidden", self.hidden),
            native.dense("rows", self.rows, torch.int64),
            n,
            native.dense("temperature", self.temperature, torch.float32),
            native.dense("target", self.target, torch.int64),
        )

    def _by_slot(self, rows: Tensor, runs: HeadRuns) -> tuple[Tensor, list[Part]]:
        """Active rows slot by slot, in order within each, and what each slot has."""
        o, stretches = self.options, runs.stretches(self._n_rows)
        flat = [run for part in stretches.values() for run in part]
        bounds = torch.searchsorted(rows, torch.tensor(flat)).tolist() if len(flat) > 1 else [(0, len(rows))]
        self.moved = flat != sorted(flat)
        if self.moved:
            rows = torch.cat([rows[first:last] for first, last in bounds])
        loras = {i: HeadLora(*x) for i, x in enumerate(zip(runs.run_A, runs.run_B, runs.run_scales, strict=True))}
        if o.lora_A is not None and o.lora_B is not None:
            loras[OFF] = HeadLora(o.lora_A, o.lora_B, o.lora_scale)
        parts, start, counts = [], 0, iter(last - first for first, last in bounds)
        for slot, part in stretches.items():
            end = start + sum(next(counts) for _ in part)
            parts.append(self._part(rows, start, end, loras.get(slot), slot_names(slot)))
            start = end
        return rows, parts

    def runs(
        self,
        sums: Sequence[Tensor] | None = None,
        sums_kl: Sequence[Tensor] | None = None,
        d_weights: Sequence[Tensor | None] | None = None,
    ) -> list[tuple[int, ...]]:
        """Runs of rows for C++, with the places of sums [rows, extra] of each, and of gradients [V, extra]."""
        places = [x or [None] * len(self._parts) for x in (sums, sums_kl, d_weights)]
        return [
            (
                part.end,
                part.extra,
                *_matrix("lora.B", part.weight),
                part.rank,
                *_matrix("lora.A", part.hidden),
                *(_optional("sums", x[i]) for x in places),
            )
            for i, part in enumerate(self._parts)
        ]

    def gather(self, values: Tensor) -> Tensor:
        """Take what all rows have, all of them active, in the order of `rows`; dense."""
        return values[self.rows] if self.moved else values.contiguous()

    def scatter(self, values: Tensor) -> Tensor:
        """Compact rows put back among all rows; zeros elsewhere."""
        n = self._n_rows
        return _put(self.rows, values, n) if self.moved else scatter(self.rows, values, n)

    def _head(self, across: bool) -> tuple[float | int, ...]:
        """The head for C++. across: its weight is multiplied with across, too; then a frozen one has a kept copy."""
        if across and self._may_keep and has_whole_tiles(self.weight.shape):
            address, stride, type_ = self.head_args[:3]
            self._packed = packed.of(self.weight, int(type_), int(address), int(stride))
        return (*self.head_args, 0 if self._packed is None else self._packed.data_ptr())

    def _part(self, rows: Tensor, start: int, end: int, lora: HeadLora | None, names: tuple[str, str]) -> Part:
        if lora is None or lora.A.shape[0] == 0:
            return Part(start, end, lora, names, None, None)
        A, B, scale = lora
        down = linear.forward(self.hidden[rows[start:end]].float(), A.float(), None).mul_(scale)  # torch's vary with n
        B = (B if B.dtype in (torch.float32, torch.bfloat16) else B.float()).contiguous()
        if not self.bf16:
            return Part(start, end, lora, names, down, B)
        high = down.bfloat16()
        low = (down - high).bfloat16()
        columns = [high, low] if B.dtype == torch.bfloat16 else [high, low, high]  # which B meets in parts, too
        return Part(start, end, lora, names, torch.cat(columns, 1), B)

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
        wants = {"expected": expected, "expected_kl": expected_kl}
        sums = {name: floats(n, self.weight.shape[1]) for name, want in wants.items() if want}
        own = {name: self._own_sums() for name in sums}
        native.extension().head_forward(
            self._head(expected),
            self.batch_args,
            self.runs(own.get("expected"), own.get("expected_kl")),
            statistics,
            pair,
            _optional("expected", sums.get("expected")),
            _optional("expected_kl", sums.get("expected_kl")),
            threads,
        )
        for name, x in sums.items():
            self._add_down_(x, own[name])
        return made | sums

    def backward(
        self,
        rows: dict[str, Tensor],
        needs: set[str],
        *,
        pair_hidden: Tensor | None = None,
        round_weight: bool = False,
    ) -> dict[str, Tensor]:
        """Gradients from those of the statistics, named as in `ROW_GRADIENTS`, each fp32 [n] and dense.

        By their names in `needs`; hidden is compact [n, H].

        round_weight: the caller takes the weight's gradient as it is, so bf16 sums may be rounded where they are made.
        fp32 are all others.
        """
        H, n_vocab, n, parts = self.weight.shape[1], self.weight.shape[0], self.rows.shape[0], self._parts
        need_hidden = "hidden" in needs or any(part.extra and part.names[0] in needs for part in parts)
        hidden, own = (floats(n, H), self._own_sums()) if need_hidden else (None, None)
        rounded = round_weight and self.bf16
        weight_dtype = torch.bfloat16 if rounded else torch.float32
        weight = torch.empty(n_vocab, H, dtype=weight_dtype) if "weight" in needs else None
        d_weights = [floats(n_vocab, part.extra) if part.names[1] in needs and part.extra else None for part in parts]
        bias = floats(n_vocab) if "bias" in needs else None
        other = None if pair_hidden is None else _rows_of(pair_hidden).to(self.hidden.dtype)
        pair = (0, 0) if other is None else _matrix("hidden_r", other, self.hidden.shape)[:2]
        native.extension().head_backward(
            self._head(need_hidden),
            self.batch_args,
            self.runs(own, None, d_weights),
            (*(_optional(name, rows.get(name), n) for name in ROW_GRADIENTS), *pair),
            _optional("d_hidden", hidden),
            0 if weight is None else native.dense("d_weight", weight, weight_dtype),
            rounded,
            _optional("d_bias", bias),
            native.threads(),
        )
        made = {name: x for name, x in (("weight", weight), ("bias", bias)) if x is not None}
        for i, part in enumerate(parts):
            made |= self._lora_gradients(part, needs, None if own is None else own[i], d_weights[i])
        if hidden is not None and own is not None and "hidden" in needs:
            self._add_down_(hidden, own)
            made["hidden"] = hidden
        return made

    def _lora_gradients(
        self, part: Part, needs: set[str], sums: Tensor | None, d_weight: Tensor | None
    ) -> dict[str, Tensor]:
        """Gradients of a part's A and B, where needed."""
        if part.lora is None:
            return {}
        made, (A, B, scale), r = dict[str, Tensor](), part.lora, part.rank
        for name, x in zip(part.names, (A, B), strict=True):
            if name in needs and not part.extra:
                made[name] = torch.zeros_like(x, dtype=torch.float32)
        if sums is not None and part.extra and part.names[0] in needs:
            made[part.names[0]] = part.down(sums).mul_(scale).T @ self.hidden[self.rows[part.start : part.end]].float()
        if d_weight is not None:
            made[part.names[1]] = d_weight[:, :r] + d_weight[:, r : 2 * r] if self.bf16 else d_weight
        return made

    def _own_sums(self) -> list[Tensor]:
        """Memory for sums of the columns of every part."""
        return [floats(part.end - part.start, part.extra) for part in self._parts]

    def _add_down_(self, x: Tensor, own: Sequence[Tensor]) -> None:
        """Σ g W' taken back through the addition, in place: x [n, H] gains what the columns of every part add."""
        for part, sums in zip(self._parts, own, strict=True):
            part.add_down_(x[part.start : part.end], sums)


def active_rows(keep: Tensor) -> Tensor:
    """int64 [n] indices of the rows that count."""
    return keep.nonzero()[:, 0]


def scatter(rows: Tensor, values: Tensor, n_rows: int) -> Tensor:
    """Compact rows, ascending, put back among `n_rows`; zeros elsewhere."""
    return values if rows.shape[0] == n_rows else _put(rows, values, n_rows)


def _put(rows: Tensor, values: Tensor, n_rows: int) -> Tensor:
    return values.new_zeros(n_rows, *values.shape[1:]).index_copy_(0, rows, values)


def results(
    gradients: dict[str, Tensor], inputs: dict[str, Tensor | None], needs: set[str], call: HeadCall
) -> tuple[Tensor, ...]:
    """Gradients in the order of the inputs, each in its input's dtype; empty where `needs` does not name it."""
    made = []
    for name, x in inputs.items():
        g = gradients.get(name)
        if x is None or name not in needs:
            made.append(floats(0))
        elif g is None:  # nothing has met it
            made.append(torch.zeros_like(x))
        elif name == "hidden":
            made.append(call.scatter(g.to(x.dtype)))
        else:
            made.append(g.to(x.dtype).contiguous())
    return tuple(made)


__all__ = ["STATISTICS", "HeadCall", "active_rows", "floats", "results", "scatter", "unsupported"]
