"""Requests and results of a rollout, for one answer and for a batch of them."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from rlhf_engine.config.rollout import EngineConfig, SamplingOptions, StepName
from rlhf_engine.hydra.batch import PackedBatch
from rlhf_engine.hydra.model import Scores

FinishReason = Literal["eos", "stop", "length"]
Weights = Literal["newest", "fixed"]
Message = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class SamplingConfig:
    """Options by which answers are drawn."""

    max_completion_length: int
    """Most tokens per answer, ≥ 1."""
    eos_token_ids: tuple[int, ...]
    """Tokens that end an answer; the ending token belongs to it. Empty: answers end at their longest, or at a stop."""
    min_completion_length: int = 0
    """Least tokens, 0 to `max_completion_length`, of an answer that ends with an end-of-sequence token, that one
    included. Tokens before are drawn among the rest of the vocabulary."""
    temperature: float = 1.0
    """Number > 0 that logits are divided by; log-probs are of that distribution."""
    top_k: int | None = None
    """Draw among the k likeliest tokens, k ≥ 1, a slower path. None: all tokens. Log-probs are of the tokens that
    `top_k`, `top_p` and `min_p` leave, in this order, renormalised; an answer's `supports` name these tokens."""
    top_p: float | None = None
    """Draw among the fewest tokens of this much probability, in (0, 1]. None: all tokens."""
    min_p: float | None = None
    """Draw among tokens of at least this share of the largest probability, in (0, 1]. None: all tokens."""
    stop: tuple[str, ...] = ()
    """Texts, none of them empty, that end an answer; the token that completes one belongs to it."""
    seed: int = 0
    """Seed of every draw."""

    @classmethod
    def of(cls, options: SamplingOptions, eos_token_ids: Sequence[int], **others: Any) -> SamplingConfig:
        """Take the options of how answers are drawn out of a configuration.

        Args:
            options: configuration of a command that draws answers.
            eos_token_ids: tokens that end an answer.
            others: values of other fields.

        Returns:
            The options of its answers.
        """
        given = {f.name: getattr(options, f.name) for f in dataclasses.fields(cls) if hasattr(options, f.name)}
        return cls(eos_token_ids=tuple(eos_token_ids), **{**given, "stop": tuple(given.get("stop", ())), **others})

    def __post_init__(self) -> None:
        for name in ("max_completion_length", "min_completion_length", "top_k", "seed"):
            if not hasattr(getattr(self, name) or 0, "__index__"):
                raise ValueError(f"{name}: expected a whole number, got {getattr(self, name)!r}")
        if self.max_completion_length < 1:
            raise ValueError(f"max_completion_length: expected at least 1 token, got {self.max_completion_length}")
        if not 0 <= self.min_completion_length <= self.max_completion_length:
            raise ValueError(
                f"min_completion_length: expected 0 to max_completion_length ({self.max_completion_length}), got "
                f"{self.min_completion_length}"
            )
        if not 0 < self.temperature < float("inf"):
            raise ValueError(f"temperature: expected a positive number (use greedy rows for 0), got {self.temperature}")
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k: expected None or at least 1, got {self.top_k}")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ValueError(f"top_p: expected None or a number in (0, 1], got {self.top_p}")
        if self.min_p is not None and not 0 < self.min_p <= 1:
            raise ValueError(f"min_p: expected None or a number in (0, 1], got {self.min_p}")
        if any(not text for text in self.stop):
            raise ValueError(f"stop: expected texts that are not empty, got {self.stop}")

    @property
    def filters(self) -> bool:
        """Whether draws leave part of the vocabulary out, so that log-probs are of the rest."""
        truncates = self.top_k is not None or (self.top_p or 1.0) < 1.0 or self.min_p is not None
        return truncates or (self.min_completion_length > 1 and bool(self.eos_token_ids))


@dataclass(frozen=True, kw_only=True)
class Request:
    """One answer to draw. An option that is None is as in the run's `SamplingConfig`."""

    prompt: tuple[int, ...]
    """Token ids, at least one."""
    sample_id: int
    """Names the answer for good: with the seed it keys its random numbers."""
    role: str = "actor"
    """Role whose adapter slot draws; it has an LM head."""
    greedy: bool = False
    """Take the arg-max instead of drawing."""
    weights: Weights = "newest"
    """Weights that draw once the answer has begun. newest: new ones of its slot (`RolloutEngine.renew`) from the next
    token on; fixed: those that it began with, which new ones wait for, to the end of its last turn."""
    then: tuple[tuple[int, ...], ...] = ()
    """Token ids that follow the answer, such as a user's next turn; another answer is drawn after each of them."""
    keep: bool = False
    """Keep what the answer leaves in the cache for a prompt that extends it, and begin from what is kept. Outside
    exact mode such a prompt differs by rounding from one that goes through the model whole."""
    max_completion_length: int | None = None
    """Most tokens of the answer, ≥ 1."""
    min_completion_length: int | None = None
    """Least tokens of an answer that ends with an end-of-sequence token."""
    temperature: float | None = None
    """Number > 0 that logits are divided by."""
    top_k: int | None = None
    """Number of the likeliest tokens to draw among, ≥ 1."""
    top_p: float | None = None
    """Probability of the tokens to draw among, in (0, 1]."""
    min_p: float | None = None
    """Least share of the largest probability that the tokens to draw among have, in (0, 1]."""
    eos_token_ids: tuple[int, ...] | None = None
    """Tokens that end the answer; empty: none does."""
    stop: tuple[str, ...] | None = None
    """Texts that end the answer."""
    seed: int | None = None
    """Seed of its draws."""

    def sampling(self, defaults: SamplingConfig) -> SamplingConfig:
        """The run's options with this request's own in place.

        Args:
            defaults: options of the run.

        Returns:
            Options of this request's answer.

        Raises:
            ValueError: an option out of its range, or options that contradict each other.
        """
        own = {name: getattr(self, name) for name in _OWN if getattr(self, name) is not None}
        if not own:
            return defaults
        return SamplingConfig(**{**vars(defaults), **own})


_OWN = tuple(f.name for f in dataclasses.fields(SamplingConfig))


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """Options by which rows are run, which change answers by rounding at most, and in exact mode not at all."""

    max_rows: int | None = None
    """Most rows alive at once, ≥ 1; None: as many as there are requests, as far as the cache holds them."""
    cache_bytes: int | None = None
    """Most bytes of keys and values, all rows together, ≥ 1; None: as many as the rows alive at once may need."""
    decode_step: StepName = "auto"
    """Kind of decoding step: `auto`, `native`, `graph` or `transformers`. auto: on CUDA graphs; on a CPU the native
    step where it serves the backbone, except where the kernel table prefers the reference. On CUDA the native step is
    captured, too."""

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


@dataclass(kw_only=True)
class RolloutStats:
    """Statistics of a rollout's time and memory."""

    prompts: int = 0
    """Prompts that went through the model; rows with the same prompt and slot share one pass."""
    prompt_tokens: int = 0
    """Tokens of these prompts."""
    tokens: int = 0
    """Tokens drawn."""
    steps: int = 0
    """Decoding steps: one token for each of the rows alive."""
    prefill_seconds: float = 0.0
    """Seconds spent on prompts and first tokens."""
    decode_seconds: float = 0.0
    """Seconds spent on the tokens after them."""
    most_rows: int = 0
    """Most rows alive at once."""
    most_blocks: int = 0
    """Most blocks of the cache in use at once."""
    seconds: float = 0.0
    """Seconds from the first prompt to the last answer, scores by frozen roles included; 0 for an engine's own
    statistics."""
    step: str = ""
    """Name of what ran the steps."""

    @property
    def tokens_per_second(self) -> float:
        """Drawn tokens per second of prefill and decoding."""
        seconds = self.prefill_seconds + self.decode_seconds
        return self.tokens / seconds if seconds > 0 else 0.0


@dataclass(frozen=True, kw_only=True)
class Talk:
    """A finished conversation, as plain values."""

    messages: list[Message]
    """All messages, the prompt's first."""
    n_prompt: int
    """Messages of the prompt."""
    reward: float | None = None
    """What the environment says that it is worth; None without an environment that does."""
    turn_rewards: tuple[float, ...] = ()
    """Reward of each drawn turn; empty where the environment gives none."""
    calls: int = 0
    """Calls of tools."""
    failures: int = 0
    """Calls that were answered with an error."""

    @property
    def prompt(self) -> list[Message]:
        """Messages of the prompt."""
        return self.messages[: self.n_prompt]

    @property
    def answer(self) -> list[Message]:
        """Messages of the policy and of tools."""
        return self.messages[self.n_prompt :]

    @property
    def text(self) -> str:
        """Text of its turns for people, each after the name of who speaks."""
        parts = list[str]()
        for message in self.answer:
            calls = [call.get("function", call) for call in message.get("tool_calls") or ()]
            shown = [message.get("content") or "", *(json.dumps(call, ensure_ascii=False) for call in calls)]
            parts.append(f"[{message.get('name') or message['role']}] " + " ".join(filter(None, shown)))
        return "\n".join(parts)


@dataclass(frozen=True, kw_only=True, eq=False)
class Rollout:
    """Answers and how they came about. M completion tokens of N sequences."""

    batch: PackedBatch
    """Prompts and answers, N sequences, with the words that their tokens were drawn among."""
    logprobs_M: torch.Tensor
    """fp32 [M], log-prob of each token under the distribution it was drawn from."""
    finish_reasons: tuple[FinishReason, ...]
    """N reasons why an answer ended."""
    versions_M: torch.Tensor
    """int64 [M], version of the policy that drew each token."""
    filtered: bool
    """Whether draws left part of the vocabulary out without a word of which, as a server's do. No importance ratio
    holds then. What this process draws keeps the words in `batch.supports`."""
    stats: RolloutStats
    """Statistics of time and memory."""
    frozen: Scores | None = None
    """Scores by frozen roles of the answers that are not greedy, where a generator made them; None elsewhere."""
    talks: tuple[Talk, ...] | None = None
    """N conversations with tools or environments; None where answers are texts."""

    def select(self, places: Sequence[int]) -> Rollout:
        """Select some of the answers, without frozen scores.

        Args:
            places: places of the answers, 0 to N−1, in the order wanted; at least one.

        Returns:
            The selected answers, in the given order.

        Raises:
            ValueError: no places.
            IndexError: a place of N or more.
        """
        rows_M = self.batch.select_completion_rows(places)
        return dataclasses.replace(
            self,
            batch=self.batch.select(places),
            logprobs_M=self.logprobs_M[rows_M],
            versions_M=self.versions_M[rows_M],
            finish_reasons=tuple(self.finish_reasons[i] for i in places),
            frozen=None,
            talks=None if self.talks is None else tuple(self.talks[i] for i in places),
        )

    @property
    def environment_rewards(self) -> list[float | None] | None:
        """N rewards of environments, those of turns in them; None where no environment gives any."""
        if self.talks is None or all(talk.reward is None and not talk.turn_rewards for talk in self.talks):
            return None
        return [
            (talk.reward or 0.0) + sum(talk.turn_rewards) if talk.turn_rewards else talk.reward for talk in self.talks
        ]

    @property
    def policy_version(self) -> int:
        """Version of the oldest policy that drew a token."""
        return int(self.versions_M.min())

    @property
    def finished(self) -> tuple[bool, ...]:
        """N flags: the answer ended by itself, not at its most tokens."""
        return tuple(reason != "length" for reason in self.finish_reasons)


def check_prompt(
    name: str, prompt: Sequence[int], context_length: int, max_completion_length: int, vocabulary: int
) -> None:
    """Raise ValueError for an empty prompt, one that leaves no room for the answer, or ids outside the vocabulary."""
    if len(prompt) == 0:
        raise ValueError(f"{name}: expected at least one token, got an empty prompt")
    if len(prompt) + max_completion_length > context_length:
        raise ValueError(
            f"{name}: expected at most {context_length - max_completion_length} tokens (context "
            f"{context_length} − max_completion_length {max_completion_length}), got {len(prompt)}"
        )
    check_ids(name, prompt, vocabulary)


def check_ids(name: str, ids: Sequence[int], vocabulary: int) -> None:
    """Raise ValueError for a token id outside a vocabulary of this size."""
    if ids and not 0 <= min(ids) <= max(ids) < vocabulary:
        wrong = next(i for i in ids if not 0 <= i < vocabulary)
        raise ValueError(f"{name}: expected token ids of 0 to {vocabulary - 1}, got {wrong}")


_MASK_64 = 0xFFFFFFFFFFFFFFFF


def row_seed(seed: int, sample_id: int) -> int:
    """Seed of one answer: SplitMix64's finaliser over (seed, sample id), as a signed 64-bit integer."""
    z = (seed * 0x9E3779B97F4A7C15 + sample_id + 1) & _MASK_64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK_64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK_64
    z ^= z >> 31
    return z - (1 << 64) if z >= 1 << 63 else z


# ---- stopping --------------------------------------------------------------------------------------------------------


Decode = Callable[[Sequence[int]], str]  # token ids to text

_CONTEXT = 4
"""Tokens before those that may hold a stop text: what a tokenizer does at the beginning of a text stays out of it."""


_BROKEN = "\ufffd"  # character that decoders put in place of bytes that are no character


class StopTexts:
    """Finds the token that completes a stop text."""

    def __init__(self, texts: Sequence[str], decode: Decode) -> None:
        self._texts = tuple(texts)
        self._decode = decode
        # every token is at least one byte of the text
        self._window = max((len(text.encode()) for text in texts), default=0) + _CONTEXT

    def completed_by(self, tokens: Sequence[int]) -> bool:
        """Whether the last of these tokens of an answer completes a stop text; the ones before did not."""
        window = self._window
        text = self._decode(tokens[-window:])
        while text.startswith(_BROKEN) and window < len(tokens):  # within a character, which may spoil those after it
            window += 1
            text = self._decode(tokens[-window:])
        return any(stop in text for stop in self._texts)

    def may_begin(self, text: str) -> int:
        """Number of characters at the end of a text that a stop text may begin with."""
        for n in range(min(len(text), max((len(stop) for stop in self._texts), default=1) - 1), 0, -1):
            if any(stop.startswith(text[-n:]) for stop in self._texts):
                return n
        return 0

    def cut(self, text: str) -> str:
        """The text up to the first stop text in it."""
        places = [place for place in (text.find(stop) for stop in self._texts) if place >= 0]
        return text[: min(places)] if places else text


# ---- prompts ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class PromptBatch:
    """N prompts, one per answer. The answers to a prompt stand next to each other."""

    rows: tuple[int, ...]
    """N rows of the training data."""
    prompts: tuple[tuple[int, ...], ...]
    """N lists of token ids."""
    groups: tuple[int, ...]
    """N numbers, which prompt of the step an answer belongs to."""
    greedy: tuple[bool, ...]
    """N flags, whether an answer is the greedy one: a baseline that nothing is learned from."""
    sample_ids: tuple[int, ...]
    """N ids that, with the seed, key the random numbers."""
    data: tuple[Mapping[str, Any], ...] = ()
    """N rows of data, with messages in `prompt`, where answers are conversations with environments; else none."""

    @classmethod
    def of(
        cls,
        rows: Sequence[int],
        ids: Sequence[Sequence[int]],
        *,
        generations: int,
        with_greedy: bool = False,
        first_id: int = 0,
        data: Sequence[Mapping[str, Any]] = (),
    ) -> PromptBatch:
        """Repeat some prompts for `generations` answers each.

        Args:
            rows: rows of the training data, one per prompt.
            ids: token ids of every row of the training data.
            generations: answers to each prompt.
            with_greedy: whether the last of them is the greedy one.
            first_id: sample id of the first answer; the others count up from it.
            data: rows of data, one per prompt, for environments; none where there are none.

        Returns:
            One entry per answer; the answers to a prompt stand next to each other.

        Raises:
            IndexError: a row that `ids` does not have.
        """
        each, prompts, groups = list[int](), list[tuple[int, ...]](), list[int]()
        for group, row in enumerate(rows):
            each += [row] * generations
            prompts += [tuple(ids[row])] * generations
            groups += [group] * generations
        return cls(
            rows=tuple(each),
            prompts=tuple(prompts),
            groups=tuple(groups),
            greedy=(*(False,) * (generations - 1), with_greedy) * len(rows),
            sample_ids=tuple(range(first_id, first_id + len(each))),
            data=tuple(row for row in data for _ in range(generations)),
        )

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def drawn(self) -> list[int]:
        """Places of the answers that are not greedy."""
        return [i for i, greedy in enumerate(self.greedy) if not greedy]
