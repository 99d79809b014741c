"""Continuous batching: requests wait, rows take the places of those that ended, blocks of the cache go round.

    engine = RolloutEngine.of(model)
    numbers = engine.submit(requests, sampling)
    for answer in engine.run(): ...

An engine lives as long as its backbone: what it has bound, captured and allocated serves the next requests, too. Each
step admits who can be admitted and draws one token for every live row. What is drawn depends on (seed, sample id,
position) and on the row's own logits only, so who shares a batch changes answers by rounding at most.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import get_args

import torch
from rlhf_kernels.runtime import registry
from rlhf_kernels.runtime.device_tables import queued

from rlhf_engine.config.rollout import StepName
from rlhf_engine.devices import is_eager, is_gpu, is_out_of_memory
from rlhf_engine.errors import MemoryLimitError
from rlhf_engine.hydra.attention import BLOCK, KVCache
from rlhf_engine.hydra.backbone import Backbone
from rlhf_engine.hydra.model import HydraModel
from rlhf_engine.hydra.roles import LM_HEAD, require_role
from rlhf_engine.hydra.supports import Supports
from rlhf_engine.rollout import decoding, exactness
from rlhf_engine.rollout.decoding import CudaCapture, GraphStep, NativeStep, RolloutStep, TransformersStep
from rlhf_engine.rollout.request import (
    Decode,
    EngineOptions,
    FinishReason,
    Request,
    RolloutStats,
    SamplingConfig,
    StopTexts,
    Weights,
    check_ids,
    check_prompt,
    row_seed,
)
from rlhf_engine.rollout.rows import Admission, AnswerRow, LiveRows, NextTokens, Sampler, blocks_of_each

_BURST = 8  # tokens between two looks at what a device has drawn
_AHEAD = 8
"""Rows from which a burst is queued before the last one is read. Reading takes the host a time in proportion to rows,
in which the device would idle; where all rows turn out to have ended, the burst was for nothing. Infinity: never."""


class _Burst:
    """Tokens that rows draw, on their way to the host."""

    _host: torch.Tensor | None = None
    """int32 [2 n, N], tokens and bits of log-probs by turns; None where they were drawn on the host."""
    _ready: torch.cuda.Event | None = None

    def __init__(self, rows: Sequence[AnswerRow], versions: Mapping[str | None, int], drawn: Sequence[NextTokens]):
        """Queue one copy of what was drawn, of the versions that draw now."""
        self.rows, self.versions, self.drawn = list(rows), [versions.get(row.slot, 0) for row in rows], drawn
        for row in rows:
            row.ahead += len(drawn)
        if is_gpu(drawn[0].tokens.device):
            packed = torch.stack([x for s in drawn for x in (s.tokens.int(), s.logprobs.float().view(torch.int32))])
            self._host = packed.to("cpu", non_blocking=packed.is_cuda)  # pinned by torch, if so
            if packed.is_cuda:
                self._ready = torch.cuda.Event()
                self._ready.record(torch.cuda.current_stream(packed.device))

    def read(self) -> Iterator[tuple[AnswerRow, int, tuple[int, ...], tuple[float, ...]]]:
        """Each row, the version that drew, tokens and log-probs, as soon as they are here."""
        for row in self.rows:
            row.ahead -= len(self.drawn)
        if self._host is None:
            tokens, logprobs = [x.tokens.tolist() for x in self.drawn], [x.logprobs.tolist() for x in self.drawn]
        else:
            if self._ready is not None:
                self._ready.synchronize()
            tokens, logprobs = self._host[::2].tolist(), self._host[1::2].view(torch.float32).tolist()
        return zip(self.rows, self.versions, zip(*tokens, strict=True), zip(*logprobs, strict=True), strict=True)


class _Engines(threading.local):
    """The engines of each thread, by model and backbone. They hold no model: it goes at once where nobody else does."""

    def __init__(self) -> None:
        self.held: weakref.WeakKeyDictionary[HydraModel, dict[str, RolloutEngine]] = weakref.WeakKeyDictionary()


_engines = _Engines()


class RolloutEngine:
    """Draws answers on one backbone, in the lanes of their roles. Calls from several threads take turns."""

    _queued: _Burst | None = None  # what live rows draw that is not read yet
    _step: RolloutStep | None = None

    def __init__(self, model: HydraModel, backbone: str = "base", *, options: EngineOptions | None = None) -> None:
        """Take a backbone; nothing is allocated before the first request.

        Args:
            model: a model with the requests' roles.
            backbone: name of the backbone that all of them run on.
            options: how rows are run; None: the defaults.
        """
        self._model, self._name, self._options = model, backbone, options or EngineOptions()
        self.backbone = model.backbone(backbone)
        """Backbone that the requests run on."""
        self.versions = Counter[str | None]()
        """Version of each slot's weights, noted with every token; 0 before the first `renew`."""
        self.stats = RolloutStats()
        """Statistics of time and memory since the engine last rested."""
        self._lock = threading.RLock()
        self._next = 0
        self._renewals: dict[str | None, tuple[int, Callable[[], object] | None]] = {}
        """Version and write of the slots whose new weights wait."""
        self._written = Counter[str | None]()
        """Number of times that each slot has got new weights."""
        self._clear()

    @classmethod
    def of(cls, model: HydraModel, backbone: str = "base", options: EngineOptions | None = None) -> RolloutEngine:
        """Find the engine of a backbone on this thread.

        Args:
            model: a model with the requests' roles.
            backbone: name of the backbone that all of them run on.
            options: how rows are run; None: the defaults.

        Returns:
            The engine of the calls before, with what it has captured; a new one where that has requests, or other
            options.
        """
        engines = _engines.held.setdefault(model, {})
        engine, given = engines.get(backbone), options or EngineOptions()
        if engine is None or not engine.finished or engine._options != given:
            engine = engines[backbone] = cls(weakref.proxy(model), backbone, options=given)  # type: ignore[arg-type]
        return engine

    def between_steps(self) -> contextlib.AbstractContextManager[object]:
        """Make a block in which no step runs, on whichever thread.

        Returns:
            The block. The thread that is in it may call the engine.
        """
        return self._lock

    # ---- requests --------------------------------------------------------------------------------------------------

    def submit(self, requests: Sequence[Request], sampling: SamplingConfig, *, decode: Decode | None = None) -> range:
        """Queue requests.

        Args:
            requests: at least one, of roles with an LM head on the backbone.
            sampling: options of every answer, except where a request has its own.
            decode: token ids to text, which stop texts need; None without them.

        Returns:
            Numbers of the requests, counted over the life of the engine.

        Raises:
            ValueError: no requests, a prompt that does not fit the context, or token ids outside the vocabulary.
            ValueError: roles that are unknown, have no LM head, or run on another backbone.
            ValueError: stop texts without `decode`, request options that contradict `sampling`, unknown `weights`.
            ValueError: a decoding step that does not serve the backbone, or a cache too small for the longest row.
        """
        asked = self.check(requests, sampling, decode=decode)
        with self._lock, torch.inference_mode(False), self.backbone.kernels.used():
            rows = [
                AnswerRow(
                    index=number,
                    prompt=request.prompt,
                    slot=self._model.roles[request.role].slot,
                    sampling=how,
                    greedy=request.greedy,
                    fixed=request.weights == "fixed",
                    seed=row_seed(how.seed, request.sample_id),
                    keep=request.keep or bool(request.then),
                    then=request.then,
                    stop=StopTexts(how.stop, decode) if how.stop and decode is not None else None,
                )
                for number, (request, how) in enumerate(asked, start=self._next)
            ]
            step = _choose_step(self._options, self.backbone)
            most_blocks = _most_blocks(self._options, self.backbone, max(blocks_of_each(rows)))
            if self.finished:
                self._begin(step)
            self._next += len(rows)
            self._admission.add(rows)
            try:
                self._make_room(rows, most_blocks)
            except BaseException:  # nobody knows the numbers of these rows
                for row in rows:
                    self._admission.remove(row)
                self._step = None  # it may be of fewer slots than the tables have now
                raise
            return range(self._next - len(rows), self._next)

    def check(
        self, requests: Sequence[Request], sampling: SamplingConfig, *, decode: Decode | None = None
    ) -> list[tuple[Request, SamplingConfig]]:
        """Check requests, as `submit` does first.

        Args:
            requests: at least one, of roles with an LM head on the backbone.
            sampling: options of every answer, except where a request has its own.
            decode: token ids to text, which stop texts need; None without them.

        Returns:
            Each request and the options of its answer.

        Raises:
            ValueError: what `submit` refuses, decoding steps and the size of the cache aside.
        """
        if len(requests) == 0:
            raise ValueError("prompts: expected at least one prompt, got a batch of size 0")
        for role in dict.fromkeys(request.role for request in requests):
            spec = require_role(self._model.roles, role)
            if spec.head != LM_HEAD:
                raise ValueError(f"role: expected one with an LM head, got {role!r} with head {spec.head!r}")
            if spec.backbone != self._name:
                raise ValueError(
                    f"role: expected one on the backbone {self._name!r}, got {role!r} on {spec.backbone!r}"
                )
        context, vocabulary = self.backbone.context_length, self.backbone.vocabulary
        asked = list[tuple[Request, SamplingConfig]]()
        for i, request in enumerate(requests):
            how = request.sampling(sampling)
            asked.append((request, how))
            if request.weights not in get_args(Weights):
                raise ValueError(f"weights: expected one of {get_args(Weights)}, got {request.weights!r}")
            if how.stop and decode is None:
                raise ValueError(f"decode: expected a function from tokens to text for the stop texts {how.stop}")
            check_ids("eos_token_ids", how.eos_token_ids, vocabulary)
            check_ids("then", list(itertools.chain(*request.then)), vocabulary)
            most = how.max_completion_length + sum(len(given) + how.max_completion_length for given in request.then)
            check_prompt(f"prompts[{i}]", request.prompt, context, most, vocabulary)
        return asked

    def cancel(self, number: int) -> None:
        """Drop a request, whether it waits or is being written; nothing happens to one that has finished.

        Args:
            number: a number that `submit` returned.

        Raises:
            ValueError: a number that no request has had.
        """
        with self._lock, torch.inference_mode(False), torch.no_grad():
            if not 0 <= number < self._next:
                raise ValueError(f"number: expected one of the {self._next} that `submit` returned, got {number}")
            for row in [row for row in self._admission.waiting if row.index == number]:
                self._admission.remove(row)
            for row in [row for row in self._live.rows if row.index == number]:
                self._admission.release(row)
                self._live.drop_ended()
            self._rest()

    def forget(self, slot: str) -> list[int]:
        """Drop a slot's requests and all that is kept of it, before it leaves the backbone.

        Args:
            slot: slot of the backbone. One that no request has had is left alone.

        Returns:
            Numbers of the requests that were dropped.
        """
        with self._lock:
            rows = [row for row in itertools.chain(self._admission.waiting, self._live.rows) if row.slot == slot]
            for number in dict.fromkeys(row.index for row in rows):
                self.cancel(number)
            self._admission.forget(slot)
            for named in (self._renewals, self._written, self.versions, self._tensors, self._bound):
                named.pop(slot, None)
            if slot in self._live.slots:
                self._live.forget(slot)
                self._step = None
                self._sampler = Sampler(self.backbone)
            return [row.index for row in rows]

    def drop_kept(self) -> None:
        """Drop what is kept for prompts that extend earlier ones."""
        with self._lock:
            for slot in {slot for slot, _ in self._admission.kept.values()}:
                self._admission.forget(slot)
            self._rest()

    def renew(self, slot: str | None, version: int, write: Callable[[], object] | None = None) -> None:
        """Give a slot new weights in place, between two steps.

        Answers that have begun go on with them, unless one of the slot's is `fixed`. Then the write waits until all
        such answers have ended, and no other answer of the slot begins before. A later call replaces one that waits.

        Args:
            slot: slot whose weights are new; None: the base itself, which all answers read.
            version: version of the new weights, noted with every token that they draw.
            write: writes them, within the next `step`, or at once where there is no request. None: the slot has them
                already, and no answer is waited for.

        Raises:
            ValueError: a slot that the backbone does not have.
        """
        if slot is not None:
            self.backbone.slot(slot)
        with self._lock, torch.no_grad():
            if write is not None or slot in self._renewals or self.versions[slot] != version:
                self._renewals[slot] = version, write
                self._rest()

    def run(self) -> Iterator[AnswerRow]:
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
        return not self._admission.waiting and not len(self._live)

    def step(self) -> list[AnswerRow]:
        """Admit waiting requests as far as they fit, and draw a token for every live row (on CUDA a few).

        Returns:
            The answers that finished.

        Raises:
            MemoryLimitError: the rows do not fit into memory. Whatever is raised, all requests are dropped.
        """
        with self._lock, torch.inference_mode(False), torch.no_grad(), self.backbone.kernels.used():  # kept for others
            began = time.perf_counter()
            try:
                self._renew()
                answers = self._admit()
                admitted = time.perf_counter()
                self.stats.prefill_seconds += admitted - began
                if len(self._live):
                    answers += self._advance()
                    self.stats.decode_seconds += time.perf_counter() - admitted
            except BaseException as error:
                rows, blocks = len(self._live), self._admission.pool.size
                self._clear()  # a step that broke off leaves rows in between, and blocks that nobody would give back
                if not is_out_of_memory(error):
                    raise
                raise MemoryLimitError(
                    f"a rollout of {rows} rows at once, with {blocks * BLOCK} tokens in its cache, does not fit into "
                    "memory; bound it with kv_cache_memory, the rest then waits"
                ) from error
            finally:
                self._rest()
            return answers

    def partial(self, number: int) -> tuple[int, ...]:
        """Tokens so far of an answer that is being written.

        Args:
            number: a number that `submit` returned.

        Returns:
            Token ids; empty for a request that waits or has finished.
        """
        with self._lock:
            return next((tuple(row.tokens) for row in self._live.rows if row.index == number), ())

    def writing(self) -> list[AnswerRow]:
        """List the answers that are being written.

        Returns:
            Rows with the tokens so far. The next step changes them.
        """
        return list(self._live.rows)

    def cache_use(self) -> tuple[int, int]:
        """Tell how much of the cache is in use.

        Returns:
            Number of blocks in use, and bytes of a block.
        """
        pool = self._admission.pool
        return pool.size - pool.free, BLOCK * self.backbone.cache_bytes_per_position

    # ---- life ------------------------------------------------------------------------------------------------------

    def _clear(self) -> None:
        """Drop every request, and all that was kept."""
        self.cache = KVCache(blocks=0)
        engine = weakref.proxy(self)  # no cycle: what is dropped gives its cache back at once
        self._admission, self._live = Admission(lambda slot: engine._weights(slot)), LiveRows(self.backbone.device)
        self._step = None
        self._tensors: dict[str | None, list[torch.Tensor]] = {}  # parameters of each slot since the last rest
        self._reads: tuple[object, ...] = ()
        self._bound: dict[str, tuple[object, ...]] = {}  # what rows' slots were when they got their numbers
        self._burst = _BURST if is_gpu(self.backbone.device) else 1
        self._ahead = _AHEAD if is_gpu(self.backbone.device) else math.inf
        self._queued = None

    def _begin(self, step: StepName) -> None:
        """Settle what may have changed since the engine last rested."""
        self._captures = step == "graph" or (step == "native" and _no_graphs(self.backbone) is None)
        addresses = [p.data_ptr() for p in self.backbone.model.parameters()] if self._captures else []
        where = (self.backbone.device, self.backbone.dtype)
        kernels = registry.effective()
        reads = (step, kernels.exact, kernels.backend, *sorted(kernels.of_op.items()), *where, *addresses)
        if reads != self._reads or any(self._where(slot) != where for slot, where in self._bound.items()):
            self._clear()
            self._reads, self._kind = reads, step
            self._is_alone = kernels.exact and exactness.unsupported(self.backbone) is not None
        if isinstance(self._step, GraphStep):
            self._step.begin()
        self._tensors = {}
        self._sampler = Sampler(self.backbone)
        self._admission.pool.most_used = self._admission.pool.size - self._admission.pool.free
        self.stats = RolloutStats()

    def _make_room(self, rows: Sequence[AnswerRow], most_blocks: int | None) -> None:
        """Room for rows that wait now, in the tables and in the cache."""
        live, pool, waiting = self._live, self._admission.pool, len(self._admission.waiting)
        alive = len(live) + waiting
        # a prompt and a row at a time where exact mode does not serve the backbone
        self._max_rows = 1 if self._is_alone else min(alive, self._options.max_rows or alive)
        share = NativeStep.wait_share if self._kind == "native" and not self._captures else GraphStep.wait_share
        self._places_to_wait_for = -(-self._max_rows // share)
        had = (live.columns, len(live.slots), pool.size)
        columns, slots = 0, set[str]()
        for row in rows:
            columns = max(columns, row.blocks_needed)
            if row.slot is not None:
                slots.add(row.slot)
        if self._captures:  # few sizes, each of which is captured anew
            columns = 1 << (columns - 1).bit_length()
        live.widen(max(live.columns, columns))
        for slot in sorted(slots - live.slots.keys()):
            live.slots[slot], self._bound[slot] = len(live.slots), self._where(slot)
            if self.backbone.adapts_head(slot):
                live.head_slots.add(slot)
        blocks = sum(len(row.blocks) for row in live.rows) + self._admission.blocks_needed(self._max_rows)
        pool.grow(max(pool.size, blocks if most_blocks is None else min(blocks, most_blocks)))
        if had != (live.columns, len(live.slots), pool.size):
            self._step = None

    def _where(self, slot: str) -> tuple[object, ...]:
        """A slot's object, and where its weights are if addresses are captured; None once it is gone."""
        adapter = self.backbone._slots.get(slot)
        return (adapter, *(p.data_ptr() for p in adapter.parameters() if self._captures)) if adapter else (None,)

    def _rest(self) -> None:
        """Keep, without requests, what is bound to addresses: graphs, and a cache on a GPU."""
        if not self.finished:
            return
        self._queued = None
        self._renew()
        if self._step is not None and self._step.name != "graph":
            self._step = None  # it may hold weights of a sharded base
        if not is_gpu(self.backbone.device) and not self._admission.kept:
            self.cache = KVCache(blocks=0)

    def _renew(self) -> None:
        """Write the new weights of slots, but those of `fixed` answers that have begun."""
        for slot, (version, write) in list(self._renewals.items()):
            rows = itertools.chain(self._live.rows, self._admission.waiting)
            if write is not None and any(row.holds and slot in (None, row.slot) for row in rows):
                continue
            del self._renewals[slot]
            if write is not None or slot is not None or not self.backbone.frozen:  # else nothing can have changed
                self._written[slot] += 1  # before: a write that breaks off may have changed something
            if write is not None:
                write()
            self.versions[slot] = version

    def _weights(self, slot: str | None) -> object:
        """Name a slot's weights and the way they are read, by another name once these have changed."""
        read = self._tensors.get(slot)
        if read is None:
            read = [] if slot is None else list(self.backbone.slot(slot).parameters())
            read += [] if self.backbone.frozen else [p for _, p in self.backbone.base_parameters()]
            self._tensors[slot] = read
        written = self._written[slot], self._written[None]
        return (self._reads, written, [p.is_inference() or p._version for p in read])

    # ---- a step ----------------------------------------------------------------------------------------------------

    def _admit(self) -> list[AnswerRow]:
        """Prompts of waiting requests into the cache and their first tokens drawn; answers that are done with that."""
        answers, live = list[AnswerRow](), self._live
        while self._admission.waiting:
            free = self._max_rows - len(live)
            if len(live) and free < self._places_to_wait_for:
                break
            rows, new, copies = self._admission.next_rows(free, self._renewals.keys(), alone=not len(live))
            if not rows:
                break
            hidden = self._prefill(new)
            if copies:
                self.cache.copy(*zip(*copies, strict=True))
            hidden = self._admission.last_states(rows, new, hidden)
            live.append(rows)
            self.stats.most_rows = max(self.stats.most_rows, len(live))
            self.stats.most_blocks = max(self.stats.most_blocks, self._admission.pool.most_used)
            first = len(live) - len(rows)
            drawn = self._sampler(hidden, live.state.at(slice(first, None)), live.draw_groups(rows))
            live.state.tokens_N[first:] = drawn.tokens
            answers += self._accept(_Burst(rows, self.versions, [drawn]))
        live.sort_by_slot()
        return answers

    def _prefill(self, rows: Sequence[AnswerRow]) -> torch.Tensor | None:
        """Hidden states of the rows' last prompt tokens; None without rows."""
        step, hidden = self._make_step(), list[torch.Tensor]()  # rows without a new prompt may need it as well
        if not rows:
            return None
        whole, rest = ([row for row in rows if bool(row.cached) == begun] for begun in (False, True))
        if whole:
            hidden.append(step.prefill(whole))
        if rest:
            hidden.append(step.extend(rest, [-1 if row.slot is None else self._live.slots[row.slot] for row in rest]))
        self.stats.prompt_tokens += sum(len(row.prompt) - row.cached for row in rows)
        self.stats.prompts += len(rows)
        place = {row: i for i, row in enumerate((*whole, *rest))}
        return torch.cat(hidden)[queued([place[row] for row in rows], self.backbone.device)]

    def _advance(self) -> list[AnswerRow]:
        """A token more for every live row, or a few where looking at them costs a wait."""
        burst = self._queued or self._draw(1)
        assert burst is not None, "a live row may have one token more"
        self._queued = None
        # Rows that turn out to have ended draw on in the blocks that they had, behind all that is kept of them. Whoever
        # gets these blocks writes into them on the same stream, thus later, and reads what it has written itself.
        if len(self._live) >= self._ahead and not self._admission.waiting and burst.drawn[-1].bits is None:
            self._queued = self._draw(self._burst)
        return self._accept(burst)

    def _draw(self, least: int) -> _Burst | None:
        """Queue the next tokens of all live rows; None where one may have fewer than `least`."""
        live, step = self._live, self._make_step()
        left = min(row.left for row in live.rows)
        if left < least:
            return None
        drawn = step.decode_many(live, min(self._burst, left), self._sampler)
        self.stats.steps += len(drawn)
        self.stats.step = step.name
        return _Burst(live.rows, self.versions, drawn)

    def _accept(self, burst: _Burst) -> list[AnswerRow]:
        """Note what rows have drawn, up to the end of each; those that are done leave."""
        answers = list[AnswerRow]()
        supports = list[Sequence[torch.Tensor]]()  # of each step and row; none where rows were drawn among all words
        for step in burst.drawn:
            some = None if step.bits is None else Supports.from_bits(step.bits, self.backbone.n_words)
            supports.append(() if some is None else some.words.cpu().split(some.lengths.tolist()))
        for i, (row, version, tokens, logprobs) in enumerate(burst.read()):
            # one that has ended or was cancelled meanwhile has no blocks, and what it drew is nobody's
            for token, logprob, support in zip(tokens, logprobs, supports, strict=True) if row.blocks else ():
                row.tokens.append(token)
                row.logprobs.append(logprob)
                if support:
                    row.supports.append(support[i])
                row.versions.append(version)
                reason = self._reason(row, token)
                if reason is not None:
                    self._admission.release(row)
                    self.stats.tokens += len(row.tokens)
                    row.finish_reason = reason
                    answers.append(row)
                    if row.then:
                        self._admission.add([_next_turn(row)])
                    break
        if answers:
            self._live.drop_ended()
        return answers

    def _reason(self, row: AnswerRow, token: int) -> FinishReason | None:
        """Finish reason of a row with the token that it just got; None if it goes on."""
        if token in row.sampling.eos_token_ids:
            return "eos"
        if row.stop is not None and row.stop.completed_by(row.tokens):
            return "stop"
        return "length" if len(row.tokens) >= row.sampling.max_completion_length else None

    def _make_step(self) -> RolloutStep:
        """The step, made anew where tables, slots or the cache have grown."""
        if self._step is not None:
            return self._step
        live, blocks = self._live, self._admission.pool.size
        # one more block, which idle places of a graph write into
        self.cache.grow(blocks + int(self._captures))
        if self._kind == "native":
            self._step = NativeStep(self.backbone, self.cache, list(live.slots), live.columns * BLOCK)
        else:
            self._step = TransformersStep(self.backbone, self.cache)
        if self._captures:
            capture, required = CudaCapture(self.backbone.device), self._options.decode_step == "graph"
            self._step = GraphStep(self._step, live.columns, blocks, capture, required=required)
        return self._step


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
    reasons: dict[StepName, Callable[[Backbone], str | None]] = {
        "native": decoding.native_unsupported,
        "graph": _no_graphs,
    }
    name = options.decode_step
    if name in reasons:
        reason = reasons[name](backbone)
        if reason is not None:
            raise ValueError(f"decode_step: expected one that serves the backbone, got {name!r}: {reason}")
        return name
    if name == "transformers":
        return name
    if is_gpu(backbone.device):
        del reasons["native"]  # no GPU has run it
    for served, unsupported in reasons.items():
        if unsupported(backbone) is None and (served != "native" or decoding.native_preferred(backbone, "cpu")):
            return served
    return "transformers"


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


def _next_turn(row: AnswerRow) -> AnswerRow:
    """The row of the answer after a row's and what was given."""
    prompt = (*row.prompt, *row.tokens, *row.then[0])
    turn = replace(row, prompt=prompt, keep=True, then=row.then[1:], blocks=[], cached=0)
    turn.tokens, turn.logprobs, turn.supports, turn.versions = [], [], [], []
    return turn
