"""Log-probs of truncated distributions: tokens that were drawn among some words are normalised over those words.

    z = head(h) / T,  −10³⁰ outside of the support S
    log p(t) = z_t − log Σ_{v ∈ S} exp z_v,   and entropy and KL are sums over S alone

The support is held fixed: gradients are those of the distribution on it. Rows that were drawn among all words take
the fused sweep of the vocabulary, which makes no logits. The others make theirs, a few rows at a time.

Memory: rows of at most 2²² logits exist at once, with a backward's also, about 80 MB in all. A backward makes them
again. Dtypes: logits are rounded once to the head's dtype, as transformers' are, and fp32 from then on (fp64 for an
fp64 head). A row's numbers depend on that row alone where those of `rlhf_kernels.linear` do.

Legend: M rows, H hidden, V words.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from rlhf_kernels.gather_logprob import gather_logprob
from rlhf_kernels.linear_logprob import LogprobOutputs, linear_logprob
from rlhf_kernels.linear_logprob_pair import PairOutputs, linear_logprob_pair
from rlhf_kernels.runtime.autocast import off
from rlhf_kernels.vocab.logits import accumulation_dtype, check_detach, check_outputs, check_temperature, row_chunks
from torch.utils.checkpoint import checkpoint

from rlhf_engine.hydra.adapters import LmHead, head_logits
from rlhf_engine.hydra.supports import Supports

OUTSIDE = -1e30  # logit of a word outside of a support: its probability is 0, and 0 times its log is a number

Results = tuple[torch.Tensor, ...]


def wide_logits(hidden: torch.Tensor, head: LmHead) -> torch.Tensor:
    """Logits before the temperature: fp32 [M, V], or fp64 with an fp64 head."""
    with off(hidden):  # as inside an op
        z = head_logits(hidden.to(head.weight.dtype), head)
    return z.to(accumulation_dtype(head.weight))


def _scaled(hidden: torch.Tensor, head: LmHead, temperature: float, supports: Supports | None) -> torch.Tensor:
    """Logits [M, V] divided by the temperature, and `OUTSIDE` beyond the supports."""
    logits = wide_logits(hidden, head)
    z = logits / logits.new_tensor(check_temperature(temperature, (), logits)[0])
    return z if supports is None else z.masked_fill(~supports.mask(), OUTSIDE)


def logprobs(
    hidden: torch.Tensor,
    head: LmHead,
    target_M: torch.Tensor,
    supports: Supports | None,
    *,
    temperature: float,
    outputs: tuple[str, ...] = ("logprob",),
    detach: tuple[str, ...] = (),
) -> LogprobOutputs:
    """Statistics of `linear_logprob`, over the words that each token was drawn among.

    Args:
        hidden: floating [M, H], hidden states that predict the M tokens.
        head: LM head that reads them.
        target_M: int64 [M], the tokens.
        supports: words that each token was drawn among; None: all words.
        temperature: number > 0 that logits are divided by.
        outputs: names of the fields of `LogprobOutputs` that are computed.
        detach: outputs that need no gradient.

    Returns:
        `LogprobOutputs`, fp32 [M] for each name in `outputs`, fp64 with an fp64 head.

    Raises:
        ValueError: an unknown name, a mean logit of a support, a temperature that is not > 0, or supports of another
            vocabulary.
        TypeError: a string instead of a tuple as `outputs` or `detach`.
    """
    options = {"temperature": temperature, **head_options(head)}
    if supports is None:
        return linear_logprob(hidden, head.weight, target_M, outputs=outputs, detach=detach, **options)
    names = tuple(check_outputs(outputs).split(","))
    fixed = check_detach(detach, names)
    if "mean_logit" in names:
        raise ValueError("outputs: expected none of the whole vocabulary for tokens with supports, got 'mean_logit'")

    def fused(hidden: torch.Tensor, target: torch.Tensor) -> Results:
        outputs = linear_logprob(hidden, head.weight, target, outputs=names, detach=detach, **options)
        return tuple(getattr(outputs, name) for name in names)

    def truncated(some: Supports | None, hidden: torch.Tensor, target: torch.Tensor) -> Results:
        z = _scaled(hidden, head, temperature, some)
        outputs = gather_logprob(z, target, outputs=names, inplace_backward=True)
        return _detached([getattr(outputs, name) for name in names], names, fixed)

    results = _by_rows(fused, truncated, supports, head, (hidden, target_M))
    return LogprobOutputs(**{"logprob": None, **dict(zip(names, results, strict=True))})


def pair(
    hidden: torch.Tensor,
    head: LmHead,
    other: torch.Tensor,
    other_head: LmHead,
    target_M: torch.Tensor,
    supports: Supports | None,
    *,
    temperature: float,
    detach: tuple[str, ...] = (),
) -> PairOutputs:
    """Statistics of `linear_logprob_pair`, over the words that each token was drawn among; heads may differ.

    Args:
        hidden: floating [M, H], hidden states that predict the M tokens.
        head: LM head that reads them.
        other: floating [M, H], hidden states of the reference, which get no gradient.
        other_head: LM head of the reference.
        target_M: int64 [M], the tokens.
        supports: words that each token was drawn among; None: all words.
        temperature: number > 0 that logits are divided by.
        detach: outputs that need no gradient.

    Returns:
        `PairOutputs`, fp32 [M] each, fp64 with an fp64 head.

    Raises:
        ValueError: an unknown name, a temperature that is not > 0, or supports of another vocabulary.
        TypeError: a string instead of a tuple as `detach`.
    """
    names = PairOutputs._fields
    fixed = check_detach(detach, names)

    def fused(hidden: torch.Tensor, other: torch.Tensor, target: torch.Tensor) -> Results:
        if not have_one_head(head, other_head):
            return _in_chunks(in_logits, None, head, (hidden, other, target))
        options: dict[str, Any] = {"temperature": temperature, **head_options(head)}
        return tuple(linear_logprob_pair(hidden, other, head.weight, target, detach=detach, **options))

    def in_logits(some: Supports | None, hidden: torch.Tensor, other: torch.Tensor, target: torch.Tensor) -> Results:
        z = _scaled(hidden, head, temperature, some)
        z_r = _scaled(other.detach(), other_head, temperature, some)
        ours = gather_logprob(z, target, outputs=("logprob", "entropy", "lse"))
        theirs = gather_logprob(z_r, target, outputs=("logprob", "lse"))
        assert ours.lse is not None
        assert theirs.lse is not None
        kl = ((z - ours.lse[:, None]).exp() * (z - z_r)).sum(-1) - ours.lse + theirs.lse
        return _detached((ours.logprob, theirs.logprob, kl, ours.entropy), names, fixed)

    tensors = (hidden, other, target_M)
    if supports is None:
        return PairOutputs(*fused(*tensors))
    return PairOutputs(*_by_rows(fused, in_logits, supports, head, tensors))


def have_one_head(head: LmHead, other: LmHead) -> bool:
    """Whether two heads are the same weight, with LoRA on the first one at most: what one sweep serves."""
    return head.weight is other.weight and other.lora is None


def head_options(head: LmHead) -> dict[str, Any]:
    """Keyword arguments that make the vocabulary kernels compute this head's distribution."""
    return {"bias": head.bias, "softcap": head.softcap, "logit_scale": head.logit_scale, "lora": head.lora}


def _detached(values: Sequence[torch.Tensor | None], names: Sequence[str], fixed: Collection[str]) -> Results:
    """Values in the order of their names, without a gradient where they are fixed."""
    pairs = zip(names, values, strict=True)
    return tuple(x.detach() if name in fixed else x for name, x in pairs if x is not None)


def _by_rows(
    fused: Callable[..., Results],
    truncated: Callable[..., Results],
    supports: Supports,
    head: LmHead,
    tensors: Sequence[torch.Tensor],
) -> Results:
    """Results [M] of `fused` for the rows that have all words, and of `truncated` for the others, in their order."""
    if supports.vocabulary != len(head.weight):
        raise ValueError(
            f"supports: expected those of the head's {len(head.weight)} words, got of {supports.vocabulary}"
        )
    some = supports.lengths > 0
    if some.all() and len(supports):
        return _in_chunks(truncated, supports, head, tensors)
    whole, rest = (flags.nonzero()[:, 0] for flags in (~some, some))
    parts = []
    for rows, run in ((whole, fused), (rest, lambda *x: _in_chunks(truncated, supports.select(rest), head, x))):
        if len(rows) or run is fused:
            at = rows.to(tensors[0].device)
            parts.append(run(*(x.index_select(0, at) for x in tensors)))
    back = torch.cat([whole, rest]).argsort().to(tensors[0].device)
    return tuple(torch.cat(column).index_select(0, back) for column in zip(*parts, strict=True))


def _in_chunks(
    function: Callable[..., Results], supports: Supports | None, head: LmHead, tensors: Sequence[torch.Tensor]
) -> Results:
    """Results of all rows, of which a few at a time have logits; a backward makes these again."""
    parts = []
    for rows in row_chunks(len(tensors[0]), len(head.weight)):
        arguments = (None if supports is None else supports.select(rows), *(x[rows] for x in tensors))
        if torch.is_grad_enabled():
            parts.append(checkpoint(function, *arguments, use_reentrant=False, preserve_rng_state=False))
        else:
            parts.append(function(*arguments))
    return tuple(torch.cat(column) for column in zip(*parts, strict=True))
