"""The thread in which all policies draw and learn, in fair shares.

Requests wait in a queue of each policy. Before every step, free rows go to the policy that has had the fewest tokens
so far: one with a thousand requests does not keep another's single request waiting. What else changes slots of the
base, such as training and the life of policies, runs between two steps (`call`).
"""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from rlhf_engine.errors import BusyError, EngineError, MemoryLimitError, PolicyRemovedError
from rlhf_engine.policy.joint import Pass, attempt
from rlhf_engine.policy.pool import LivePolicy, Policies, fill, promise
from rlhf_engine.rollout.request import Decode, Request, SamplingConfig
from rlhf_engine.rollout.rows import AnswerRow

T = TypeVar("T")
Listen = Callable[[int, AnswerRow, bool], None]
"""Called in the thread after a step: place of a request, its row so far, and whether that has finished."""
MAX_ROWS, MAX_WAITING_TOKENS = 256, 1_000_000


@dataclass(eq=False, kw_only=True)
class Ticket:
    """Requests of one call, of one policy."""

    number: int  # counted over the life of the thread
    policy: LivePolicy  # who draws
    requests: Sequence[Request]  # requests, of the policy's role
    sampling: SamplingConfig  # options of requests that have none of their own
    decode: Decode | None  # token ids to text, for stop texts
    listen: Listen | None  # who hears of tokens; None: nobody
    holds: bool  # whether it holds the policy itself, as nobody else does for it
    answers: Future[list[AnswerRow]] = field(default_factory=promise)  # finished rows, in the order of the requests
    rows: dict[int, AnswerRow] = field(default_factory=dict)  # finished rows by place

    def cost(self, place: int) -> int:
        """Most tokens that a request may be."""
        request = self.requests[place]
        return len(request.prompt) + (request.max_completion_length or self.sampling.max_completion_length)


class PolicyThread:
    """Draws for the policies of a pool until it is closed; a context manager."""

    def __init__(
        self,
        policies: Policies,
        *,
        max_rows: int = MAX_ROWS,
        max_waiting_tokens: int = MAX_WAITING_TOKENS,
        log: Callable[[dict[str, Any]], None] | None = None,
    ) -> None:
        """Start the thread.

        max_rows: most answers at once. max_waiting_tokens: most tokens, of prompts and answers, that are not done.
        log: takes what the thread decides, in order, for `replay`.
        """
        for name, limit in (("max_rows", max_rows), ("max_waiting_tokens", max_waiting_tokens)):
            if limit < 1:
                raise ValueError(f"{name}: expected at least 1, got {limit}")
        self.policies, self.engine = policies, policies.engine
        self._rows = self._max_rows = max_rows
        self._max_tokens, self._log = max_waiting_tokens, log
        self._waiting: dict[str, deque[tuple[Ticket, int]]] = {}  # key of the policy → requests, as they came
        self._open = set[Ticket]()  # tickets that are not done
        self._live: dict[int, tuple[Ticket, int]] = {}  # the engine's number → request
        self._had: dict[str, int] = {}  # key → tokens that the policy has had, those of latecomers from the least on
        self._calls = deque[tuple[Future[Any], Callable[[], Any]]]()
        self._passes = deque[tuple[Future[Any], Pass]]()
        self._numbers = itertools.count()
        self._changed = threading.Condition()
        self._closed = False
        self.owed = 0  # most tokens of requests that are not done
        self.turns = 0  # steps so far
        self.tokens = 0  # tokens of finished answers so far
        policies.heard = self._policy_leaves
        self._thread = threading.Thread(target=self._run, name="policies", daemon=True)
        self._thread.start()

    def __enter__(self) -> PolicyThread:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def is_alive(self) -> bool:
        """Whether it still draws."""
        return self._thread.is_alive()

    @property
    def n_live(self) -> int:
        """Requests that are being written."""
        return len(self._live)

    @property
    def n_waiting(self) -> int:
        """Requests that wait for a row."""
        return sum(len(queue) for queue in list(self._waiting.values()))

    # ---- for other threads -----------------------------------------------------------------------------------------

    def submit(
        self,
        policy: str | LivePolicy,
        requests: Sequence[Request],
        sampling: SamplingConfig,
        *,
        decode: Decode | None = None,
        listen: Listen | None = None,
    ) -> Ticket:
        """Queue requests of a policy, whose role they get. One that is given itself is held by the caller meanwhile.

        Raises BusyError where more would wait than may, or the policy is paused; ValueError as `Policies.get` and
        `RolloutEngine.submit` do; PolicyRemovedError for a policy that has left.
        """
        held = self.policies.hold(policy) if isinstance(policy, str) else policy
        requests, holds = [replace(request, role=held.role) for request in requests], held is not policy
        try:
            if not self._has(held):
                raise _removed(held)
            self.engine.check(requests, sampling, decode=decode)
            if any(request.then for request in requests):
                raise ValueError("then: expected no further turns, each of which is a request by itself here, got some")
            if held.name in self.policies.paused:
                raise BusyError(f"policy: expected one that is not paused, got {held.name!r}")
            ticket = Ticket(
                number=next(self._numbers), policy=held, requests=requests, sampling=sampling, decode=decode,
                listen=listen, holds=holds,
            )  # fmt: skip
            self._queue(ticket)
            return ticket
        except BaseException:
            if holds:
                self.policies.release(held)
            raise

    def _has(self, policy: LivePolicy) -> bool:
        return any(other is policy for other in self.policies)

    def require_room(self, tokens: int) -> None:
        """Raise BusyError where so many tokens more, of prompts and answers, would wait than may."""
        if self.owed + tokens > self._max_tokens:
            raise BusyError(f"expected at most {self._max_tokens} tokens to wait, got {self.owed} and {tokens} more")

    def _queue(self, ticket: Ticket) -> None:
        key = ticket.policy.key
        with self._changed:
            asked = sum(map(ticket.cost, range(len(ticket.requests))))
            self.require_room(asked)
            self._require_open()
            self.owed += asked
            if key not in self._waiting:
                # lists and defaults, for the thread draws meanwhile, and a policy may leave
                others = {t.policy.key for t, _ in list(self._live.values())} | self._waiting.keys()
                least = min((self._had.get(other, 0) for other in others), default=0)
                self._had[key] = max(self._had.get(key, 0), least)
            self._open.add(ticket)
            self._waiting.setdefault(key, deque()).extend((ticket, i) for i in range(len(ticket.requests)))
            self._changed.notify()

    def cancel(self, ticket: Ticket) -> Future[None]:
        """Drop what a ticket still waits for; nothing happens where it is done."""
        return self.call(lambda: self._drop(ticket, PolicyRemovedError("the request was cancelled")))

    def call(self, work: Callable[[], T]) -> Future[T]:
        """Run work between two steps; its result, or what it raised."""
        return self._ask(self._calls, work)

    def compute(self, asked: Pass) -> Future[tuple[Any, ...]]:
        """Compute a policy's outputs between two steps, in one traversal with those that others ask for meanwhile."""
        return self._ask(self._passes, asked)

    def _ask(self, queue: deque[tuple[Future[Any], Any]], asked: Any, *, is_open: bool = True) -> Future[Any]:
        done = promise()
        with self._changed:
            if is_open:
                self._require_open()
            queue.append((done, asked))
            self._changed.notify()
        return done

    def close(self) -> None:
        """Stop after the present step; requests that are left fail with an EngineError."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()

    def _require_open(self) -> None:
        if self._closed:
            raise EngineError("the thread of the policies was closed")

    # ---- in the thread ---------------------------------------------------------------------------------------------

    def _run(self) -> None:
        error = EngineError("the thread of the policies was closed")
        try:
            while not self._closed:
                self._turn()
        except BaseException as fault:  # nobody is to wait for ever
            error = EngineError(f"the thread of the policies broke off: {fault!r}")
            raise
        finally:
            with self._changed:
                self._closed = True
            for ticket in list(self._open):
                self._drop(ticket, error)
            for done, _ in (*self._calls, *self._passes):
                done.set_exception(error)

    def _turn(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._calls or self._passes or self._waiting or self._live)
            calls, passes = list(self._calls), list(self._passes)
            self._calls.clear()  # the same ones stay: who asks may hold one already
            self._passes.clear()
        for done, work in calls:
            self._note("call")
            fill(done, work)
        self._compute(passes)
        self._feed()
        if self._live:
            self._step()

    def _compute(self, passes: Sequence[tuple[Future[Any], Pass]]) -> None:
        with self.engine.between_steps():  # no policy comes or goes meanwhile
            outcomes = attempt(self.policies.host, [asked for _, asked in passes])
        for (done, _), outcome in zip(passes, outcomes, strict=True):
            if isinstance(outcome, Exception):
                done.set_exception(outcome)
            else:
                done.set_result(outcome)

    def _feed(self) -> None:
        """Give free rows to the policies that have had the fewest tokens."""
        while self._waiting and len(self._live) < self._rows:
            with self._changed:
                key = min(self._waiting, key=lambda key: (self._had[key], key))
                queue, places = self._waiting[key], list[int]()
                ticket = queue[0][0]
                while queue and queue[0][0] is ticket and len(self._live) + len(places) < self._rows:
                    places.append(queue.popleft()[1])  # together, for they may share a prompt
                if not queue:
                    del self._waiting[key]
            try:
                requests = [ticket.requests[place] for place in places]
                numbers = self.engine.submit(requests, ticket.sampling, decode=ticket.decode)
            except (ValueError, RuntimeError, MemoryError) as error:
                # a row alone is larger than the cache, no memory is left, or the policy has left meanwhile
                self._drop(ticket, error if self._has(ticket.policy) else _removed(ticket.policy))
                continue
            if self._log is not None:
                how = [{**vars(request), "role": ticket.policy.name} for request in requests]
                self._note("feed", ticket=ticket.number, places=places, requests=how, sampling=vars(ticket.sampling))
            self._had[key] += sum(map(ticket.cost, places))
            self._live |= {number: (ticket, place) for number, place in zip(numbers, places, strict=True)}

    def _step(self) -> None:
        """Make a step, and hand out what it drew."""
        self.turns += 1
        try:
            answers = self.engine.step()
        except MemoryLimitError as error:
            self._begin_again(error)
            return
        except Exception as error:  # of this step; the engine has dropped its requests, others go on
            for ticket in dict.fromkeys(ticket for ticket, _ in self._live.values()):
                self._drop(ticket, error)
            return
        self._rows = min(self._max_rows, self._rows + len(answers))  # so that something is done before rows fail again
        finished = {row.index for row in answers}
        for row in (*self.engine.writing(), *answers):
            if row.index not in self._live:  # of a ticket that was dropped
                continue
            ticket, place = self._live[row.index]
            if ticket.listen is not None:
                try:
                    ticket.listen(place, row, row.index in finished)
                except Exception as error:  # of the listener, whose answers nobody waits for; others go on
                    self._drop(ticket, error)
        for row in answers:
            if row.index not in self._live:
                continue
            ticket, place = self._live.pop(row.index)
            ticket.rows[place] = row
            self.tokens += len(row.tokens)
            with self._changed:
                self.owed -= ticket.cost(place)
            self._had[ticket.policy.key] += len(row.prompt) + len(row.tokens) - ticket.cost(place)
            self._note("done", ticket=ticket.number, place=place, tokens=row.tokens)
            if len(ticket.rows) == len(ticket.requests):
                self._release(ticket)
                ticket.answers.set_result([row for _, row in sorted(ticket.rows.items())])

    def _begin_again(self, error: MemoryLimitError) -> None:
        """Let everything that was alive wait again, for half of the rows; one alone that does not fit fails."""
        live, self._live = list(self._live.values()), {}
        self._rows = max(1, len(live) // 2)
        repeats = self.engine.backbone.kernels.exact  # else tokens that a listener has heard may be others now
        for ticket, place in reversed(live):
            if len(live) == 1 or (ticket.listen is not None and not repeats):
                self._drop(ticket, error)
            else:
                with self._changed:
                    self._waiting.setdefault(ticket.policy.key, deque()).appendleft((ticket, place))

    def _policy_leaves(self, policy: LivePolicy) -> None:
        def drop() -> None:  # in the thread, which may be handing out tokens
            tickets = [ticket for ticket, _ in (*self._waiting.get(policy.key, ()), *self._live.values())]
            for ticket in dict.fromkeys(ticket for ticket in tickets if ticket.policy is policy):
                self._drop(ticket, _removed(policy))
            self._had.pop(policy.key, None)

        self._ask(self._calls, drop, is_open=False)

    def _drop(self, ticket: Ticket, error: BaseException) -> None:
        """Fail a ticket, and forget its requests."""
        if ticket.answers.done():
            return
        numbers = [number for number, (other, _) in self._live.items() if other is ticket]
        for number in numbers:
            self.engine.cancel(number)
            del self._live[number]
        with self._changed:
            queue = self._waiting.pop(ticket.policy.key, deque())
            if left := deque(entry for entry in queue if entry[0] is not ticket):
                self._waiting[ticket.policy.key] = left
            self.owed -= sum(ticket.cost(place) for place in range(len(ticket.requests)) if place not in ticket.rows)
        self._note("drop", ticket=ticket.number)
        self._release(ticket)
        ticket.answers.set_exception(error)

    def _release(self, ticket: Ticket) -> None:
        self._open.discard(ticket)
        if ticket.holds:
            self.policies.release(ticket.policy)

    def _note(self, event: str, **fields: Any) -> None:
        if self._log is not None:
            self._log({"turn": self.turns, "event": event, **fields})


def _removed(policy: LivePolicy) -> PolicyRemovedError:
    return PolicyRemovedError(f"policy {policy.name!r} was removed")


def replay(
    events: Iterable[Mapping[str, Any]],
    policies: Policies,
    *,
    decode: Decode | None = None,
    on_call: Callable[[], object] | None = None,
) -> int:
    """Decide again what a log of `PolicyThread` says was decided; the number of answers, each with the same tokens.

    policies: with the weights that they had when the log began. decode: token ids to text, where texts ended answers.
    on_call: does again what was done between two steps, in the order of the calls; None: calls changed no answer.
    Raises ValueError for the first answer with other tokens.
    """
    engine, turns, places = policies.engine, 0, dict[int, tuple[int, int]]()
    finished = dict[tuple[int, int], list[int]]()
    for event in events:
        while turns < event["turn"]:
            turns += 1
            finished |= {places[row.index]: row.tokens for row in engine.step()}
        if event["event"] == "feed":
            sampling = SamplingConfig(**{name: _frozen(value) for name, value in event["sampling"].items()})
            requests = [
                Request(**{name: _frozen(value) for name, value in given.items()}) for given in event["requests"]
            ]
            requests = [replace(request, role=policies.get(request.role).role) for request in requests]
            numbers = engine.submit(requests, sampling, decode=decode)
            places |= {n: (event["ticket"], p) for n, p in zip(numbers, event["places"], strict=True)}
        elif event["event"] == "drop":
            for number in [n for n, (ticket, _) in places.items() if ticket == event["ticket"]]:
                engine.cancel(number)
        elif event["event"] == "call" and on_call is not None:
            on_call()
        elif event["event"] == "done":
            place, tokens = (event["ticket"], event["place"]), list(event["tokens"])
            if finished.get(place) != tokens:
                raise ValueError(f"events: expected tokens {tokens} of request {place}, got {finished.get(place)}")
    return len(finished)


def _frozen(value: Any) -> Any:
    """Lists, as JSON has them, as tuples."""
    return tuple(map(_frozen, value)) if isinstance(value, list) else value
