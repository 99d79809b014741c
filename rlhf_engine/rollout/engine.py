"""Continuous batching: requests wait, rows take the places of those that ended, blocks of the cache go round.

    engine = RolloutEngine(model, sampling, requests)
    for answer in engine.run(): ...

Each step admits who can be admitted and draws one token for every live row. What is drawn depends on (seed, sample id,
position) and on the row's own logits only, so who shares a batch changes answers by rounding at most.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from rlhf_kernels.runtime import registry

from rlhf_engine.config.rollout import EngineConfig, StepName
from rlhf_engine.devices import is_gpu, is_out_of_memory
from rlhf_engine.errors import MemoryLimitError
from rlhf_engine.hydra.backbone import Backbone
from rlhf_engine.hydra.eager import is_eager
from rlhf_engine.hydra.kv_cache import BLOCK, BlockPool, KVCache
from rlhf_engine.hydra.model import HydraModel
from rlhf_engine.hydra.roles import LM_HEAD, require_role
from rlhf_engine.hydra.supports import Supports
from rlhf_engine.rollout import exactness
from rlhf_engine.rollout.request import (
    Answer,
    Decode,
    FinishReason,
    Request,
    RolloutStats,
    SamplingConfig,
    StopTexts,
    check_ids,
    check_prompt,
    row_seed,
)
from rlhf_engine.rollout.rows import AnswerRow, LiveRows
from rlhf_engine.rollout.sampler import NextTokens, Sampler
from rlhf_engine.rollout.steps import native as native_step
from rlhf_engine.rollout.steps.graph import CudaCapture, GraphStep
from rlhf_engine.rollout.steps.native import NativeStep
from rlhf_engine.rollout.steps.transformers import PREFILL_TOKENS, Prompt, RolloutStep, TransformersStep

_PrefixKey = tuple[str | None, tuple[int, ...]]


@dataclass(eq=False)
class _Prefix:
    """A prompt that several requests share, for as long as some of them wait."""

    blocks: list[int]
    waiting: int  # requests that have not been admitted yet
    version: int  # of the policy that the prompt went through
    hidden: torch.Tensor | None = None  # [H], of the last token, once the prompt is in the cache


class _New(NamedTuple):
    prompt: Prompt
    prefix: _Prefix | None


class Admitted(NamedTuple):
    """Rows that start together."""

    rows: list[AnswerRow]
    new: list[_New]  # prompts among theirs that are not in the cache yet
    copies: list[tuple[int, int]]  # blocks to copy once the prompts are in the cache: (from, to)

    @property
    def prompts(self) -> list[Prompt]:
        """The prompts that are not in the cache yet."""
        return [new.prompt for new in self.new]


class Admission:
    """The requests that wait, and the blocks of the cache."""

    def __init__(self, rows: Sequence[AnswerRow], *, most_rows: int, most_blocks: int | None, most_tokens: int) -> None:
        """Take bounds of rows alive at once, of blocks and of prompt tokens; ValueError if a row alone needs more."""
        groups: dict[_PrefixKey, list[AnswerRow]] = {}
        for row in rows:
            groups.setdefault(row.prefix, []).append(row)
        self._waiting = deque(row for members in groups.values() for row in members)
        self._sharing = {prefix: len(members) for prefix, members in groups.items() if len(members) > 1}
        self._prefixes: dict[_PrefixKey, _Prefix] = {}
        self._most_tokens = most_tokens
        blocks = self._blocks_needed(rows, most_rows)
        largest = self.most_of_one(rows)
        if most_blocks is not None and most_blocks < largest:
            raise ValueError(f"most_blocks: expected at least {largest}, which one row may need, got {most_blocks}")
        self.pool = BlockPool(blocks if most_blocks is None else min(blocks, most_blocks))

    def __len__(self) -> int:
        return len(self._waiting)

    def next_rows(self, most: int, version: int) -> Admitted:
        """The next rows that fit, up to so many, with their blocks. Prompts of a slot's older version are forgotten."""
        self._version = version
        for key, known in list(self._prefixes.items()):
            if key[0] is not None and known.version != version:
                self.pool.give_back(self._prefixes.pop(key).blocks)
                self._sharing[key] = known.waiting
        admitted = Admitted([], [], [])
        tokens = 0
        while self._waiting and len(admitted.rows) < most:
            row = self._waiting[0]
            arrives = row.prefix not in self._prefixes
            if arrives and tokens and tokens + len(row.prompt) > self._most_tokens:
                break
            if not self._take_blocks(row, admitted.copies):
                break
            if arrives:
                prefix = self._prefixes.get(row.prefix)
                blocks = row.blocks if prefix is None else prefix.blocks
                admitted.new.append(_New(Prompt(tokens=row.prompt, slot=row.slot, blocks=blocks), prefix))
                tokens += len(row.prompt)
            admitted.rows.append(self._waiting.popleft())
        return admitted

    def last_states(self, admitted: Admitted, hidden: torch.Tensor | None) -> torch.Tensor:
        """Hidden states [N, H] of the rows' last prompt tokens; `hidden` has those of the new prompts."""
        if hidden is not None and len(admitted.new) == len(admitted.rows) and not self._prefixes:
            return hidden
        states: dict[_PrefixKey, torch.Tensor] = {}
        for i, new in enumerate(admitted.new):
            assert hidden is not None
            states[new.prompt.slot, new.prompt.tokens] = hidden[i]
            if new.prefix is not None:
                new.prefix.hidden = hidden[i]
        for row in admitted.rows:
            prefix = self._prefixes.get(row.prefix)
            if prefix is not None and prefix.hidden is not None:
                states[row.prefix] = prefix.hidden
                if prefix.waiting == 0:
                    del self._prefixes[row.prefix], self._sharing[row.prefix]
        return torch.stack([states[row.prefix] for row in admitted.rows])

    def release(self, row: AnswerRow) -> None:
        """A row has ended."""
        self.pool.give_back(row.blocks)

    def _take_blocks(self, row: AnswerRow, copies: list[tuple[int, int]]) -> bool:
        """Give a row its blocks if there are enough, and note what has to be copied into them."""
        pool, need = self.pool, row.blocks_needed
        if row.prefix not in self._sharing:
            if need > pool.free:
                return False
            row.blocks = pool.take(need)
            return True
        full, held = len(row.prompt) // BLOCK, -(-len(row.prompt) // BLOCK)
        prefix = self._prefixes.get(row.prefix)
        if prefix is None:
            if held + need - full > pool.free:
                return False
            prefix = _Prefix(pool.take(held), self._sharing[row.prefix], self._version)
            self._prefixes[row.prefix] = prefix
        kept = held if prefix.waiting == 1 else full
        if need - kept > pool.free:
            return False
        own = pool.take(need - kept)
        row.blocks = prefix.blocks[:kept] + own
        if prefix.waiting > 1:
            pool.share(prefix.blocks[:full])
            if held > full:
                copies.append((prefix.blocks[full], own[0]))
        prefix.waiting -= 1
        return True

    @staticmethod
    def most_of_one(rows: Sequence[AnswerRow]) -> int:
        """Blocks that must be there for any of these rows to be admitted alone."""
        return max(_blocks_of_each(rows))

    def _blocks_needed(self, rows: Sequence[AnswerRow], most_rows: int) -> int:
        """Blocks that the rows alive at once may need."""
        shared = sum(len(prompt) // BLOCK * (n - 1) for (_, prompt), n in self._sharing.items())
        largest = sorted(_blocks_of_each(rows), reverse=True)[:most_rows]
        return min(sum(row.blocks_needed for row in rows) - shared, sum(largest))


def _blocks_of_each(rows: Sequence[AnswerRow]) -> list[int]:
    """Blocks of every row, and one more where a part of a shared prompt stands beside the row's copy of it."""
    counts = Counter(row.prefix for row in rows)
    return [row.blocks_needed + int(counts[row.prefix] > 1 and len(row.prompt) % BLOCK > 0) for row in rows]


_BURST = 8  # tokens between two looks at what a device has drawn


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """Options by which rows are run, which change answers by rounding at most, and in exact mode not at all."""

    max_rows: int | None = None
    """Most rows alive at once, ≥ 1; None: as many as there are requests, as far as the cache holds them."""
    cache_bytes: int | None = None
    """Most bytes of keys and values, all rows together, ≥ 1; None: as many as the rows alive at once may need."""
    decode_step: StepName = "auto"
    """Kind of decoding step: `auto`, `native`, `graph` or `transformers`. auto: on CUDA graphs; on a CPU the native
    step where it serves the backbone, except where the kernel table prefers the reference."""

    @classmethod
    def of(cls, config: EngineConfig) -> EngineOptions:
        """Take the options out of a configuration.

        Args:
            config: configuration of a command that draws answers in this process.

        Returns:
            The options.
        """
        return cls(cache_bytes=config.cache_bytes, decode_step=config.decode_step)

    def __post_init__(self) -> None:
        for name in ("max_rows", "cache_bytes"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name}: expected None or at least 1, got {value}")


class RolloutEngine:
    """Draws answers for requests on one backbone, in the lanes of their roles."""

    def __init__(
        self,
        model: HydraModel,
        sampling: SamplingConfig,
        requests: Sequence[Request],
        *,
        options: EngineOptions | None = None,
        decode: Decode | None = None,
        policy_version: int = 0,
    ) -> None:
        """Queue the requests and set up the cache.

        Args:
            model: a model with the requests' roles.
            sampling: options of every answer, except where a request has its own.
            requests: at least one, of roles with an LM head on one backbone.
            options: how rows are run; None: the defaults.
            decode: token ids to text, which stop texts need; None without them.
            policy_version: noted with every token. Set the attribute anew when a slot's weights change between two
                steps.

        Raises:
            ValueError: no requests, a prompt that does not fit the context, or token ids outside the vocabulary.
            ValueError: roles that are unknown, have no LM head, or run on different backbones.
            ValueError: stop texts without `decode`, or request options that contradict the run's.
            ValueError: a decoding step that does not serve the backbone, or a cache too small for the longest row.
        """
        options = options or EngineOptions()
        if len(requests) == 0:
            raise ValueError("prompts: expected at least one prompt, got a batch of size 0")
        self.sampling, self._options = sampling, options
        self.policy_version = policy_version
        """Version of the policy, noted with every token."""
        self.backbone = model.backbone(_one_backbone(model, requests))
        """Backbone that the requests run on."""
        if sampling.stop and decode is None:
            raise ValueError(f"decode: expected a function from tokens to text for the stop texts {sampling.stop}")
        self._stop = StopTexts(sampling.stop, decode) if sampling.stop and decode is not None else None
        check_ids("eos_token_ids", sampling.eos_token_ids, self.backbone.vocabulary)
        self._eos = frozenset(sampling.eos_token_ids)
        rows = [_row(model, i, request, sampling) for i, request in enumerate(requests)]
        context = self.backbone.context_length
        for i, row in enumerate(rows):
            check_prompt(
                f"prompts[{i}]", row.prompt, context, row.sampling.max_completion_length, self.backbone.vocabulary
            )
        step = _choose_step(options, self.backbone)
        self._max_rows = min(len(rows), options.max_rows or len(rows))
        kind = _KINDS[step]
        if registry.is_exact() and exactness.unsupported(self.backbone) is not None:
            self._max_rows = 1  # a prompt and a row at a time
        self._places_to_wait_for = -(-self._max_rows // kind.wait_share)
        self._admission = Admission(
            rows,
            most_rows=self._max_rows,
            most_blocks=_most_blocks(options, self.backbone, Admission.most_of_one(rows)),
            most_tokens=PREFILL_TOKENS,
        )
        columns = max(row.blocks_needed for row in rows)
        slots = sorted({row.slot for row in rows if row.slot is not None})
        head_slots = frozenset(slot for slot in self.backbone.slots if self.backbone.adapts_head(slot))
        self._live = LiveRows(self.backbone.device, columns, slots, head_slots)
        self._sampler = Sampler(self.backbone, sampling.eos_token_ids)
        self._step = self._make_step(step, slots, columns)
        self._burst = _BURST if is_gpu(self.backbone.device) else 1
        self.stats = RolloutStats(step=self._step.name)
        """Statistics of time and memory so far."""

    # ---- running ---------------------------------------------------------------------------------------------------

    def run(self) -> Iterator[Answer]:
        """Draw until every request has its answer.

        Yields:
            Answers, as they finish.

        Raises:
            MemoryLimitError: the rows do not fit into memory.
        """
        while not self.finished:
            yield from self.step()

    @property
    def finished(self) -> bool:
        """Whether every request has its answer."""
        return not len(self._admission) and not len(self._live)

    @torch.no_grad()
    def step(self) -> list[Answer]:
        """Admit waiting requests as far as they fit, and draw a token for every live row (on CUDA a few).

        Returns:
            The answers that finished.

        Raises:
            MemoryLimitError: the rows do not fit into memory.
        """
        began = time.perf_counter()
        try:
            answers = self._admit()
            admitted = time.perf_counter()
            self.stats.prefill_seconds += admitted - began
            if len(self._live):
                answers += self._advance()
                self.stats.decode_seconds += time.perf_counter() - admitted
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            raise MemoryLimitError(
                f"a rollout of {len(self._live)} rows at once, with {self._admission.pool.size * BLOCK} tokens in its "
                "cache, does not fit into memory; bound it with kv_cache_memory, the rest then waits"
            ) from error
        return answers

    def partial(self, index: int) -> tuple[int, ...]:
        """Tokens so far of an answer that is being written.

        Args:
            index: place of its request in the order of submission.

        Returns:
            Token ids; empty for a request that waits or has finished.
        """
        return next((tuple(row.tokens) for row in self._live.rows if row.index == index), ())

    def _admit(self) -> list[Answer]:
        """Prompts of waiting requests into the cache and their first tokens drawn; answers that are done with that."""
        answers: list[Answer] = []
        while len(self._admission):
            free = self._max_rows - len(self._live)
            if len(self._live) and free < self._places_to_wait_for:
                break
            admitted = self._admission.next_rows(free, self.policy_version)
            if not admitted.rows:
                break
            hidden = self._admission.last_states(admitted, self._prefill(admitted.prompts))
            if admitted.copies:
                self.cache.copy([source for source, _ in admitted.copies], [target for _, target in admitted.copies])
            answers += self._start(admitted.rows, hidden)
        self._live.sort_by_slot()
        return answers

    def _prefill(self, prompts: Sequence[Prompt]) -> torch.Tensor | None:
        """Hidden states of the prompts' last tokens; None without prompts."""
        if not prompts:
            return None
        self.stats.prompts += len(prompts)
        self.stats.prompt_tokens += sum(len(prompt.tokens) for prompt in prompts)
        return self._step.prefill(prompts)

    def _start(self, rows: list[AnswerRow], hidden: torch.Tensor) -> list[Answer]:
        """First tokens of rows whose prompts are in the cache."""
        live, first = self._live, len(self._live)
        live.append(rows)
        self.stats.most_rows = max(self.stats.most_rows, len(live))
        self.stats.most_blocks = self._admission.pool.most_used
        new = live.state.at(slice(first, None))
        drawn = self._sampler(hidden, new, live.draw_groups(rows))
        live.state.tokens_N[first:] = drawn.tokens
        return self._accept(first, [drawn])

    def _advance(self) -> list[Answer]:
        """A token more for every live row, or a few where looking at them costs a wait."""
        left = min(row.sampling.max_completion_length - len(row.tokens) for row in self._live.rows)
        n = min(self._burst, left)
        drawn = self._step.decode_many(self._live, n, self._sampler)
        self.stats.steps += n
        self.stats.step = self._step.name
        return self._accept(0, drawn)

    def _accept(self, first: int, drawn: Sequence[NextTokens]) -> list[Answer]:
        """Note what was drawn for the rows from `first` on, up to the end of each; those that are done leave."""
        live, answers = self._live, []
        tokens = torch.stack([step.tokens for step in drawn], 1).tolist()
        logprobs = torch.stack([step.logprobs for step in drawn], 1).tolist()
        supports = [self._supports(step) for step in drawn]
        done: set[int] = set()
        for place, row in enumerate(live.rows[first:], start=first):
            for token, logprob, support in zip(tokens[place - first], logprobs[place - first], supports, strict=True):
                row.tokens.append(token)
                row.logprobs.append(logprob)
                if support:
                    row.supports.append(support[place - first])
                row.versions.append(self.policy_version)
                reason = self._reason(row, token)
                if reason is not None:
                    done.add(place)
                    answers.append(self._finish(row, reason))
                    break
        if done:
            live.keep([place for place in range(len(live)) if place not in done])
        return answers

    def _supports(self, drawn: NextTokens) -> Sequence[torch.Tensor]:
        """The support of each row of a step, on the host; none of them where all rows were drawn among all words."""
        if drawn.bits is None:
            return ()
        supports = Supports.from_bits(drawn.bits, self.backbone.n_words)
        return supports.words.cpu().split(supports.lengths.tolist())

    def _reason(self, row: AnswerRow, token: int) -> FinishReason | None:
        """Finish reason of a row with the token that it just got; None if it goes on."""
        if token in self._eos:
            return "eos"
        if self._stop is not None and self._stop.completed_by(row.tokens):
            return "stop"
        return "length" if len(row.tokens) >= row.sampling.max_completion_length else None

    def _finish(self, row: AnswerRow, reason: FinishReason) -> Answer:
        self._admission.release(row)
        self.stats.tokens += len(row.tokens)
        n, supports = len(row.tokens), None
        if any(len(support) for support in row.supports):
            supports = Supports.of_rows(row.supports, n, self.backbone.n_words)
        return Answer(
            index=row.index,
            tokens=tuple(row.tokens),
            logprobs=tuple(row.logprobs),
            versions=tuple(row.versions),
            finish_reason=reason,
            supports=supports,
        )

    # ---- parts -----------------------------------------------------------------------------------------------------

    def _make_step(self, name: StepName, slots: Sequence[str], columns: int) -> RolloutStep:
        if name == "graph":
            # one more block, which idle places of a graph write into
            idle = self._admission.pool.size
            self.cache = KVCache(blocks=idle + 1)
            capture = CudaCapture(self.backbone.device)
            return GraphStep(
                self.backbone, self.cache, columns, idle, capture, required=self._options.decode_step == "graph"
            )
        self.cache = KVCache(blocks=self._admission.pool.size)
        if name == "native":
            decoder = native_step.decoder_of(self.backbone)
            return NativeStep(self.backbone, decoder, self.cache, slots, columns * BLOCK)
        return TransformersStep(self.backbone, self.cache)


_KINDS: dict[str, type[RolloutStep]] = {"native": NativeStep, "graph": GraphStep, "transformers": TransformersStep}


def check_options(options: EngineOptions, backbone: Backbone, most_tokens: int) -> None:
    """Raise ValueError unless a backbone's answers can be drawn like that, prompt and answer together so long."""
    _choose_step(options, backbone)
    reason = exactness.unsupported(backbone) if registry.is_exact() else None
    if reason is not None:
        raise ValueError(
            "exact: expected a backbone whose rows have the same bits in decoding and in training, got one that exact "
            f"mode does not serve: {reason}; with --exact false the training forward computes a rollout's log-probs "
            "again, and their difference is bounded (rollout_mismatch_bound)"
        )
    _most_blocks(options, backbone, -(-(most_tokens - 1) // BLOCK))


def _most_blocks(options: EngineOptions, backbone: Backbone, largest: int) -> int | None:
    """Blocks that the budget holds. Raises ValueError if it does not hold the largest row."""
    if options.cache_bytes is None:
        return None
    size = BLOCK * backbone.cache_bytes_per_position
    if options.cache_bytes < largest * size:
        raise ValueError(
            f"kv_cache_memory: expected at least {largest * size} bytes, keys and values of the longest row, got "
            f"{options.cache_bytes}"
        )
    return options.cache_bytes // size


def _choose_step(options: EngineOptions, backbone: Backbone) -> StepName:
    """Choose the implementation of decoding steps. Raises ValueError for a named one that does not serve."""
    reasons = {"native": native_step.unsupported, "graph": _no_graphs}
    name = options.decode_step
    if name in reasons:
        reason = reasons[name](backbone)
        if reason is not None:
            raise ValueError(f"decode_step: expected one that serves the backbone, got {name!r}: {reason}")
        return name
    if name == "transformers":
        return name
    served = [name for name, unsupported in reasons.items() if unsupported(backbone) is None]
    if "native" in served and not native_step.preferred(backbone, "cpu"):
        served.remove("native")
    return served[0] if served else "transformers"  # type: ignore[return-value]


def _no_graphs(backbone: Backbone) -> str | None:
    if not is_eager():
        return "the CPU stands in for another device, or a graph is being compiled"
    if backbone.device.type != "cuda":
        return f"graphs are CUDA's, the backbone is on {backbone.device.type}"
    if backbone.quantized:
        return "bitsandbytes' products may not be captured"
    if backbone.sharded:
        return "the hooks of sharded blocks may not be captured"
    kind = getattr(getattr(backbone.base_model, "rotary_emb", None), "rope_type", "default")
    if kind in exactness.LOOKS_AT_LENGTHS:
        return f"its rotary embedding, of the kind {kind!r}, waits for the device to know the longest row"
    return None


def _one_backbone(model: HydraModel, requests: Sequence[Request]) -> str:
    """Name of the backbone that all requests run on."""
    names = {}
    for role in dict.fromkeys(request.role for request in requests):
        spec = require_role(model.roles, role)
        if spec.head != LM_HEAD:
            raise ValueError(f"role: expected one with an LM head, got {role!r} with head {spec.head!r}")
        names[spec.backbone] = role
    if len(names) > 1:
        raise ValueError(f"role: expected roles on one backbone, got {sorted(names.values())} on {sorted(names)}")
    return next(iter(names))


def _row(model: HydraModel, index: int, request: Request, sampling: SamplingConfig) -> AnswerRow:
    return AnswerRow(
        index=index,
        prompt=request.prompt,
        slot=model.roles[request.role].slot,
        sampling=request.sampling(sampling),
        greedy=request.greedy,
        seed=row_seed(sampling.seed, request.sample_id),
    )
