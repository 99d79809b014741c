"""Supports: the words that each token was drawn among, kept from the rollout to the update, and log-probs over them.

top_k, top_p and min_p draw a token among some words alone. A ratio of two policies is right only where both are
normalised over the words that the drawing one chose among. So those words stay with the token.

    z = head(h) / T,  −10³⁰ outside of the support S
    log p(t) = z_t − log Σ_{v ∈ S} exp z_v,   and entropy and KL are sums over S alone

A token's support is stored as nothing (all words), as the ids of its words, or as one bit per word, whichever is
smaller: at most ⌈V / 32⌉ numbers of 32 bits, V / 8 bytes.

The support is held fixed: gradients are those of the distribution on it. Rows that were drawn among all words take
the fused sweep of the vocabulary, which makes no logits. The others make theirs, a few rows at a time.

Memory: rows of at most 2²² logits exist at once, with a backward's also, about 80 MB in all. A backward makes them
again. Dtypes: logits are rounded once to the head's dtype, as transformers' are, and fp32 from then on (fp64 for an
fp64 head). A row's numbers depend on that row alone where those of `rlhf_kernels.linear` do.

Legend: M tokens or rows, H hidden, V words of the vocabulary, W = ⌈V / 32⌉, S stored numbers of all tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from rlhf_kernels.gather_logprob import gather_logprob
from rlhf_kernels.linear_logprob import LogprobOutputs, linear_logprob
from rlhf_kernels.linear_logprob_pair import PairOutputs, linear_logprob_pair
from rlhf_kernels.runtime.autocast import off
from rlhf_kernels.vocab.logits import accumulation_dtype, check_detach, check_outputs, check_temperature, row_chunks
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from rlhf_engine.hydra.gate import LmHead, head_logits


@dataclass(frozen=True, kw_only=True, eq=False)
class Supports:
    """Words that each of M tokens was drawn among."""

    words: torch.Tensor  # int32 [S], the ids or the bits of every token, one after another
    offsets: torch.Tensor
    """int64 [M+1] on the host, where each token's numbers begin. None of them: all words; W: bits; fewer: ids."""
    vocabulary: int  # V, number of words

    def __post_init__(self) -> None:
        if self.words.dtype != torch.int32 or self.words.dim() != 1:
            raise TypeError(f"words: expected int32 [S], got {self.words.dtype} {list(self.words.shape)}")
        if self.offsets.dtype != torch.int64 or self.offsets.dim() != 1 or not self.offsets.is_cpu:
            raise TypeError(
                f"offsets: expected int64 [M+1] on the host, got {self.offsets.dtype} {list(self.offsets.shape)} on "
                f"{self.offsets.device}"
            )
        most = numbers_of_bits(self.vocabulary)
        fits = len(self.offsets) > 0 and int(self.offsets[0]) == 0 and int(self.offsets[-1]) == len(self.words)
        if not fits or bool(((self.lengths < 0) | (self.lengths > most)).any()):
            raise ValueError(
                f"offsets: expected steps of 0 to {most} from 0 to the {len(self.words)} numbers of words, got "
                f"{self.offsets[:8].tolist()}"
            )

    @classmethod
    def whole(cls, n_tokens: int, vocabulary: int, device: torch.device | str = "cpu") -> Supports:
        """Make supports of tokens that were drawn among all words, which take no memory but their offsets."""
        return cls(
            words=torch.empty(0, dtype=torch.int32, device=device),
            offsets=torch.zeros(n_tokens + 1, dtype=torch.int64),
            vocabulary=vocabulary,
        )

    @classmethod
    def from_bits(cls, bits: torch.Tensor, vocabulary: int) -> Supports:
        """Make supports of bits, int32 [M, W] as of `pack_bits`; a token without one was drawn among all words."""
        most, parts = numbers_of_bits(vocabulary), [cls.whole(0, vocabulary, bits.device)]
        for rows in row_chunks(len(bits), vocabulary):
            own = bits[rows]
            lengths = count_bits(own).clamp_max(most).cpu()
            has_bits = lengths == most
            of_bits = has_bits.repeat_interleave(lengths)
            ids = unpack_bits(own[_places(~has_bits, bits)], vocabulary).nonzero()[:, 1]
            words = torch.empty(len(of_bits), dtype=torch.int32, device=bits.device)
            words[_places(of_bits, bits)] = own[_places(has_bits, bits)].flatten()
            words[_places(~of_bits, bits)] = ids.int()
            parts.append(cls.of_lengths(words, lengths, vocabulary))
        return cls.concat(parts)

    @classmethod
    def of_lengths(cls, words: torch.Tensor, lengths: torch.Tensor, vocabulary: int) -> Supports:
        """Make supports of numbers int32 [S], `lengths` [M] of them for each token; ValueError where S differs."""
        return cls(words=words, offsets=_offsets(lengths.long().cpu()), vocabulary=vocabulary)

    @classmethod
    def of_rows(cls, rows: Sequence[torch.Tensor], n_tokens: int, vocabulary: int) -> Supports:
        """Join the stored numbers of single tokens, at least one; tokens beyond `rows` were drawn among all words."""
        lengths = torch.tensor([len(row) for row in rows] + [0] * (n_tokens - len(rows)), dtype=torch.int64)
        return cls.of_lengths(torch.cat(list(rows)), lengths, vocabulary)

    @classmethod
    def concat(cls, parts: Sequence[Supports]) -> Supports:
        """Join supports of one vocabulary and device in the order of the parts; ValueError where they differ."""
        sizes = sorted({part.vocabulary for part in parts})
        if len(sizes) != 1:
            raise ValueError(f"parts: expected supports of one vocabulary, got vocabularies of {sizes}")
        return cls(
            words=torch.cat([part.words for part in parts]),
            offsets=_offsets(torch.cat([part.lengths for part in parts])),
            vocabulary=sizes[0],
        )

    @classmethod
    def join(cls, parts: Sequence[tuple[Supports | None, int]]) -> Supports | None:
        """Join supports and numbers of tokens without; None where no part has any, ValueError where they differ."""
        known = next((part for part, _ in parts if part is not None), None)
        if known is None:
            return None
        vocabulary, device = known.vocabulary, known.words.device
        return cls.concat([cls.whole(n, vocabulary, device) if part is None else part for part, n in parts])

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @cached_property
    def lengths(self) -> torch.Tensor:
        """int64 [M] on the host, stored numbers of each token."""
        return self.offsets.diff()

    @property
    def n_bytes(self) -> int:
        """Bytes of words and offsets."""
        return self.words.nbytes + self.offsets.nbytes

    @cached_property
    def sizes(self) -> torch.Tensor:
        """int64 [M] on the host, number of words in each support."""
        most = numbers_of_bits(self.vocabulary)
        has_bits = self.lengths == most
        of_bits = _places(has_bits.repeat_interleave(self.lengths), self.words)
        sizes = torch.where(self.lengths == 0, self.vocabulary, self.lengths)
        sizes[has_bits] = count_bits(self.words[of_bits].view(-1, most)).cpu()
        return sizes

    def select(self, rows: slice | torch.Tensor) -> Supports:
        """Select the supports of a slice of step 1, without a copy, or of int64 [m] on the host."""
        if isinstance(rows, slice):
            first, end, _ = rows.indices(len(self))
            offsets = self.offsets[first : end + 1]
            words = self.words[int(offsets[0]) : int(offsets[-1])]
            return Supports(words=words, offsets=offsets - offsets[0], vocabulary=self.vocabulary)
        lengths = self.lengths[rows]
        offsets = _offsets(lengths)
        places = torch.arange(int(offsets[-1])) + (self.offsets[:-1][rows] - offsets[:-1]).repeat_interleave(lengths)
        words = self.words[places.to(self.words.device)]
        return Supports(words=words, offsets=offsets, vocabulary=self.vocabulary)

    def to(self, device: torch.device | str) -> Supports:
        """Move the words to a device; offsets stay on the host."""
        return Supports(words=self.words.to(device), offsets=self.offsets, vocabulary=self.vocabulary)

    def mask(self) -> torch.Tensor:
        """bool [M, V], True for the words of a support; `select` a few rows first. IndexError for an unknown id."""
        most, words = numbers_of_bits(self.vocabulary), self.words
        has_bits, has_none = self.lengths == most, self.lengths == 0
        of_bits = has_bits.repeat_interleave(self.lengths)
        mask = torch.zeros(len(self), self.vocabulary, dtype=torch.bool, device=words.device)
        mask[_places(has_none, words)] = True
        mask[_places(has_bits, words)] = unpack_bits(words[_places(of_bits, words)].view(-1, most), self.vocabulary)
        rows = torch.arange(len(self)).repeat_interleave(self.lengths)[~of_bits]
        mask[rows.to(words.device), words[_places(~of_bits, words)].long()] = True
        return mask


def numbers_of_bits(vocabulary: int) -> int:
    """W: numbers of 32 bits that have one bit for each word."""
    return -(-vocabulary // 32)


def pack_bits(mask: torch.Tensor) -> torch.Tensor:
    """One bit per word: int32 [n, W] of a mask [n, V]; word v is bit v % 8 of byte v // 8."""
    n, vocabulary = mask.shape
    padded = F.pad(mask, (0, 32 * numbers_of_bits(vocabulary) - vocabulary)).contiguous()
    # bit 8 i of a word of eight flags goes to bit 56 + i: no two products meet, so none carries
    eights = padded.view(torch.int64) * 0x0102040810204080 >> 56
    return eights.to(torch.uint8).view(n, -1).view(torch.int32)


def unpack_bits(bits: torch.Tensor, vocabulary: int) -> torch.Tensor:
    """Mask bool [n, V] that `pack_bits` was given."""
    # a byte in all eight bytes of a word, of which byte i keeps bit i
    eights = bits.contiguous().view(torch.uint8).long() * 0x0101010101010101 & (0x8040201008040201 - 2**64)
    return (eights.view(torch.uint8) != 0)[:, :vocabulary]


def count_bits(bits: torch.Tensor) -> torch.Tensor:
    """Count the bits that are set in each row of int32 [n, W]: int64 [n]. Pairs, fours and eights are added up."""
    x = bits.long()
    x = (x & 0x55555555) + (x >> 1 & 0x55555555)
    x = (x & 0x33333333) + (x >> 2 & 0x33333333)
    x = (x & 0x0F0F0F0F) + (x >> 4 & 0x0F0F0F0F)
    return (x * 0x01010101 >> 24 & 0xFF).sum(1)


def _offsets(lengths: torch.Tensor) -> torch.Tensor:
    return F.pad(lengths.cumsum(0), (1, 0))


def _places(flags: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Indices of the flags on the host that are set, on the device of `like`: none waits for that device."""
    return flags.nonzero()[:, 0].to(like.device)


# ---- log-probs over the supports -------------------------------------------------------------------------------------


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
    """Statistics of `linear_logprob`, over the words that each token was drawn among; None: all words.

    hidden: floating [M, H], states that predict the tokens. Raises ValueError as that does, and for a mean logit of a
    support or supports of another vocabulary.
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

    other: floating [M, H], states of the reference, which get no gradient. The rest is as of `logprobs`.
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
