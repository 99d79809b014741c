"""Sample the next token straight from hidden states with the Gumbel-max trick.

Forward   z = transform(hidden Wᵀ + …) / temperature           the logits of `linear_logprob`
          token = argmax_v (z_v + g_v),  g_v = −log(−log1p(−u_v)), u from Philox4x32-10 keyed by seed,
                  counter (v // 4, stream 1, position)         which is a draw from softmax(z)
          greedy rows: token = argmax_v of the logits before the temperature, first maximum
          rows that forbid: z_v = −∞ for the forbidden tokens, greedy or not
          logprob = z_token − lse(z),  entropy = −Σ p log p
Backward  none: inference only.

Legend    hidden [N, H], weight W [V, H], temperature scalar or [N], seed [N] and position [N]
          int64, greedy [N] bool.
Dtypes    any float in; accumulation fp32 (fp64 if hidden or weight is fp64); noise fp32; token int64.
Determinism: the noise of a row is a function of (seed[n], position[n]) only: not of the batch, its order or
its size.
Source    Gumbel (1954), Maddison et al. 2014; Philox: Salmon et al., SC 2011.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from rlhf_kernels.runtime import autocast, eager, registry, triton_support
from rlhf_kernels.sample import native, reference
from rlhf_kernels.vocab.logits import (
    HEAD,
    HeadLora,
    HeadOptions,
    accumulation_dtype,
    check_head,
    check_matrices,
    check_outputs,
    check_tensor,
    widest,
)
from rlhf_kernels.vocab.runs import RUNS, HeadLoras, HeadRuns, check_runs, is_one_sweep, joined

__all__ = ["SampleOutputs", "sample"]

registry.register("sample", "reference", reference)
registry.register("sample", "triton", registry.Lazy("rlhf_kernels.sample.triton", triton_support.unsupported))
registry.register("sample", "cpu", native)

FILTERS = "top_k, top_p and min_p need all logits of a row at once"
"""Reason why a call with a filter goes to the reference."""


class Filters(NamedTuple):
    """Tokens that may be drawn; the defaults leave all."""

    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0


class SampleOutputs(NamedTuple):
    """Per-row results of `sample`; a field that `outputs` does not name is None."""

    token: Tensor | None
    """[N] int64, the sampled token"""
    logprob: Tensor | None = None
    """[N], its log-prob at the row's temperature, in nats"""
    entropy: Tensor | None = None
    """[N], entropy of the row's distribution, in nats"""


def sample(
    hidden: Tensor,
    weight: Tensor,
    *,
    seed: Tensor,
    position: Tensor,
    temperature: float | Tensor = 1.0,
    greedy: Tensor | None = None,
    forbidden: Tensor | None = None,
    forbids: Tensor | None = None,
    softcap: float | None = None,
    logit_scale: float | None = None,
    bias: Tensor | None = None,
    lora: HeadLora | HeadLoras | None = None,
    outputs: tuple[str, ...] = ("token", "logprob"),
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    backend: str = "auto",
) -> SampleOutputs:
    """Sample one token per row by the Gumbel-max trick (Gumbel 1954), with the equations of the module's docstring.

    Inference only. Greedy and sampled rows may stand in one batch. Log-prob and entropy are those of the tokens that
    `forbids`, top_k, top_p and min_p leave, renormalised.

    Args:
        hidden: [N, H], floating; last hidden states.
        weight: [V, H], floating, of the head; V ≥ 1.
        seed: [N] int64, key of a row's random numbers: the seed of its sequence.
        position: [N] int64, counter of a row's random numbers: the position of the token.
        temperature: number > 0, or a floating tensor [N] without a gradient. Log-probs of greedy rows are at it, too.
        greedy: [N] bool, rows that take the arg-max. None: no row.
        forbidden: [F] int64 in [0, V), tokens that the rows of `forbids` never draw. None: no token, and no `forbids`.
        forbids: [N] bool, rows that may not draw the forbidden tokens. None: no row, and no `forbidden`.
        softcap: number > 0, the bound of |logits| before the temperature. None: no bound.
        logit_scale: number > 0, factor of the logits before the softcap. None: 1.
        bias: [V], floating, of the head. None: no bias.
        lora: rank-r addition to the head, or additions by runs of rows. None: no addition.
        outputs: names of the fields of `SampleOutputs` that are returned.
        top_k: integer ≥ 1; only the k most probable tokens are kept. None or ≥ V: all. Below V it needs the `reference`
            backend, which `auto` then takes.
        top_p: number in (0, 1]; of these, only the smallest set that reaches mass top_p is kept. None or 1: all. Below
            1 it needs the `reference` backend, too.
        min_p: number in (0, 1]; of these, only tokens are kept that have at least this share of the probability of the
            most probable one. None: all. It needs the `reference` backend, too.
        backend: `auto` or the name of a backend, see `rlhf_kernels.runtime.registry`.

    Returns:
        `SampleOutputs` with token [N] int64, logprob [N] and entropy [N]: float64 if hidden or weight is float64, else
            float32. Fields that `outputs` does not name are None.

    Raises:
        TypeError: a tensor's dtype is not of the kind above, or outputs is a str.
        ValueError: a shape or device does not fit, a number is out of its range, or a name in outputs or backend is
            unknown.
        ValueError: forbidden is given without forbids, or forbids without forbidden.
        ValueError: a row has no token left, or a forbidden token is out of range, which the CPU alone checks.
        ValueError: a tensor requires grad while gradients are enabled.
        BackendUnavailableError: the named backend cannot serve the call, or cannot filter by top_k, top_p and min_p.
    """
    check_matrices(hidden, weight)
    one, runs = check_runs(lora, hidden, weight)
    options = check_head(hidden, weight, bias, one, temperature, softcap, logit_scale)
    n_rows = hidden.shape[0]
    check_tensor("seed", seed, (n_rows,), hidden, "int64")
    check_tensor("position", position, (n_rows,), hidden, "int64")
    if greedy is not None:
        check_tensor("greedy", greedy, (n_rows,), hidden, "bool")
    _check_bans(forbidden, forbids)
    if forbidden is not None and forbids is not None:
        check_tensor("forbidden", forbidden, tuple(forbidden.shape[:1]), hidden, "int64")
        check_tensor("forbids", forbids, (n_rows,), hidden, "bool")
        _check_words(forbidden, weight.shape[0])
        _require_rest(forbidden, forbids, weight.shape[0])
    if top_k is not None and (isinstance(top_k, bool) or not isinstance(top_k, int) or top_k < 1):
        raise ValueError(f"top_k: expected None or an int ≥ 1, got {top_k!r}")
    if top_p is not None and not 0.0 < top_p <= 1.0:
        raise ValueError(f"top_p: expected None or a number in (0, 1], got {top_p!r}")
    if min_p is not None and not 0.0 < min_p <= 1.0:
        raise ValueError(f"min_p: expected None or a number in (0, 1], got {min_p!r}")
    wanted = check_outputs(outputs, SampleOutputs._fields).split(",")
    if torch.is_grad_enabled():
        inputs = {"hidden": hidden, "weight": weight, "bias": bias}
        inputs |= {"lora.A": options.lora_A, "lora.B": options.lora_B}
        inputs |= {f"A of lora.loras, slot {i} of those with rows": x for i, x in enumerate(runs.run_A)}
        inputs |= {f"B of lora.loras, slot {i} of those with rows": x for i, x in enumerate(runs.run_B)}
        for name, x in inputs.items():
            if x is not None and x.requires_grad:
                raise ValueError(
                    f"{name}: expected one that needs no gradient (sampling has none), got one that requires "
                    "grad; call under torch.no_grad(), or use linear_logprob for a log-prob with a gradient"
                )
    if top_k is not None and top_k >= weight.shape[0]:
        top_k = None
    chosen = _resolve(backend, hidden, weight, top_k is not None or (top_p or 1.0) < 1.0 or min_p is not None)
    results = _sample(
        hidden,
        weight,
        seed,
        position,
        greedy,
        forbidden,
        forbids,
        options,
        runs,
        Filters(top_k or 0, float(top_p or 1.0), float(min_p or 0.0)),
        "entropy" in wanted,
        chosen,
    )
    return SampleOutputs(
        **{name: x if name in wanted else None for name, x in zip(SampleOutputs._fields, results, strict=True)}
    )


def _check_words(forbidden: Tensor, n_vocab: int) -> None:
    """Raise ValueError for a forbidden token that the vocabulary lacks. Only on a CPU: a GPU's values cost a wait."""
    if forbidden.numel() == 0 or not forbidden.is_cpu or not eager.eager(forbidden):
        return
    for word in map(int, forbidden.aminmax()):
        if not 0 <= word < n_vocab:
            raise ValueError(f"forbidden: expected tokens in [0, {n_vocab}), got {word}")


def _require_rest(forbidden: Tensor, forbids: Tensor, n_vocab: int) -> None:
    """Raise ValueError where a row may draw no token. Only as many tokens as the vocabulary has are looked at."""
    if forbidden.numel() >= n_vocab and forbidden.unique().numel() >= n_vocab and bool(forbids.any()):
        raise ValueError(f"forbidden: expected fewer than the {n_vocab} tokens of the vocabulary, got all of them")


def _resolve(backend: str, hidden: Tensor, weight: Tensor, filtered: bool) -> str:
    """The backend for such tensors; with a filter `auto` passes over kernels, and by name they are refused."""
    chosen = registry.resolve("sample", backend, widest(hidden, weight), weight.shape)
    if not filtered or chosen == "reference":
        return chosen
    asked = registry.asked("sample") if backend == "auto" else backend
    if asked != "auto":
        raise registry.BackendUnavailableError(
            f"backend={asked!r} cannot serve sample: {FILTERS}; available here: ['reference']"
        )
    return "reference"


def _check_filters(given: Any) -> None:
    """Raise for one of `forbidden` and `forbids` without the other, and for a filter that the backend lacks.

    Raise for a forbidden token that the vocabulary lacks, and for a row without a token that is left, too.
    """
    forbidden, forbids, n_vocab = given.forbidden, given.forbids, given.weight.shape[0]
    _check_bans(forbidden, forbids)
    given.runs.check(given.hidden.shape[0])
    if forbidden is not None:
        _check_words(forbidden, n_vocab)
        if forbidden.is_cpu and eager.eager(forbidden):
            _require_rest(forbidden, forbids, n_vocab)
    if given.backend != "reference" and given.filters != Filters():
        raise registry.BackendUnavailableError(f"backend={given.backend!r} cannot serve sample: {FILTERS}")


def _check_bans(forbidden: Tensor | None, forbids: Tensor | None) -> None:
    if (forbidden is None) != (forbids is None):
        raise ValueError("forbids: expected it together with forbidden, got one of the two")


@eager.custom_op(
    "rlhf_kernels::sample",
    "hidden: float[N, H], weight: float[V, H], seed: int64[N], position: int64[N], greedy: bool[N], "
    f"forbidden: int64[F], forbids: bool[N], {HEAD}, {RUNS}",
    also=_check_filters,
)
def _sample(
    hidden: Tensor,
    weight: Tensor,
    seed: Tensor,
    position: Tensor,
    greedy: Tensor | None,
    forbidden: Tensor | None,
    forbids: Tensor | None,
    head: HeadOptions,
    runs: HeadRuns,
    filters: Filters,
    with_entropy: bool,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor]:
    served = registry.implementation("sample", backend)
    run = served.forward
    bans = None if forbidden is None or forbids is None else (forbidden, forbids)
    rest = (*filters, with_entropy)
    with autocast.off(hidden):
        if not runs.run_A:
            return run(hidden, weight, seed, position, greedy, bans, head, *rest)
        if backend == "cpu":  # which knows runs
            return run(hidden, weight, seed, position, greedy, bans, head, *rest, runs)
        together = served.together(hidden, weight, head) if backend == "triton" and is_one_sweep() else None
        heads, parts = runs.heads(head, len(hidden), hidden.device, together), []
        for one in heads:
            own = [None if x is None else x[one.rows] for x in (hidden, seed, position, greedy, forbids)]
            own_bans = None if forbidden is None else (forbidden, own[4])
            shared = () if one.runs is None else (one.runs,)
            parts.append(run(own[0], weight, *own[1:4], own_bans, one.head, *rest, *shared))
        made = [joined(heads, column, len(hidden)) for column in zip(*parts, strict=True)]
        return tuple(made)  # type: ignore[return-value]


@_sample.register_fake
def _(hidden, weight, seed, *args):
    dtype = accumulation_dtype(hidden, weight)
    n_rows, with_entropy = hidden.shape[0], args[-2]
    return (
        torch.empty_like(seed),
        hidden.new_empty(n_rows, dtype=dtype),
        hidden.new_empty(n_rows if with_entropy else 0, dtype=dtype),
    )
