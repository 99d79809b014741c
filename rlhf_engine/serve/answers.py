"""Answers to what was asked, drawn by the thread of the policies: whole, or token by token."""

from __future__ import annotations

import asyncio
import itertools
import secrets
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from rlhf_engine.hydra import PackedBatch
from rlhf_engine.hydra.outputs import TargetLogprobs, TopLogprobs
from rlhf_engine.policy.joint import Pass
from rlhf_engine.policy.pool import LivePolicy
from rlhf_engine.policy.thread import PolicyThread, Ticket
from rlhf_engine.rollout.request import Request, StopTexts
from rlhf_engine.rollout.rows import AnswerRow
from rlhf_engine.serve.protocol import TOOL_CALL, Asked, tool_calls

_REASONS = {"eos": "stop", "stop": "stop", "length": "length"}


@dataclass(frozen=True, kw_only=True)
class TokenLogprob:
    """A token, its log-prob in nats, and the likeliest words in its place, in falling order."""

    token: int
    logprob: float | None
    """None for the first token of a prompt."""
    top: Mapping[int, float] = field(default_factory=dict)


class Reply:
    """The answers to one body, of one policy."""

    def __init__(self, thread: PolicyThread, tokenizer: PreTrainedTokenizerBase, asked: Asked, kind: str) -> None:
        """kind: `cmpl`, `chatcmpl` or `gen`, the endpoint's prefix of ids."""
        self.thread, self.tokenizer, self.asked, self.kind = thread, tokenizer, asked, kind
        self.id, self.created = f"{kind}-{secrets.token_hex(12)}", int(time.time())
        self._stops = StopTexts(asked.sampling.stop if asked.sampling else (), self._raw_text)
        self._ticket: Ticket | None = None
        self._policy: LivePolicy | None = None

    # ---- whole -----------------------------------------------------------------------------------------------------

    async def whole(self) -> dict[str, Any]:
        """OpenAI's object of all answers."""
        rows = await self._draw()
        try:
            scored = await self._scores(rows, [self.asked.prompts[i // self.asked.n] for i in range(len(rows))])
        finally:
            self.thread.policies.release(self._held())
        choices = [self._choice(i, row, scored[i]) for i, row in enumerate(rows)]
        usage = self._usage(sum(len(row.tokens) for row in rows if row is not None))
        if self.kind == "gen":
            prompt = None if self.asked.prompt_logprobs is None else self._prompt_object(scored[0][0])
            return {"request_id": self.id, "choices": choices, "usage": usage, "prompt_logprobs": prompt}
        body = {**self._frame(""), "choices": choices, "usage": usage}
        if self.asked.token_ids and self.kind == "chatcmpl":
            body["prompt_token_ids"] = self.asked.prompts[0]
        if self.kind == "chatcmpl" and self.asked.prompt_logprobs is not None:
            body["prompt_logprobs"] = self._prompt_object(scored[0][0])
        return body

    async def _draw(self) -> list[AnswerRow | None]:
        """Rows of the answers, prompt by prompt; None for each where nothing is drawn. The policy is held."""
        if self.asked.sampling is None:
            self._policy = await asyncio.to_thread(self.thread.policies.hold, self.asked.policy)
            return [None for _ in range(len(self.asked.prompts) * self.asked.n)]
        await self._submit(None)
        assert self._ticket is not None
        try:
            rows: list[AnswerRow] = await asyncio.wrap_future(self._ticket.answers)
            return [*rows]
        except BaseException:
            self.cancel()
            self.thread.policies.release(self._held())
            raise

    async def _submit(self, listen: Any) -> None:
        asked, sampling = self.asked, self.asked.sampling
        assert sampling is not None
        requests = [
            Request(prompt=tuple(prompt), sample_id=i * asked.n + j, greedy=asked.greedy, keep=True)
            for i, prompt in enumerate(asked.prompts)
            for j in range(asked.n)
        ]
        policies = self.thread.policies
        # reading a policy from disk waits for a step, at which the loop of all requests must not
        held = await asyncio.to_thread(policies.hold, asked.policy) if asked.policy in policies.evicted else None
        self._policy = held or policies.hold(asked.policy)
        try:
            decode = self._raw_text if sampling.stop else None
            self._ticket = self.thread.submit(asked.policy, requests, sampling, decode=decode, listen=listen)
        except BaseException:
            policies.release(self._policy)
            raise

    def cancel(self) -> None:
        """Stop drawing; nothing happens where all is drawn."""
        if self._ticket is not None and not self._ticket.answers.done():
            self.thread.cancel(self._ticket)

    def _held(self) -> LivePolicy:
        assert self._policy is not None
        return self._policy

    # ---- log-probs -------------------------------------------------------------------------------------------------

    async def _scores(
        self, rows: Sequence[AnswerRow | None], prompts: Sequence[Sequence[int]]
    ) -> list[tuple[list[TokenLogprob], list[TokenLogprob]]]:
        """Log-probs of each answer's prompt and tokens, as far as they are wanted."""
        asked = self.asked
        in_prompt = asked.prompt_logprobs is not None
        again = asked.logprobs is not None and (asked.logprobs > 0 or not asked.draws_all_words)
        if not (in_prompt or again):
            return [([], [TokenLogprob(token=t, logprob=x) for t, x in _drawn(row)]) for row in rows]
        answers = [[] if row is None else row.tokens for row in rows]
        k = max(asked.logprobs or 0, asked.prompt_logprobs or 0)
        batch = PackedBatch.from_lists(prompts, answers, device=self.thread.engine.backbone.device)
        places = [r for a, b in zip(batch.cu_seqlens, batch.cu_seqlens[1:], strict=False) for r in range(a, b - 1)]
        rows_P, role = torch.tensor(places, dtype=torch.int64, device=batch.device), self._held().own_role
        targets = TargetLogprobs(role=role, rows_P=rows_P, targets=batch.tokens_T[rows_P + 1])
        top = (TopLogprobs(role=role, rows_P=rows_P, k=k),) if k else ()
        results = await asyncio.wrap_future(
            self.thread.compute(Pass(policy=self._held(), batch=batch, outputs=(targets, *top)))
        )
        own = iter(zip(results[0].logprob.tolist(), *(x.tolist() for x in results[1]) if k else (), strict=True))
        scored = []
        for i, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
            tokens = [TokenLogprob(token=prompt[0], logprob=None)]
            for token in (*prompt[1:], *answer):
                value, *best = next(own)
                words = dict(zip(best[1], best[0], strict=True)) if best else {}
                tokens.append(TokenLogprob(token=token, logprob=value, top=words | ({token: value} if words else {})))
            drawn = tokens[len(prompt) :] if again else [TokenLogprob(token=t, logprob=x) for t, x in _drawn(rows[i])]
            scored.append((tokens[: len(prompt)] if in_prompt else [], drawn))
        return scored

    # ---- objects ---------------------------------------------------------------------------------------------------

    def _frame(self, chunk: str) -> dict[str, Any]:
        kind = {"cmpl": "text_completion", "chatcmpl": f"chat.completion{chunk}", "gen": "generate"}[self.kind]
        return {"id": self.id, "object": kind, "created": self.created, "model": self.asked.model}

    def _usage(self, drawn: int) -> dict[str, int]:
        given = sum(map(len, self.asked.prompts))
        return {"prompt_tokens": given, "completion_tokens": drawn, "total_tokens": given + drawn}

    def _choice(
        self, i: int, row: AnswerRow | None, scored: tuple[list[TokenLogprob], list[TokenLogprob]]
    ) -> dict[str, Any]:
        asked, (in_prompt, drawn) = self.asked, scored
        tokens, prompt = [] if row is None else row.tokens, asked.prompts[i // asked.n]
        reason = "length" if row is None else _REASONS[row.finish_reason]
        choice: dict[str, Any] = {"index": i, "finish_reason": reason}
        if self.kind == "gen":
            return {**choice, "token_ids": tokens, "logprobs": self._chat_logprobs(drawn, by_id=True)}
        text = self._stops.cut(self.text(tokens))
        choice["stop_reason"] = self._stop_reason(row)
        if asked.token_ids:
            choice |= {"token_ids": tokens} | ({"prompt_token_ids": prompt} if self.kind == "cmpl" else {})
        if self.kind == "cmpl":
            whole = self.text(prompt) + text if asked.echo else text
            given = [*in_prompt, *drawn] if asked.echo else drawn
            if asked.prompt_logprobs is not None and not asked.echo:
                choice["prompt_logprobs"] = self._prompt_object(in_prompt)
            return {**choice, "text": whole, "logprobs": self._text_logprobs(given)}
        message: dict[str, Any] = {"role": "assistant", "content": text}
        if asked.tools:
            content, calls = tool_calls(text)
            if calls:
                message |= {"content": content or None, "tool_calls": calls}
                choice["finish_reason"] = "tool_calls" if reason == "stop" else reason
        return {**choice, "message": message, "logprobs": self._chat_logprobs(drawn)}

    def _stop_reason(self, row: AnswerRow | None) -> str | int | None:
        """The stop text, or the token that ended an answer, unless that is the tokenizer's end of sequence."""
        if row is None or row.finish_reason == "length":
            return None
        if row.finish_reason == "stop":
            text = self._raw_text(row.tokens)
            return next((stop for stop in row.sampling.stop if stop in text), None)
        return None if row.tokens[-1] == self.tokenizer.eos_token_id else row.tokens[-1]

    def _text_logprobs(self, tokens: Sequence[TokenLogprob]) -> dict[str, Any] | None:
        """OpenAI's object for completions."""
        if self.asked.logprobs is None:
            return None
        before = [None, *(x.token for x in tokens)]
        texts = [self._piece(a, x.token) for a, x in zip(before, tokens, strict=False)]
        offsets = [0, *itertools.accumulate(map(len, texts))]
        top = [
            None if x.logprob is None or not self.asked.logprobs else self._named(a, x.top)
            for a, x in zip(before, tokens, strict=False)
        ]
        return {
            "tokens": texts, "token_logprobs": [x.logprob for x in tokens], "top_logprobs": top,
            "text_offset": offsets[:-1],
        }  # fmt: skip

    def _named(self, before: int | None, top: Mapping[int, float]) -> dict[str, float]:
        """Log-probs by the words' texts after a token; of several words with one text the likeliest."""
        named: dict[str, float] = {}
        for token, value in sorted(top.items(), key=lambda item: -item[1]):
            named.setdefault(self._piece(before, token), value)
        return named

    def _piece(self, before: int | None, token: int) -> str:
        """Text that a token adds to that of the one before: white space may belong to it only there."""
        first = "" if before is None else self._raw_text([before])
        both = self._raw_text([token] if before is None else [before, token])
        return both[len(first) :] if both.startswith(first) else self._raw_text([token])

    def _chat_logprobs(self, tokens: Sequence[TokenLogprob], *, by_id: bool = False) -> dict[str, Any] | None:
        """OpenAI's object for chats."""
        if self.asked.logprobs is None:
            return None

        def named(before: int | None, token: int, value: float | None) -> dict[str, Any]:
            text = f"token_id:{token}" if by_id else self._piece(before, token)
            return {"token": text, "logprob": value, "bytes": list(text.encode())}

        def best(before: int | None, x: TokenLogprob) -> list[dict[str, Any]]:
            words = sorted(x.top.items(), key=lambda item: -item[1])
            return [named(before, *word) for word in words[: self.asked.logprobs]]

        each = zip([None, *(x.token for x in tokens)], tokens, strict=False)
        return {"content": [{**named(a, x.token, x.logprob), "top_logprobs": best(a, x)} for a, x in each]}

    def _prompt_object(self, tokens: Sequence[TokenLogprob]) -> list[dict[str, Any] | None]:
        """vLLM's list: for each token of a prompt but the first, words by id."""
        entries: list[dict[str, Any] | None] = [None]
        for x in tokens[1:]:
            ranked = sorted(({x.token: x.logprob or 0.0} | dict(x.top)).items(), key=lambda item: -item[1])
            entries.append(
                {
                    str(token): {"logprob": value, "rank": rank, "decoded_token": self._raw_text([token])}
                    for rank, (token, value) in enumerate(ranked, start=1)
                }
            )
        return entries

    def _raw_text(self, tokens: Any) -> str:
        return str(self.tokenizer.decode(tokens))

    def text(self, tokens: Any) -> str:
        """Text of tokens without special ones."""
        return str(self.tokenizer.decode(tokens, skip_special_tokens=True))

    # ---- token by token --------------------------------------------------------------------------------------------

    async def begin_stream(self) -> asyncio.Queue[Any]:
        """Queue the requests; the queue of what they draw: (choice, tokens, log-probs, finish reason or None)."""
        loop, news = asyncio.get_running_loop(), asyncio.Queue[Any]()
        seen = [0] * len(self.asked.prompts) * self.asked.n

        def listen(place: int, row: AnswerRow, finished: bool) -> None:
            new = row.tokens[seen[place] :], row.logprobs[seen[place] :]
            if new[0] or finished:
                seen[place] += len(new[0])
                loop.call_soon_threadsafe(news.put_nowait, (place, *new, row if finished else None))

        await self._submit(listen)
        assert self._ticket is not None
        self._ticket.answers.add_done_callback(lambda done: loop.call_soon_threadsafe(news.put_nowait, done))
        return news

    async def chunks(self, news: asyncio.Queue[Any]) -> AsyncIterator[dict[str, Any]]:
        """OpenAI's objects of a stream, as tokens come."""
        asked, drawn = self.asked, 0
        # likeliest words, and log-probs before the temperature, are computed when an answer is whole
        late = asked.logprobs is not None and (asked.logprobs > 0 or not asked.draws_all_words)
        texts = [_Text(self) for _ in range(len(asked.prompts) * asked.n)]
        try:
            if self.kind == "chatcmpl":
                for i in range(len(texts)):
                    yield self._chunk(i, {"role": "assistant", "content": ""})
            while True:
                item = await news.get()
                if not isinstance(item, tuple):
                    item.result()  # raises what ended the answers
                    break
                place, tokens, logprobs, row = item
                drawn += len(tokens)
                scored = [TokenLogprob(token=t, logprob=x) for t, x in zip(tokens, logprobs, strict=True)]
                if late:
                    scored = [] if row is None else (await self._scores([row], [asked.prompts[place // asked.n]]))[0][1]
                for chunk in self._chunks_of(place, texts[place], tokens, scored, row):
                    yield chunk
            if asked.usage_in_stream:
                yield {**self._frame(".chunk"), "choices": [], "usage": self._usage(drawn)}
        finally:
            self.cancel()
            self.thread.policies.release(self._held())

    def _chunks_of(
        self, place: int, text: _Text, tokens: Sequence[int], scored: Sequence[TokenLogprob], row: AnswerRow | None
    ) -> Iterator[dict[str, Any]]:
        """Chunks for new tokens of one choice, the last of which has the finish reason."""
        new, more = text.add(tokens, row), dict[str, Any]()
        reason = None if row is None else _REASONS[row.finish_reason]
        if self.asked.token_ids:
            more["token_ids"] = list(tokens)
        calls = text.calls if row is not None else []
        if not new and not scored and reason is None and not more:
            return
        if self.kind == "gen":
            logprobs = self._chat_logprobs(scored, by_id=True)
            choice = {"index": place, "token_ids": list(tokens), "logprobs": logprobs, "finish_reason": reason}
            yield {"request_id": self.id, "choices": [choice]}
        elif self.kind == "cmpl":
            choice = {"index": place, "text": new, "logprobs": self._text_logprobs(scored), "finish_reason": reason}
            yield {**self._frame(""), "choices": [{**choice, **more}]}
        else:
            delta: dict[str, Any] = {"content": new} if new else {}
            if calls:
                delta["tool_calls"] = [{"index": i, **call} for i, call in enumerate(calls)]
                reason = "tool_calls" if reason == "stop" else reason
            yield self._chunk(place, delta, logprobs=self._chat_logprobs(scored), finish_reason=reason, **more)

    def _chunk(self, i: int, delta: Mapping[str, Any], **fields: Any) -> dict[str, Any]:
        choice = {"index": i, "delta": delta, "logprobs": None, "finish_reason": None, **fields}
        return {**self._frame(".chunk"), "choices": [choice]}


class _Text:
    """The text of one choice of a stream, as far as later tokens cannot change it."""

    def __init__(self, answers: Reply) -> None:
        self._answers = answers
        self._tokens: list[int] = []
        self._from, self._read = 0, 0  # tokens whose text gives the next ones' context; tokens whose text is known
        self._text, self._sent = "", 0
        stops = answers.asked.sampling.stop if answers.asked.sampling else ()
        holds = (*stops, *((TOOL_CALL,) if answers.asked.tools else ()))
        self._holds = StopTexts(holds, answers._raw_text)
        self.calls: list[dict[str, Any]] = []
        """Calls of tools, once the answer is whole."""

    def add(self, tokens: Sequence[int], row: AnswerRow | None) -> str:
        """Text that new tokens add; row: the answer, where it is whole."""
        self._tokens += tokens
        answers = self._answers
        before, now = answers.text(self._tokens[self._from : self._read]), answers.text(self._tokens[self._from :])
        if not now.endswith("\ufffd") or row is not None:
            self._text += now[len(before) :]
            self._from, self._read = self._read, len(self._tokens)
        if row is not None:
            whole = answers._stops.cut(self._text)
            if answers.asked.tools:
                content, self.calls = tool_calls(whole)
                whole = content if self.calls else whole
            new = whole[self._sent :]
            return new
        shown = self._holds.cut(self._text)
        end = len(shown) - (self._holds.may_begin(shown) if shown == self._text else 0)
        new, self._sent = shown[self._sent : end], max(self._sent, end)
        return new


def _drawn(row: AnswerRow | None) -> list[tuple[int, float]]:
    return [] if row is None else list(zip(row.tokens, row.logprobs, strict=True))
