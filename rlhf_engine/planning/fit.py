"""Peaks by batch and the largest batches that fit, from traced numbers; without torch.

generation   weights, adapters, heads, optimizer + what `generate` of the prompts takes, their KV cache included
inference    the same + what `HydraModel.score` of these answers takes
update       the same + the larger of a micro-batch's forward and backward, and AdamW's step

Of P bytes of frozen backbones, each of n processes holds

                      generation, inference      update
whole                 P                          P
shard_base            P / n + P                  P / n + G
shard_base, vllm      P / n + G                  P / n + G

with G the embeddings, heads and few blocks that are gathered at a time.

Several answers to one prompt share its keys and values while they are drawn. They share its pass through a backbone in
scoring and update where the model shares prompts (`Fit._shares`); tokens are then those that go through it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

PHASES = ("generation", "inference", "update")
FULL_SFT = "full_sft"
"""`sft --full` without a reward head, beside the methods of RL."""

WHOLE, IN_SHARES, NEVER_WHOLE = WAYS = ("whole", "shard_base", "shard_base vllm")
"""Ways of holding a frozen base in several processes: options of a run, from the fastest to the smallest."""
GATHERED_BLOCKS = 3
"""Blocks beside a share, at most: the one that runs, the buffer that it came in, and the next one's."""

TRACED_ROWS = 64
"""Sequences up to which every number is traced: a trace takes time per sequence."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """Numbers of sequences and tokens in a step; names as in TrainConfig."""

    prompt_length: int
    """Tokens; every prompt has as many."""
    completion_length: int
    """Tokens; every answer has as many."""
    batch: int
    """Answers per step (generation_batch_size)."""
    num_generations: int = 1
    """Answers per prompt."""
    num_mini_batches: int
    micro_batch: int
    """Sequences per forward and backward (per_device_train_batch_size)."""
    token_budget: int
    processes: int = 1
    """Processes that share a step. `batch` and what follows from it are of one of them."""

    def prompts(self, answers: int) -> int:
        """Number of prompts that so many answers belong to."""
        return -(-answers // self.num_generations)

    @property
    def length(self) -> int:
        """Tokens of a whole sequence."""
        return self.prompt_length + self.completion_length

    @property
    def update_rows(self) -> int:
        """Sequences of a micro-batch: no more than a minibatch has."""
        return min(self.micro_batch, -(-self.batch // self.num_mini_batches))

    @property
    def micro_batches(self) -> int:
        """Micro-batches of a minibatch."""
        return -(-max(1, self.batch // self.num_mini_batches) // self.update_rows)


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """One method's memory, bytes."""

    method: str
    state_bytes: dict[str, int]
    """By part, see `predict`."""
    peak_bytes: dict[str, int]
    """By phase."""
    activation_bytes: dict[str, int]
    """By phase: what its peak adds to the resident state, without gradients and KV cache."""
    kv_cache_bytes: int
    support_bytes: int
    """Most bytes, in no peak, of the words that tokens were drawn among, where top_k, top_p or min_p bound them."""
    base_bytes: dict[str, int]
    """By phase: of frozen backbones, in one process."""
    shared_phases: tuple[str, ...]
    """Phases in which answers to one prompt share its pass through a backbone."""
    max_batch: dict[str, int]
    """Largest numbers that fit the budget, 0 if not even one does. `generation`: answers per step that can be
    generated and scored. `update`: sequences of a micro-batch."""

    @property
    def peak(self) -> int:
        """The largest peak of all phases."""
        return max(self.peak_bytes.values())

    @property
    def largest_batch(self) -> int:
        """Answers per step that fit; 0 where the update of not even one does. Without rollouts, the micro-batch."""
        micro_batch = self.max_batch["update"]
        return self.max_batch.get("generation", micro_batch) if micro_batch else 0


class Fit(ABC):
    """Prediction of one method. What a step allocates is left to those who trace it or look it up."""

    cache_block: int
    """Positions of a block of the KV cache."""
    prefill_tokens: int
    """Tokens of prompts that are admitted in one call."""
    way: str = WHOLE
    """Way of holding the frozen backbones, one of `WAYS`."""

    def __init__(self, method: str, step: Step) -> None:
        self.method, self.step = method, step
        self.phases = ("update",) if method == FULL_SFT else PHASES

    @property
    @abstractmethod
    def state_bytes(self) -> dict[str, int]:
        """Bytes of the state by part."""

    @property
    @abstractmethod
    def temporary_bytes(self) -> int:
        """Most bytes that AdamW takes for a parameter while it steps, one parameter at a time."""

    @property
    def gathered_bytes(self) -> int:
        """Bytes of frozen backbones beside its share, where a process gathers blocks as they run; else 0."""
        return 0

    @property
    def drawing_bytes(self) -> int:
        """Bytes of the backbone that draws; 0 where no process has a share."""
        return 0

    @property
    @abstractmethod
    def cache_bytes_per_position(self) -> int:
        """Keys and values of a token in every layer."""

    @property
    @abstractmethod
    def support_bytes_per_token(self) -> int:
        """Most bytes of the words that a token was drawn among, see `hydra.supports`."""

    @abstractmethod
    def _most_lanes(self, phase: str) -> int:
        """Lanes of the phase on the backbone that has most of them."""

    @abstractmethod
    def _shares(self, phase: str) -> bool:
        """Whether neighbours in a batch of the phase share their prompt's pass through a backbone."""

    @abstractmethod
    def _allocated(self, phase: str, rows: int, repeats: int, apart: bool) -> int:
        """Most bytes that a phase allocates, with 1 … TRACED_ROWS rows."""

    # ---- peaks -----------------------------------------------------------------------------------------------------

    @property
    def resident(self) -> int:
        """Bytes that stay through all phases."""
        parts = ("frozen_weights", "trained_weights", "adapters", "heads", "packed_weights", "optimizer")
        return sum(self.state_bytes[part] for part in parts)

    def base_bytes(self, phase: str) -> int:
        """Compute the bytes of frozen backbones that one process holds.

        Args:
            phase: one of `PHASES`.

        Returns:
            Bytes, the process's share included where it has one.
        """
        frozen = self.state_bytes["frozen_weights"]
        if self.way == WHOLE:
            return frozen
        gathered = frozen if self.way == IN_SHARES and phase != "update" else min(frozen, self.gathered_bytes)
        return -(-frozen // self.step.processes) + gathered

    def _held(self, phase: str) -> int:
        """Bytes that stay through a phase."""
        return self.resident - self.state_bytes["frozen_weights"] + self.base_bytes(phase)

    def peak(self, phase: str, rows: int | None = None) -> int:
        """Peak of a phase. rows: answers (generation, inference) or sequences of a micro-batch (update)."""
        rows = rows or self._rows(phase)
        if phase == "generation":
            together = self._prefilled_together(self.step.prompts(rows))  # of different prompts
            others = self._cache_bytes(rows) - self._cache_bytes(together, shared=False)
            return self._held(phase) + self._traced("generation", together, 1) + others
        if phase == "inference":
            return self._held(phase) + self._traced("inference", *self._scored_together(rows))
        step = self.state_bytes["gradients"] + self.temporary_bytes
        return self._held(phase) + max(step, self._traced("update", rows, min(2, self.step.micro_batches)))

    def _rows(self, phase: str) -> int:
        """Rows of the phase in a step."""
        return self.step.update_rows if phase == "update" else self.step.batch

    def _prefilled_together(self, prompts: int) -> int:
        """Prompts that go through a layer at once."""
        return self._admitted(prompts)

    def _admitted(self, prompts: int) -> int:
        """Prompts that are admitted in one call."""
        return min(prompts, max(1, self.prefill_tokens // self.step.prompt_length))

    def _scored_together(self, rows: int) -> tuple[int, int]:
        """(sequences per group, groups to trace: two where there are more, for what the first leaves)."""
        together = max(1, min(rows, self._rows_within("inference", self.step.token_budget)))
        return together, 2 if rows > together else 1

    def _alike(self, phase: str) -> int:
        """Neighbours in a batch of the phase that share a prompt's pass.

        In an update of several minibatches, to which answers are dealt at random, none are counted on. Pairs of
        supervised runs stay together.
        """
        dealt = phase == "update" and self.method != FULL_SFT and self.step.num_mini_batches > 1
        return self.step.num_generations if not dealt and self._shares(phase) else 1

    @property
    def shared_phases(self) -> tuple[str, ...]:
        """Phases in which answers to one prompt share its pass through a backbone."""
        return tuple(phase for phase in self.phases if self._alike(phase) > 1)

    def _tokens(self, phase: str, rows: int) -> int:
        """Tokens of so many sequences that go through a backbone."""
        return -(-rows // self._alike(phase)) * self.step.prompt_length + rows * self.step.completion_length

    def _rows_within(self, phase: str, tokens: int) -> int:
        """Most sequences of which no more tokens go through a backbone."""
        alike, step = self._alike(phase), self.step
        families, rest = divmod(tokens, step.prompt_length + alike * step.completion_length)
        return families * alike + max(0, (rest - step.prompt_length) // step.completion_length)

    @property
    def kv_cache_bytes(self) -> int:
        """Keys and values of every layer for `batch` answers of full length, as generation allocates them."""
        return self._cache_bytes(self.step.batch) if "generation" in self.phases else 0

    @property
    def support_bytes(self) -> int:
        """Most bytes of the words that the tokens of a step were drawn among."""
        drawn = self.step.batch * self.step.completion_length if "generation" in self.phases else 0
        return drawn * self.support_bytes_per_token

    def _cache_bytes(self, rows: int, *, shared: bool = True) -> int:
        """Bytes of the cache of so many answers. shared: whether answers to one prompt share its full blocks."""
        blocks = rows * -(-(self.step.length - 1) // self.cache_block)  # the last token is never read
        if shared:
            blocks -= (rows - self.step.prompts(rows)) * (self.step.prompt_length // self.cache_block)
        return blocks * self.cache_block * self.cache_bytes_per_position

    def _traced(self, phase: str, rows: int, repeats: int, apart: bool | None = None) -> int:
        """Bytes; beyond `TRACED_ROWS` on the line through two traces, because allocations are linear in the rows.

        apart: whether lanes go one after another, by default as they do with so many rows; on a line all points agree.
        """
        if apart is None:
            apart = rows > self._rows_together(phase)
        alike = self._alike(phase)
        few = max(1, TRACED_ROWS // 2 // alike) * alike  # whole prompts, of which allocations are a linear function
        if rows <= max(2 * few, TRACED_ROWS):
            return self._allocated(phase, rows, repeats, apart)
        half, whole = (self._allocated(phase, n, repeats, apart) for n in (few, 2 * few))
        return whole + -(-(whole - half) * (-(-rows // alike) * alike - 2 * few) // few)

    def _rows_together(self, phase: str) -> int:
        """Sequences up to which lanes share a backbone forward; beyond, peaks drop before they rise again."""
        return self._rows_within(phase, self.step.token_budget // self._most_lanes(phase))

    # ---- what fits -------------------------------------------------------------------------------------------------

    def predict(self, budget: int) -> Prediction:
        """Everything, with the largest batches within `budget` bytes."""
        peaks = {phase: self.peak(phase) for phase in self.phases}
        held = {phase: self._held(phase) for phase in self.phases}
        if "generation" in held:
            held["generation"] += self.kv_cache_bytes
        held["update"] += self.state_bytes["gradients"]
        return Prediction(
            method=self.method,
            state_bytes=self.state_bytes,
            peak_bytes=peaks,
            activation_bytes={phase: max(0, peaks[phase] - held[phase]) for phase in self.phases},
            kv_cache_bytes=self.kv_cache_bytes,
            support_bytes=self.support_bytes,
            base_bytes={phase: self.base_bytes(phase) for phase in self.phases},
            shared_phases=self.shared_phases,
            max_batch=self.max_batch(budget),
        )

    def ways(self, budget: int) -> dict[str, Prediction]:
        """Predict every way of holding the frozen backbones.

        Args:
            budget: bytes that one process may use.

        Returns:
            Predictions of one process by way, in the order of `WAYS`. The fit is left in the first way that fits the
                step, or in the last one.
        """
        found = {}
        for self.way in WAYS:
            found[self.way] = self.predict(budget)
        self.choose_way(budget)
        return found

    def choose_way(self, budget: int) -> None:
        """Take the first way of holding the frozen backbones in which the step fits, or the last one.

        Args:
            budget: bytes that one process may use.
        """
        for self.way in WAYS:
            if max(map(self.peak, self.phases)) <= budget:
                return

    def max_batch(self, budget: int) -> dict[str, int]:
        """Largest numbers whose peaks are within `budget` bytes."""

        def rollout(n: int) -> int:
            return max(self.peak("generation", n), self.peak("inference", n))

        def update(n: int) -> int:
            return self.peak("update", n)

        def above(phase: str) -> int:
            return self._rows_together(phase) if self._most_lanes(phase) > 1 else 0

        found = {"update": largest_fitting(update, budget, above=above("update"), probe=self._rows("update"))}
        if "generation" in self.phases:
            probe = self._rows("generation")
            found["generation"] = largest_fitting(rollout, budget, above=above("inference"), probe=probe)
        return found


def largest_fitting(peak: Callable[[int], int], budget: int, *, above: int = 0, probe: int = 1) -> int:
    """Largest n with peak(n) ≤ budget, 0 if there is none.

    Args:
        peak: bytes; rises up to n = `above`, and from `above` + 1 on.
        budget: bytes.
        above: see `peak`.
        probe: a number to begin with, whose peak is at hand.
    """
    found = _rising(peak, budget, above + 1, None, probe)
    return found or (_rising(peak, budget, 1, above, probe) or 0 if above else 0)


def _rising(peak: Callable[[int], int], budget: int, first: int, last: int | None, probe: int) -> int | None:
    """Largest n in first … last with peak(n) ≤ budget: lines through two points first, then bisection."""
    low, high = first - 1, None if last is None else last + 1
    before: int | None = None  # the largest that fitted before `low`
    top: int | None = None  # the least that did not
    if probe < first:
        probe = max(first, TRACED_ROWS)  # where lines begin
    if high is not None and probe >= high:
        probe = first
    while high is None or high - low > 1:
        if peak(probe) > budget:
            high = top = probe
        else:
            before, low = low if low >= first else None, probe
        if low < first:
            probe = first
            continue
        if low >= _MOST_ROWS:
            break
        other = top if before is None else before
        slope = 0.0 if other is None else (peak(other) - peak(low)) / (other - low)
        probe = low + max(1, int((budget - peak(low)) / slope)) if slope > 0 else 2 * low
        if high is not None and not low < probe < high:
            probe = (low + high) // 2
    return low if low >= first else None


_MOST_ROWS = 2**20
"""A search ends here: nothing that grows would still fit."""
