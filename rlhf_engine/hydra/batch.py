"""Packed token rows: what every lane reads.

Legend: T tokens of all sequences, N sequences, M completion tokens of all sequences.
Sequence i owns rows cu_seqlens[i] … cu_seqlens[i+1]−1; its first prompt_lens[i] tokens are the prompt, the rest is the
completion. In a conversation parts of the completion were given, by a tool or a user. They are none of the M.
Quantities per completion token are packed [M] in the same order and belong to the state *before* the token: row
`predict_rows_M[m]` is the hidden state that predicts token `targets_M[m]`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise
from operator import sub

import torch
from rlhf_kernels.runtime.device_tables import queued

from rlhf_engine.hydra.supports import Supports

_POSITION_BITS = 24
Turns = tuple[tuple[int, int], ...]


@dataclass(frozen=True, kw_only=True, eq=False)
class SharedRows:
    """Rows of a batch in which a prompt of several sequences stands once, followed by their completions."""

    rows: torch.Tensor  # int64 [R], the row of the batch that each of the R ≤ T rows is
    places_T: torch.Tensor  # int64 [T], the place of each row of the batch among the R
    lengths: tuple[int, ...]  # rows of each part: a shared prompt, a completion of one, or a whole sequence
    parents: tuple[int, ...]  # number of the prompt that each part goes on from; −1: none


@dataclass(frozen=True, kw_only=True)
class PackedBatch:
    """Prompts with their completions, packed without padding."""

    tokens_T: torch.Tensor
    """int64 [T], tokens of all sequences one after another."""
    cu_seqlens: tuple[int, ...]
    """N+1 offsets into the T rows, kept on the host so that no kernel launch waits for them."""
    prompt_lens: tuple[int, ...]
    """N prompt lengths, at least 1 each."""
    sample_ids: tuple[int, ...]
    """N ids that name a sample for good: dropout masks are keyed by (sample id, position), not by place in a batch."""
    supports: Supports | None = None
    """Words that each of the M completion tokens was drawn among, which log-probs are normalised over; None: all."""
    turns: tuple[Turns, ...] | None = None
    """N lists of turns, the spans (first, end) of positions whose tokens were drawn, in order. Tokens between them and
    behind them were given. None: all of each completion was drawn, in one turn."""

    @classmethod
    def from_lists(
        cls,
        prompts: Sequence[Sequence[int]],
        completions: Sequence[Sequence[int]],
        *,
        device: torch.device | str = "cpu",
        sample_ids: Sequence[int] | None = None,
        supports: Supports | None = None,
        turns: Sequence[Turns] | None = None,
    ) -> PackedBatch:
        """Pack token lists.

        Args:
            prompts: N lists of token ids, of at least one token each.
            completions: N lists of token ids, which may be empty.
            device: device of the packed tokens.
            sample_ids: N ids that key dropout masks; None: 0 to N−1.
            supports: words that each of the completion tokens was drawn among; None: all.
            turns: N lists of spans (first, end) of positions, from the prompt's first on, whose tokens were drawn;
                None: whole completions.

        Returns:
            The N sequences, prompt then completion, in the given order.

        Raises:
            ValueError: no sequences, an empty prompt, lists of different lengths, or supports of other tokens.
            ValueError: turns outside the completion, empty, or not in order.
        """
        if len(prompts) == 0:
            raise ValueError("prompts: expected at least one sequence, got a batch of size 0")
        if len(prompts) != len(completions):
            raise ValueError(f"completions: expected {len(prompts)} like prompts, got {len(completions)}")
        flat, cu_seqlens = list[int](), [0]
        for i, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
            if len(prompt) == 0:
                raise ValueError(f"prompts[{i}]: expected at least one token, got an empty prompt")
            flat += prompt
            flat += completion
            cu_seqlens.append(len(flat))
        tokens = torch.tensor(flat, device=device)
        if tokens.is_floating_point():
            raise ValueError(f"prompts, completions: expected token ids, whole numbers, got {tokens.dtype}")
        return cls(
            tokens_T=tokens.to(torch.int64),
            cu_seqlens=tuple(cu_seqlens),
            prompt_lens=tuple(map(len, prompts)),
            sample_ids=tuple(sample_ids) if sample_ids is not None else tuple(range(len(prompts))),
            supports=None if supports is None else supports.to(device),
            turns=None if turns is None else tuple(map(tuple, turns)),
        )

    @classmethod
    def concat(cls, batches: Sequence[PackedBatch]) -> PackedBatch:
        """Join batches into one.

        Args:
            batches: at least one batch, all on one device.

        Returns:
            All sequences, in the order of the batches.

        Raises:
            ValueError: no batches, or supports of different vocabularies.
        """
        if len(batches) == 0:
            raise ValueError("batches: expected at least one batch, got none")
        return cls(
            tokens_T=torch.cat([batch.tokens_T for batch in batches]),
            cu_seqlens=(0, *accumulate(length for batch in batches for length in batch.lengths)),
            prompt_lens=tuple(n for batch in batches for n in batch.prompt_lens),
            sample_ids=tuple(i for batch in batches for i in batch.sample_ids),
            supports=Supports.join([(batch.supports, batch.n_completion_tokens) for batch in batches]),
            turns=_joined_turns(batches),
        )

    @classmethod
    def from_padded(
        cls,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        prompt_lens: Sequence[int],
        *,
        sample_ids: Sequence[int] | None = None,
        drawn: torch.Tensor | None = None,
    ) -> PackedBatch:
        """Pack a padded batch, so that padding costs nothing.

        Args:
            input_ids: int64 [N, L], padded on either side.
            attention_mask: [N, L], 1 or True for a real token.
            prompt_lens: N numbers of prompt tokens, from 1 to the real tokens of the row.
            sample_ids: N ids that key dropout masks; None: 0 to N−1.
            drawn: [N, L], 1 or True for a real token behind the prompt that was drawn; None: all of these.

        Returns:
            The N sequences without padding, on the device of `input_ids`.

        Raises:
            ValueError: other shapes or lengths, a mask with a hole, an empty row, or a prompt longer than its row.
            ValueError: drawn tokens in a prompt.
        """
        if input_ids.dim() != 2 or attention_mask.shape != input_ids.shape:
            raise ValueError(
                f"attention_mask: expected the shape [N, L] of input_ids, got {tuple(attention_mask.shape)} and "
                f"{tuple(input_ids.shape)}"
            )
        real = attention_mask.bool().cpu()
        lengths = real.sum(1).tolist()
        if len(prompt_lens) != len(lengths):
            raise ValueError(f"prompt_lens: expected {len(lengths)} like the rows of input_ids, got {len(prompt_lens)}")
        for i, (length, prompt) in enumerate(zip(lengths, prompt_lens, strict=True)):
            if not 1 <= prompt <= length:
                raise ValueError(f"prompt_lens[{i}]: expected 1 to {length}, the real tokens of its row, got {prompt}")
            begin = int(real[i].int().argmax())
            if not real[i, begin : begin + length].all():
                raise ValueError(f"attention_mask[{i}]: expected real tokens without a gap between them")
        turns = None
        if drawn is not None:
            if drawn.shape != input_ids.shape:
                raise ValueError(
                    f"drawn: expected the shape of input_ids, {tuple(real.shape)}, got {tuple(drawn.shape)}"
                )
            masks = zip(drawn.bool().cpu(), real, strict=True)
            turns = tuple(spans_of(mask[row].tolist()) for mask, row in masks)
        return cls(
            tokens_T=input_ids[real.to(input_ids.device)],
            cu_seqlens=(0, *accumulate(lengths)),
            prompt_lens=tuple(int(p) for p in prompt_lens),
            sample_ids=tuple(sample_ids) if sample_ids is not None else tuple(range(len(lengths))),
            turns=turns,
        )

    def __post_init__(self) -> None:
        if not len(self.cu_seqlens) - 1 == len(self.prompt_lens) == len(self.sample_ids):
            raise ValueError(
                f"prompt_lens, sample_ids: expected {len(self.cu_seqlens) - 1} entries (cu_seqlens − 1), "
                f"got {len(self.prompt_lens)} and {len(self.sample_ids)}"
            )
        if self.turns is not None:
            if len(self.turns) != self.n_sequences:
                raise ValueError(f"turns: expected those of {self.n_sequences} sequences, got {len(self.turns)}")
            for i, (turns, prompt, length) in enumerate(zip(self.turns, self.prompt_lens, self.lengths, strict=True)):
                places = [prompt, *(place for span in turns for place in span)]
                if places != sorted(places) or places[-1] > length or any(first == end for first, end in turns):
                    raise ValueError(
                        f"turns[{i}]: expected spans of positions {prompt} to {length} in order, got {list(turns)}"
                    )
        if self.supports is not None and len(self.supports) != self.n_completion_tokens:
            raise ValueError(
                f"supports: expected those of {self.n_completion_tokens} completion tokens, got {len(self.supports)}"
            )

    @property
    def device(self) -> torch.device:
        """Device of the packed tokens."""
        return self.tokens_T.device

    @property
    def n_sequences(self) -> int:
        """N, number of sequences."""
        return len(self.prompt_lens)

    @property
    def n_tokens(self) -> int:
        """T, tokens of all sequences."""
        return self.cu_seqlens[-1]

    @cached_property
    def lengths(self) -> tuple[int, ...]:
        """N lengths, prompt and completion together."""
        return tuple(map(sub, self.cu_seqlens[1:], self.cu_seqlens[:-1]))

    @cached_property
    def completion_lens(self) -> tuple[int, ...]:
        """N numbers of completion tokens, those that were given left out."""
        if self.turns is None:
            return tuple(map(sub, self.lengths, self.prompt_lens))
        return tuple(sum(end - first for first, end in turns) for turns in self.turns)

    @cached_property
    def completion_lens_N(self) -> torch.Tensor:
        """int64 [N], completion lengths on the device."""
        return queued(self.completion_lens, self.device)

    @cached_property
    def completion_cu(self) -> tuple[int, ...]:
        """N+1 offsets of the sequences into the M completion tokens."""
        return (0, *accumulate(self.completion_lens))

    @cached_property
    def last_completion_rows_N(self) -> torch.Tensor:
        """int64 [N], index of each completion's last token among the M; ValueError for one without tokens."""
        if 0 in self.completion_lens:
            empty = [i for i, length in enumerate(self.completion_lens) if length == 0]
            raise ValueError(f"batch: expected completions of at least one token, got none in sequences {empty[:5]}")
        return queued(self.completion_cu[1:], self.device) - 1

    @property
    def n_completion_tokens(self) -> int:
        """M, completion tokens of all sequences."""
        return self.completion_cu[-1]

    @cached_property
    def positions_T(self) -> torch.Tensor:
        """int64 [T], position of each token in its own sequence."""
        return queued(torch.cat(list(map(torch.arange, self.lengths))), self.device)

    @cached_property
    def predict_rows_M(self) -> torch.Tensor:
        """int64 [M], row of the hidden state that predicts each completion token."""
        turns = self.turns or [((p, n),) for p, n in zip(self.prompt_lens, self.lengths, strict=True)]
        starts = zip(self.cu_seqlens[:-1], turns, strict=True)
        rows = [torch.arange(at + first - 1, at + end - 1) for at, spans in starts for first, end in spans]
        return queued(torch.cat([torch.arange(0), *rows]), self.device)

    @cached_property
    def places_M(self) -> torch.Tensor:
        """int64 [M], place of each completion token behind its prompt, among those that were given as well."""
        prompts_N = queued(self.prompt_lens, self.device)
        return self.positions_T[self.predict_rows_M] + 1 - prompts_N[self.sequence_of_M]

    @cached_property
    def turn_of_M(self) -> torch.Tensor:
        """int64 [M], number of the turn within its conversation that each completion token belongs to."""
        turns = self.turns or [((0, n),) for n in self.completion_lens]
        counts = [torch.full((end - first,), k) for spans in turns for k, (first, end) in enumerate(spans)]
        return queued(torch.cat([torch.arange(0), *counts]), self.device)

    @cached_property
    def targets_M(self) -> torch.Tensor:
        """int64 [M], the completion tokens themselves."""
        return self.tokens_T[self.predict_rows_M + 1]

    @cached_property
    def last_rows_N(self) -> torch.Tensor:
        """int64 [N], row of each sequence's last token, where a reward head reads."""
        return queued(self.cu_seqlens[1:], self.device) - 1

    @cached_property
    def sequence_of_M(self) -> torch.Tensor:
        """int64 [M], index of the sequence that each completion token belongs to."""
        places = torch.arange(self.n_sequences, device=self.device)
        return torch.repeat_interleave(places, self.completion_lens_N, output_size=self.n_completion_tokens)

    @cached_property
    def row_ids_T(self) -> torch.Tensor:
        """int64 [T], a name of each row that no re-batching changes: sample id · 2²⁴ + position."""
        lens, ids = queued(self.lengths, self.device), queued(self.sample_ids, self.device)
        return (torch.repeat_interleave(ids, lens, output_size=self.n_tokens) << _POSITION_BITS) + self.positions_T

    @cached_property
    def prompts_N(self) -> tuple[int, ...]:
        """N numbers of the sequences' prompts: equal prompts have one."""
        tokens, known = self.tokens_T.cpu().numpy(), dict[bytes, int]()
        starts = zip(self.cu_seqlens[:-1], self.prompt_lens, strict=True)
        return tuple(known.setdefault(tokens[start : start + p].tobytes(), len(known)) for start, p in starts)

    @cached_property
    def shared(self) -> SharedRows | None:
        """The rows with every prompt once; None where no two sequences have the same prompt."""
        families: dict[int, list[int]] = {}
        for i, number in enumerate(self.prompts_N):
            families.setdefault(number, []).append(i)
        if len(families) == self.n_sequences:
            return None
        rows: list[torch.Tensor] = []
        lengths: list[int] = []
        parents: list[int] = []
        places = torch.empty(self.n_tokens, dtype=torch.int64)
        at = 0

        def add(first: int, end: int, parent: int) -> None:
            nonlocal at
            rows.append(torch.arange(first, end))
            places[first:end] = torch.arange(at, at + end - first)
            lengths.append(end - first)
            parents.append(parent)
            at += end - first

        for members in families.values():
            start, p = self.cu_seqlens[members[0]], self.prompt_lens[members[0]]
            if len(members) == 1:
                add(start, self.cu_seqlens[members[0] + 1], -1)
                continue
            prompt, first = len(lengths), at
            add(start, start + p, -1)
            for i in members:
                places[self.cu_seqlens[i] : self.cu_seqlens[i] + p] = torch.arange(first, first + p)
                add(self.cu_seqlens[i] + p, self.cu_seqlens[i + 1], prompt)
        return SharedRows(
            rows=queued(torch.cat(rows), self.device),
            places_T=queued(places, self.device),
            lengths=tuple(lengths),
            parents=tuple(parents),
        )

    def select(self, indices: Sequence[int]) -> PackedBatch:
        """Select some sequences as a batch of their own.

        Args:
            indices: places of the sequences, 0 to N−1, in the order wanted.

        Returns:
            The selected sequences, in the given order, with their sample ids and supports.

        Raises:
            ValueError: no indices.
            IndexError: an index of N or more.
        """
        if len(indices) == 0:
            raise ValueError("indices: expected at least one sequence, got a batch of size 0")
        pieces = [self.tokens_T[self.cu_seqlens[i] : self.cu_seqlens[i + 1]] for i in indices]
        selected = PackedBatch(
            tokens_T=torch.cat(pieces),
            cu_seqlens=(0, *accumulate(map(len, pieces))),
            prompt_lens=tuple(map(self.prompt_lens.__getitem__, indices)),
            sample_ids=tuple(map(self.sample_ids.__getitem__, indices)),
            supports=None if self.supports is None else self.supports.select(self._completion_rows(indices)),
            turns=None if self.turns is None else tuple(map(self.turns.__getitem__, indices)),
        )
        if "prompts_N" in self.__dict__:  # which to compute anew would wait for the device
            selected.__dict__["prompts_N"] = tuple(map(self.prompts_N.__getitem__, indices))
        return selected

    def select_completion_rows(self, indices: Sequence[int]) -> torch.Tensor:
        """Index of the completion tokens of some sequences.

        Args:
            indices: places of the sequences, 0 to N−1, in the order wanted; at least one.

        Returns:
            int64 index that takes a packed [M] quantity of this batch to the same quantity of `select(indices)`.

        Raises:
            ValueError: no indices.
            IndexError: an index of N or more.
        """
        return queued(self._completion_rows(indices), self.device)

    def _completion_rows(self, indices: Sequence[int]) -> torch.Tensor:
        cu = self.completion_cu
        return torch.cat([torch.arange(cu[i], cu[i + 1]) for i in indices])

    def prompt_tokens(self, i: int) -> list[int]:
        """Prompt of one sequence.

        Args:
            i: place of the sequence, 0 to N−1.

        Returns:
            Its prompt's token ids.

        Raises:
            IndexError: an index of N or more.
        """
        start = self.cu_seqlens[i]
        return self.tokens_T[start : start + self.prompt_lens[i]].tolist()

    def completion_tokens(self, i: int) -> list[int]:
        """Completion of one sequence.

        Args:
            i: place of the sequence, 0 to N−1.

        Returns:
            Its completion's token ids, those that were given as well.

        Raises:
            IndexError: an index of N or more.
        """
        return self.tokens_T[self.cu_seqlens[i] + self.prompt_lens[i] : self.cu_seqlens[i + 1]].tolist()

    def to(self, device: torch.device | str) -> PackedBatch:
        """Move the batch to a device.

        Args:
            device: where the tokens go.

        Returns:
            The same sequences there. Lengths and ids stay on the host.
        """
        supports = None if self.supports is None else self.supports.to(device)
        return replace(self, tokens_T=self.tokens_T.to(device), supports=supports)

    def pad(self, x_M: torch.Tensor, fill: float = 0.0) -> torch.Tensor:
        """Spread packed numbers over right-padded rows.

        Args:
            x_M: [M], a number per completion token, of any dtype.
            fill: number that stands in the padding.

        Returns:
            [N, C] in the dtype of `x_M`, where C is the most completion tokens of a sequence.
        """
        width = max(self.completion_lens)
        out = x_M.new_full((self.n_sequences, width), fill)
        out[self.sequence_of_M, self.completion_position_M] = x_M
        return out

    def unpad(self, x_NC: torch.Tensor) -> torch.Tensor:
        """Pack the numbers of right-padded rows. It is the inverse of `pad`.

        Args:
            x_NC: [N, C], where C is the most completion tokens of a sequence, of any dtype.

        Returns:
            [M] in the dtype of `x_NC`.
        """
        return x_NC[self.sequence_of_M, self.completion_position_M]

    @cached_property
    def completion_position_M(self) -> torch.Tensor:
        """int64 [M], index of each completion token among those of its sequence."""
        return queued(torch.cat(list(map(torch.arange, self.completion_lens))), self.device)


def spans_of(mask: Sequence[bool]) -> Turns:
    """Spans (first, end) of the places where a mask holds."""
    edges = [i for i, (before, now) in enumerate(pairwise((False, *mask, False))) if before != now]
    return tuple(zip(edges[::2], edges[1::2], strict=True))


def _joined_turns(batches: Sequence[PackedBatch]) -> tuple[Turns, ...] | None:
    """Turns of several batches; None where no batch says any."""
    if all(batch.turns is None for batch in batches):
        return None
    whole = [
        batch.turns or tuple(((p, n),) if n > p else () for p, n in zip(batch.prompt_lens, batch.lengths, strict=True))
        for batch in batches
    ]
    return tuple(turns for theirs in whole for turns in theirs)


def split_by_tokens(
    lengths: Sequence[int], budget: int, once: tuple[Sequence[int], Sequence[int]] | None = None
) -> list[list[int]]:
    """Consecutive groups of sequences of at most `budget` tokens, prompts in `once` counted once a group."""
    groups: list[list[int]] = []
    held, prompts = budget + 1, set[int]()
    for i, length in enumerate(lengths):
        more = length - once[1][i] if once is not None and once[0][i] in prompts else length
        if held + more > budget:
            groups.append([])
            held, more = 0, length
            prompts.clear()
        groups[-1].append(i)
        held += more
        if once is not None:
            prompts.add(once[0][i])
    return groups
