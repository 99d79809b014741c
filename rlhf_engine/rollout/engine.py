"""Continuous batching: requests wait, rows take the places of those that ended, blocks of the cache go round.

    engine = RolloutEngine(model, sampling, requests)
    for answer in engine.run(): ...

A request is admitted when a row is free and the cache can hold it to its end, so that no row ever has to give way. The
prompt goes through the model once for all requests with the same prompt and slot; their rows share its full blocks and
have a copy of the last one. Then each step draws one token for every live row. What is drawn depends on (seed, sample
id, position) and on the row's own logits only, so the order of admission changes answers by rounding at most.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from rlhf_kernels.sample import sample

from rlhf_engine.hydra.gated import GatedHead
from rlhf_engine.hydra.kv_cache import BLOCK, BlockPool, KVCache, bytes_per_position
from rlhf_engine.hydra.model import HydraModel
from rlhf_engine.hydra.roles import LM_HEAD, require_role
from rlhf_engine.rollout import native_step
from rlhf_engine.rollout.request import (
    Answer,
    FinishReason,
    Request,
    RolloutStats,
    SamplingConfig,
    check_prompt,
    row_seed,
)
from rlhf_engine.rollout.rows import DrawGroup, LiveRows, Prompt, Row
from rlhf_engine.rollout.step import Step, TransformersStep
from rlhf_engine.rollout.stopping import Decode, StopTexts

PREFILL_TOKENS = 8192
"""Most prompt tokens of one call; a longer prompt is a call of its own."""
_WAIT_SHARE = 8
"""One in so many places has to be free before waiting prompts interrupt the decoding of the others."""


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """How rows are run; nothing of it changes answers but by rounding."""

    max_rows: int | None = None
    """Most rows alive at once; None: as many as there are requests, as far as the cache holds them."""
    cache_bytes: int | None = None
    """Most bytes of keys and values, all rows together; None: as many as the rows alive at once may need."""
    step: Literal["auto", "native", "transformers"] = "auto"
    """What runs a decoding step; auto: the native one where it serves the backbone."""
    batch_invariant: bool = False
    """Tokens and log-probs have the same bits whatever an answer was batched with: prompts go through the model one by
    one, and so do rows where the step rounds by their number."""

    def __post_init__(self) -> None:
        for name in ("max_rows", "cache_bytes"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name}: expected None or at least 1, got {value}")


@dataclass(eq=False)
class _Prefix:
    """A prompt that several requests share, for as long as some of them wait."""

    blocks: list[int]
    waiting: int
    """Requests that have not been admitted yet."""
    hidden: torch.Tensor | None = None
    """[H], of the last token, once the prompt is in the cache."""


class _NewPrompt(NamedTuple):
    """A prompt that is not in the cache yet, and whom it is shared through."""

    prompt: Prompt
    prefix: _Prefix | None


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
    ) -> None:
        """decode: token ids to text, which stop texts need.

        Raises ValueError for no requests, a prompt that does not fit the context or the cache, roles without an LM head
        or on different backbones, and stop texts without a `decode`.
        """
        options = options or EngineOptions()
        if len(requests) == 0:
            raise ValueError("prompts: expected at least one prompt, got a batch of size 0")
        self.sampling = sampling
        self.backbone = model.backbone(_one_backbone(model, requests))
        self.stats = RolloutStats()
        if sampling.stop and decode is None:
            raise ValueError(f"decode: expected a function from tokens to text for the stop texts {sampling.stop}")
        self._stop = StopTexts(sampling.stop, decode) if sampling.stop and decode is not None else None
        self._eos = frozenset(sampling.eos_token_ids)
        rows = [_row(model, i, request, sampling) for i, request in enumerate(requests)]
        context = self.backbone.context_length
        for i, row in enumerate(rows):
            check_prompt(f"prompts[{i}]", row.prompt, context, row.sampling.max_completion_length)
        self._max_rows = min(len(rows), options.max_rows or len(rows))
        groups: dict[tuple[str | None, tuple[int, ...]], list[Row]] = {}
        for row in rows:
            groups.setdefault(row.prefix, []).append(row)
        self._waiting = deque(row for members in groups.values() for row in members)
        self._sharing = {prefix: len(members) for prefix, members in groups.items() if len(members) > 1}
        self._prefixes: dict[tuple[str | None, tuple[int, ...]], _Prefix] = {}
        self._pool = BlockPool(self._blocks_needed(rows, options.cache_bytes))
        self.cache = KVCache(blocks=self._pool.size)
        slots = sorted({row.slot for row in rows if row.slot is not None})
        self._step = self._choose_step(options.step, slots, BLOCK * max(r.blocks_needed for r in rows))
        self._alone = options.batch_invariant
        if self._alone and not self._step.invariant:
            self._max_rows = 1
        self.stats.step = self._step.name
        device = self.backbone.device
        heads = [layer for layer in self.backbone.linears.values() if isinstance(layer, GatedHead)]
        head_slots = frozenset(slot for head in heads for slot in head.slots)
        self._live = LiveRows(device, max(row.blocks_needed for row in rows), slots, head_slots)
        self._ends = torch.tensor(sorted(self._eos), dtype=torch.int64, device=device)

    # ---- running ---------------------------------------------------------------------------------------------------

    def run(self) -> Iterator[Answer]:
        """Answers as they finish, until every request has one."""
        while self._waiting or len(self._live):
            yield from self.step()

    @torch.no_grad()
    def step(self) -> list[Answer]:
        """Admit who can be admitted, draw a token for every live row; the answers that finished."""
        began = time.perf_counter()
        answers = self._admit()
        admitted = time.perf_counter()
        self.stats.prefill_seconds += admitted - began
        if len(self._live):
            answers += self._advance()
            self.stats.decode_seconds += time.perf_counter() - admitted
        return answers

    def partial(self, index: int) -> tuple[int, ...]:
        """Tokens so far of a request that is being written; empty for one that waits or has finished."""
        return next((tuple(row.tokens) for row in self._live.rows if row.index == index), ())

    # ---- admission -------------------------------------------------------------------------------------------------

    def _admit(self) -> list[Answer]:
        """Prompts of waiting requests into the cache and their first tokens drawn; answers that are done with that."""
        answers: list[Answer] = []
        while self._waiting and self._may_interrupt():
            rows, prompts, copies = self._next_rows(self._max_rows - len(self._live))
            if not rows:
                break
            hidden = self._prefill(rows, prompts)
            if copies:
                self.cache.copy([source for source, _ in copies], [target for _, target in copies])
            first = len(self._live)
            self._live.append(rows)
            self.stats.most_rows = max(self.stats.most_rows, len(self._live))
            answers += self._accept(first, *self._draw(hidden, first))
        self._live.sort_by_slot()
        return answers

    def _may_interrupt(self) -> bool:
        free = self._max_rows - len(self._live)
        return free > 0 and (len(self._live) == 0 or free * _WAIT_SHARE >= self._max_rows)

    def _next_rows(self, most: int) -> tuple[list[Row], list[_NewPrompt], list[tuple[int, int]]]:
        """The next rows that fit, with their blocks; prompts among theirs that are not in the cache; blocks to copy."""
        rows: list[Row] = []
        prompts: list[_NewPrompt] = []
        copies: list[tuple[int, int]] = []
        tokens = 0
        while self._waiting and len(rows) < most:
            row = self._waiting[0]
            arrives = row.prefix not in self._prefixes
            if arrives and tokens and tokens + len(row.prompt) > PREFILL_TOKENS:
                break
            if not self._take_blocks(row, copies):
                break
            if arrives:
                prefix = self._prefixes.get(row.prefix)
                blocks = row.blocks if prefix is None else prefix.blocks
                prompts.append(_NewPrompt(Prompt(tokens=row.prompt, slot=row.slot, blocks=blocks), prefix))
                tokens += len(row.prompt)
            rows.append(self._waiting.popleft())
        return rows, prompts, copies

    def _take_blocks(self, row: Row, copies: list[tuple[int, int]]) -> bool:
        """Give a row its blocks if there are enough, and note what has to be copied into them."""
        pool, need = self._pool, row.blocks_needed
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
            prefix = _Prefix(blocks=pool.take(held), waiting=self._sharing[row.prefix])
            self._prefixes[row.prefix] = prefix
        kept = held if prefix.waiting == 1 else full  # the last one takes the prefix over
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

    def _prefill(self, rows: Sequence[Row], prompts: Sequence[_NewPrompt]) -> torch.Tensor:
        """Hidden states [N, H] of the rows' last prompt tokens."""
        hidden_of: dict[tuple[str | None, tuple[int, ...]], torch.Tensor] = {}
        if prompts:
            calls = [[new.prompt] for new in prompts] if self._alone else [[new.prompt for new in prompts]]
            hidden = torch.cat([self._step.prefill(call) for call in calls])
            self.stats.prompts += len(prompts)
            self.stats.prompt_tokens += sum(len(new.prompt.tokens) for new in prompts)
            if len(prompts) == len(rows) and not self._prefixes:
                return hidden
            for new, state in zip(prompts, hidden, strict=True):
                hidden_of[new.prompt.slot, new.prompt.tokens] = state
                if new.prefix is not None:
                    new.prefix.hidden = state
        for row in rows:
            prefix = self._prefixes.get(row.prefix)
            if prefix is not None and prefix.hidden is not None:
                hidden_of[row.prefix] = prefix.hidden
                if prefix.waiting == 0:
                    del self._prefixes[row.prefix], self._sharing[row.prefix]
        return torch.stack([hidden_of[row.prefix] for row in rows])

    # ---- drawing ---------------------------------------------------------------------------------------------------

    def _advance(self) -> list[Answer]:
        """One token more for every live row."""
        live = self._live
        hidden = self._step.decode(live)
        live.lengths_N += 1
        live.longest += 1
        self.stats.steps += 1
        return self._accept(0, *self._draw(hidden, 0))

    def _draw(self, hidden: torch.Tensor, first: int) -> tuple[list[int], list[float]]:
        """Tokens and log-probs of the rows from `first` on, from their hidden states [N, H]."""
        live = self._live
        rows = live.rows[first:]
        groups = live.groups if first == 0 else live.draw_groups(rows)
        if len(groups) == 1:
            token_N, logprob_N = self._draw_group(hidden, groups[0], slice(first, None), rows)
        else:
            token_N = hidden.new_empty(len(rows), dtype=torch.int64)
            logprob_N = hidden.new_empty(len(rows), dtype=torch.float32)
            for group in groups:
                assert group.rows_N is not None
                members = [rows[i] for i in group.places]
                drawn = self._draw_group(hidden[group.rows_N], group, group.rows_N + first, members)
                token_N[group.rows_N], logprob_N[group.rows_N] = drawn
        live.tokens_N[first:] = token_N
        return token_N.tolist(), logprob_N.tolist()

    def _draw_group(
        self, hidden: torch.Tensor, group: DrawGroup, at: slice | torch.Tensor, rows: Sequence[Row]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        live = self._live
        head = self.backbone.lm_head_in(group.slot)
        early = [len(row.tokens) + 1 < row.sampling.min_completion_length for row in rows] if live.any_minimum else []
        drawn = sample(
            hidden,
            head.weight,
            temperature=live.temperatures_N[at] if group.temperature is None else group.temperature,
            seed=live.seeds_N[at],
            position=live.lengths_N[at],
            greedy=live.greedy_N[at],
            softcap=head.softcap,
            logit_scale=head.logit_scale,
            bias=head.bias,
            lora=head.lora,
            top_k=group.top_k,
            top_p=group.top_p,
            forbidden=self._ends if any(early) else None,
            forbids=torch.tensor(early, device=hidden.device) if any(early) else None,
        )
        assert drawn.token is not None
        assert drawn.logprob is not None
        return drawn.token, drawn.logprob

    def _accept(self, first: int, tokens: Sequence[int], logprobs: Sequence[float]) -> list[Answer]:
        """Note what was drawn for the rows from `first` on; those that are done leave."""
        live, answers = self._live, []
        done: set[int] = set()
        for place, (token, logprob) in enumerate(zip(tokens, logprobs, strict=True), start=first):
            row = live.rows[place]
            row.tokens.append(token)
            row.logprobs.append(logprob)
            reason = self._reason(row, token)
            if reason is not None:
                done.add(place)
                answers.append(self._finish(row, reason))
        self.stats.tokens += len(tokens)
        if done:
            live.keep([place for place in range(len(live)) if place not in done])
        return answers

    def _reason(self, row: Row, token: int) -> FinishReason | None:
        """Why a row ends with the token it just got; None if it goes on."""
        if token in self._eos:
            return "eos"
        if self._stop is not None and self._stop.completed_by(row.tokens):
            return "stop"
        return "length" if len(row.tokens) >= row.sampling.max_completion_length else None

    def _finish(self, row: Row, reason: FinishReason) -> Answer:
        self._pool.give_back(row.blocks)
        self.stats.most_blocks = self._pool.most_used
        return Answer(index=row.index, tokens=tuple(row.tokens), logprobs=tuple(row.logprobs), finish_reason=reason)

    def _choose_step(self, name: str, slots: Sequence[str], positions: int) -> Step:
        reason = native_step.unsupported(self.backbone) if name != "transformers" else ""
        if reason is None:
            decoder = native_step.decoder_of(self.backbone)
            return native_step.NativeStep(self.backbone, decoder, self.cache, slots, positions)
        if name == "native":
            raise ValueError(f"step: expected a backbone that the native step serves, got one of which {reason}")
        return TransformersStep(self.backbone, self.cache)

    # ---- sizes -----------------------------------------------------------------------------------------------------

    def _blocks_needed(self, rows: Sequence[Row], cache_bytes: int | None) -> int:
        """Blocks that the rows alive at once may need, or what the budget holds of them."""
        copied = [int(row.prefix in self._sharing and len(row.prompt) % BLOCK > 0) for row in rows]
        most = sorted((row.blocks_needed + extra for row, extra in zip(rows, copied, strict=True)), reverse=True)
        shared = sum(len(prompt) // BLOCK * (n - 1) for (_, prompt), n in self._sharing.items())
        blocks = min(sum(row.blocks_needed for row in rows) - shared, sum(most[: self._max_rows]))
        if cache_bytes is None:
            return blocks
        size = BLOCK * bytes_per_position(self.backbone.model.config, self.backbone.dtype)
        if cache_bytes // size < most[0]:
            raise ValueError(
                f"cache_bytes: expected at least {most[0] * size}, the keys and values of the longest row, "
                f"got {cache_bytes}"
            )
        return min(blocks, cache_bytes // size)


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


def _row(model: HydraModel, index: int, request: Request, sampling: SamplingConfig) -> Row:
    return Row(
        index=index,
        prompt=request.prompt,
        slot=model.roles[request.role].slot,
        sampling=request.sampling(sampling),
        greedy=request.greedy,
        seed=row_seed(sampling.seed, request.sample_id),
    )
