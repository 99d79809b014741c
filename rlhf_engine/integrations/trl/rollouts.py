"""Rollouts of our trainers behind TRL: conversations that TRL goes on with, and rows of tensors that it cuts up.

Rollouts are rows of tensors, which are shuffled, cut up and saved. What drew their tokens is in columns among them:

    answer_mask    bool [N, C], the drawn tokens of the N answers, right-padded
    given_mask     bool [N, C], the others, where tools, environments or a `rollout_func` have a mask
    support_lens   int32 [N, C], stored numbers of each drawn token
    support_words  int32 [N, K], the stored numbers of each answer, right-padded (see `rlhf_engine.hydra.supports`)
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence

from rlhf_engine.hydra import PackedBatch
from rlhf_engine.hydra.supports import Supports
from rlhf_engine.rollout.request import check_ids, check_prompt


class OpenAnswer(list[int]):
    """Tokens of a conversation up to now; what TRL adds to them stays that of the same answer."""

    def __init__(self, ids: Sequence[int], *, place: int, start: int) -> None:
        """place: of the answer in its batch. start: tokens of its prompt."""
        super().__init__(ids)
        self.place, self.start = place, start

    def __add__(self, ids: Any) -> Any:
        return OpenAnswer([*self, *ids], place=self.place, start=self.start)


def text_only(tool: Callable[..., Any], most: int) -> Callable[..., Any]:
    """A tool whose result or error is a text of at most so many characters; anything else is its failure.

    TRL counts failures and tells the model of them. It would tokenize any text first, however long, and end the
    conversation then.
    """

    def require_text(result: Any) -> str:
        parts = result if isinstance(result, list) else [{"type": "text", "text": result}]
        kinds = {str(part.get("type")) if isinstance(part, dict) else type(part).__name__ for part in parts}
        if kinds - {"text"}:
            raise TypeError(f"expected text, got a list of {', '.join(sorted(kinds))}")
        text = "".join(str(part.get("text", "")) for part in parts)
        if len(text) > most:
            raise ValueError(f"expected a result of at most {most} characters, got {len(text)}")
        return whole_characters(text)

    @contextlib.contextmanager
    def short_errors() -> Iterator[None]:
        try:
            yield
        except Exception as error:
            raise RuntimeError(require_text(str(error))) from error

    async def awaited(result: Awaitable[Any]) -> str:
        with short_errors():
            return require_text(await result)

    def call(*arguments: Any, **named: Any) -> Any:
        with short_errors():
            result = tool(*arguments, **named)
            return awaited(result) if inspect.iscoroutinefunction(tool) else require_text(result)

    return call


def whole_characters(text: str) -> str:
    """A text without halves of characters, which JSON has a way to write and no tokenizer takes."""
    return text.encode(errors="replace").decode()


def rolled_out(function: Callable[..., Any], prompts: list[Any], trainer: Any) -> dict[str, Any]:
    """Ask a user's `rollout_func`; ValueError unless it returns one answer to each prompt that can be scored."""
    output: dict[str, Any] = function(prompts, trainer)
    if not {"prompt_ids", "completion_ids"} <= output.keys():
        return output  # which TRL refuses
    ids, answers = output["prompt_ids"], output["completion_ids"]
    masks, backbone = output.get("env_mask") or [[1] * len(answer) for answer in answers], trainer.hydra.backbone()
    if not len(ids) == len(answers) == len(masks) == len(prompts):
        n = f"{len(answers)} to {len(ids)} prompts with {len(masks)} masks"
        raise ValueError(f"rollout_func: expected {len(prompts)} answers, got {n}")
    for i, (prompt, answer, mask) in enumerate(zip(ids, answers, masks, strict=True)):
        check_prompt(
            f"rollout_func: prompt_ids[{i}]", prompt, backbone.context_length, len(answer), backbone.vocabulary
        )
        check_ids(f"rollout_func: completion_ids[{i}]", answer, backbone.vocabulary)
        if len(mask) != len(answer) or set(mask) - {0, 1} or not any(mask):
            raise ValueError(
                f"rollout_func: expected an env_mask[{i}] of 0 and 1, one for each of {len(answer)} tokens and some of "
                f"them 1, got {list(mask)[:20]}"
            )
    return output


def in_rows(batch: PackedBatch, x_M: torch.Tensor, width: int = 0) -> torch.Tensor:
    """Spread numbers of drawn tokens [M] over right-padded completions [N, width]; 0: as wide as the longest."""
    longest = max(n - p for n, p in zip(batch.lengths, batch.prompt_lens, strict=True))
    x_NC = x_M.new_zeros(batch.n_sequences, max(width, longest))
    x_NC[batch.sequence_of_M, batch.places_M] = x_M
    return x_NC


def to_columns(batch: PackedBatch, rows: Callable[[torch.Tensor], torch.Tensor]) -> dict[str, torch.Tensor]:
    """Make columns of what drew the tokens of a batch: see the module's text. rows: spreads numbers of tokens."""
    answer_NC = rows(torch.ones_like(batch.targets_M)).bool()
    columns = {"answer_mask": answer_NC}
    if batch.turns is not None:
        lens_N = torch.tensor(batch.lengths, device=batch.device) - torch.tensor(batch.prompt_lens, device=batch.device)
        real_NC = torch.arange(answer_NC.shape[1], device=batch.device) < lens_N[:, None]
        columns["given_mask"] = real_NC & ~answer_NC
    if batch.supports is not None:
        sizes = batch.supports.offsets[torch.tensor(batch.completion_cu)].diff()
        columns["support_lens"] = rows(batch.supports.lengths.int().to(batch.device))
        columns["support_words"] = pad_sequence(batch.supports.words.split(sizes.tolist()), batch_first=True)
    return columns


def from_columns(columns: Mapping[str, Any], vocabulary: int) -> PackedBatch:
    """The batch of a rollout's rows."""
    answer_NC, prompt_NP, supports, drawn = columns["answer_mask"], columns["prompt_mask"].bool(), None, None
    if "support_lens" in columns:
        lens_NC, words_NK = columns["support_lens"] * answer_NC, columns["support_words"]
        stored_NK = torch.arange(words_NK.shape[1], device=words_NK.device) < lens_NC.sum(1)[:, None]
        supports = Supports.of_lengths(words_NK[stored_NK], lens_NC[answer_NC], vocabulary)
    real_NC = answer_NC
    if "given_mask" in columns:
        real_NC, drawn = answer_NC | columns["given_mask"], torch.cat([torch.zeros_like(prompt_NP), answer_NC], 1)
    ids, real = torch.cat([columns["prompt_ids"], columns["completion_ids"]], 1), torch.cat([prompt_NP, real_NC], 1)
    return replace(PackedBatch.from_padded(ids, real, prompt_NP.sum(1).tolist(), drawn=drawn), supports=supports)
