"""`linear_logprob_pair` on Triton and cuBLAS: `linear_logprob.triton_sweep` with two sets of rows.

Few rows: one kernel, each tile of W is loaded once and serves both sets, so a pair costs about what one call does. Many
rows: two cuBLAS products per tile, with the shapes that `linear_logprob` uses, and one kernel that folds both tiles. So
logprob_a, logprob_r and entropy are its very bits; one product of both sets stacked might run another cuBLAS kernel. KL
= Σ p (z_a − z_r) − (lse_a − lse_r), the first sum folded with the policy's running maximum; equal rows without lora
give exactly 0. Ahead, D is Σ_{v≠t} p (z_a − z_r − centre) u W − (lse_a − lse_r + kl − centre) E. The centre is
each row's mean difference in the first tile, so that little cancels. GEMMs of N·H·V: forward 2; ahead 3 or 4 in all;
otherwise 4 with only logprob_a or entropy to be differentiated, 5 with kl. Deterministic and capturable like
`linear_logprob`.
"""

from __future__ import annotations

from torch import Tensor

from rlhf_kernels.runtime.triton_support import AotCase
from rlhf_kernels.vocab import triton_aot
from rlhf_kernels.vocab.logits import HeadOptions, PairSaved
from rlhf_kernels.vocab.triton_sweep import RowGrads, Stats, Sweep


def forward(
    hidden_a: Tensor,
    hidden_r: Tensor,
    weight: Tensor,
    target: Tensor,
    options: HeadOptions,
    ignore_index: int,
    ahead: str,
) -> tuple[Tensor, ...]:
    """(logprob_a, logprob_r, kl, entropy, lse_a, lse_r), each [N], then E and D [N, H].

    E is empty unless `ahead` names logprob, D unless it names kl.
    """
    sweep = Sweep(hidden_a, weight, target, options, ignore_index, hidden_r)
    if sweep.n_rows == 0:
        made = (sweep.empty(0, sweep.hidden_size) if n in ahead else sweep.empty(0) for n in ("logprob", "kl"))
        return (*(sweep.empty(0) for _ in range(6)), *made)
    stats = sweep.statistics("entropy", ahead)
    rows = (stats.values[name] for name in ("logprob", "logprob_r", "kl", "entropy", "lse", "lse_r"))
    return (*rows, *(sweep.empty(0) if x is None else x for x in (stats.expected, stats.expected_kl)))


def backward(
    hidden_a: Tensor,
    hidden_r: Tensor,
    weight: Tensor,
    target: Tensor,
    options: HeadOptions,
    ignore_index: int,
    saved: PairSaved,
    grads: tuple[Tensor | None, Tensor | None, Tensor | None],
) -> Tensor:
    """d_hidden_a. grads: those of logprob_a, kl, entropy (or None)."""
    sweep = Sweep(hidden_a, weight, target, options, ignore_index, hidden_r)
    if sweep.n_rows == 0:
        return hidden_a.new_zeros(hidden_a.shape)
    d_logprob, d_kl, d_entropy = grads
    row_grads = RowGrads.of(logprob=d_logprob, kl=d_kl, entropy=d_entropy)
    values = {
        "logprob": saved.logprob_a,
        "logprob_r": saved.logprob_r,
        "entropy": saved.entropy,
        "lse_r": saved.lse_r,
        "kl": saved.kl,
    }
    stats = Stats(lse=saved.lse_a, values=values)
    if saved.expected.dim() == 2 and d_entropy is None and (d_kl is None or saved.expected_kl.dim() == 2):
        stats.expected, stats.expected_kl = saved.expected, saved.expected_kl
        return sweep.from_expected(stats, row_grads, hidden_a.dtype)
    return sweep.gradients(stats, row_grads, "hidden", {"hidden": hidden_a.dtype})["hidden"]


def aot_cases() -> list[AotCase]:
    """The kernels of the sweep with a reference's rows."""
    return triton_aot.pair_cases()
