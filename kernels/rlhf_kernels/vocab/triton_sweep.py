"""One or two sweeps over the rows of W: what the Triton backends of all linear_* ops are built from.

Large N: a tile [rows, columns] of products by cuBLAS with fp32 results (bf16 and fp16 operands are never rounded
again), then one kernel that reads it once: it turns products into logits and folds them into each row's running state.
Where E = Σ_{v≠t} p u W is needed, it writes e^(z−m) u, and a second cuBLAS product adds the tile's part. When a row's
maximum moves, the same kernel rescales that row of E. Vocabulary outside, rows inside: W is read once. Small N
(`fused_rows`): bandwidth decides, so one kernel makes products and states of a share of the vocabulary per program and
nothing but states leaves the chip; a pair shares every tile of W. E then takes a sweep of tiles of its own, so a
log-prob has the same bits whether a gradient is wanted or not. In exact mode that kernel serves any number of rows,
with the tiles of `sample` (`triton_by_row`).

Several LoRAs, by `vocab.runs.use_variant`: few rows share a launch of the fused kernel, and tiles of all slots take one
part of W after another, each with the products that it has alone. No GPU has run that.

Which path and which tiles depends on N, V, H and dtypes alone, as does the order of every sum. It is the same for the
three ops: equal inputs give equal bits in `linear_logprob`, `linear_logprob_pair` and `linear_ppo_loss`. Nothing reads
back from the device.
Memory beyond inputs, outputs and sums of their size: at most 16 bytes per tile element. A tile has at most N·V / 32
elements (or 2²³). That is 1/8 of the fp32 logits, or 128 MiB.
"""

from __future__ import annotations

import functools
import heapq
from collections.abc import Generator, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch
import triton
from torch import Tensor

from rlhf_kernels.linear.triton import product
from rlhf_kernels.runtime import registry
from rlhf_kernels.runtime.triton_support import INTERPRETED
from rlhf_kernels.vocab import cost, triton_by_row as by_row, triton_kernels as kernels
from rlhf_kernels.vocab.logits import HeadOptions, split_target
from rlhf_kernels.vocab.runs import HeadRuns, Together
from rlhf_kernels.vocab.triton_inputs import HeadInputs

# The defaults, all in one place. Numbers of rows and columns are powers of two.
FUSED_ROWS = {torch.bfloat16: 128, torch.float16: 128, torch.float32: 32}  # up to here the fused kernel runs
FUSED_PROGRAMS = 264  # shares of the vocabulary: two per multiprocessor of an H200
# Rows: columns, bytes of depth, and of depth beside a loop over ranks
FUSED_TILES = {16: (128, 256, 128), 32: (128, 128, 64), 64: (128, 128, 32), 128: (128, 128, 32)}
MOST_TOGETHER = {2: 64, 4: 16}  # rows of a block of several runs: it holds its sums twice, and registers are few
FOLD_ROWS = 32 if INTERPRETED else 1  # rows per program; the interpreter pays per program
FOLD_WARPS = 8
WARPS, STAGES = 4, 3  # where a kernel does not say otherwise; Triton's own defaults
GRAD_BLOCK = 128 if INTERPRETED else 2048
ROW_BLOCK = 64 if INTERPRETED else 1024  # columns per program of elementwise kernels over [N, H]

T = TypeVar("T")
Sweeping = Generator[int, None, T]
"""A sweep that stops before each tile, whose first column it names."""

FLAGS = {"SUM_SQ": "log_sum_sq_prob", "MEAN": "mean_logit", "TOP": "is_top1"}  # entropy and lse are always made


def fused_tile(rows: int, dtype: torch.dtype, rank: int) -> tuple[int, int]:
    """(columns, depth) of the fused kernel's tiles.

    fp32 products take registers in place of tensor cores, so they have fewer columns. A loop over ranks takes some;
    there only the depth may shrink, which changes no sum: tensor cores add in steps of 16 and fp32 units one by one, in
    one order whatever the depth. So rows without LoRA keep the bits of a call without it.
    """
    columns, *depths = FUSED_TILES[rows]
    return columns * 2 // dtype.itemsize, depths[rank > kernels.RANK_TILE.value] // dtype.itemsize


def fused_warps(rows: int, dtype: torch.dtype) -> int:
    """Warps of the fused kernel; more rows need more registers for their sums."""
    return 4 if rows < 64 and dtype.itemsize == 2 else 8


def fused_tiles(n_rows: int, dtype: torch.dtype, plain: bool, rank: int) -> dict[str, int]:
    """Constants of the fused kernel, and the most shares of the vocabulary (`PROGRAMS`); plain: see `is_plain`."""
    if registry.is_exact():
        return by_row.tile_sizes(dtype.itemsize, plain=plain, rank=rank) | {"PROGRAMS": cost.SHARES}
    block_n = min(128, max(16, triton.next_power_of_2(n_rows)))
    block_v, block_k = fused_tile(block_n, dtype, rank)
    return {
        "BN": block_n,
        "BV": block_v,
        "BK": block_k,
        "RANKS": kernels.padded_rank(rank),
        "num_warps": fused_warps(block_n, dtype),
        "num_stages": STAGES,
        "PROGRAMS": FUSED_PROGRAMS,
    }


def is_fused(n_rows: int, dtype: torch.dtype, weight: Tensor) -> bool:
    """Whether statistics come from the fused kernel."""
    return registry.is_exact() or (weight.dtype == dtype and n_rows <= FUSED_ROWS[dtype])


def together(hidden: Tensor, weight: Tensor, options: HeadOptions) -> Together:
    """Let slots share a launch of the fused kernel that it serves with the same tiles."""
    dtype, bare = torch.promote_types(hidden.dtype, weight.dtype), options.bias is None and not options.softcap

    def key(n_rows: int, rank: int | None) -> Hashable | None:
        if not is_fused(n_rows, dtype, weight):
            return None
        tiles = fused_tiles(n_rows, dtype, bare and rank is None, rank or 0)
        if tiles["BN"] > MOST_TOGETHER[dtype.itemsize]:
            return None
        return tuple(n for name, n in tiles.items() if name != "RANKS")

    return key


def side_by_side(sweeps: Sequence[Sweeping[T]]) -> Sweeping[list[T]]:
    """Sweeps of several slots as one: the one that is furthest behind goes on, so they read a part of W together."""
    found: dict[int, T] = {}

    def kept(i: int, sweep: Sweeping[T]) -> Sweeping[None]:
        found[i] = yield from sweep

    yield from heapq.merge(*(kept(i, sweep) for i, sweep in enumerate(sweeps)))
    return [found[i] for i in range(len(sweeps))]


def finished(sweep: Sweeping[T]) -> T:
    """Run a sweep to its end."""
    while True:
        try:
            next(sweep)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]


def gemm_(out: Tensor, a: Tensor, b: Tensor, *, add: bool = False) -> None:
    """out = a b, or out += a b: fp32 sums of operands in one dtype. In exact mode a row's bits are its own."""
    if registry.is_exact():
        made = torch.empty_like(out, memory_format=torch.contiguous_format) if add or not out.is_contiguous() else out
        product(a, b, None, made)
        if made is not out:
            _ = out.add_(made) if add else out.copy_(made)
        return
    if not registry.is_gpu(a.device):
        a, b = a.float(), b.float()
    if a.dtype == torch.float32:
        _ = torch.addmm(out, a, b, out=out) if add else torch.mm(a, b, out=out)
    elif add:
        torch.addmm(out, a, b, out_dtype=torch.float32, out=out)
    else:
        torch.mm(a, b, out_dtype=torch.float32, out=out)


@dataclass(kw_only=True)
class Stats:
    """Row statistics [N] fp32, 0 in rows that do not count; empty where not made."""

    lse: Tensor
    values: dict[str, Tensor] = field(default_factory=dict)  # by output name; a pair adds logprob_r, lse_r, kl
    expected: Tensor | None = None  # E [N, H], without the target's column
    expected_kl: Tensor | None = None  # D [N, H], likewise


@dataclass(frozen=True, kw_only=True)
class RowGrads:
    """Gradients [N] fp32 of row statistics, with 0 or anything in rows that do not count."""

    logprob: Tensor | None = None
    lse: Tensor | None = None
    entropy: Tensor | None = None
    mean_logit: Tensor | None = None
    log_sum_sq_prob: Tensor | None = None
    kl: Tensor | None = None

    @classmethod
    def of(cls, **grads: Tensor | None) -> RowGrads:
        """Make row gradients of autograd's, whatever their dtype and strides."""
        return cls(**{k: None if g is None else g.to(torch.float32).contiguous() for k, g in grads.items()})


class Sweep(HeadInputs):
    """A head and its rows, checked and laid out for the kernels."""

    def __init__(
        self,
        hidden: Tensor,
        weight: Tensor,
        target: Tensor,
        options: HeadOptions,
        ignore_index: int,
        hidden_r: Tensor | None = None,
        runs: HeadRuns | None = None,
        buffers: dict[str, Tensor] | None = None,
    ) -> None:
        """buffers: memory of tiles that sweeps side by side share; it grows as they need."""
        keep, index = split_target(target, weight.shape[0], ignore_index)
        super().__init__(hidden, weight, options, keep, hidden_r, runs)
        self.index = torch.where(keep, index, -1)
        self.buffers: dict[str, Tensor] = {} if buffers is None else buffers
        self.tile_rows, self.tile_columns = cost.tile_shape(self.n_rows, self.n_vocab)

    # --- pieces -------------------------------------------------------------------------------------------------

    @functools.cached_property
    def down(self) -> Tensor | None:
        """scale · h Aᵀ [N, r] fp32."""
        if registry.is_exact():
            return by_row.down(self)
        if self.runs is not None:  # torch's products, as each slot has them alone
            made = self.empty(self.n_rows, self.runs.width)
            for A, scale, rows in self.runs.slots():
                made[rows, : A.shape[0]] = (self.hidden[rows].float() @ A.float().T).mul_(scale)
            return made
        if self.lora_A is None:
            return None
        return (self.hidden.float() @ self.lora_A.T).mul_(self.options.lora_scale)

    @property
    def fused(self) -> bool:
        """Whether statistics come from the fused kernel."""
        return is_fused(self.n_rows, self.dtype, self.weight)

    def columns(self) -> Iterator[slice]:
        for start in range(0, self.n_vocab, self.tile_columns):
            yield slice(start, min(start + self.tile_columns, self.n_vocab))

    def chunks(self) -> Iterator[slice]:
        for start in range(0, self.n_rows, self.tile_rows):
            yield slice(start, min(start + self.tile_rows, self.n_rows))

    def tile_buffer(self, name: str, dtype: torch.dtype = torch.float32) -> Tensor:
        shape = min(self.tile_rows, self.n_rows), self.tile_columns
        if name not in self.buffers or self.buffers[name].numel() < shape[0] * shape[1]:
            self.buffers[name] = self.empty(shape[0] * shape[1], dtype=dtype)
        return self.buffers[name][: shape[0] * shape[1]].view(shape)

    def weight_tile(self, columns: slice) -> Tensor:
        return self.weight[columns].to(self.dtype)

    def products(self, buffer: Tensor, weight: Tensor, rows: slice, columns: slice, *, reference: bool) -> Tensor:
        """[n, width] of h Wᵀ (+ the policy's rank-r part) in `buffer`."""
        y = buffer[: rows.stop - rows.start, : columns.stop - columns.start]
        hidden = self.hidden_r if reference else self.hidden
        assert hidden is not None
        gemm_(y, hidden[rows], weight.T)
        if self.lora_B is not None and self.down is not None and not reference:
            gemm_(y, self.down[rows], self.lora_B[columns].T, add=True)
        return y

    # --- statistics ---------------------------------------------------------------------------------------------

    def statistics(self, outputs: str, ahead: str = "") -> Stats:
        """lse and `outputs` of every row; `ahead` names E ("logprob") and D ("kl")."""
        return finished(self.sweeping_statistics(outputs, ahead))

    def sweeping_statistics(self, outputs: str, ahead: str = "") -> Sweeping[Stats]:
        """`statistics`, tile by tile."""
        flags = {flag: name in outputs.split(",") for flag, name in FLAGS.items()}
        if not self.fused:
            return (yield from self._tiled(flags, outputs, ahead))
        stats, _ = self._finish(self._fused_state(flags), outputs)
        if ahead:
            stats.expected, stats.expected_kl = yield from self.expected(ahead)
        return stats

    def expected(self, ahead: str) -> Sweeping[tuple[Tensor | None, Tensor | None]]:
        """E and D, with the maxima and sums of tiled products: those of the fused kernel are rounded otherwise."""
        tiled = yield from self._tiled(dict.fromkeys(FLAGS, False), "", ahead)
        return tiled.expected, tiled.expected_kl

    def _fused_state(self, flags: dict[str, bool]) -> Tensor:
        n_rows, rank = self.n_rows, 0 if self.down is None else self.down.shape[1]
        if self.runs is not None:  # what they have alone, and all of them the same: see `together`
            n_rows, rank = self.runs.rows_and_rank()
        tiles = fused_tiles(n_rows, self.dtype, by_row.is_plain(self), rank)
        tiles |= {} if self.runs is None else {"RANKS": 0}  # read from the table: one binary for all
        down, lora_B, table, rank, wide = self.lora(self.down, tiles["BN"])
        n_tiles = triton.cdiv(self.n_vocab, tiles["BV"])
        per_split = triton.cdiv(n_tiles, tiles.pop("PROGRAMS"))
        splits = triton.cdiv(n_tiles, per_split)
        state = self.empty(splits, kernels.FIELDS, self.n_rows)
        kernels.fused_kernel[(triton.cdiv(self.n_rows, tiles["BN"]), splits)](
            self.hidden,
            self.hidden_r,
            self.weight,
            self.index,
            self.bias,
            down,
            lora_B,
            table,
            self.temperature,
            state,
            self.n_rows,
            self.n_vocab,
            self.hidden_size,
            rank,
            self.hidden.stride(0),
            0 if self.hidden_r is None else self.hidden_r.stride(0),
            self.weight.stride(0),
            per_split,
            **self.transform(),
            **flags,
            UPCAST=INTERPRETED,
            WIDE=wide,
            **tiles,
            **kernels.SAME_ROUNDING,
        )
        return state

    def _tiled(self, flags: dict[str, bool], outputs: str, ahead: str) -> Sweeping[Stats]:
        state = self.empty(1, kernels.FIELDS, self.n_rows).zero_()
        state[0, 0] = state[0, 7] = -torch.inf  # the running maxima
        made = [name in ahead for name in ("logprob", "kl")]
        unused = self.empty(0, dtype=self.dtype)  # the kernel takes a pointer of this type whether it writes or not
        width = self.hidden_size + (0 if self.lora_B is None else self.lora_B.shape[1])
        sums = [self.empty(self.n_rows, width) if make else None for make in made]
        for columns in self.columns():
            yield columns.start
            z, z_r = self.tile_buffer("z"), None if self.hidden_r is None else self.tile_buffer("z_r")
            factors = [
                self.tile_buffer(name, self.dtype) if make else None for name, make in zip("pq", made, strict=True)
            ]
            p, q = (unused if factor is None else factor for factor in factors)
            weight = self.weight_tile(columns)
            for rows in self.chunks():
                y = self.products(z, weight, rows, columns, reference=False)
                if z_r is not None:
                    self.products(z_r, weight, rows, columns, reference=True)
                n = rows.stop - rows.start
                kernels.fold_tile_kernel[(triton.cdiv(n, FOLD_ROWS),)](
                    z,
                    z_r,
                    p,
                    None if z_r is None else q,
                    self.index,
                    self.bias,
                    self.temperature,
                    state,
                    *(state if total is None else total for total in sums),
                    sum(made),
                    rows.start,
                    n,
                    self.n_rows,
                    columns.start,
                    y.shape[1],
                    self.tile_columns,
                    self.tile_columns,
                    width,
                    **self.transform(),
                    **flags,
                    R=FOLD_ROWS,
                    BLOCK=self.tile_columns,
                    num_warps=FOLD_WARPS,
                    **kernels.SAME_ROUNDING,
                )
                for factor, total in zip(factors, sums, strict=True):
                    if factor is not None and total is not None:
                        self._add_product(factor[:n, : y.shape[1]], total[rows], weight, columns)
        stats, inverse = self._finish(state, outputs)
        self._normalise(stats, inverse, state, sums)
        return stats

    def _add_product(self, p: Tensor, total: Tensor, weight: Tensor, columns: slice) -> None:
        """total [n, H + r] += p [W, B] of one tile, or = in the first."""
        add = columns.start > 0
        gemm_(total[:, : self.hidden_size], p, weight, add=add)
        if self.lora_B is not None:
            gemm_(total[:, self.hidden_size :], p, self.lora_B[columns].to(self.dtype), add=add)

    def _finish(self, state: Tensor, outputs: str) -> tuple[Stats, Tensor]:
        """Statistics from states, and 1 / s [N]."""
        pair = self.hidden_r is not None
        names = ("logprob", "lse", *outputs.split(","), *(("logprob_r", "lse_r", "kl") if pair else ()))
        values = {name: self.empty(self.n_rows) for name in names if name}
        inverse = self.empty(self.n_rows)
        finish(state, self.index, inverse, values, self.n_vocab)
        return Stats(lse=values["lse"], values=values), inverse

    def _normalise(self, stats: Stats, inverse: Tensor, state: Tensor, sums: list[Tensor | None]) -> None:
        """E and D from the sums of the sweep."""
        if sums[0] is None:
            return
        n, width = sums[0].shape
        values = stats.values
        kernels.normalise_kernel[(triton.cdiv(n, FOLD_ROWS), triton.cdiv(width, ROW_BLOCK))](
            *sums,
            inverse,
            stats.lse,
            values.get("lse_r"),
            values.get("kl"),
            state[0, 11],
            n,
            width,
            R=FOLD_ROWS,
            BLOCK=ROW_BLOCK,
            num_warps=WARPS,
        )
        h = self.hidden_size
        if self.lora_A is not None:
            A = self.lora_A * self.options.lora_scale
            for x in sums:
                if x is not None:
                    gemm_(x[:, :h], x[:, h:], A, add=True)
            sums = [None if x is None else x[:, :h].contiguous() for x in sums]
        stats.expected, stats.expected_kl = sums

    # --- gradients ----------------------------------------------------------------------------------------------

    def from_expected(self, stats: Stats, grads: RowGrads, dtype: torch.dtype) -> Tensor:
        """d_hidden [N, H] from E (and D) and the gradients of logprob, lse (and kl), elementwise."""
        assert stats.expected is not None
        lora = self.lora_A is not None
        out = self.empty(self.n_rows, self.hidden_size, dtype=torch.float32 if lora else dtype)
        on_target = self.empty(self.n_rows) if lora else None
        grid = (triton.cdiv(self.n_rows, FOLD_ROWS), triton.cdiv(self.hidden_size, ROW_BLOCK))
        kernels.from_expected_kernel[grid](
            stats.expected,
            None if grads.kl is None else stats.expected_kl,
            self.weight,
            self.index,
            self.temperature,
            stats.values["logprob"],
            stats.lse,
            None if grads.kl is None else stats.values["logprob_r"],
            None if grads.kl is None else stats.values["kl"],
            grads.logprob,
            grads.lse,
            grads.kl,
            on_target,
            out,
            self.n_rows,
            self.hidden_size,
            self.weight.stride(0),
            **self.transform(),
            R=FOLD_ROWS,
            BLOCK=ROW_BLOCK,
            num_warps=WARPS,
        )
        if on_target is not None and self.lora_A is not None and self.lora_B is not None:
            target = self.lora_B[self.index.clamp_min(0)] * (self.options.lora_scale * on_target)[:, None]
            gemm_(out, target, self.lora_A, add=True)
        return out.to(dtype)

    def gradients(
        self, stats: Stats, grads: RowGrads, needs: str, dtypes: dict[str, torch.dtype] | None = None
    ) -> dict[str, Tensor]:
        """Return what `sweeping_gradients` makes."""
        return finished(self.sweeping_gradients(stats, grads, needs, dtypes))

    def sweeping_gradients(
        self, stats: Stats, grads: RowGrads, needs: str, dtypes: dict[str, torch.dtype] | None = None
    ) -> Sweeping[dict[str, Tensor]]:
        """Gradients of the inputs named in `needs`, from products that are made again tile by tile.

        dtypes: of the results, fp32 where not given. A row's gradient is 0 where it does not count.
        """
        names = set(needs.split(","))
        dtypes = dtypes or {}
        n, h, v = self.n_rows, self.hidden_size, self.n_vocab
        rank = 0 if self.lora_A is None else self.lora_A.shape[0]
        sums: dict[str, Tensor] = {}
        if "hidden" in names:
            sums["hidden"] = self.empty(n, h)
        if rank and names & {"hidden", "lora_A"}:
            sums["down"] = self.empty(n, rank)  # Σ G B
        for name, shape in (("weight", (v, h)), ("bias", (v,)), ("lora_B", (v, rank))):
            if name in names:
                sums[name] = self.empty(*shape, dtype=dtypes.get(name, torch.float32))
        # Products with rows that do not count meet zeros, but 0 · NaN is not 0
        clean = self.hidden.masked_fill(~self.keep[:, None], 0) if names & {"weight", "lora_A"} else None
        down = None
        if "lora_B" in names and self.down is not None:
            down = self.down.masked_fill(~self.keep[:, None], 0).to(self.dtype)
        for columns in self.columns():
            yield columns.start
            z, z_r = self.tile_buffer("z"), None if grads.kl is None else self.tile_buffer("z_r")
            g = z if self.dtype == torch.float32 else self.tile_buffer("g", self.dtype)
            weight = self.weight_tile(columns)
            tile = {
                name: self.empty(columns.stop - columns.start, *sums[name].shape[1:])
                for name in sums
                if name in PER_COLUMN
            }
            for rows in self.chunks():
                G = self._grad_tile(z, z_r, g, stats, grads, weight, rows, columns)
                later = columns.start > 0
                if "hidden" in sums:
                    gemm_(sums["hidden"][rows], G, weight, add=later)
                if "down" in sums and self.lora_B is not None:
                    gemm_(sums["down"][rows], G, self.lora_B[columns].to(self.dtype), add=later)
                later = rows.start > 0
                if clean is not None and "weight" in tile:
                    gemm_(tile["weight"], G.T, clean[rows], add=later)
                if down is not None:
                    gemm_(tile["lora_B"], G.T, down[rows], add=later)
                if "bias" in tile:
                    part = G.sum(0, dtype=torch.float32)
                    tile["bias"] = tile["bias"].add_(part) if later else part
            for name, value in tile.items():
                sums[name][columns] = value
        if "down" in sums and self.lora_A is not None:
            scaled = sums.pop("down").mul_(self.options.lora_scale)
            if "hidden" in sums:
                gemm_(sums["hidden"], scaled, self.lora_A, add=True)
            if "lora_A" in names and clean is not None:
                sums["lora_A"] = scaled.T @ clean.float()
        return {name: x.to(dtypes.get(name, torch.float32)) for name, x in sums.items()}

    def _grad_tile(
        self,
        z: Tensor,
        z_r: Tensor | None,
        g: Tensor,
        stats: Stats,
        grads: RowGrads,
        weight: Tensor,
        rows: slice,
        columns: slice,
    ) -> Tensor:
        """dL/dy of one tile [n, width] in the operands' dtype."""
        y = self.products(z, weight, rows, columns, reference=False)
        if z_r is not None:
            self.products(z_r, weight, rows, columns, reference=True)
        n, width = y.shape
        kernels.grad_tile_kernel[(triton.cdiv(n, FOLD_ROWS), triton.cdiv(width, GRAD_BLOCK))](
            z,
            z_r,
            g,
            self.index,
            self.bias,
            self.temperature,
            stats.lse,
            stats.values.get("lse_r") if grads.kl is not None else None,
            stats.values.get("entropy") if grads.entropy is not None else None,
            stats.values.get("log_sum_sq_prob") if grads.log_sum_sq_prob is not None else None,
            stats.values.get("kl") if grads.kl is not None else None,
            grads.logprob,
            grads.lse,
            grads.entropy,
            grads.mean_logit,
            grads.log_sum_sq_prob,
            grads.kl,
            rows.start,
            n,
            columns.start,
            width,
            self.n_vocab,
            self.tile_columns,
            self.tile_columns,
            **self.transform(),
            R=FOLD_ROWS,
            BLOCK=GRAD_BLOCK,
            num_warps=WARPS,
        )
        return g[:n, :width]


PER_COLUMN = ("weight", "bias", "lora_B")


def finish(state: Tensor, index: Tensor, inverse: Tensor | None, values: dict[str, Tensor], n_vocab: int) -> None:
    """Fill `values` (row statistics by name) from states [splits, FIELDS, N]."""
    n_splits, _, n_rows = state.shape
    splits = triton.next_power_of_2(n_splits)
    per_program = max(1, 128 // splits)
    names = ("logprob", "lse", "entropy", "is_top1", "mean_logit", "log_sum_sq_prob", "logprob_r", "lse_r", "kl")
    kernels.finish_kernel[(triton.cdiv(n_rows, per_program),)](
        state,
        index,
        inverse,
        *(values.get(name) for name in names),
        n_splits,
        n_rows,
        n_vocab,
        SPLITS=splits,
        R=per_program,
        **kernels.SAME_ROUNDING,
    )
