"""Rows to token ids: plain strings or chat templates, and what happens to rows that are too long.

Strings: a prompt has the tokenizer's own beginning, an answer ends with the end-of-sequence token (`tokenizing.py`).
An empty prompt of an answer is the beginning-of-sequence token, or the end-of-sequence token where there is none.

Conversations: the prompt is the chat template's text of its messages with the generation prompt; prompt and answer are
the template's text of all messages. The prompt's tokens have to be the first of prompt and answer together, or the row
is bad: a policy would be trained on answers to a prompt that it is never given. The answer ends with its last end
token, at which rollouts stop as well: the tokenizer's end-of-sequence token or another that the model's generation
config names. White space that some templates write after it is left out; where the template writes none, the
end-of-sequence token is added.

`truncation` says what becomes of a row of more than `max_length` tokens:

    error        the row is bad, which stops the run unless max_bad_rows allows for it
    drop         the row is left out and counted as dropped
    keep_end     the prompt's oldest tokens go until the row fits, but not its beginning-of-sequence token; answers
                 stay whole
    keep_start   the answer's last tokens go, its end-of-sequence token among them, until the row fits
    both         the prompt's oldest tokens go, down to half of max_length, and then the answer's last ones

Of a preference both answers are measured against the same prompt, and the longer one decides. At least one token of
the prompt stays, and where answers are cut one of each; a row that cannot be made to fit is bad.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from rlhf_engine.data.tally import RowError, Tally, shown
from rlhf_engine.data.types import Message, Preference, PromptCompletion, Row, Text, UnpairedPreference
from rlhf_engine.errors import ConfigError
from rlhf_engine.tokenizing import encode_completion, encode_prompt

Truncation = Literal["error", "drop", "keep_end", "keep_start", "both"]


@dataclass(frozen=True, kw_only=True)
class Tokenized:
    """A row with its token ids."""

    row: Row
    """Row that the tokens are of."""
    prompt: list[int]
    """Token ids of the prompt, at least one."""
    answers: tuple[list[int], ...]
    """Token ids of the answers: none of a prompt alone, one completion, or chosen and rejected."""
    truncated: bool = False
    """Whether tokens were cut."""

    @property
    def n_tokens(self) -> int:
        """Tokens of all sequences that the row becomes: the prompt once per answer."""
        return max(1, len(self.answers)) * len(self.prompt) + sum(map(len, self.answers))


def tokenize_rows(
    rows: Sequence[Row],
    tokenizer: PreTrainedTokenizerBase,
    tally: Tally,
    *,
    max_length: int,
    truncation: Truncation = "error",
    limit_name: str = "tokens of prompt and answer",
    end_ids: Sequence[int] | None = None,
    vocabulary: int | None = None,
) -> list[Tokenized]:
    """Tokenize rows of at most max_length tokens.

    Args:
        rows: rows of any type.
        tokenizer: tokenizer of the model, with a chat template where rows are messages.
        tally: counts what is bad, dropped or cut.
        max_length: most tokens of prompt and longest answer.
        truncation: what becomes of longer rows: a `Truncation`, see the module.
        limit_name: name of max_length's tokens, for messages.
        end_ids: tokens that end an answer (`read_eos_token_ids`); None: the tokenizer's own alone.
        vocabulary: number of token ids that the model has; None: ids are not checked.

    Returns:
        The rows that can be used, in their order.

    Raises:
        ConfigError: messages without a chat template, too many bad rows, or no row left.
    """
    found = []
    for row in rows:
        try:
            tokens = tokenize_row(row, tokenizer, end_ids)
            if vocabulary is not None:
                _require_known(tokens, vocabulary, tokenizer)
            kept = int(tokens.prompt[0] == tokenizer.bos_token_id)
            one = fit_to_length(tokens, max_length, truncation, limit_name, keep_first=kept)
        except RowError as error:
            tally.bad(row.place, error)
            continue
        if one is None:
            tally.dropped += 1
        else:
            tally.truncated += one.truncated
            tally.without_prompt += not row.prompt
            found.append(one)
    tally.check()
    return found


def tokenize_row(row: Row, tokenizer: PreTrainedTokenizerBase, end_ids: Sequence[int] | None = None) -> Tokenized:
    """Tokenize a row, of any length.

    Args:
        row: row of any type.
        tokenizer: tokenizer of the model.
        end_ids: tokens that end an answer; None: the tokenizer's own alone.

    Returns:
        The row with its token ids.

    Raises:
        RowError: a prompt without tokens, or messages that the chat template does not take.
        ConfigError: messages without a chat template.
    """
    texts: tuple[Text, ...] = ()
    if isinstance(row, Preference):
        texts = (row.chosen, row.rejected)
    elif isinstance(row, (PromptCompletion, UnpairedPreference)):
        texts = (row.completion,)
    prompt = encode_text(tokenizer, row.prompt)
    if not prompt and not row.prompt and texts:
        first = tokenizer.eos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id
        prompt = [int(first)]  # type: ignore[arg-type]
    if not prompt:
        raise RowError("a prompt of at least one token", shown(row.prompt))
    answers = tuple(_answer(tokenizer, row.prompt, prompt, text, end_ids) for text in texts)
    return Tokenized(row=row, prompt=prompt, answers=answers)


def _require_known(tokens: Tokenized, vocabulary: int, tokenizer: PreTrainedTokenizerBase) -> None:
    highest = max(max(ids, default=0) for ids in (tokens.prompt, *tokens.answers))
    if highest >= vocabulary:
        raise RowError(
            f"tokens that the model has, with ids of 0 to {vocabulary - 1}",
            f"id {highest}, {shown(tokenizer.decode([highest]))}",
        )


def encode_text(tokenizer: PreTrainedTokenizerBase, prompt: Text) -> list[int]:
    """Token ids of a prompt, a string or messages.

    Args:
        tokenizer: tokenizer of the model.
        prompt: string or messages.

    Returns:
        Token ids, without an end-of-sequence token at the end of a string.

    Raises:
        RowError: messages that the chat template does not take.
        ConfigError: messages without a chat template.
    """
    if isinstance(prompt, str):
        return encode_prompt(tokenizer, prompt)
    return _ids(tokenizer, plain_text(tokenizer, prompt))


def plain_text(tokenizer: PreTrainedTokenizerBase, prompt: Text) -> str:
    """Text of a prompt as the model reads it.

    Args:
        tokenizer: tokenizer of the model.
        prompt: string or messages.

    Returns:
        The string itself, or the chat template's text with the generation prompt.

    Raises:
        RowError: messages that the chat template does not take.
        ConfigError: messages without a chat template.
    """
    return prompt if isinstance(prompt, str) else _template(tokenizer, prompt, generation_prompt=True)


def fit_to_length(
    tokens: Tokenized, max_length: int, truncation: Truncation, limit_name: str, *, keep_first: int = 0
) -> Tokenized | None:
    """Cut a row to max_length tokens, or leave it out.

    Args:
        tokens: the row.
        max_length: most tokens of prompt and longest answer.
        truncation: what becomes of a longer row: a `Truncation`, see the module.
        limit_name: name of max_length's tokens, for messages.
        keep_first: tokens that stay at the beginning of a prompt that is cut.

    Returns:
        The row within max_length tokens; None if it is dropped.

    Raises:
        RowError: a longer row that `truncation` cannot make fit, or does not.
    """
    longest = max(map(len, tokens.answers), default=0)
    length = len(tokens.prompt) + longest
    if length <= max_length:
        return tokens
    if truncation == "drop":
        return None
    if truncation == "keep_end" and longest + keep_first < max_length:
        kept = tokens.prompt[len(tokens.prompt) - (max_length - longest - keep_first) :]
        prompt = tokens.prompt[:keep_first] + kept
        return Tokenized(row=tokens.row, prompt=prompt, answers=tokens.answers, truncated=True)
    room = max_length - len(tokens.prompt)
    half = max(room, max_length // 2)
    if truncation == "both" and (half > 0 or not tokens.answers):
        answers = tuple(answer[:half] for answer in tokens.answers)
        shorter = dataclasses.replace(tokens, answers=answers, truncated=True)
        return fit_to_length(shorter, max_length, "keep_end", limit_name, keep_first=keep_first)
    if truncation == "keep_start" and tokens.answers and room > 0:
        answers = tuple(answer[:room] for answer in tokens.answers)
        return Tokenized(row=tokens.row, prompt=tokens.prompt, answers=answers, truncated=True)
    hint = "truncation=drop leaves such rows out, keep_end cuts their prompts" if truncation == "error" else ""
    raise RowError(f"at most {max_length} {limit_name}", str(length), hint)


# ---- chat templates --------------------------------------------------------------------------------------------------


def _template(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], *, generation_prompt: bool) -> str:
    if not tokenizer.chat_template:
        raise ConfigError(
            "model_name_or_path: expected a tokenizer with a chat template for rows of messages, got one without; set "
            "chat_template in its tokenizer_config.json, or give strings"
        )
    try:
        text = tokenizer.apply_chat_template(
            [dict(message) for message in messages], tokenize=False, add_generation_prompt=generation_prompt
        )
    except (TemplateError, TypeError, ValueError) as error:  # what templates raise for messages they do not know
        reason = str(error).strip().partition("\n")[0]
        raise RowError("messages that the chat template takes", reason) from error
    assert isinstance(text, str)
    return text


def _ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    # the template writes special tokens itself
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def _answer(
    tokenizer: PreTrainedTokenizerBase,
    prompt: Text,
    prompt_ids: list[int],
    answer: Text,
    end_ids: Sequence[int] | None,
) -> list[int]:
    if isinstance(prompt, str) or isinstance(answer, str):
        assert isinstance(answer, str)
        return encode_completion(tokenizer, answer, end_ids)
    whole = _ids(tokenizer, _template(tokenizer, [*prompt, *answer], generation_prompt=False))
    if whole[: len(prompt_ids)] != prompt_ids:
        i = next((i for i, pair in enumerate(zip(whole, prompt_ids, strict=False)) if pair[0] != pair[1]), len(whole))
        raise RowError(
            "a chat template whose text of prompt and answer begins with that of the prompt",
            f"other tokens from token {i} on",
        )
    eos = int(tokenizer.eos_token_id)  # type: ignore[arg-type]
    return _ended(whole[len(prompt_ids) :], eos, end_ids or (eos,), tokenizer.decode)  # type: ignore[arg-type]


def _ended(ids: list[int], eos: int, ends: Sequence[int], decode: Callable[[list[int]], str]) -> list[int]:
    """The answer up to its last end token, if only white space follows that, or with eos added."""
    last = max((i for i, token in enumerate(ids) if token in ends), default=None)
    if last is not None and not decode(ids[last + 1 :]).strip():
        return ids[: last + 1]
    return [*ids, eos]
