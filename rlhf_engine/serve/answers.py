"""Answers to what was asked, drawn by the thread of the policies: whole, or token by token."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import secrets
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedTokenizerBase

from rlhf_engine.errors import EngineError, PolicyRemovedError
from rlhf_engine.hydra.batch import PackedBatch, split_by_tokens
from rlhf_engine.hydra.outputs import TargetLogprobs, TopLogprobs
from rlhf_engine.policy.joint import Pass
from rlhf_engine.policy.pool import LivePolicy
from rlhf_engine.policy.thread import Listen, PolicyThread, Ticket
from rlhf_engine.rollout.request import Request, StopTexts
from rlhf_engine.rollout.rows import AnswerRow
from rlhf_engine.serve.protocol import TOOL_CALL, Asked, tool_calls

_REASONS = {"eos": "stop", "stop": "stop", "length": "length"}
_REASONS_OF_CALLS = {"stop": "tool_calls", "length": "length"}
_CONTEXT = 4  # tokens before a text that it is decoded with: white space at its beginning may belong to it only there


class TokenLogprob(NamedTuple):
    """A token, its log-prob in nats, and the likeliest words in its place, in falling order."""

    token: int
    logprob: float | None  # None for the first token of a prompt
    top: Sequence[tuple[int, float]] = ()


Scored = tuple[list[TokenLogprob], list[TokenLogprob]]  # of a prompt and of an answer, as far as they are wanted


class Reply:
    """The answers to one body, of one policy; `end` lets go of it."""

    def __init__(self, thread: PolicyThread, tokenizer: PreTrainedTokenizerBase, asked: Asked, kind: str) -> None:
        """kind: `cmpl`, `chatcmpl` or `gen`, the endpoint's prefix of ids."""
        self.thread, self.tokenizer, self.asked, self.kind = thread, tokenizer, asked, kind
        self.id, self.created = f"{kind}-{secrets.token_hex(12)}", int(time.time())
        self.stops = asked.sampling.stop if asked.sampling else ()
        self._prompts = [prompt for prompt in asked.prompts for _ in range(asked.n)]  # of each choice
        self._ticket: Ticket | None = None
        self._held = list[LivePolicy]()
        self._ended = False
        self._special = frozenset(tokenizer.all_special_ids)  # which the tokenizer lists anew at every look

    async def _begin(self, listen: Listen | None = None) -> LivePolicy:
        """Hold the policy, and queue the requests where something is drawn."""
        asked, policies = self.asked, self.thread.policies
        self.thread.require_room(asked.n_tokens)  # before so many requests are made
        # reading a policy from disk waits for a step, at which the loop of all requests must not
        policy = await asyncio.to_thread(self._hold) if asked.policy in policies.evicted else self._hold()
        if asked.sampling is not None:
            numbered, decode = enumerate(self._prompts), self.raw_text if self.stops else None
            requests = [Request(prompt=tuple(p), sample_id=i, greedy=asked.greedy, keep=True) for i, p in numbered]
            self._ticket = self.thread.submit(policy, requests, asked.sampling, decode=decode, listen=listen)
        return policy

    def _hold(self) -> LivePolicy:
        name = self.asked.policy
        try:
            policy = self.thread.policies.hold(name)
        except ValueError as error:
            if name in self.thread.policies:
                raise
            raise PolicyRemovedError(f"policy {name!r} was removed") from error
        self._held.append(policy)
        if self._ended:  # the client has left while it was read
            self.end()
        return policy

    def end(self) -> None:
        """Stop drawing what is not drawn, and let go of the policy; nothing happens a second time."""
        self._ended = True
        with contextlib.suppress(EngineError):  # a thread that was closed has dropped it
            if self._ticket is not None and not self._ticket.answers.done():
                self.thread.cancel(self._ticket)
        with contextlib.suppress(IndexError):
            self.thread.policies.release(self._held.pop())

    async def whole(self) -> dict[str, Any]:
        """OpenAI's object of all answers."""
        asked, policy = self.asked, await self._begin()
        rows: list[AnswerRow] | list[None] = [None] * len(self._prompts)
        if self._ticket is not None:
            rows = await asyncio.wrap_future(self._ticket.answers)
        scored = await self._scores(policy, rows, self._prompts)
        choices = [self._choice(i, row, *scored[i]) for i, row in enumerate(rows)]
        body = {**self._frame(""), "choices": choices, "usage": self._usage(sum(len(r.tokens) for r in rows if r))}
        if self.kind == "chatcmpl" and asked.token_ids:
            body["prompt_token_ids"] = asked.prompts[0]
        if self.kind != "cmpl":
            body["prompt_logprobs"] = self._prompt_object(scored[0][0])
        return body

    async def _scores(
        self, policy: LivePolicy, rows: Sequence[AnswerRow | None], prompts: Sequence[Sequence[int]]
    ) -> list[Scored]:
        """Log-probs of each answer's prompt and tokens."""
        asked, host = self.asked, self.thread.policies.host
        drawn = [list(map(TokenLogprob, row.tokens, row.logprobs)) if row else [] for row in rows]
        if asked.prompt_logprobs is None and not asked.scores_again:
            return [([], own) for own in drawn]
        answers, scored = [[x.token for x in own] for own in drawn], list[Scored]()
        lengths = [len(prompt) + len(answer) for prompt, answer in zip(prompts, answers, strict=True)]
        k = max(asked.logprobs or 0, asked.prompt_logprobs or 0)
        # one pass after another, each as large as a traversal may be: others draw meanwhile
        for group in split_by_tokens(lengths, host.token_budget):
            batch = PackedBatch.from_lists([prompts[i] for i in group], [answers[i] for i in group], device=host.device)
            places = [r for a, b in itertools.pairwise(batch.cu_seqlens) for r in range(a, b - 1)]
            rows_P, role = torch.tensor(places, dtype=torch.int64, device=batch.device), policy.own_role
            targets = TargetLogprobs(role=role, rows_P=rows_P, targets=batch.tokens_T[rows_P + 1])
            top = (TopLogprobs(role=role, rows_P=rows_P, k=k),) if k else ()
            done = self.thread.compute(Pass(policy=policy, batch=batch, outputs=(targets, *top)))
            own, *best = await asyncio.wrap_future(done)
            found = iter(zip(own.logprob.tolist(), *(x.tolist() for x in best[0]) if best else (), strict=True))
            for i in group:
                tokens, n = [TokenLogprob(prompts[i][0], None)], len(prompts[i])
                for token in (*prompts[i][1:], *answers[i]):
                    value, *ranked = next(found)
                    # of one word there are two sums, which may differ in their last bit
                    words = [(t, value if t == token else x) for x, t in zip(*ranked, strict=True)] if ranked else []
                    tokens.append(TokenLogprob(token, value, words))
                in_prompt = [] if asked.prompt_logprobs is None else tokens[:n]
                scored.append((in_prompt, tokens[n:] if asked.scores_again else drawn[i]))
        return scored

    def _frame(self, chunk: str) -> dict[str, Any]:
        if self.kind == "gen":
            return {"request_id": self.id}
        kind = "text_completion" if self.kind == "cmpl" else f"chat.completion{chunk}"
        return {"id": self.id, "object": kind, "created": self.created, "model": self.asked.model}

    def _usage(self, drawn: int) -> dict[str, int]:
        given = sum(map(len, self.asked.prompts))
        return {"prompt_tokens": given, "completion_tokens": drawn, "total_tokens": given + drawn}

    def _choice(
        self, i: int, row: AnswerRow | None, in_prompt: Sequence[TokenLogprob], drawn: Sequence[TokenLogprob]
    ) -> dict[str, Any]:
        asked, prompt = self.asked, self._prompts[i]
        tokens, before = row.tokens if row else [], self.context(i)
        choice: dict[str, Any] = {"index": i, "finish_reason": _REASONS[row.finish_reason] if row else "length"}
        if asked.token_ids:
            choice["token_ids"] = tokens
        choice["stop_reason"] = self.stop_reason(row)
        if self.kind == "gen":
            return {**choice, "logprobs": self.logprobs(drawn, before)}
        text, calls = self.parts(i, row)
        if self.kind == "chatcmpl":
            message: dict[str, Any] = {"role": "assistant", "content": text or (None if calls else "")}
            if calls:
                message["tool_calls"] = calls
                choice["finish_reason"] = _REASONS_OF_CALLS[choice["finish_reason"]]
            return {**choice, "message": message, "logprobs": self.logprobs(drawn, before)}
        if asked.token_ids:
            choice["prompt_token_ids"] = prompt
        if asked.echo:
            text, drawn, before = self.text(prompt) + text, [*in_prompt, *drawn], []
        else:
            choice["prompt_logprobs"] = self._prompt_object(in_prompt)
        return {**choice, "text": text, "logprobs": self.logprobs(drawn, before)}

    def stop_reason(self, row: AnswerRow | None) -> str | int | None:
        """The stop text, or the token that ended an answer, unless that is the tokenizer's end of sequence."""
        if row is None or row.finish_reason == "length":
            return None
        if row.finish_reason == "stop":
            text = self.raw_text(row.tokens)
            return next((stop for stop in row.sampling.stop if stop in text), None)
        return None if row.tokens[-1] == self.tokenizer.eos_token_id else row.tokens[-1]

    def logprobs(self, tokens: Sequence[TokenLogprob], before: Sequence[int], offset: int = 0) -> dict[str, Any] | None:
        """OpenAI's object for completions, or for chats, of tokens that follow others.

        offset: characters of the answer before them.
        """
        asked = self.asked
        if asked.logprobs is None:
            return None
        each = list(zip([list(before[-1:]), *([x.token] for x in tokens)], tokens, strict=False))
        texts = [self._piece(a, x.token) for a, x in each]
        named = [[(self._piece(a, t), value) for t, value in x.top[: asked.logprobs]] for a, x in each]
        if self.kind != "cmpl":

            def entry(text: str, value: float | None) -> dict[str, Any]:
                return {"token": text, "logprob": value, "bytes": list(text.encode())}

            parts = zip(texts, tokens, named, strict=True)
            return {
                "content": [{**entry(t, x.logprob), "top_logprobs": [entry(*w) for w in best]} for t, x, best in parts]
            }
        # of several words with one text the likeliest
        top = [
            dict([(t, x.logprob), *best[::-1]]) if best else None
            for t, (_, x), best in zip(texts, each, named, strict=True)
        ]
        lengths = [self.length(a, x.token) for a, x in each]
        return {
            "tokens": texts, "token_logprobs": [x.logprob for x in tokens], "top_logprobs": top,
            "text_offset": [*itertools.accumulate(lengths, initial=offset)][:-1],
        }  # fmt: skip

    def _piece(self, before: Sequence[int], token: int) -> str:
        """The characters that a token adds to the text of the one before, or its id."""
        if self.asked.by_id:
            return f"token_id:{token}"
        first, both = self.raw_text(before), self.raw_text([*before, token])
        return both[len(first) :] if both.startswith(first) else self.raw_text([token])

    def length(self, before: Sequence[int], token: int) -> int:
        """Characters that a token adds to the text of the one before; special ones add none."""
        if token in self._special:
            return 0
        return len(self.raw_text([*before, token])) - len(self.raw_text(before))

    def _prompt_object(self, tokens: Sequence[TokenLogprob]) -> list[dict[str, Any] | None] | None:
        """vLLM's list: for each token of a prompt but the first, words by id; None where it was not asked for."""
        entries = list[dict[str, Any] | None]()
        for x in tokens:
            best = enumerate(x.top[: self.asked.prompt_logprobs], start=1)
            ranks: dict[int, tuple[int | None, float | None]] = {token: (rank, value) for rank, (token, value) in best}
            ranks.setdefault(x.token, (None, x.logprob))  # none of the likeliest
            words = {
                t: {"logprob": v, "rank": rank, "decoded_token": self.raw_text([t])} for t, (rank, v) in ranks.items()
            }
            entries.append({str(t): word for t, word in words.items()} if entries else None)
        return entries or None

    def raw_text(self, tokens: Any) -> str:
        """Text of tokens with special ones."""
        return str(self.tokenizer.decode(tokens))

    def text(self, tokens: Any) -> str:
        """Text of tokens without special ones."""
        return str(self.tokenizer.decode(tokens, skip_special_tokens=True))

    def context(self, i: int) -> list[int]:
        """Tokens that the text of a choice goes on from: a message begins anew."""
        return self._prompts[i][-_CONTEXT:] if self.kind == "cmpl" else []

    def parts(self, i: int, row: AnswerRow | None) -> tuple[str, list[dict[str, Any]]]:
        """Text of a choice up to its end, and the calls of tools in it."""
        if row is None:
            return "", []
        before, tokens = self.context(i), row.tokens[: len(row.tokens) - (row.finish_reason == "eos")]
        first, both = self.text(before), self.text([*before, *tokens])
        text = both[len(first) :] if both.startswith(first) else self.text(tokens)
        text = StopTexts(self.stops, self.raw_text).cut(text)
        return tool_calls(text) if self.asked.tools else (text, [])

    async def begin_stream(self) -> AsyncIterator[dict[str, Any]]:
        """Queue the requests; OpenAI's objects of a stream, as tokens come."""
        loop, news = asyncio.get_running_loop(), asyncio.Queue[Any]()
        seen = [0] * len(self._prompts)

        def tell(item: Any) -> None:
            with contextlib.suppress(RuntimeError):  # the loop was closed, and nobody reads any more
                loop.call_soon_threadsafe(news.put_nowait, item)

        def listen(place: int, row: AnswerRow, finished: bool) -> None:
            tokens, logprobs = row.tokens[seen[place] :], row.logprobs[seen[place] :]
            seen[place] += len(tokens)
            if tokens:
                tell((place, [*map(TokenLogprob, tokens, logprobs)], row if finished else None))

        try:
            policy = await self._begin(listen)
        except BaseException:
            self.end()
            raise
        assert self._ticket is not None, "what is streamed is drawn"
        self._ticket.answers.add_done_callback(tell)
        return self._chunks(policy, news)

    async def _chunks(self, policy: LivePolicy, news: asyncio.Queue[Any]) -> AsyncIterator[dict[str, Any]]:
        drawn, texts = 0, [_Text(self, i) for i in range(len(self._prompts))]
        if self.kind == "chatcmpl":
            for i in range(len(texts)):
                yield self._chunk(i, delta={"role": "assistant", "content": ""})
        while isinstance(item := await news.get(), tuple):
            place, tokens, row = item
            drawn += len(tokens)
            ids, scored = [x.token for x in tokens], tokens
            if self.asked.scores_again:  # likeliest words, and log-probs of the model itself, once an answer is whole
                scored = (await self._scores(policy, [row], [self._prompts[place]]))[0][1] if row else []
            if chunk := self._chunk_of(texts[place], ids, scored, row):
                yield chunk
        item.result()  # raises what ended the answers
        if self.asked.usage_in_stream:
            yield {**self._frame(".chunk"), "choices": [], "usage": self._usage(drawn)}

    def _chunk_of(
        self, text: _Text, tokens: Sequence[int], scored: Sequence[TokenLogprob], row: AnswerRow | None
    ) -> dict[str, Any] | None:
        """The chunk for new tokens of one choice, with the finish reason at last; None where nothing is said."""
        new, calls = text.add(tokens, row)
        more: dict[str, Any] = {"logprobs": text.logprobs(scored), "finish_reason": None}
        if self.asked.token_ids:
            more["token_ids"] = list(tokens)
        if row is not None:
            more |= {"finish_reason": _REASONS[row.finish_reason], "stop_reason": self.stop_reason(row)}
        elif not (new or scored or self.asked.token_ids):
            return None
        if self.kind == "chatcmpl":
            delta: dict[str, Any] = {"content": new} if new else {}
            if calls:
                delta["tool_calls"] = [{"index": i, **call} for i, call in enumerate(calls)]
                more["finish_reason"] = _REASONS_OF_CALLS[more["finish_reason"]]
            more["delta"] = delta
        elif self.kind == "cmpl":
            more["text"] = new
        return self._chunk(text.place, **more)

    def _chunk(self, i: int, **fields: Any) -> dict[str, Any]:
        return {**self._frame(".chunk"), "choices": [{"index": i, "logprobs": None, "finish_reason": None, **fields}]}


class _Text:
    """The text of one choice of a stream, as far as later tokens cannot change it."""

    def __init__(self, answers: Reply, place: int) -> None:
        self.place, self._answers = place, answers
        self._tokens = answers.context(place)
        self._from, self._read = 0, len(self._tokens)  # tokens whose text gives the next ones' context; that are read
        self._text, self._sent = "", 0
        self._before, self._offset = self._tokens[-1:], 0  # of the next log-prob
        holds = (*answers.stops, *((TOOL_CALL,) if answers.asked.tools else ()))
        self._holds = StopTexts(holds, answers.raw_text)

    def add(self, tokens: Sequence[int], row: AnswerRow | None) -> tuple[str, list[dict[str, Any]]]:
        """Take new tokens; the text that they add, and calls of tools. row: the answer, where it is whole."""
        answers = self._answers
        if row is not None:
            whole, calls = answers.parts(self.place, row)
            return whole[self._sent :], calls
        self._tokens += tokens
        before, now = answers.text(self._tokens[self._from : self._read]), answers.text(self._tokens[self._from :])
        if len(now) > len(before) and not now.endswith("\ufffd"):  # else it may be part of a character, or special
            self._text += now[len(before) :]
            self._from, self._read = self._read, len(self._tokens)
        shown = self._holds.cut(self._text)
        if shown == self._text:
            shown = shown[: len(shown) - self._holds.may_begin(shown)]
        if answers.asked.tools:  # a call takes the white space before it along
            shown = shown.rstrip()
        new, self._sent = shown[self._sent :], max(self._sent, len(shown))
        return new, []

    def logprobs(self, scored: Sequence[TokenLogprob]) -> dict[str, Any] | None:
        """Object of the next tokens' log-probs, where they are asked for."""
        if self._answers.asked.logprobs is None:
            return None
        found = self._answers.logprobs(scored, self._before, self._offset)
        for x in scored:
            self._offset += self._answers.length(self._before, x.token)
            self._before = [x.token]
        return found
